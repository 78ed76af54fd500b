"""crop: the span is the tail, so it is cut. Exact and free."""

from __future__ import annotations

from dataclasses import dataclass

from contextmem.errors import UnsupportedEdit
from contextmem.retraction.base import Edit, Plan, register
from contextmem.state import State

__all__ = ["Crop"]


@dataclass(frozen=True)
class Crop:
    """Cut the tail: nothing stood after it, so nothing has seen it. Costs no computation and no copy."""

    name: str = "crop"

    def plan(self, edit: Edit) -> Plan:
        if not edit.is_tail:
            raise UnsupportedEdit(
                f"method 'crop' cuts the tail, but {edit.n_suffix:,} tokens stand after segment "
                f"{edit.targets[0].id!r}. Use method='auto' or 'recompute'. Nothing was changed."
            )
        exact = edit.state.exact_slots >= edit.start
        return Plan(self.name, 0, edit.start, "exact" if exact else "approximate")

    def apply(self, edit: Edit) -> State:
        return State(
            edit.state.ledger.removed(edit.ids),
            edit.state.cache.view(edit.start),
            min(edit.state.exact_slots, edit.start),
        )


register(Crop())
