"""Retract failed calls once the tool has worked."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from contextmem import ContextMemory
from contextmem.integrations.tool_loop.pairs import Pair
from contextmem.integrations.tool_loop.policies.base import Change, Policy, register, taken_out

__all__ = ["RetractFailed"]


@register
@dataclass(frozen=True)
class RetractFailed(Policy):
    """After a success, earlier failed calls of the same tool go: they would be examples of how to fail.

    A call whose result was withheld goes like a failed one, unless it has changed something.

    Attributes:
        method: how, see `ContextMemory.retract`.
    """

    name: ClassVar[str] = "retract_failed"
    method: str = "auto"

    def after(self, memory: ContextMemory, pair: Pair, earlier: Sequence[Pair]) -> list[Change]:
        if pair.is_error or pair.withheld:
            return []
        failed = [p for p in earlier if p.tool == pair.tool and (p.is_error or (p.withheld and not p.writes))]
        changes: list[Change] = taken_out(memory, self.name, failed, "retracted", method=self.method)
        return changes
