"""mask: drop the span and leave its positions empty."""

from __future__ import annotations

from dataclasses import dataclass

from contextmem.errors import UnsupportedEdit
from contextmem.retraction.base import Edit, Plan, register
from contextmem.retraction.crop import Crop
from contextmem.retraction.delete_and_shift import approximation
from contextmem.state import State

__all__ = ["Mask"]


@dataclass(frozen=True)
class Mask:
    """Drop e's slots and leave the gap in the positions: as if e were masked out of every later attention.

    Everything outside e stays bit-identical. Approximate: s attended to e and keeps its traces. The memory is freed, but
    the positions are not given back until `settle()`.
    """

    name: str = "mask"

    def plan(self, edit: Edit) -> Plan:
        implementation = edit.backbone.core.config._attn_implementation
        if edit.backbone.has_sliding_layers and implementation not in ("sdpa", "eager"):
            raise UnsupportedEdit(
                f"method 'mask' leaves a gap in the positions, which needs an explicit mask on sliding-window layers; "
                f"attention implementation {implementation!r} takes none. Use 'sdpa' or 'eager', or method='recompute'. "
                f"Nothing was changed."
            )
        return Plan(self.name, 0, edit.n_kept, approximation(edit))

    def apply(self, edit: Edit) -> State:
        if edit.is_tail:
            return Crop().apply(edit)
        cache = edit.state.cache.select(edit.kept)
        return State(edit.state.ledger.removed(edit.ids), cache, min(edit.state.exact_slots, edit.start))


register(Mask())
