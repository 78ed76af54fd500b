"""The state of a memory: one value. Operations compute a next state and swap it in; a failure leaves the old one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from contextmem.backbone import CHUNK, Backbone
from contextmem.cache import SpanCache
from contextmem.ledger import Ledger, Segment

__all__ = ["State", "extended", "rebuilt"]

Step = Callable[[int], None] | None


@dataclass(frozen=True)
class State:
    """A ledger, the cache it describes, and how much of that cache is exact.

    Attributes:
        ledger: what stands in which slot.
        cache: the KV of those slots.
        exact_slots: leading slots whose keys, values and positions are those of a context rebuilt from the token log,
            up to numeric noise. Always a span's edge.
    """

    ledger: Ledger
    cache: SpanCache
    exact_slots: int = 0

    @property
    def n_slots(self) -> int:
        """Slots in use."""
        return self.cache.n_slots

    @property
    def is_exact(self) -> bool:
        """Whether no approximate edit is left."""
        return self.exact_slots == self.n_slots

    def view(self) -> State:
        """The same state with a cache object of its own; no tensor is copied."""
        return State(self.ledger, self.cache.view(), self.exact_slots)

    def check(self) -> None:
        """Raise AssertionError unless log, spans and cache agree in every layer. Cheap."""
        self.ledger.check()
        lengths = {layer.get_seq_length() for layer in self.cache.layers}
        assert lengths == {self.ledger.n_slots}, f"ledger has {self.ledger.n_slots} slots, layers have {lengths}"
        assert self.cache.n_slots == self.ledger.n_slots, "positions and spans disagree"
        assert 0 <= self.exact_slots <= self.n_slots


def extended(
    backbone: Backbone, state: State, new: Sequence[Segment], *, chunk: int = CHUNK, step: Step = None
) -> State:
    """`state` with the segments of `new` prefilled at its end."""
    ledger = state.ledger.added(new)
    cache = state.cache.view()
    if ids := [token for segment in new for token in segment.token_ids]:
        backbone.prefill(ids, cache, chunk=chunk, step=step)
    return State(ledger, cache, ledger.n_slots if state.is_exact else state.exact_slots)


def rebuilt(
    backbone: Backbone, state: State, ledger: Ledger, start: int, *, chunk: int = CHUNK, step: Step = None
) -> State:
    """The exact state of `ledger`: KV before slot `start` is kept, everything from there on is prefilled again.

    `ledger` must agree with the ledger of `state` before `start`, and `start` must not exceed `state.exact_slots`.
    Positions from there on are packed again.
    """
    cache = state.cache.view(start)
    cache.next_position = start
    ids = [token for span in ledger.spans if span.start >= start for token in span.token_ids]
    if ids:
        backbone.prefill(ids, cache, chunk=chunk, step=step)
    return State(ledger, cache, ledger.n_slots)
