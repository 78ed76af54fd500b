"""Retract results that a later call has made stale."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from contextmem import ContextMemory
from contextmem.integrations.tool_loop.pairs import Pair
from contextmem.integrations.tool_loop.policies.base import Change, Policy, register, taken_out

__all__ = ["SupersedeReads"]


@register
@dataclass(frozen=True)
class SupersedeReads(Policy):
    """A successful call takes out earlier reads of what it wrote, and its own earlier result when it is the same call again.

    Resources are named by `Tool.reads` and `Tool.writes`. A failed call makes nothing stale.

    Attributes:
        method: how, see `ContextMemory.retract`.
    """

    name: ClassVar[str] = "supersede_reads"
    method: str = "auto"

    def after(self, memory: ContextMemory, pair: Pair, earlier: Sequence[Pair]) -> list[Change]:
        if pair.is_error:
            return []
        stale = [p for p in earlier if p.reads & pair.writes or (p.reads and p.call.text == pair.call.text)]
        changes: list[Change] = taken_out(memory, self.name, stale, "retracted", method=self.method)
        return changes
