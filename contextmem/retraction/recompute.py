"""recompute: keep what stands before the span and prefill the rest again. The exact reference."""

from __future__ import annotations

from dataclasses import dataclass

from contextmem.ledger import Ledger
from contextmem.retraction.base import Edit, Plan, register
from contextmem.state import State, rebuilt

__all__ = ["Recompute"]


@dataclass(frozen=True)
class Recompute:
    """Exact retraction: keep KV(p), prefill s again under p + s.

    Costs O(|s| (|p| + |s|)) for a prefix p and a suffix s. Where approximate edits were left before the span, it starts
    at the first of them, so that the result always is what a context without the span would hold.
    """

    name: str = "recompute"

    def plan(self, edit: Edit) -> Plan:
        start, ledger = self._target(edit)
        return Plan(self.name, ledger.n_slots - start, start, "exact")

    def apply(self, edit: Edit) -> State:
        start, ledger = self._target(edit)
        return rebuilt(edit.backbone, edit.state, ledger, start, chunk=edit.chunk, step=edit.step)

    def _target(self, edit: Edit) -> tuple[int, Ledger]:
        start = min(edit.start, edit.state.exact_slots)
        return start, edit.state.ledger.removed(edit.ids).without_erased()


register(Recompute())
