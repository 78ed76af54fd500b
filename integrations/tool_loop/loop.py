"""The loop: a call under a grammar, its result as a segment, policies, the next call."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from contextmem import Answer, Checkpoint, ContextMemory, ContextOverflow, InvalidInput, Segment
from contextmem.integrations.tool_loop.formats import ToolFormat, format_of
from contextmem.integrations.tool_loop.grammar import CallGrammar, call_schema
from contextmem.integrations.tool_loop.pairs import pairs_of
from contextmem.integrations.tool_loop.policies import Change, Policy, oversize, policy_named
from contextmem.integrations.tool_loop.tools import Outcome, Tool

__all__ = ["RunReport", "ToolLoop"]

_DEFAULT = ("refuse_oversize", "collapse_repeats", "retract_failed", "supersede_reads")
_FINAL = "final_answer"
_FRAMES = 64  # tokens kept for the frames of a turn
_HUGE = 10**9  # tokens of a result, to see how long the stub is that names them


def _final_answer(answer: str) -> str:
    """Give the answer to the task, once the results hold it."""
    return answer


@dataclass
class RunReport:
    """How a run went.

    Attributes:
        answer: the final answer, or None.
        finish_reason: "answer", "turns" (`max_turns` were used up), "length" (a call was cut off), or "context_length".
        n_calls, n_failed: tool calls made, and those that failed; one whose result was withheld has not.
        n_kept: pairs of call and result that stand in the memory at the end.
        changes: what the policies did.
        seconds: time of the whole run.
    """

    answer: str | None = None
    finish_reason: str = "turns"
    n_calls: int = 0
    n_failed: int = 0
    n_kept: int = 0
    changes: list[Change] = field(default_factory=list)
    seconds: float = 0.0

    def count(self, what: str) -> int:
        """Pairs that were "retracted" or "collapsed", or results that were "withheld"."""
        return sum(len(change.tools) for change in self.changes if change.what == what)

    @property
    def tokens_saved(self) -> int:
        """Tokens that policies kept out of the context, or took out of it."""
        return sum(change.n_tokens for change in self.changes)


class ToolLoop:
    """Lets the model call tools until it gives an answer; every result is a segment tied to its call.

    Attributes:
        memory: what the run stands in; new runs go on in it.
        tools: by name.
        policies: applied in order.
        format: how calls and results look, see `formats`.
    """

    def __init__(
        self,
        model: Any,
        tokenizer: Any,
        tools: Sequence[Callable[..., Any] | Tool],
        *,
        system: str | None = None,
        policies: Sequence[str | Policy] = _DEFAULT,
        required: Sequence[str] = (),
        max_turns: int = 8,
        max_new_tokens: int = 256,
        on_step: Callable[[str, str], None] | None = None,
        **options: Any,
    ) -> None:
        """
        Args:
            model, tokenizer: as of `ContextMemory`; the tokenizer must be a fast one.
            tools: functions, or `Tool`s.
            system: told before the tools.
            policies: names or objects; () switches all off.
            required: tools that must have worked in a run before the final answer is offered; small models answer too early.
            max_turns: most calls in a run.
            max_new_tokens: most tokens of a call.
            on_step: called with "call" or "result", and its text, as they come.
            options: passed to `ContextMemory`, such as `budget`.

        Raises:
            InvalidInput: two tools share a name, or one cannot be called by name.
        """
        made = [Tool.of(one) for one in tools]
        self.tools = {one.name: one for one in made}
        if len(self.tools) < len(made) or not made or _FINAL in self.tools:
            raise InvalidInput(f"tools need names of their own, other than {_FINAL!r}; there must be at least one.")
        self._final = Tool.of(_final_answer, name=_FINAL)
        if unknown := sorted(set(required) - set(self.tools)):
            raise InvalidInput(f"required names no tool: {', '.join(unknown)}.")
        self.policies, self._required = [policy_named(policy) for policy in policies], frozenset(required)
        self.format: ToolFormat = format_of(tokenizer, [*made, self._final], system)
        CallGrammar(tokenizer, call_schema([*made, self._final]))  # what no grammar can express is refused here
        self.memory = ContextMemory(model, tokenizer, self.format.system, **options)
        self.memory.frame_tools(*self.format.frames)
        self._max_turns, self._max_new_tokens, self._on_step = max_turns, max_new_tokens, on_step

    def run(self, task: str) -> RunReport:
        """Work on a task. What was said before stays; what fails leaves the memory whole.

        Raises:
            ContextOverflow: the task itself does not fit.
        """
        report, started = RunReport(), time.perf_counter()
        self.memory.append(f"{task}\n", kind="user")
        barred: set[str] = set()
        missing = set(self._required)
        for _ in range(self._max_turns):
            try:
                with self.memory.transaction() as mark:  # a call never stays without its result
                    ended = self._turn(report, barred, missing, mark)
            except ContextOverflow:
                ended = "context_length"
            if ended is not None:
                report.finish_reason = ended
                break
        report.n_kept = len(pairs_of(self.memory))
        report.seconds = time.perf_counter() - started
        return report

    def _turn(self, report: RunReport, barred: set[str], missing: set[str], mark: Checkpoint) -> str | None:
        """One call and its result; returns why the run has ended, or None. Updates what is barred and what is missing."""
        answer = self._ask(barred, may_finish=not missing)
        called = _parsed(answer.text)
        if called is None:
            self.memory.restore(mark)  # half a call is of no use to anybody
            return "length"
        self._say("call", answer.text)
        if called[0] == _FINAL:
            report.answer = str(called[1]["answer"])
            return "answer"
        assert answer.segment is not None
        self._check_stub(self.tools[called[0]])
        has_worked, changes = self._called(answer.segment, *called, report)
        report.changes += changes
        barred.clear()
        barred.update(t for c in changes if c.what == "collapsed" and not c.was_error for t in c.tools)
        missing.difference_update({called[0]} if has_worked else set())
        return None

    def messages(self) -> list[dict[str, Any]]:
        """The live dialogue as messages in the usual form; a call always stands with its results."""
        return list(_messages(self.memory.segments(), self.format))

    def _ask(self, barred: set[str], may_finish: bool) -> Answer:
        offered = [one for name, one in self.tools.items() if name not in barred]
        if may_finish or not offered:
            offered.append(self._final)
        grammar = CallGrammar(self.memory.tokenizer, call_schema(offered))
        return self.memory.ask(
            "",
            keep=True,
            kind="tool_call",
            max_new_tokens=self._max_new_tokens,
            logits_processor=[grammar],
        )

    def _called(
        self, call: Segment, name: str, arguments: dict[str, Any], report: RunReport
    ) -> tuple[bool, list[Change]]:
        """Run the tool, put its result behind the call, and let the policies work; says whether the tool worked."""
        chosen, changes = self.tools[name], []
        outcome = chosen.call(arguments)
        report.n_calls += 1
        for policy in self.policies:
            n_before = self.memory.count_tokens(outcome.text)
            shown = policy.before(self.memory, name, outcome)
            if shown is not outcome:
                n_saved = n_before - self.memory.count_tokens(shown.text)
                changes.append(Change(policy.name, "withheld", (name,), n_saved, shown.is_error))
            outcome = shown
        result, outcome, held = self._appended(call, chosen, arguments, outcome)
        changes += held
        report.n_failed += outcome.is_error
        self._say("result", outcome.text)
        for policy in self.policies:
            live = pairs_of(self.memory)
            pair = next((p for p in live if p.result.id == result.id), None)
            if pair is None:
                break  # an earlier policy has taken it out
            changes += policy.after(self.memory, pair, [p for p in live if p.result.id != result.id])
        return not outcome.is_error, changes

    def _appended(
        self, call: Segment, chosen: Tool, arguments: dict[str, Any], outcome: Outcome
    ) -> tuple[Segment, Outcome, list[Change]]:
        mark = self.memory.checkpoint()
        try:
            self._check_room(chosen, outcome, self._max_new_tokens)  # for the next call, so that the run can go on
            result = self._put(call, chosen, arguments, outcome)
        except ContextOverflow as error:
            outcome = oversize(error.needed, error.available, outcome.is_error)
            return self._put(call, chosen, arguments, outcome), outcome, []
        except InvalidInput as error:  # characters that the model's vocabulary lacks
            outcome = Outcome(
                json.dumps({"error": "result not shown", "why": str(error)}), outcome.is_error, "unreadable"
            )
            return self._put(call, chosen, arguments, outcome), outcome, []
        for policy in self.policies if not (outcome.is_error or outcome.withheld) else ():
            if (why := policy.objection(self.memory, result)) is not None:
                self.memory.restore(mark)
                change = Change(policy.name, "withheld", (chosen.name,), result.n_tokens, False)
                outcome = Outcome(json.dumps({"error": "result withheld", "why": why}), withheld=policy.name)
                return self._put(call, chosen, arguments, outcome), outcome, [change]
        return result, outcome, []

    def _check_stub(self, chosen: Tool) -> None:
        """Run no tool, which may change something, whose result could not be told even as a stub."""
        self._check_room(chosen, oversize(_HUGE, _HUGE, is_error=False), reserve=0)

    def _check_room(self, chosen: Tool, outcome: Outcome, reserve: int) -> None:
        """That a result fits, and `reserve` tokens after it."""
        needed = self.memory.count_tokens(self.format.result(chosen.name, outcome.text))
        available = self.memory.context_length - self.memory.next_position - reserve - _FRAMES
        if needed > available:
            raise ContextOverflow(
                f"a result of {needed:,} tokens exceeds the {available:,} left of the context length.",
                needed=needed,
                available=max(0, available),
                limit=self.memory.context_length,
            )

    def _put(self, call: Segment, chosen: Tool, arguments: dict[str, Any], outcome: Outcome) -> Segment:
        reads = [] if outcome.is_error or outcome.withheld else sorted(chosen.resources(chosen.reads, arguments))
        writes = [] if outcome.is_error else sorted(chosen.resources(chosen.writes, arguments))
        said = {"is_error": outcome.is_error, "withheld": outcome.withheld, "reads": reads, "writes": writes}
        return self.memory.append(
            self.format.result(chosen.name, outcome.text),
            kind="tool_result",
            source=chosen.name,
            parents=(call,),
            metadata={"tool": chosen.name, **said},
        )

    def _say(self, what: str, text: str) -> None:
        if self._on_step is not None:
            self._on_step(what, text)


def _parsed(text: str) -> tuple[str, dict[str, Any]] | None:
    """Name and arguments of a call; None if it was cut off."""
    try:
        call = json.loads(text)
    except ValueError:
        return None
    return call["name"], call["arguments"]


def _messages(segments: Sequence[Segment], form: ToolFormat) -> Iterator[dict[str, Any]]:
    for segment in segments:
        if segment.kind == "tool_call":
            called = _parsed(segment.text)
            name, arguments = called if called is not None else (_FINAL, {"answer": segment.text})
            if name == _FINAL:
                yield {"role": "assistant", "content": arguments["answer"]}
            else:
                function = {"name": name, "arguments": arguments}
                call = {"id": segment.id, "type": "function", "function": function}
                yield {"role": "assistant", "content": "", "tool_calls": [call]}
        elif segment.kind == "tool_result":
            name = segment.metadata.get("tool", "")
            call_id = segment.parents[0] if segment.parents else None
            yield {"role": "tool", "name": name, "content": form.said(name, segment.text), "tool_call_id": call_id}
        else:
            role = segment.kind if segment.kind in ("system", "assistant") else "user"
            yield {"role": role, "content": segment.text}
