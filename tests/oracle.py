"""What tests compare with: a plain transformers forward over the same token ids, and the noise floor of this machine."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

import torch
from transformers import DynamicCache

from contextmem import ContextMemory, storage

FLOOR_CHUNKS = (1, 16, 64)


def reference(model: Any, token_ids: Sequence[int]) -> torch.Tensor:
    """Last-token logits of one plain forward, no cache of ours involved."""
    with torch.no_grad():
        ids = torch.tensor([list(token_ids)])
        return model(ids, attention_mask=torch.ones_like(ids)).logits[0, -1].float()


def cache_argument(model: Any) -> str:
    """What this transformers release calls the cache in `forward`."""
    return "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"


def plain_cache(model: Any, token_ids: Sequence[int], chunk: int | None = None) -> tuple[Any, torch.Tensor]:
    """A cache of transformers' own after prefilling the ids, and the last logits."""
    past = DynamicCache()
    ids = torch.tensor([list(token_ids)])
    with torch.no_grad():
        for start in range(0, ids.shape[1], chunk or ids.shape[1]):
            stop = min(start + (chunk or ids.shape[1]), ids.shape[1])
            where = torch.arange(start, stop).unsqueeze(0)
            logits = model(
                ids[:, start:stop], position_ids=where, use_cache=True, **{cache_argument(model): past}
            ).logits
    return past, logits[0, -1].float()


def floor(model: Any, token_ids: Sequence[int]) -> float:
    """FLOOR: the largest logit difference between one-pass and chunked prefill, at least 1e-6 of the largest logit."""
    _, whole = plain_cache(model, token_ids)
    chunked = [plain_cache(model, token_ids, chunk)[1] for chunk in FLOOR_CHUNKS]
    return max(*(float((c - whole).abs().max()) for c in chunked), 1e-6 * float(whole.abs().max()))


def assert_equals_reference(memory: ContextMemory, probe: str = "?") -> None:
    """The memory's next-token logits after a probe equal those of a fresh context with the same ids (5 x FLOOR)."""
    opening = () if memory.token_ids else memory._framing.bare_opening
    ids = [*opening, *memory.token_ids, *memory._codec.encode(probe)]
    assert_equal_logits(memory.model, ids, memory.logits(probe), reference(memory.model, ids))


def assert_equal_logits(model: Any, token_ids: Sequence[int], ours: torch.Tensor, theirs: torch.Tensor) -> None:
    """At most 5 x FLOOR apart. The floor is measured only where its lower bound does not settle it."""
    difference = float((ours - theirs).abs().max())
    if difference > 5e-6 * float(theirs.abs().max()):
        assert difference <= 5 * floor(model, token_ids), f"{difference} apart"


def layer_tensors(memory: ContextMemory) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Keys and values of every layer, copied."""
    return [(layer.keys.clone(), layer.values.clone()) for layer in memory.past_key_values.layers]


def state_tensors(memory: ContextMemory) -> dict[str, torch.Tensor]:
    """Every tensor of the state by name, copied: the cache, what a compaction kept, the full tier."""
    return {name: tensor.clone() for name, tensor in storage.tensors_of(memory._state).items() if tensor.numel()}


def same_tensors(a: Any, b: Any) -> bool:
    """Whether two results of `layer_tensors` are bit-identical."""
    return all(torch.equal(ka, kb) and torch.equal(va, vb) for (ka, va), (kb, vb) in zip(a, b, strict=True))


def snapshot(memory: ContextMemory) -> tuple[Any, ...]:
    """Everything a failed operation must leave as it was."""
    return memory.segments(frames=True), memory.token_ids, memory.next_position, state_tensors(memory)


def assert_unchanged(memory: ContextMemory, before: tuple[Any, ...]) -> None:
    """The memory is bit for bit what `snapshot` saw."""
    segments, ids, position, tensors = before
    assert memory.segments(frames=True) == segments
    assert memory.token_ids == ids
    assert memory.next_position == position
    now = state_tensors(memory)
    assert now.keys() == tensors.keys() and all(torch.equal(now[name], tensors[name]) for name in now)
    memory._state.check()
