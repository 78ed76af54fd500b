"""What restore slots must beat: empty positions, embeddings without adapter, slots from what was left, slots that leave."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache

from contextmem import RestoreKV
from contextmem.backbone import Backbone
from contextmem.cache import Slots, SpanCache
from contextmem.ragged import RaggedCache

__all__ = ["CONTROLS", "Control"]

Made = Callable[[RestoreKV, Backbone, SpanCache, RaggedCache], Slots | None]


@dataclass(frozen=True)
class Control:
    """A way to fill the place of the restore slots.

    Attributes:
        name: as in the rows.
        slots: from the restorer, the model, the full cache and the evicted one to slots; None: their positions stay empty.
        stays: whether the slots are still there when the answer is decoded.
    """

    name: str
    slots: Made
    stays: bool = True

    def beside(self, restorer: RestoreKV, backbone: Backbone, full: SpanCache, evicted: RaggedCache) -> SpanCache:
        """The evicted cache with what this control puts beside it; a new one."""
        slots = self.slots(restorer, backbone, full, evicted)
        if slots is not None:
            return evicted.restored(slots, full.next_position)
        moved = evicted.view()
        moved.next_position += restorer.n
        return moved


@lru_cache(maxsize=1)
def _without_adapter(restorer: RestoreKV, backbone: Backbone) -> RestoreKV:
    """The same embeddings, run through the model as it is."""
    plain = RestoreKV.untrained(backbone.core, n=restorer.n)
    plain.embeddings = restorer.embeddings
    return plain


CONTROLS = {
    one.name: one
    for one in (
        Control("positions-only", lambda restorer, backbone, full, evicted: None),
        Control(
            "without-lora",
            lambda restorer, backbone, full, evicted: _without_adapter(restorer, backbone).slots(backbone, full),
        ),
        Control("from-evicted", lambda restorer, backbone, full, evicted: restorer.slots(backbone, evicted)),
        Control("dropped", lambda restorer, backbone, full, evicted: restorer.slots(backbone, full), stays=False),
    )
}
