"""Hold a result as the tail until a checker accepts it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

from contextmem import ContextMemory, Segment
from contextmem.integrations.tool_loop.policies.base import Policy, register

__all__ = ["Quarantine"]


@register
@dataclass(frozen=True)
class Quarantine(Policy):
    """A result that the checker rejects is cut off again before anything follows it, which is exact.

    Attributes:
        check: called with the memory, whose tail is the result, and the result's segment; returns whether to keep it. It may
            ask the memory, transiently. Not called for errors and results that are withheld already.
    """

    check: Callable[[ContextMemory, Segment], bool]
    name: ClassVar[str] = "quarantine"

    def objection(self, memory: ContextMemory, result: Segment) -> str | None:
        return None if self.check(memory, result) else "it was rejected by a check"
