"""The state of a memory: one value. Operations compute a next state and swap it in; a failure leaves the old one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from contextmem.backbone import CHUNK, Backbone
from contextmem.cache import Slots, SpanCache
from contextmem.errors import ContextOverflow, InconsistentState
from contextmem.ledger import Ledger, Segment
from contextmem.ragged import RaggedCache

__all__ = ["State", "check_room", "extended", "rebuilt"]

Step = Callable[[int], None] | None


@dataclass(frozen=True)
class State:
    """A ledger, the cache it describes, and how much of that cache is exact.

    Attributes:
        ledger: what stands in which slot.
        cache: the KV of those slots.
        exact_slots: leading slots whose keys, values and positions are those of a context rebuilt from the token log,
            up to numeric noise. Always a span's edge.
        patches: keys and values to be written over the slots from a first one on when the state is taken over, see `landed`;
            until then the state before it is whole.
        full: of a compacted state, every slot before the compaction, as far as `exact_slots` says exact, if a full tier is
            kept. What was appended since is in `cache` alone.
        scores: (layers, heads, n) what an evictor made of the first n slots, to be compared with later ones.
    """

    ledger: Ledger
    cache: SpanCache
    exact_slots: int = 0
    patches: tuple[tuple[int, Slots], ...] = ()
    full: SpanCache | None = None
    scores: Tensor | None = None

    @property
    def n_slots(self) -> int:
        """Slots in use, evicted ones included."""
        return self.ledger.n_slots

    @property
    def is_compacted(self) -> bool:
        """Whether something was evicted."""
        return isinstance(self.cache, RaggedCache)

    @property
    def n_restore(self) -> int:
        """Restore slots beside what was not evicted."""
        return self.cache.n_restore if isinstance(self.cache, RaggedCache) else 0

    @property
    def is_exact(self) -> bool:
        """Whether no approximate edit is left, and nothing was evicted."""
        return self.exact_slots == self.n_slots and not self.is_compacted

    def view(self) -> State:
        """The same state with cache objects of its own; no tensor is copied."""
        return replace(self, cache=self.cache.view(), full=self.full.view() if self.full is not None else None)

    def landed(self) -> State:
        """This state with its patches written, in place unless another state reads those slots; all of them or none."""
        if not self.patches:
            return self
        cache = self.cache.owned(self.patches[0][0])
        before = [(start, cache.read(start, start + slots[0][0].shape[-2])) for start, slots in self.patches]
        try:
            for start, slots in self.patches:
                cache.write(start, slots)
        except BaseException:
            for start, slots in before:
                cache.write(start, slots)
            raise
        return replace(self, cache=cache, patches=())

    def check(self) -> None:
        """Raise `InconsistentState` unless log, spans and cache agree in every layer. Cheap."""
        self.ledger.check()
        n, cache = self.ledger.n_slots, self.cache
        lengths = {layer.get_seq_length() for layer in cache.layers} | {len(cache.positions), len(cache.turns)}
        if lengths != {n}:
            raise InconsistentState(f"the ledger has {n} slots, the cache has {sorted(lengths)}")
        after = int(cache.positions[-1]) + 1 if n else 0
        if cache.next_position < after or (cache.next_position > after and not self.is_compacted):
            raise InconsistentState(f"the next position is {cache.next_position}, not the one after the last slot")
        if not 0 <= self.exact_slots <= n or not torch.equal(
            cache.positions[: self.exact_slots], torch.arange(self.exact_slots)
        ):
            raise InconsistentState(f"{self.exact_slots} slots are said to be exact and are not at their places")


def extended(
    backbone: Backbone, state: State, new: Sequence[Segment], *, chunk: int = CHUNK, step: Step = None
) -> State:
    """`state` with the segments of `new` prefilled at its end."""
    ledger = state.ledger.added(new)
    cache = state.cache.view()
    if ids := [token for segment in new for token in segment.token_ids]:
        backbone.prefill(ids, cache, chunk=chunk, step=step)
    return replace(
        state, ledger=ledger, cache=cache, exact_slots=ledger.n_slots if state.is_exact else state.exact_slots
    )


def rebuilt(
    backbone: Backbone, state: State, ledger: Ledger, start: int, *, chunk: int = CHUNK, step: Step = None
) -> State:
    """The exact state of `ledger`: KV before slot `start` is kept, everything from there on is prefilled again.

    `ledger` must agree with the ledger of `state` before `start`, and `start` must not exceed `state.exact_slots`.
    Positions from there on are packed again.
    """
    cache = state.cache.view(start) if start else backbone.new_cache()
    cache.next_position = start
    ids = [token for span in ledger.spans if span.start >= start for token in span.token_ids]
    if ids:
        backbone.prefill(ids, cache, chunk=chunk, step=step)
    return State(ledger, cache, ledger.n_slots)


def check_room(backbone: Backbone, taken: int, needed: int, what: str = "the text") -> None:
    """Raise `ContextOverflow` if `needed` tokens do not fit into the model's context length beside `taken` positions."""
    limit = backbone.context_length
    available = limit - taken
    if needed > available:
        rope = sorted(backbone.rope_types - {"default"})
        raise ContextOverflow(
            f"{what} needs {needed:,} tokens, which exceeds the {available:,} left of the context length {limit:,}"
            f"{f' (RoPE type {rope[0]})' if rope else ''}. Retract something, settle() position gaps, or append with "
            f"overflow='truncate'. Nothing was changed.",
            needed=needed,
            available=available,
            limit=limit,
        )
