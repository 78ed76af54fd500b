"""The tool loop: valid calls whatever the model says, pairs that stay whole, and policies that take out what is stale."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Sequence
from typing import Annotated, Any, Literal

import pytest
from oracle import assert_equals_reference, assert_unchanged, snapshot
from pydantic import BaseModel, Field
from tiny import build, tiny_config, tiny_model, tiny_tokenizer
from tokenizers import AddedToken

from contextmem import Answer, ContextMemory, InvalidInput, Segment
from contextmem.integrations.tool_loop import (
    CallGrammar,
    Quarantine,
    RefuseOversize,
    RetractFailed,
    SupersedeReads,
    Tool,
    ToolLoop,
    call_schema,
    format_of,
    pairs_of,
    tool,
)

QWEN_LIKE = """\
{%- if tools %}{{- '<|im_start|>system\\n' }}\
{%- if messages[0]['role'] == 'system' %}{{- messages[0]['content'] }}{%- endif %}\
{{- "\\n\\n# Tools\\n<tools>" }}{%- for tool in tools %}{{- "\\n" }}{{- tool | tojson }}{%- endfor %}\
{{- "\\n</tools><|im_end|>\\n" }}{%- elif messages[0]['role'] == 'system' %}\
{{- '<|im_start|>system\\n' + messages[0]['content'] + '<|im_end|>\\n' }}{%- endif %}\
{%- for message in messages %}{%- if message.role == "user" or (message.role == "assistant" and not message.tool_calls) %}\
{{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>' + '\\n' }}\
{%- elif message.role == "assistant" %}{{- '<|im_start|>' + message.role }}{%- for call in message.tool_calls %}\
{{- '\\n<tool_call>\\n{"name": "' + call.function.name + '", "arguments": ' }}{{- call.function.arguments | tojson }}\
{{- '}\\n</tool_call>' }}{%- endfor %}{{- '<|im_end|>\\n' }}{%- elif message.role == "tool" %}\
{{- '<|im_start|>user\\n<tool_response>\\n' + message.content + '\\n</tool_response><|im_end|>\\n' }}{%- endif %}\
{%- endfor %}{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"""


class Scripted(ToolLoop):
    """Says what it is told to say, through the same grammar, decoding and cache as a model of its own mind."""

    script: list[tuple[str, dict[str, Any]]]
    offered: list[set[str]]

    may_finish: list[bool]

    def _ask(self, barred: set[str], may_finish: bool) -> Answer:
        self.may_finish = [*getattr(self, "may_finish", []), may_finish]
        self.offered = [*getattr(self, "offered", []), set(self.tools) - barred]
        name, arguments = self.script.pop(0)
        said = {
            "type": "object",
            "properties": {
                "name": {"const": name},
                "arguments": {
                    "type": "object",
                    "properties": {key: {"const": value} for key, value in arguments.items()},
                    "required": list(arguments),
                    "additionalProperties": False,
                },
            },
            "required": ["name", "arguments"],
            "additionalProperties": False,
        }
        grammar = CallGrammar(self.memory.tokenizer, said)
        return self.memory.ask(
            "",
            keep=True,
            kind="tool_call",
            max_new_tokens=600,
            logits_processor=[grammar],
        )


END = ("final_answer", {"answer": "done"})


def loop_of(tools: Sequence[Any], script: Sequence[tuple[str, dict[str, Any]]], **options: Any) -> Scripted:
    loop = Scripted(
        tiny_model("llama", "sdpa"),
        tiny_tokenizer(),
        tools,
        **{"policies": (), "max_turns": 30, "eraser": None, **options},
    )
    loop.script = [*script, END]
    return loop


class Files:
    """A store of files, as tools."""

    def __init__(self, n_failures: int = 0) -> None:
        self.content = {"a": "A", "b": "B"}
        self.n_failures = n_failures

    @property
    def tools(self) -> list[Tool]:
        def read(path: str) -> str:
            """Read a file."""
            if self.n_failures:
                self.n_failures -= 1
                raise OSError("the disk is busy")
            return f"{path} holds {self.content[path]}"

        def read_both(first: str, second: str) -> str:
            """Read two files."""
            return self.content[first] + self.content[second]

        def write(path: str, text: str) -> str:
            """Write a file."""
            if not text:
                raise ValueError("nothing to write")
            self.content[path] = text
            return f"wrote {path}"

        return [
            Tool.of(read, reads=("file:{path}",)),
            Tool.of(read_both, reads=("file:{first}", "file:{second}")),
            Tool.of(write, writes=("file:{path}",)),
        ]


class Tree(BaseModel):
    children: list[Tree] = []


def _coded(code: Annotated[str, Field(pattern="^[A-Z]{3}$")]) -> str:
    return code


def _recursive(tree: Tree) -> None:
    pass


def _unexpressible(words: set[str]) -> None:
    pass


def _unresolved(x: Nowhere) -> None:  # type: ignore[name-defined]  # noqa: F821
    pass


class Point(BaseModel):
    x: int
    y: int = 0


class Item(BaseModel):
    name: Literal["nut", "bolt"]
    count: int


READ_A, READ_B = ("read", {"path": "a"}), ("read", {"path": "b"})


def results(memory: ContextMemory) -> list[str]:
    return [segment.text.strip() for segment in memory.segments(kind="tool_result")]


class TestTools:
    def test_the_schema_is_the_signature(self) -> None:
        @tool(reads=("at:{place}",))
        def move(place: Point, mode: Literal["slow", "fast"] = "slow", tags: list[str] | None = None) -> str:
            """Move there.

            Not shown."""
            return f"{place.x} {mode} {tags}"

        assert (move.name, move.description) == ("move", "Move there.")
        assert move.parameters["required"] == ["place"] and set(move.parameters["properties"]) == {
            "place",
            "mode",
            "tags",
        }
        assert move.call({"place": {"x": 3}}).text == "3 slow None"
        wrong = move.call({"place": {"x": "three"}, "speed": 4})
        assert wrong.is_error and "place.x" in wrong.text and "speed" in wrong.text

    def test_constraints_of_annotations_hold(self) -> None:
        coded = Tool.of(_coded)
        assert coded.call({"code": "ABC"}).text == "ABC" and coded.call({"code": "nope"}).is_error
        memory = ContextMemory(tiny_model("llama", "sdpa"), tiny_tokenizer())
        memory.append("task")
        grammar = CallGrammar(memory.tokenizer, call_schema([coded]))
        said = json.loads(memory.ask("", max_new_tokens=80, logits_processor=[grammar]).text)
        assert not coded.call(said["arguments"]).is_error

    def test_results_are_text_or_json_and_errors_are_text(self) -> None:
        async def later(n: int) -> dict[str, int]:
            return {"n": n}

        def broken() -> str:
            raise RuntimeError("no luck")

        assert Tool.of(later).call({"n": 2}).text == '{"n": 2}'

        async def inside_a_loop() -> str:
            return Tool.of(later).call({"n": 3}).text

        assert asyncio.run(inside_a_loop()) == '{"n": 3}'
        assert Tool.of(broken).call({}) == type(Tool.of(broken).call({}))("Error: RuntimeError: no luck", is_error=True)

    def test_what_cannot_be_called_by_name_is_refused(self) -> None:
        with pytest.raises(InvalidInput, match="'words'"):
            Tool.of(lambda *words: None, name="any")
        with pytest.raises(InvalidInput, match="refers to itself"):
            Tool.of(_recursive)
        with pytest.raises(InvalidInput, match="grammar"):
            loop_of([Tool.of(_unexpressible)], [])
        with pytest.raises(InvalidInput, match="resolved"):
            Tool.of(_unresolved)
        with pytest.raises(InvalidInput, match="identifier"):
            Tool.of(lambda: None)
        with pytest.raises(InvalidInput, match="names of their own"):
            loop_of([*Files().tools, *Files().tools], [])
        with pytest.raises(InvalidInput, match="unknown policy"):
            loop_of(Files().tools, [], policies=("forget_everything",))
        with pytest.raises(InvalidInput, match="object"):
            loop_of(Files().tools, [], policies=("quarantine",))
        with pytest.raises(InvalidInput, match="required"):
            loop_of(Files().tools, [], required=("reed",))


class TestGrammar:
    @pytest.mark.parametrize("seed", range(4))
    def test_a_random_model_makes_valid_calls(self, seed: int) -> None:
        def order(item: Item, express: bool) -> str:
            """Order it."""
            return f"{item.count} of {item.name}, {express}"

        def colour(shade: Literal["red", "green"]) -> str:
            """Choose one."""
            return shade

        tools = [Tool.of(order), Tool.of(colour)]
        memory = ContextMemory(tiny_model("llama", "sdpa"), tiny_tokenizer())
        memory.append(f"task {seed}")
        grammar = CallGrammar(memory.tokenizer, call_schema(tools))
        answer = memory.ask("", max_new_tokens=400, logits_processor=[grammar], temperature=1.5, seed=seed)
        call = json.loads(answer.text)
        assert answer.finish_reason == "stop"
        assert not {t.name: t for t in tools}[call["name"]].call(call["arguments"]).is_error

    def test_a_call_that_is_cut_off_leaves_nothing(self) -> None:
        def note(text: str) -> str:
            """Note it."""
            return text

        model, tokenizer = tiny_model("llama", "sdpa"), tiny_tokenizer()
        loop = ToolLoop(model, tokenizer, [note], required=("note",), max_new_tokens=5)
        report = loop.run("task")
        assert (report.finish_reason, report.answer, report.n_calls) == ("length", None, 0)
        assert [segment.kind for segment in loop.memory.segments()] == ["system", "user"]


class TestFormats:
    def test_without_tools_in_the_template_the_plain_one_is_used(self) -> None:
        form = format_of(tiny_tokenizer(), Files().tools, "Be brief.")
        assert not form.is_native and form.system.startswith("Be brief.\n\nYou solve tasks")
        assert "- write(path: string, text: string): Write a file." in form.system

    def test_the_templates_own_is_read_off_it(self) -> None:
        """Token for token what the template renders, its added tokens included; only the system text is plain text."""
        tokenizer = tiny_tokenizer()
        tokenizer.chat_template = QWEN_LIKE
        marks = ("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>")
        tokenizer.add_tokens([AddedToken(mark, special=False) for mark in marks])
        model = build(tiny_config("llama", vocab_size=len(tokenizer)))
        loop = Scripted(model, tokenizer, Files().tools, policies=(), eraser=None)
        loop.script = [READ_A, END]
        assert loop.format.is_native
        assert loop.run("task").answer == "done"
        functions = [
            {"type": "function", "function": {"name": t.name, "description": t.description, "parameters": t.parameters}}
            for t in [*loop.tools.values(), loop._final]
        ]
        told = [{"role": "system", "content": ""}, {"role": "user", "content": "task\n"}]
        rendered = tokenizer.apply_chat_template([*told, *_turns(READ_A, "a holds A")], tools=functions, tokenize=False)
        held = loop.memory.token_ids
        assert tokenizer.decode(held).startswith(rendered.rpartition("<|im_end|>")[0])
        expected = tokenizer("<tool_call>\n", add_special_tokens=False).input_ids
        assert all(held.count(tokenizer.convert_tokens_to_ids(mark)) == 2 for mark in marks[:2])
        assert all(held.count(tokenizer.convert_tokens_to_ids(mark)) == 1 for mark in marks[2:])
        call = loop.memory.segments(kind="tool_call")[0]
        assert list(held[call.start - len(expected) : call.start]) == expected
        assert json.loads(call.text)["name"] == "read"
        loop.memory.retract(loop.memory.segments(kind="tool_result")[0], method="recompute")
        assert not [mark for mark in marks[2:] if tokenizer.convert_tokens_to_ids(mark) in loop.memory.token_ids]
        assert_equals_reference(loop.memory)

    def test_a_result_wrapper_may_name_the_tool(self) -> None:
        tokenizer = tiny_tokenizer()
        tokenizer.chat_template = QWEN_LIKE.replace("<tool_response>\\n'", "<tool_response of=' + message.name + '>'")
        form = format_of(tokenizer, Files().tools, None)
        assert form.is_native and form.result("read", "A") == "<tool_response of=read>A\n</tool_response>"
        assert form.said("read", form.result("read", "A")) == "A"

    def test_templates_with_the_tools_elsewhere_or_another_call_get_the_plain_format(self) -> None:
        for old, new in (
            (
                "<|im_start|>system\\n' }}{%- if messages[0]['role'] == 'system' %}",
                "<|im_start|>tools\\n' }}{%- if true %}",
            ),
            ('"arguments": ', '"parameters": '),
            ("<|im_start|>user\\n<tool_response>", "<|im_start|>tool\\n<tool_response>"),
        ):
            tokenizer = tiny_tokenizer()
            tokenizer.chat_template = QWEN_LIKE.replace(old, new)
            assert tokenizer.chat_template != QWEN_LIKE, old
            assert not format_of(tokenizer, Files().tools, None).is_native


def _turns(call: tuple[str, dict[str, Any]], result: str) -> list[dict[str, Any]]:
    function = {"name": call[0], "arguments": call[1]}
    asked = {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": function}]}
    return [asked, {"role": "tool", "name": call[0], "content": result}]


class TestFailures:
    """U28: failed calls teach the model to fail."""

    def test_repeated_failures_collapse_and_go_after_a_success(self) -> None:
        loop = loop_of(Files(n_failures=5).tools, [READ_A] * 6, policies=("collapse_repeats", "retract_failed"))
        lengths: list[int] = []
        loop._on_step = lambda what, text: lengths.append(loop.memory.seq_length) if what == "call" else None
        report = loop.run("task")
        assert (report.answer, report.n_calls, report.n_failed, report.n_kept) == ("done", 6, 5, 1)
        assert (report.count("collapsed"), report.count("retracted")) == (4, 1)
        assert results(loop.memory) == ["Result of read: a holds A"]
        assert len(set(lengths[1:6])) == 1  # what repeats does not make the context grow
        assert report.tokens_saved > 0
        assert_equals_reference(loop.memory)

    def test_without_policies_all_is_kept(self) -> None:
        loop = loop_of(Files(n_failures=5).tools, [READ_A] * 6)
        report = loop.run("task")
        assert report.n_kept == 6 == len(results(loop.memory)) and not report.changes and report.tokens_saved == 0

    def test_failures_of_other_tools_stay(self) -> None:
        script = [("write", {"path": "a", "text": ""}), READ_A]
        loop = loop_of(Files().tools, script, policies=(RetractFailed(method="recompute"),))
        assert loop.run("task").n_kept == 2

    def test_a_tool_that_repeats_itself_is_not_offered_again_at_once(self) -> None:
        loop = loop_of(Files().tools, [READ_A, READ_A, READ_B], policies=("collapse_repeats",))
        report = loop.run("task")
        assert report.count("collapsed") == 1 and report.n_kept == 2
        assert [set(loop.tools) - offered for offered in loop.offered] == [set(), set(), {"read"}, set()]

    def test_unknown_arguments_and_errors_are_results(self) -> None:
        loop = loop_of(Files().tools, [("read", {"path": "nowhere"})])
        report = loop.run("task")
        assert report.n_failed == 1 and results(loop.memory) == ["Result of read: Error: KeyError: 'nowhere'"]


class TestWhole:
    """Whatever fails in a turn, no call stays without its result, and nothing that was done is forgotten."""

    def assert_whole(self, loop: ToolLoop) -> None:
        calls = [s for s in loop.memory.segments(kind="tool_call") if "final_answer" not in s.text]
        assert len(calls) == len(pairs_of(loop.memory))
        assert_equals_reference(loop.memory)

    def test_a_checker_that_raises_lets_nothing_in(self) -> None:
        def check(memory: ContextMemory, result: Segment) -> bool:
            raise RuntimeError("the checker is out of order")

        loop = loop_of(Files().tools, [READ_A], policies=(Quarantine(check),))
        with pytest.raises(RuntimeError, match="out of order"):
            loop.run("task")
        self.assert_whole(loop)
        assert "holds A" not in loop.memory._codec.decode(loop.memory.token_ids)

    def test_an_interrupted_tool(self) -> None:
        def stop() -> None:
            raise KeyboardInterrupt

        loop = loop_of([stop], [("stop", {})])
        with pytest.raises(KeyboardInterrupt):
            loop.run("task")
        self.assert_whole(loop)

    def test_defaults_count_as_arguments_of_resources(self) -> None:
        def read(path: str = "a") -> str:
            return path

        loop = loop_of([Tool.of(read, reads="file:{path}")], [("read", {})])
        loop.run("task")
        assert pairs_of(loop.memory)[0].reads == {"file:a"}
        with pytest.raises(InvalidInput, match="'pth'"):
            Tool.of(read, reads=("file:{pth}",))

    def test_results_with_lone_surrogates_are_shown(self) -> None:
        loop = loop_of([Tool.of(lambda: "a\udce9b", name="listing")], [("listing", {})])
        assert loop.run("task").answer == "done"
        assert results(loop.memory) == ["Result of listing: a?b"]

    @pytest.mark.parametrize("free", [20, 60, 120, 200, 320])
    def test_a_context_that_is_nearly_full(self, free: int) -> None:
        runs: list[str] = []
        counted = Tool.of(lambda path: runs.append(path) or "done", name="read", writes=("file:{path}",))
        loop = loop_of([counted], [READ_A] * 3, max_new_tokens=40)
        loop.memory.append("x" * (loop.memory.context_length - loop.memory.next_position - free - 10))
        report = loop.run("t")
        assert report.finish_reason in ("context_length", "length", "answer")
        self.assert_whole(loop)
        assert len(runs) == len(pairs_of(loop.memory)) == report.n_calls  # what was done is told

    def test_an_effect_whose_result_is_withheld_has_happened(self) -> None:
        def send(to: str) -> str:
            """Send it."""
            return "sent " * 200

        script = [READ_A, ("write", {"path": "a", "text": "X"}), ("send", {"to": "b"})]
        files = Files()
        long = Tool.of(
            lambda path, text: files.content.update({path: text}) or "long " * 200,
            name="write",
            writes=("file:{path}",),
        )
        policies = (
            RefuseOversize(max_tokens=100),
            "collapse_repeats",
            "retract_failed",
            SupersedeReads(method="recompute"),
        )
        loop = loop_of([files.tools[0], long, send], script, policies=policies, required=("send",))
        report = loop.run("task")
        assert report.answer == "done" and (report.n_failed, report.count("withheld")) == (0, 2)
        assert [pair.tool for pair in pairs_of(loop.memory)] == ["write", "send"]  # the read is stale
        assert loop.may_finish == [False, False, False, True]

    def test_a_write_is_never_collapsed(self) -> None:
        write = ("write", {"path": "a", "text": "X"})
        script = [write, ("write", {"path": "a", "text": "Y"}), READ_A, write]
        loop = loop_of(Files().tools, script, policies=("collapse_repeats", SupersedeReads(method="recompute")))
        loop.run("task")
        assert [pair.tool for pair in pairs_of(loop.memory)] == ["write", "write", "write"]

    def test_errors_are_not_put_in_quarantine(self) -> None:
        seen: list[str] = []

        def check(memory: ContextMemory, result: Segment) -> bool:
            seen.append(result.text)
            return False

        loop = loop_of(Files().tools, [("read", {"path": "nowhere"})], policies=(Quarantine(check),))
        loop.run("task")
        assert not seen and results(loop.memory) == ["Result of read: Error: KeyError: 'nowhere'"]


@pytest.mark.filterwarnings("ignore::contextmem.DependentsWarning")
class TestPairs:
    """U29: a call and its results go together."""

    @staticmethod
    def transcript() -> ContextMemory:
        loop = loop_of(Files().tools, [READ_A, READ_B, ("read_both", {"first": "a", "second": "b"})])
        loop.run("task")
        last = loop.memory.segments(kind="tool_result")[-1]
        metadata = {**last.metadata, "tool": "read_both"}
        loop.memory.append("a second result\n", kind="tool_result", parents=last.parents, metadata=metadata)
        return loop.memory

    def test_retracting_any_of_them_leaves_no_orphan(self) -> None:
        whole = self.transcript()
        halves = [s for s in whole.segments() if s.kind in ("tool_call", "tool_result")]
        assert len(halves) == 8  # three pairs, a parallel result, the final answer
        for half in halves:
            memory = whole.fork()
            memory.retract(half.id, method="recompute", cascade=False)
            self.assert_whole(memory)
            assert half.id not in [segment.id for segment in memory.segments()]
            assert_equals_reference(memory)

    def test_retracting_any_two_leaves_no_orphan(self) -> None:
        whole = self.transcript()
        halves = [s for s in whole.segments() if s.kind in ("tool_call", "tool_result")]
        for one, other in zip(halves, halves[2:], strict=False):
            memory = whole.fork()
            memory.retract([one, other], method="mask")
            self.assert_whole(memory)

    @staticmethod
    def assert_whole(memory: ContextMemory) -> None:
        live = {segment.id: segment for segment in memory.segments()}
        answered = {parent for s in live.values() if s.kind == "tool_result" for parent in s.parents if parent in live}
        for segment in live.values():
            if segment.kind == "tool_result":
                assert any(live[p].kind == "tool_call" for p in segment.parents if p in live)
            if segment.kind == "tool_call" and "final_answer" not in segment.text:
                assert segment.id in answered

    def test_rendered_messages_hold_no_orphan(self) -> None:
        loop = loop_of(Files().tools, [READ_A, READ_B])
        loop.run("task")
        loop.memory.retract(loop.memory.segments(kind="tool_result")[0], method="recompute")
        said = loop.messages()
        calls = {call["id"] for message in said for call in message.get("tool_calls", ())}
        assert calls == {message["tool_call_id"] for message in said if message["role"] == "tool"} and len(calls) == 1
        assert [message["role"] for message in said] == ["system", "user", "assistant", "tool", "assistant"]
        assert said[-1]["content"] == "done" and said[3]["content"] == "b holds B"

    def test_every_way_of_taking_half_a_pair_takes_the_other(self) -> None:
        whole = self.transcript()
        first, second = pairs_of(whole)[:2]
        document = whole.append("a document ")
        derived = whole.append("from both ", kind="tool_result", parents=[first.call, document], key="K")

        memory = whole.fork()
        memory.retract(document, cascade=True, method="recompute")
        self.assert_whole(memory)
        assert first.call.id not in [s.id for s in memory.segments()]

        memory = whole.fork()
        memory.append("newer ", kind="tool_result", parents=[second.call], key="K", on_conflict="replace")
        self.assert_whole(memory)
        assert {first.call.id, derived.id}.isdisjoint(s.id for s in memory.segments())

        memory = whole.fork()
        memory.append("newer ", kind="tool_result", parents=[first.call], key="K", on_conflict="replace")
        self.assert_whole(memory)
        assert first.call.id in [s.id for s in memory.segments()]

        memory = whole.fork()
        said = first.result.text
        again = memory.append(said, kind="tool_result", parents=[second.call], source="read", on_duplicate="share")
        assert again.id != first.result.id

        memory = whole.fork()
        new = memory.replace(first.call, '{"name": "read", "arguments": {"path": "c"}}').segment
        assert new is not None
        memory.retract(first.result.id, method="recompute")
        assert new.id not in [s.id for s in memory.segments()]
        self.assert_whole(memory)

    def test_a_dry_run_says_what_goes_along(self) -> None:
        memory = self.transcript()
        result = memory.segments(kind="tool_result")[0]
        before = snapshot(memory)
        assert len(memory.retract(result, dry_run=True).segments) == 2
        assert_unchanged(memory, before)

    def test_pairs_are_known_after_saving_and_loading(self, tmp_path: Any) -> None:
        memory = self.transcript()
        loaded = ContextMemory.load(memory.save(tmp_path / "saved"), memory.model, memory.tokenizer)
        assert [p.tool for p in pairs_of(loaded)] == [p.tool for p in pairs_of(memory)] != []


class TestStaleReads:
    """U30: a result is stale when what it describes has changed."""

    @pytest.mark.parametrize("method", ["recompute", "mask"])
    def test_a_write_and_a_newer_read_take_the_old_one_out(self, method: str) -> None:
        both = ("read_both", {"first": "b", "second": "a"})
        script = [READ_A, READ_B, both, ("write", {"path": "a", "text": "X"}), READ_A]
        seen: list[list[str]] = []
        loop = loop_of(Files().tools, script, policies=(SupersedeReads(method=method),))
        loop._on_step = lambda what, text: seen.append(results(loop.memory)) if what == "call" else None
        report = loop.run("task")
        assert seen[4] == ["Result of read: b holds B", "Result of write: wrote a"]  # before the next call
        assert results(loop.memory)[-1] == "Result of read: a holds X" and report.count("retracted") == 2

    def test_the_same_read_again_takes_its_old_result_out(self) -> None:
        loop = loop_of(Files().tools, [READ_A, READ_B, READ_A], policies=(SupersedeReads(method="recompute"),))
        report = loop.run("task")
        assert results(loop.memory) == ["Result of read: b holds B", "Result of read: a holds A"]
        assert report.count("retracted") == 1
        assert_equals_reference(loop.memory)

    def test_a_failed_write_makes_nothing_stale(self) -> None:
        loop = loop_of(Files().tools, [READ_A, ("write", {"path": "a", "text": ""})], policies=("supersede_reads",))
        assert loop.run("task").count("retracted") == 0 and len(results(loop.memory)) == 2

    def test_a_read_of_less_leaves_a_read_of_more(self) -> None:
        both = ("read_both", {"first": "b", "second": "a"})
        loop = loop_of(Files().tools, [both, READ_A], policies=("supersede_reads",))
        assert loop.run("task").count("retracted") == 0


class TestOversize:
    """U31: one giant result must not wedge the session."""

    @pytest.mark.parametrize("policies", [("refuse_oversize",), (RefuseOversize(max_tokens=100),), ()])
    def test_it_is_refused_before_it_is_prefilled(self, policies: Any) -> None:
        def dump() -> str:
            """Show everything."""
            return "word " * 3 * tiny_model("llama", "sdpa").config.max_position_embeddings

        loop = loop_of([dump, *Files().tools], [("dump", {}), READ_A], policies=policies)
        sizes: list[int] = []
        prefill = loop.memory.backbone.prefill
        loop.memory.backbone.prefill = lambda ids, *a, **k: (sizes.append(len(ids)), prefill(ids, *a, **k))[1]  # type: ignore[method-assign]
        try:
            report = loop.run("task")
        finally:
            del loop.memory.backbone.prefill
        assert report.answer == "done" and report.n_failed == 0 and max(sizes) < 300
        error = json.loads(results(loop.memory)[0].removeprefix("Result of dump: "))
        assert error["error"] == "result too large" and error["tokens"] > error["limit"] > 0
        assert_equals_reference(loop.memory)

    def test_within_a_budget_the_limit_follows_it(self) -> None:
        limit = RefuseOversize()._limit(loop_of(Files().tools, [], budget=400).memory)
        assert limit == 100

    def test_a_full_context_ends_the_run_and_nothing_is_lost(self) -> None:
        loop = loop_of(Files().tools, [READ_A])
        free = loop.memory.context_length - loop.memory.next_position
        loop.memory.append("x" * (free - 12))
        loop._ask = lambda barred, may_finish: ToolLoop._ask(loop, barred, may_finish)  # type: ignore[method-assign]
        report = loop.run("task")
        assert report.finish_reason in ("context_length", "length") and report.answer is None
        assert loop.memory.segments(kind="user")[-1].text == "task\n"


def test_a_rejected_result_is_cut_off_exactly() -> None:
    tails: list[tuple[str, bool]] = []

    def check(memory: ContextMemory, result: Segment) -> bool:
        tails.append((result.text, memory.segments()[-1].id == result.id))
        return "B" not in result.text

    loop = loop_of(Files().tools, [READ_A, READ_B], policies=(Quarantine(check),))
    report = loop.run("task")
    assert tails == [("Result of read: a holds A\n", True), ("Result of read: b holds B\n", True)]
    assert report.count("withheld") == 1 and report.n_failed == 0 and report.n_kept == 2
    assert "holds B" not in loop.memory._codec.decode(loop.memory.token_ids)
    assert json.loads(results(loop.memory)[1].removeprefix("Result of read: "))["error"] == "result withheld"
    assert_equals_reference(loop.memory)


def test_a_kept_answer_may_be_a_call(llama_memory: Callable[..., ContextMemory]) -> None:
    memory = llama_memory()
    answer = memory.ask("call it", keep=True, kind="tool_call", max_new_tokens=4)
    assert answer.segment is not None and answer.segment.kind == "tool_call"
    with pytest.raises(InvalidInput, match="kind"):
        memory.ask("call it", keep=True, kind="document")


@pytest.mark.smollm2
def test_the_embedded_model_finishes_a_task_with_a_tool_that_fails_three_times(smollm2: tuple[Any, Any]) -> None:
    n_failures = 3

    def find_city(person: str) -> str:
        """Find the city in which a person lives."""
        nonlocal n_failures
        if n_failures:
            n_failures -= 1
            raise ConnectionError("the directory did not answer, try again")
        return f"{person} lives in Porto."

    def get_weather(city: str) -> str:
        """Tell today's weather in a city."""
        return f"The weather in {city} is rain at 14 degrees."

    tools = [find_city, get_weather]
    loop = ToolLoop(*smollm2, tools, required=("find_city", "get_weather"), max_turns=12, max_new_tokens=60)
    report = loop.run("First find the city where Anna lives. Then get the weather in that city.")
    assert report.finish_reason == "answer" and "14 degrees" in (report.answer or "")
    assert report.n_failed == 3 and not [pair for pair in pairs_of(loop.memory) if pair.is_error]
    assert {pair.tool for pair in pairs_of(loop.memory)} == {"find_city", "get_weather"}
    assert report.count("collapsed") >= 2 and report.count("retracted") == 1
