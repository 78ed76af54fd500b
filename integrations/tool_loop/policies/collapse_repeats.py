"""Keep one of several identical calls with identical results."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from contextmem import ContextMemory
from contextmem.integrations.tool_loop.pairs import Pair
from contextmem.integrations.tool_loop.policies.base import Change, Policy, register, taken_out

__all__ = ["CollapseRepeats"]


@register
@dataclass(frozen=True)
class CollapseRepeats(Policy):
    """A pair that repeats one in the context is cut off again: it is the tail, so that is exact and free.

    Not so a call that has changed something, nor one that reads what was changed in between: those say what is true now.

    The loop does not offer a tool in the turn after a repeated success.
    """

    name: ClassVar[str] = "collapse_repeats"

    def after(self, memory: ContextMemory, pair: Pair, earlier: Sequence[Pair]) -> list[Change]:
        last = max((n for n, other in enumerate(earlier) if pair.repeats(other)), default=None)
        if last is None or pair.writes or any(pair.reads & later.writes for later in earlier[last + 1 :]):
            return []
        repeats = [pair]
        changes: list[Change] = taken_out(memory, self.name, repeats, "collapsed")
        return changes
