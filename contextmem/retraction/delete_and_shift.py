"""delete_and_shift: drop the span and re-rotate what stood after it."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from contextmem.backbone import Backbone
from contextmem.cache import Ranges, SpanCache
from contextmem.retraction.base import Edit, Plan, register
from contextmem.retraction.crop import Crop
from contextmem.retraction.recompute import Recompute
from contextmem.state import State

__all__ = ["DeleteAndShift", "approximation", "close_gaps_", "is_worn", "recompute_plan", "shifted"]

# Chained re-rotations add up: 1e-7 relative each in float32, 2e-3 in bfloat16 (storage alone: 1.7e-3).
MAX_TURNS_FULL, MAX_TURNS_HALF = 64, 3


@dataclass(frozen=True)
class DeleteAndShift:
    """Drop e and rotate the keys of s by -|e| positions. Approximate: s attended to e and keeps its traces.

    Keys are rotated in place of being computed, so rounding adds up. A slot is re-rotated at most 64 times in float32 and
    3 times in half precision; then the whole suffix is recomputed instead, and the report says so.
    """

    name: str = "delete_and_shift"

    def plan(self, edit: Edit) -> Plan:
        if is_worn(edit):
            return recompute_plan(edit)
        if not edit.is_tail:
            edit.backbone.angles()
        return Plan(self.name, 0, edit.n_kept, approximation(edit))

    def apply(self, edit: Edit) -> State:
        if edit.is_tail:
            return Crop().apply(edit)
        if is_worn(edit):
            return Recompute().apply(edit)
        return State(edit.state.ledger.removed(edit.ids), shifted(edit), min(edit.state.exact_slots, edit.start))


def shifted(edit: Edit) -> SpanCache:
    """The kept slots, packed, their keys moved to close the gaps."""
    cache = edit.state.cache.select(edit.kept)
    close_gaps_(edit.backbone, cache, edit.kept)
    return cache


def close_gaps_(backbone: Backbone, cache: SpanCache, ranges: Ranges) -> None:
    """Move the keys of a cache that `select` has just made of `ranges` to where no slot is missing before them."""
    angles, at, moves = backbone.angles(), 0, dict[int, tuple[int, int]]()  # by delta: first slot and end
    for start, stop in ranges:
        delta, end = at - start, at + stop - start
        first, _ = moves.get(delta, (at, at))
        moves[delta] = (first, end)
        at = end
    with backbone.lock, torch.no_grad():
        for delta, (first, end) in moves.items():
            cache.turn_(first, end, delta, angles)


def approximation(edit: Edit) -> str:
    """The guarantee of dropping slots: exact if nothing that stays has seen what goes, approximate otherwise."""
    return "exact" if edit.is_tail and edit.state.exact_slots >= edit.start else "approximate"


def is_worn(edit: Edit) -> bool:
    """Whether a key that would be moved was re-rotated too often already."""
    half = edit.backbone.dtype in (torch.float16, torch.bfloat16)
    turns = edit.state.cache.turns[edit.start :]
    return not edit.is_tail and int(turns.max()) >= (MAX_TURNS_HALF if half else MAX_TURNS_FULL)


def recompute_plan(edit: Edit) -> Plan:
    """The plan to recompute instead of moving worn keys once more."""
    plan = Recompute().plan(edit)
    why = f"keys were re-rotated {int(edit.state.cache.turns.max())} times in {edit.backbone.dtype}; recomputed instead"
    return replace(plan, why=why)


register(DeleteAndShift())
