"""How much a memory may hold, and by what it decides what to let go."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from contextmem.arguments import check_choice
from contextmem.backbone import Backbone
from contextmem.compaction import ALLOCATIONS, check_compactable
from contextmem.errors import InvalidInput
from contextmem.eviction import Evictor, evictor_named

__all__ = ["FULL_TIERS", "Budget", "check_eviction"]

FULL_TIERS = (None, "cpu", "disk")
_UNITS = {"B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}
_DEFAULT_RESERVE = 256


@dataclass(frozen=True)
class Budget:
    """A hard limit on the active cache.

    Attributes:
        n_tokens: a token counts for one slot in every layer and head, so this many times layers times heads pairs in all.
        reserve: tokens kept free for a question and its answer. A compaction makes this much room, so that a growing
            memory is not compacted at every call.
        evictor: scores what may go.
        allocation: see `compaction.chosen`.
        full_tier: where everything that was evicted is kept: "cpu", "disk" (a temporary file), or None for nowhere.
    """

    n_tokens: int
    reserve: int
    evictor: Evictor
    allocation: str = "global"
    full_tier: str | None = None

    @classmethod
    def of(
        cls,
        backbone: Backbone,
        size: int | str,
        *,
        reserve: int | None = None,
        evictor: str | Evictor = "kvzip",
        allocation: str = "global",
        full_tier: str | None = None,
    ) -> Budget:
        """A budget from what users write: tokens, or bytes as "512MB".

        Raises:
            InvalidInput: one of the arguments makes no sense.
            UnsupportedEdit: the model's attention cannot run over a compacted cache.
        """
        n_tokens = _n_tokens(backbone, size)
        reserve = min(_DEFAULT_RESERVE, n_tokens // 4) if reserve is None else reserve
        if not isinstance(reserve, int) or isinstance(reserve, bool) or not 0 <= reserve < n_tokens:
            raise InvalidInput(
                f"reserve must be a number of tokens below the budget of {n_tokens:,}, not {reserve!r}. Nothing was changed."
            )
        check_eviction(evictor, allocation, full_tier)
        check_compactable(backbone)
        return cls(n_tokens, reserve, evictor_named(evictor), allocation, full_tier)

    @property
    def target(self) -> int:
        """Tokens that a compaction leaves."""
        return self.n_tokens - self.reserve


def check_eviction(evictor: str | Evictor, allocation: str, full_tier: str | None) -> None:
    """Raise `InvalidInput` unless there are such an evictor, allocation and full tier."""
    evictor_named(evictor)
    check_choice("allocation", allocation, ALLOCATIONS)
    check_choice("full_tier", full_tier, FULL_TIERS)


def _n_tokens(backbone: Backbone, size: Any) -> int:
    if isinstance(size, int) and not isinstance(size, bool) and size > 0:
        return size
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([KMG]?i?B)\s*", size, re.IGNORECASE) if isinstance(size, str) else None
    if found is None:
        raise InvalidInput(
            f"a budget is a positive number of tokens, or of bytes as '512MB', not {size!r}. Nothing was changed."
        )
    n_bytes = float(found[1]) * _UNITS[found[2].upper()]
    if n_bytes < backbone.slot_nbytes:
        raise InvalidInput(
            f"a budget of {size} is less than one token of {backbone.slot_nbytes:,} bytes. Nothing was changed."
        )
    return int(n_bytes // backbone.slot_nbytes)
