"""The KV tensors of one context: growable buffers that several states can share, and edits by slot.

A `SpanCache` is a transformers cache. Its keys and values live in a `Storage`; a `Lease` says how far this cache reads
into it. Caches that share a storage each see only their own length. The one that reaches furthest may extend in place,
any other copies first; a cache that goes out of scope gives its slots back. Hence forks, checkpoints and transient
answers cost no copy, and nothing that one state writes is seen by another.

Only this file and `backbone.py` touch the internals of transformers' caches (5.2 to 5.24).
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from weakref import ref

import torch
from torch import Tensor
from transformers.cache_utils import Cache, DynamicCache, DynamicLayer

from contextmem.errors import UnsupportedEdit
from contextmem.rope import rotated, rotation

__all__ = ["Slots", "SpanCache"]

SPARE = 256  # slots kept free beyond what was asked for, so that a question and an answer fit without growing
Ranges = Sequence[tuple[int, int]]
Slots = list[tuple[Tensor, Tensor]]  # keys and values, (1, heads, n, head_dim) each, a pair a layer


class Storage:
    """Key and value buffers, one pair a layer, (1, heads, capacity, head_dim) each, allocated when first written.

    Leases are known weakly: one that went out of scope counts no more. A plain list of references, because a `WeakSet`
    may change size under an iteration when another thread drops a state.
    """

    def __init__(self, n_layers: int, capacity: int) -> None:
        self.keys: list[Tensor | None] = [None] * n_layers
        self.values: list[Tensor | None] = [None] * n_layers
        self.capacity = capacity
        self.lock = threading.Lock()
        self._leases: list[ref[Lease]] = []

    def join(self, lease: Lease) -> None:
        """Let `lease` read and write here."""
        with self.lock:
            self._leases = [known for known in self._leases if known() is not None] + [ref(lease)]

    def leave(self, lease: Lease) -> None:
        """Forget `lease`."""
        with self.lock:
            self._leases = [known for known in self._leases if known() not in (None, lease)]

    def grant(self, lease: Lease, length: int, stop: int) -> bool:
        """Give `lease` the slots from `length` to `stop`, unless there are none or another lease reaches past `length`."""
        with self.lock:
            others = [other for known in self._leases if (other := known()) is not None and other is not lease]
            if stop > self.capacity or any(other.reach > length for other in others):
                return False
            lease.reach = stop
            return True

    def others_read(self, lease: Lease, start: int) -> bool:
        """Whether a lease other than `lease` reaches past slot `start`."""
        with self.lock:
            others = [other for known in self._leases if (other := known()) is not None and other is not lease]
            return any(other.reach > start for other in others)

    def layer(self, index: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """The buffers of one layer, shaped after new `keys` and `values`."""
        if self.keys[index] is None:
            self.keys[index] = keys.new_empty((*keys.shape[:2], self.capacity, keys.shape[-1]))
            self.values[index] = values.new_empty((*values.shape[:2], self.capacity, values.shape[-1]))
        return self.keys[index], self.values[index]  # type: ignore[return-value]

    def copied(self, ranges: Ranges, capacity: int) -> Storage:
        """A private storage with the slots of `ranges`, packed."""
        copy = Storage(len(self.keys), capacity)
        for source, target in ((self.keys, copy.keys), (self.values, copy.values)):
            for index, buffer in enumerate(source):
                if buffer is None:
                    continue
                fresh = buffer.new_empty((*buffer.shape[:2], capacity, buffer.shape[-1]))
                at = 0
                for start, stop in ranges:
                    fresh[:, :, at : at + stop - start] = buffer[:, :, start:stop]
                    at += stop - start
                target[index] = fresh
        return copy

    def placed(self, length: int, place: Callable[[Tensor], Tensor]) -> Storage:
        """A storage of exactly `length` slots whose buffers are what `place` makes of these."""
        copy = Storage(len(self.keys), length)
        for source, target in ((self.keys, copy.keys), (self.values, copy.values)):
            target[:] = [place(buffer[:, :, :length]) if buffer is not None else None for buffer in source]
        return copy

    @property
    def nbytes(self) -> int:
        """Bytes held, used or not."""
        return sum(b.numel() * b.element_size() for b in (*self.keys, *self.values) if b is not None)


class Lease:
    """One cache's claim on a storage: slots below `reach` are its own, shared only with caches that read them."""

    __slots__ = ("__weakref__", "reach", "storage")

    def __init__(self, storage: Storage, reach: int) -> None:
        self.storage, self.reach = storage, reach
        storage.join(self)

    def claim(self, length: int, stop: int) -> None:
        """Make the slots from `length` to `stop` writable; moves to a storage of its own when others reach further."""
        if stop <= self.reach:
            return
        storage = self.storage
        if not storage.grant(self, length, stop):
            grown = 2 * storage.capacity if stop > storage.capacity else 0
            self.move(storage.copied(((0, length),), max(grown, stop + SPARE)), stop)

    def move(self, storage: Storage, reach: int) -> None:
        """Leave the present storage for `storage`."""
        self.storage.leave(self)
        self.storage, self.reach = storage, reach
        storage.join(self)


