"""The active cache of a compacted context: every layer and KV head keeps slots of its own choice, and no others.

What a compaction kept is packed and never written again, so forks and checkpoints share it. What is appended later stands
behind it in a dense tail, which is a `SpanCache` as before. Slots are numbered as if nothing had been evicted: the ledger,
positions and reports need not know.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any
from weakref import ref

import torch
from torch import Tensor
from transformers.cache_utils import Cache

from contextmem.cache import Lease, Slots, SpanCache, SpanLayer, Storage
from contextmem.errors import UnsupportedEdit

__all__ = ["Kept", "RaggedCache", "RaggedLayer", "attention_over", "is_seen"]


@dataclass(frozen=True)
class Kept:
    """Slots that one layer kept, a list entry a KV head.

    Attributes:
        slots: (n_h,) sorted numbers of the slots of head h; restore slots are numbered on from the cache's offset.
        keys, values: (n_h, head_dim) each.
    """

    slots: tuple[Tensor, ...]
    keys: tuple[Tensor, ...]
    values: tuple[Tensor, ...]

    @classmethod
    def of(cls, keys: Tensor, values: Tensor, keep: Tensor) -> Kept:
        """The slots of a dense layer, (1, heads, n, head_dim) each, that the mask `keep`, (heads, n), names."""
        slots = tuple(head.nonzero()[:, 0] for head in keep.cpu())
        packed = [
            _packed([tensor[0, h][s.to(tensor.device)] for h, s in enumerate(slots)]) for tensor in (keys, values)
        ]
        return cls(slots, *packed)

    @property
    def nbytes(self) -> int:
        """Bytes of keys and values."""
        return sum(t.numel() * t.element_size() for t in (*self.keys, *self.values))


def _stays(keep: Tensor, slots: Tensor, offset: int) -> Tensor:
    """Which of the kept slots stay; restore slots, numbered from `offset` on, never do."""
    early = slots < offset
    return early & keep[slots.where(early, torch.zeros_like(slots))]


def _packed(heads: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """The same tensors as views of one buffer, so that a layer is one allocation."""
    return torch.split(torch.cat(list(heads)), [len(head) for head in heads])


class RaggedLayer(SpanLayer):
    """One layer of a `RaggedCache`; stands for its own keys and values and computes the attention over both parts."""

    def __init__(self, lease: Lease, index: int, length: int, kept: Kept, cache: RaggedCache) -> None:
        self.kept, self._cache = kept, ref(cache)
        self._offset, self._window = cache.offset, cache.windows[index]
        super().__init__(lease, index, length)

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        super().update(key_states, value_states)
        return self, self

    def get_seq_length(self) -> int:
        return self._offset + self.length

    @property
    def shape(self) -> tuple[int, ...]:
        """As of dense keys, for wrappers round attention functions that look at it."""
        return (*self.keys.shape[:2], self.get_seq_length(), self.keys.shape[-1])

    def attend(self, query: Tensor, scaling: float, position_ids: Tensor) -> Tensor:
        """Attention of the last n slots' queries, (1, heads, n, head_dim), over kept slots and tail; see `Attended`."""
        at = position_ids.reshape(-1)
        seen_tail: Tensor | None = None
        seen_kept: list[Tensor] | None = None
        cache = self._cache()
        assert cache is not None
        if len(at) > 1 or self._window is not None or cache.is_before_restore:
            where = torch.cat((cache.positions[self._offset :].to(at.device), at))[: self.length]
            seen_tail = is_seen(at, where, self._window)
            if self._window is not None or cache.is_before_restore:
                places = (cache.early_positions[slots].to(at.device) for slots in self.kept.slots)
                seen_kept = [is_seen(at, place, self._window) for place in places]
        return attention_over(query * scaling, self.kept, self.keys, self.values, seen_tail, seen_kept)


def attention_over(
    query: Tensor,
    kept: Kept,
    keys: Tensor,
    values: Tensor,
    seen_tail: Tensor | None = None,
    seen_kept: Sequence[Tensor] | None = None,
) -> Tensor:
    """One softmax over what each head kept and a dense tail; differentiable in all of them.

    Args:
        query: (1, query heads, n, head_dim), scaled.
        keys, values: (1, heads, m, head_dim), the tail.
        seen_tail: (n, m) whether a query sees a slot of the tail; None: all do.
        seen_kept: the same for what was kept, (n, n_h) a head.

    Returns:
        (1, query heads, n, head_dim).
    """
    n_heads = keys.shape[1]
    grouped = query.reshape(n_heads, -1, query.shape[-1])  # a group's queries one after the other
    tail = grouped @ keys[0].transpose(-1, -2)
    tail = tail if seen_tail is None else _hidden(tail, seen_tail)
    outputs = []
    for head in range(n_heads):
        early = grouped[head] @ kept.keys[head].T
        early = early if seen_kept is None else _hidden(early, seen_kept[head])
        weights = torch.cat((early, tail[head]), dim=-1).softmax(-1, dtype=torch.float32).to(query.dtype)
        n = early.shape[-1]
        outputs.append(torch.addmm(weights[:, n:] @ values[0, head], weights[:, :n], kept.values[head]))
    return torch.cat(outputs).reshape(query.shape)


