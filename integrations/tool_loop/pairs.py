"""Calls and their results, read off a memory: what policies work on."""

from __future__ import annotations

from dataclasses import dataclass

from contextmem import ContextMemory, Segment

__all__ = ["Pair", "pairs_of"]


@dataclass(frozen=True)
class Pair:
    """One tool call and its result, both live.

    Attributes:
        call, result: their segments.
        tool: the tool's name.
        is_error: whether the call failed.
        withheld: why the result is not shown, or None.
        reads, writes: resources that the shown result depends on, and that the call changed; a failed one changed none.
    """

    call: Segment
    result: Segment
    tool: str
    is_error: bool
    reads: frozenset[str]
    writes: frozenset[str]
    withheld: str | None = None

    @property
    def n_tokens(self) -> int:
        """Tokens of both, without frames."""
        return self.call.n_tokens + self.result.n_tokens

    def repeats(self, other: Pair) -> bool:
        """Whether it is the same call with the same result."""
        return (self.call.text, self.result.text) == (other.call.text, other.result.text)


def pairs_of(memory: ContextMemory) -> list[Pair]:
    """Live pairs in order."""
    live = {segment.id: segment for segment in memory.segments()}
    pairs = []
    for result in live.values():
        call = next((live[p] for p in result.parents if p in live and live[p].kind == "tool_call"), None)
        if result.kind == "tool_result" and call is not None and "tool" in result.metadata:
            said = result.metadata
            reads, writes = frozenset(said["reads"]), frozenset(said["writes"])
            pairs.append(Pair(call, result, said["tool"], said["is_error"], reads, writes, said.get("withheld")))
    return pairs