class SpanLayer(DynamicLayer):
    """One layer of a `SpanCache`: writes new slots in place and shows `keys` and `values` as views of the buffers."""

    def __init__(self, lease: Lease, index: int, length: int) -> None:
        super().__init__()
        self.lease, self.index = lease, index
        self.show(length)

    def show(self, length: int) -> None:
        """Look at the first `length` slots."""
        self.length = length
        keys, values = self.lease.storage.keys[self.index], self.lease.storage.values[self.index]
        if keys is not None and values is not None:
            self.keys, self.values = keys[:, :, :length], values[:, :, :length]
            self.dtype, self.device = keys.dtype, keys.device
            self.is_initialized = True

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        self.lease.storage.layer(self.index, key_states, value_states)
        self.show(self.length)

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        start, stop = self.length, self.length + key_states.shape[-2]
        self.lease.claim(start, stop)
        keys, values = self.lease.storage.layer(self.index, key_states, value_states)
        keys[:, :, start:stop] = key_states
        values[:, :, start:stop] = value_states
        self.length = stop
        self.keys, self.values = keys[:, :, :stop], values[:, :, :stop]
        self.is_initialized = True
        return self.keys, self.values

    def get_seq_length(self) -> int:
        return self.length

    def _refuse(self, *args: Any, **kwargs: Any) -> None:
        raise UnsupportedEdit(
            "SpanCache is edited through ContextMemory: crop, reset and reordering differ between transformers "
            "releases. Nothing was changed."
        )

    crop = reset = reorder_cache = batch_repeat_interleave = batch_select_indices = offload = prefetch = _refuse