def is_seen(at: Tensor, where: Tensor, window: int | None) -> Tensor:
    """Whether queries at positions `at` see keys at positions `where`, (len(at), len(where))."""
    ahead = at[:, None] - where[None, :]
    return (ahead >= 0) if window is None else (ahead >= 0) & (ahead < window)


def _hidden(scores: Tensor, seen: Tensor) -> Tensor:
    """Scores, (..., group * n, slots), with what is not `seen`, (n, slots), masked out."""
    grouped = scores.reshape(*scores.shape[:-2], -1, *seen.shape)
    return grouped.masked_fill(~seen, torch.finfo(scores.dtype).min).reshape(scores.shape)


class RaggedCache(SpanCache):
    """KV of a compacted context. Its slots before `offset` are those that each head kept of them, the rest is dense.

    Attributes:
        kept: what was kept, an entry a layer.
        windows: tokens that a layer sees, or None, an entry a layer.
        early_positions: positions of the slots before `offset`, kept or not, and of restore slots.
        n_restore: restore slots, which every head holds beside those of its choice.
    """

    n_restore: int = 0

    def __init__(
        self, kept: Sequence[Kept], windows: Sequence[int | None], positions: Tensor, turns: Tensor, next_position: int
    ) -> None:
        self.kept, self.windows = tuple(kept), tuple(windows)
        self.early_positions, self.offset = positions, len(positions)
        self.positions, self.turns, self.next_position = positions, turns, next_position
        self._attach(Lease(Storage(len(kept), 0), 0), len(kept), 0)

    @classmethod
    def of(cls, cache: SpanCache, keep: Tensor, windows: Sequence[int | None]) -> RaggedCache:
        """The slots of a dense cache that `keep`, (layers, heads, n_slots), names."""
        kept = [Kept.of(layer.keys, layer.values, keep[index]) for index, layer in enumerate(cache.layers)]
        return cls(kept, windows, cache.positions, cache.turns, cache.next_position)

    def again(self, keep: Tensor) -> RaggedCache:
        """Compacted once more: those of its slots that `keep`, (layers, heads, n_slots), names, the tail's included."""
        n = self.offset
        kept = []
        for index, (layer, old) in enumerate(zip(self.layers, self.kept, strict=True)):
            tail = Kept.of(layer.keys, layer.values, keep[index, :, n:])
            still = [_stays(keep[index, h].cpu(), slots, n) for h, slots in enumerate(old.slots)]
            parts = {
                name: _packed(
                    [
                        torch.cat((getattr(old, name)[h][stay.to(layer.keys.device)], getattr(tail, name)[h]))
                        for h, stay in enumerate(still)
                    ]
                )
                for name in ("keys", "values")
            }
            slots = tuple(torch.cat((old.slots[h][stay], tail.slots[h] + n)) for h, stay in enumerate(still))
            kept.append(Kept(slots, **parts))
        return RaggedCache(kept, self.windows, self.positions, self.turns, self.next_position)

    def restored(self, slots: Slots, position: int) -> RaggedCache:
        """With restore slots, (1, heads, n, head_dim) a layer, in every head; they stand at `position` and on.

        The next token comes after them. A later compaction drops them.
        """
        n = slots[0][0].shape[2]
        numbers = torch.arange(self.offset, self.offset + n)
        kept = [
            Kept(
                tuple(torch.cat((s, numbers)) for s in old.slots),
                _packed([torch.cat((old.keys[h], keys[0, h])) for h in range(keys.shape[1])]),
                _packed([torch.cat((old.values[h], values[0, h])) for h in range(values.shape[1])]),
            )
            for old, (keys, values) in zip(self.kept, slots, strict=True)
        ]
        other = RaggedCache(kept, self.windows, self.positions[: self.offset], self.turns[: self.offset], position + n)
        other.early_positions = torch.cat((other.positions, torch.arange(position, position + n)))
        other.n_restore = n
        other.extend(self, self.offset)
        other.next_position = position + n
        return other

    @property
    def is_before_restore(self) -> bool:
        """Whether the next token stands before the restore slots, as the last one does when it is fed again."""
        return self.n_restore > 0 and self.next_position <= int(self.early_positions[-1])

    def grew(self, n_tokens: int) -> None:
        """As of a dense cache; what comes after the tokens comes after the restore slots."""
        super().grew(n_tokens)
        if self.is_before_restore:
            self.next_position = int(self.early_positions[-1]) + 1

    def held(self) -> Tensor:
        """Which slots each head holds, restore slots aside, (layers, heads, n_slots)."""
        n_heads = len(self.kept[0].slots)
        mask = torch.zeros(len(self.kept), n_heads, self.n_slots, dtype=torch.bool)
        mask[:, :, self.offset :] = True
        for index, kept in enumerate(self.kept):
            for head, slots in enumerate(kept.slots):
                mask[index, head, slots[slots < self.offset]] = True
        return mask

    def _attach(self, lease: Lease, n_layers: int, length: int) -> None:
        self.lease = lease
        layers = [RaggedLayer(lease, index, length, self.kept[index], self) for index in range(n_layers)]
        Cache.__init__(self, layers=layers)
        for layer, kept in zip(layers, self.kept, strict=True):
            if not layer.is_initialized:  # the tail is shaped like what was kept, before anything is in it
                empty = kept.keys[0].new_empty((1, len(kept.keys), 0, kept.keys[0].shape[-1]))
                layer.lazy_initialization(empty, empty)

    def _with(self, storage: Storage, positions: Tensor, turns: Tensor, next_position: int) -> SpanCache:
        if len(positions) < self.offset:
            raise UnsupportedEdit("slots before a compaction are not addressable one by one. Nothing was changed.")
        other = RaggedCache.__new__(RaggedCache)
        other.kept, other.windows, other.offset = self.kept, self.windows, self.offset
        other.early_positions, other.n_restore = self.early_positions, self.n_restore
        n_stored = len(positions) - self.offset
        other._attach(Lease(storage, n_stored), len(self.layers), n_stored)
        other.positions, other.turns, other.next_position = positions, turns, next_position
        return other

    def view(self, length: int | None = None) -> SpanCache:
        """As of a dense cache. The slots before the compaction, the one after them, and restore slots stay together."""
        other = super().view(length)
        if self.n_restore:
            other.next_position = max(other.next_position, int(self.early_positions[-1]) + 1)
        return other

    def release(self) -> None:
        """Let go of the buffers."""
        self.lease.move(Storage(len(self.layers), 0), 0)

    @property
    def nbytes(self) -> int:
        """Bytes held: what was kept, and the capacity of the tail."""
        return self.lease.storage.nbytes + sum(kept.nbytes for kept in self.kept)

    @property
    def n_held(self) -> int:
        """Key-value pairs held, over all layers and heads; a dense cache holds n_slots x layers x heads."""
        n_tail = self.n_slots - self.offset
        return sum(sum(map(len, kept.slots)) + n_tail * len(kept.slots) for kept in self.kept)

    def tensors(self) -> dict[str, Tensor]:
        """Everything needed to rebuild the cache, by name: the tail as of a dense cache, and what was kept."""
        named = super().tensors()
        named["kept.positions"] = self.early_positions.clone()
        for index, kept in enumerate(self.kept):
            named[f"kept.counts.{index}"] = torch.tensor([len(slots) for slots in kept.slots])
            for name in ("slots", "keys", "values"):
                named[f"kept.{name}.{index}"] = torch.cat(getattr(kept, name))
        return named

    @classmethod
    def from_kept(
        cls,
        named: dict[str, Tensor],
        next_position: int,
        offset: int,
        n_restore: int,
        windows: Sequence[int | None],
    ) -> RaggedCache:
        """The inverse of `tensors`."""
        device, kept = named["keys.0"].device, []
        for index in range(len(windows)):
            counts = named[f"kept.counts.{index}"].tolist()
            slots, keys, values = (torch.split(named[f"kept.{n}.{index}"], counts) for n in ("slots", "keys", "values"))
            kept.append(Kept(slots, _packed([k.to(device) for k in keys]), _packed([v.to(device) for v in values])))
        positions, turns = named["positions"], named["turns"]
        cache = cls(kept, windows, positions[:offset], turns[:offset], next_position)
        cache.early_positions, cache.n_restore = named["kept.positions"], n_restore
        cache.lease.claim(0, len(positions) - offset)
        for index, layer in enumerate(cache.layers):
            layer.update(named[f"keys.{index}"], named[f"values.{index}"])
        cache.positions, cache.turns, cache.next_position = positions, turns, next_position
        return cache

    def _refuse(self, *args: Any, **kwargs: Any) -> Any:
        raise UnsupportedEdit("slots of a compacted cache are not edited in place. Nothing was changed.")

    select = placed = owned = over = read = write = borrowed = joined = turn_ = _refuse
