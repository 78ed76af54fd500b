"""One trace through a memory, turn by turn: recorded calls and results, the model only scored."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from contextmem import ContextMemory, Segment
from contextmem.evals.agent.traces import Trace, Turn
from contextmem.integrations.tool_loop import Policy, pairs_of

__all__ = ["put", "rate", "replayed"]


def replayed(
    memory: ContextMemory, trace: Trace, policies: Sequence[Policy], *, rebuild: bool = True
) -> dict[str, Any]:
    """Replay a trace and count.

    Args:
        rebuild: time reading the context from nothing after every edit as well.

    Returns:
        `score`: log-probability of the recorded assistant turns, nats a token; `turns`: that of each, in all, and its
        tokens; `first`: number of the first one after a change by a policy, or None; `seconds` of the policies' edits;
        `again_s`: of reading the context from nothing after each of them instead; tokens at the end and at most; pairs
        retracted and collapsed.
    """
    call: Segment | None = None
    said: list[tuple[float, int]] = []
    first: int | None = None
    counts = {"retracted": 0, "collapsed": 0}
    edit_s, again_s, n_edits, peak = 0.0, 0.0, 0, 0
    for turn in trace.turns:
        if turn.kind == "assistant":
            if first is None and any(counts.values()):
                first = len(said)
            said.append((round(memory.score(turn.text, question=""), 3), memory.count_tokens(turn.text)))
        segment = put(memory, turn, call)
        call = segment if turn.kind == "tool_call" else call
        peak = max(peak, _n_live(memory))
        if turn.kind != "tool_result":
            continue
        for policy in policies:
            live = pairs_of(memory)
            pair = next((p for p in live if p.result.id == segment.id), None)
            if pair is not None:
                started = time.perf_counter()
                changes = policy.after(memory, pair, [p for p in live if p.result.id != segment.id])
                if any(change.what == "retracted" for change in changes):  # what is collapsed is cut, which is free
                    edit_s += time.perf_counter() - started
                    again_s += _rebuilt(memory) if rebuild else 0.0
                    n_edits += 1
                for change in changes:
                    counts[change.what] += len(change.tools)
    return {
        "score": rate(said),
        "turns": said,
        "first": first,
        "seconds": round(edit_s, 3),
        "again_s": round(again_s, 3),
        "n_edits": n_edits,
        "tokens": _n_live(memory),
        "peak": peak,
        **counts,
        "n_calls": sum(turn.kind == "tool_result" for turn in trace.turns),
        "n_failed": sum(turn.is_error for turn in trace.turns),
    }


def put(memory: ContextMemory, turn: Turn, call: Segment | None) -> Segment:
    """A turn as a segment; a result is tied to the call before it."""
    if turn.kind != "tool_result":
        return memory.append(turn.text, kind=turn.kind, source=turn.tool or None)
    said = {"tool": turn.tool, "is_error": turn.is_error, "reads": list(turn.reads), "writes": list(turn.writes)}
    text = f"Result of {turn.tool}: {turn.text}\n"
    return memory.append(text, kind="tool_result", source=turn.tool, parents=(call,) if call else (), metadata=said)


def _n_live(memory: ContextMemory) -> int:
    return len(memory.token_ids)


def rate(said: Sequence[Sequence[float]]) -> float | None:
    """Log-probability a token of turns with their totals and tokens."""
    n_tokens = sum(n for _, n in said)
    return round(sum(total for total, _ in said) / n_tokens, 4) if n_tokens else None


def _rebuilt(memory: ContextMemory) -> float:
    backbone = memory.backbone
    started = time.perf_counter()
    backbone.prefill(memory.token_ids, backbone.new_cache())
    return time.perf_counter() - started