class SpanCache(DynamicCache):
    """KV of one context, one sequence, addressable by slot.

    Attributes:
        positions: (n_slots,) position every slot was encoded at; a slot's position is not its index once edited.
        turns: (n_slots,) how often a slot's key was re-rotated since it was computed.
        next_position: position of the next token.
        offset: leading slots that are not in the storage; none here, see `RaggedCache`.
    """

    offset: int = 0

    def __init__(self, n_layers: int) -> None:
        self._attach(Lease(Storage(n_layers, 0), 0), n_layers, 0)
        self.positions = torch.empty(0, dtype=torch.long)
        self.turns = torch.empty(0, dtype=torch.int16)
        self.next_position = 0

    def _attach(self, lease: Lease, n_layers: int, length: int) -> None:
        self.lease = lease
        Cache.__init__(self, layers=[SpanLayer(lease, index, length) for index in range(n_layers)])

    def _with(self, storage: Storage, positions: Tensor, turns: Tensor, next_position: int) -> SpanCache:
        other = SpanCache.__new__(SpanCache)
        other._attach(Lease(storage, len(positions)), len(self.layers), len(positions))
        other.positions, other.turns, other.next_position = positions, turns, next_position
        return other

    @property
    def n_slots(self) -> int:
        """Slots in use; the same in every layer."""
        return len(self.positions)

    def view(self, length: int | None = None) -> SpanCache:
        """The first `length` slots (default: all) over the same buffers. Costs no copy; extending it is invisible here."""
        if length is None or length == self.n_slots:
            return self._with(self.lease.storage, self.positions, self.turns, self.next_position)
        next_position = int(self.positions[length - 1]) + 1 if length else 0
        return self._with(self.lease.storage, self.positions[:length], self.turns[:length], next_position)

    def select(self, ranges: Ranges, spare: int = SPARE) -> SpanCache:
        """A copy with only the slots of `ranges` (sorted, half-open), packed; keys and positions unchanged.

        The next token follows the last slot that is kept.
        """
        index = torch.cat([torch.arange(start, stop) for start, stop in ranges] or [torch.empty(0, dtype=torch.long)])
        storage = self.lease.storage.copied(ranges, len(index) + spare)
        positions = self.positions[index]
        next_position = int(positions[-1]) + 1 if len(positions) else 0
        return self._with(storage, positions, self.turns[index], next_position)

    def placed(self, place: Callable[[Tensor], Tensor]) -> SpanCache:
        """A copy whose buffers are what `place` makes of these: on another device, in a file."""
        storage = self.lease.storage.placed(self.n_slots, place)
        return self._with(storage, self.positions, self.turns, self.next_position)

    def owned(self, start: int) -> SpanCache:
        """This cache if no other one reads its slots from `start` on, else a copy: what may be written over."""
        if not self.lease.storage.others_read(self.lease, start):
            return self
        return self.select(((0, self.n_slots),))

    def over(self, start: int, stop: int) -> SpanCache:
        """The slots before `start`, as a cache that writes its next `stop - start` slots over those of this one.

        For caches that are `owned` only. Nothing is copied; put the slots back with `write`.
        """
        other = self.view(start)
        other.next_position = int(self.positions[start]) if start < self.n_slots else self.next_position
        other.lease.reach = stop
        return other

    def read(self, start: int, stop: int) -> Slots:
        """Copies of the keys and values of some slots, a pair a layer."""
        return [
            (layer.keys[:, :, start:stop].clone(), layer.values[:, :, start:stop].clone())
            for layer in self.layers
            if layer.is_initialized
        ]

    def write(self, start: int, slots: Slots) -> None:
        """Put keys and values over the slots from `start` on, in place: for caches that are `owned` only."""
        for layer, (keys, values) in zip(self.layers, slots, strict=True):
            stop = start + keys.shape[-2]
            layer.keys[:, :, start:stop] = keys
            layer.values[:, :, start:stop] = values

    @contextmanager
    def borrowed(self, ranges: Ranges) -> Iterator[None]:
        """Slots that may be written over inside; afterwards they are as before, whatever happens. For `owned` caches."""
        before = [(start, self.read(start, stop)) for start, stop in ranges]
        try:
            yield
        finally:
            for start, slots in before:
                self.write(start, slots)

    def joined(self, other: SpanCache, start: int) -> SpanCache:
        """This cache followed by a copy of the slots of `other` from `start` on, which keep their positions."""
        result = self.view()
        result.extend(other, start)
        return result

    def extend(self, other: SpanCache, start: int) -> None:
        """Put a copy of the slots of `other` from `start` on behind those of this one; they keep their positions."""
        n_stored, first = self.n_slots - self.offset, start - other.offset
        self.lease.claim(n_stored, n_stored + other.n_slots - start)
        for layer, source in zip(self.layers, other.layers, strict=True):
            layer.update(source.keys[:, :, first:], source.values[:, :, first:])
        self.positions = torch.cat((self.positions, other.positions[start:]))
        self.turns = torch.cat((self.turns, other.turns[start:]))
        self.next_position = other.next_position

    def turn_(self, start: int, stop: int, delta: int, angles: Sequence[Callable[[Tensor], Any]]) -> None:
        """Move slots `start` to `stop` by `delta` positions, in place: for caches made by `select` only.

        Args:
            angles: one function a layer, see `rope.layer_angles`.
        """
        if delta == 0 or start == stop:
            return
        old = self.positions[start:stop]
        rotations = {of_layer: rotation(old, old + delta, of_layer) for of_layer in set(angles)}
        for index, of_layer in enumerate(angles):
            keys = self.lease.storage.keys[index]
            assert keys is not None
            keys[:, :, start:stop] = rotated(keys[:, :, start:stop], *rotations[of_layer])
        # The tables may be shared with the cache this one was made from: replace, never write into them.
        moved = torch.zeros_like(self.positions)
        moved[start:stop] = 1
        self.positions = self.positions + moved * delta
        self.turns = self.turns + moved.to(self.turns.dtype)
        self.next_position = int(self.positions[-1]) + 1

    def grew(self, n_tokens: int) -> None:
        """Record the positions of `n_tokens` slots that a forward has just written."""
        new = torch.arange(self.next_position, self.next_position + n_tokens)
        self.positions = torch.cat((self.positions, new))
        self.turns = torch.cat((self.turns, torch.zeros(n_tokens, dtype=self.turns.dtype)))
        self.next_position += n_tokens

    def reserve(self, n_tokens: int) -> None:
        """Make room for `n_tokens` more slots now, so that a chunked prefill grows once."""
        n_stored = self.n_slots - self.offset
        self.lease.claim(n_stored, n_stored + n_tokens)
        for layer in self.layers:
            layer.show(n_stored)

    def adopt(self, other: SpanCache) -> None:
        """Continue in the buffers of `other`, whose first slots are these: keeps what a discarded answer grew or copied."""
        if other.lease.storage is self.lease.storage:
            return
        n_stored = self.n_slots - self.offset
        self.lease.move(other.lease.storage, n_stored)
        for layer in self.layers:
            layer.show(n_stored)

    def rewind(self, length: int) -> None:
        """Drop the slots from `length` on; the next token takes the position of the first one dropped."""
        if length < self.n_slots:
            self.next_position = int(self.positions[length])
            self.positions, self.turns = self.positions[:length], self.turns[:length]
            self.lease.reach = length - self.offset
            for layer in self.layers:
                layer.show(length - self.offset)

    def release(self) -> None:
        """Let go of the buffers: the cache is empty and its slots belong to nobody."""
        self.lease.move(Storage(len(self.layers), 0), 0)
        self.__init__(len(self.layers))  # type: ignore[misc]

    @property
    def nbytes(self) -> int:
        """Bytes of capacity held (buffers shared with other states are counted in each)."""
        return self.lease.storage.nbytes

    @property
    def slot_nbytes(self) -> int:
        """Bytes of one slot over all layers."""
        held, capacity = self.lease.storage.nbytes, self.lease.storage.capacity
        return held // capacity if capacity else 0

    def tensors(self) -> dict[str, Tensor]:
        """Everything needed to rebuild the cache, as contiguous tensors by name."""
        named = {"positions": self.positions.contiguous(), "turns": self.turns.contiguous()}
        for index, layer in enumerate(self.layers):
            if layer.is_initialized:
                named[f"keys.{index}"] = layer.keys.contiguous()
                named[f"values.{index}"] = layer.values.contiguous()
        return named

    @classmethod
    def from_tensors(cls, n_layers: int, named: dict[str, Tensor], next_position: int) -> SpanCache:
        """The inverse of `tensors`."""
        cache = cls(n_layers)
        length = len(named["positions"])
        cache.lease.claim(0, length)
        for index, layer in enumerate(cache.layers):
            if f"keys.{index}" in named:
                layer.update(named[f"keys.{index}"], named[f"values.{index}"])
        cache.positions, cache.turns, cache.next_position = named["positions"], named["turns"], next_position
        return cache
