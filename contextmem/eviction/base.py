"""What an evictor is, and what it is given."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from contextmem.attention import Watch, switched
from contextmem.backbone import Backbone
from contextmem.cache import SpanCache
from contextmem.codec import Codec
from contextmem.errors import InvalidInput
from contextmem.framing import Framing
from contextmem.ragged import RaggedLayer

__all__ = ["EVICTORS", "N_SINK", "Evictor", "Reading", "evictor_named", "group_weights", "register"]

N_SINK = 4  # first slots, which every head attends to and no compaction drops
WINDOW = 256  # queries watched at a time: bounds the memory of their attention weights


@dataclass(frozen=True)
class Reading:
    """A cache whose last slots are to be scored.

    Attributes:
        backbone, codec, framing: the model and how texts are put to it.
        cache: everything up to now, dense or compacted; evictors never change it.
        token_ids: ids of the slots from `start` on; slots that were erased have a stand-in.
        start: first slot to score; not before the offset of a compacted cache.
        before: ids of the slots right before it, a few.
        step: called with the tokens done before every forward; may raise to cancel.
    """

    backbone: Backbone
    codec: Codec
    framing: Framing
    cache: SpanCache
    token_ids: tuple[int, ...]
    start: int
    before: tuple[int, ...] = ()
    step: Callable[[int], None] | None = None

    @property
    def n(self) -> int:
        """Number of slots to score."""
        return self.cache.n_slots - self.start

    def layers(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Keys and values to score, (heads, n, head_dim) each, layer by layer."""
        for layer in self.cache.layers:
            at = self.start - self.cache.offset
            yield layer.keys[0, :, at:], layer.values[0, :, at:]

    def empty(self) -> Tensor:
        """Scores of zero, (layers, heads, n), float32."""
        heads = self.cache.layers[0].keys.shape[1]
        return torch.zeros(len(self.cache.layers), heads, self.n)

    def watch(self, ids: tuple[int, ...], cache: SpanCache, watch: Watch) -> None:
        """Run `ids` after `cache`, a view to be thrown away, and see the queries and keys of every layer.

        Where the context length leaves no room for them, they are put at its end, over positions that are taken.
        """
        cache.next_position = max(0, min(cache.next_position, self.backbone.context_length - len(ids)))
        for start in range(0, len(ids), WINDOW):
            if self.step is not None:
                self.step(start)
            with self.backbone.lock, switched(self.backbone.core, watch, masked=self.cache.offset == 0):
                self.backbone.forward(ids[start : start + WINDOW], cache)

    def again(self, watch: Watch) -> None:
        """Run the tokens to score once more over what stands before them."""
        self.watch(self.token_ids, self.cache.view(self.start), watch)


class Evictor(Protocol):
    """A way to tell which slots will be missed least. Adding one is a file with a frozen dataclass and a `register` line.

    An evictor with an attribute `n_recent` has so many of the last slots kept at every compaction, whatever their scores.
    """

    @property
    def name(self) -> str:
        """Name in the registry and in reports."""
        ...

    def scores(self, reading: Reading) -> Tensor:
        """How much each layer and head will need each slot, (layers, heads, reading.n) float32; more is more."""
        ...


EVICTORS: dict[str, Evictor] = {}


def register(evictor: Evictor) -> None:
    """Make `evictor` available by its name."""
    EVICTORS[evictor.name] = evictor


def evictor_named(evictor: str | Evictor) -> Evictor:
    """The evictor of that name, or `evictor` itself if it is one.

    Raises:
        InvalidInput: no such evictor.
    """
    if isinstance(evictor, str) and evictor in EVICTORS:
        return EVICTORS[evictor]
    if isinstance(evictor, str) or not all(hasattr(evictor, part) for part in ("name", "scores")):
        raise InvalidInput(f"unknown evictor {evictor!r}; there are {', '.join(EVICTORS)}. Nothing was changed.")
    return evictor


def group_weights(query: Tensor, keys: object, head: int, columns: Tensor | None = None) -> Tensor:
    """Causal attention weights of the last n slots' queries over the slots of one KV head.

    Args:
        query: (1, query heads, n, head_dim), as a `Watch` gets it.
        keys: (1, heads, slots, head_dim), or the layer of a compacted cache.
        head: the KV head.
        columns: slots, numbered among those that the head holds, to which the softmax is restricted; default: all. The n
            queries' own slots must be the last ones.

    Returns:
        (group, n, columns) float32.
    """
    own = _keys_of(keys, head)
    n_heads = keys.keys.shape[1] if isinstance(keys, RaggedLayer) else keys.shape[1]  # type: ignore[attr-defined]
    group = query[0].reshape(n_heads, -1, *query.shape[-2:])[head].float()
    n, own = group.shape[-2], own.float() if columns is None else own[columns].float()
    scores = group @ own.T / query.shape[-1] ** 0.5
    ahead = torch.ones(n, len(own), dtype=torch.bool, device=scores.device).triu(len(own) - n + 1)
    weights: Tensor = scores.masked_fill(ahead, float("-inf")).softmax(-1)
    return weights


def _keys_of(keys: object, head: int) -> Tensor:
    """(slots, head_dim): what one head holds, kept slots first."""
    if isinstance(keys, RaggedLayer):
        return torch.cat((keys.kept.keys[head], keys.keys[0, head]))
    assert isinstance(keys, Tensor)
    return keys[0, head]
