"""Refuse results that are too long, before they are prefilled."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import ClassVar

from contextmem import ContextMemory
from contextmem.integrations.tool_loop.policies.base import Policy, register
from contextmem.integrations.tool_loop.tools import Outcome

__all__ = ["RefuseOversize", "oversize"]


@register
@dataclass(frozen=True)
class RefuseOversize(Policy):
    """A result beyond the limit is replaced by a short error that names both sizes.

    Attributes:
        max_tokens: of a result; None: a quarter of what is free of the context or of the budget.
    """

    name: ClassVar[str] = "refuse_oversize"
    max_tokens: int | None = None

    def before(self, memory: ContextMemory, tool: str, outcome: Outcome) -> Outcome:
        n_tokens, limit = memory.count_tokens(outcome.text), self._limit(memory)
        return outcome if n_tokens <= limit else oversize(n_tokens, limit, outcome.is_error)

    def _limit(self, memory: ContextMemory) -> int:
        if self.max_tokens is not None:
            return self.max_tokens
        free = memory.context_length - memory.next_position
        return min(free, memory.budget.n_tokens if memory.budget is not None else free) // 4


def oversize(n_tokens: int, limit: int, is_error: bool) -> Outcome:
    """What the model reads in the place of a result that is too long; `is_error`: whether the call failed."""
    said = {"error": "result too large", "tokens": n_tokens, "limit": limit, "hint": "ask for less, or for a part"}
    return Outcome(json.dumps(said), is_error=is_error, withheld="oversize")
