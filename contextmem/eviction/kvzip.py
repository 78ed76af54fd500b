"""kvzip: what the model needs to repeat the context, it needs for whatever is asked. The default."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from contextmem.eviction.base import N_SINK, Reading, group_weights, register

__all__ = ["KvZip", "peaks", "rehearsed"]

_REPEAT = "\n\nRepeat the text above word for word."
_GO_ON = "\n\nRepeat the part of the text above that begins right after these words:"
_N_LEAD = 8  # tokens of the part before that tell where to go on
Rehearsed = Callable[[int, int, int, int, Tensor, Any], None]  # layer, head, first and last slot, weights, keys


@dataclass(frozen=True)
class KvZip:
    """The most attention a slot gets while the model repeats its part of the context.

    Source: KVzip (arXiv 2505.23416). The text is rehearsed in parts of `chunk` tokens; the softmax is restricted to the
    first slots, the part, and the rehearsal itself. Needs no question. Runs every token once more.

    Attributes:
        chunk: tokens rehearsed at a time.
    """

    chunk: int = 512
    name: str = "kvzip"

    def scores(self, reading: Reading) -> Tensor:
        return peaks(reading, self.chunk)


def peaks(reading: Reading, chunk: int, text: tuple[int, ...] | None = None) -> Tensor:
    """The most attention that each slot gets in a rehearsal, see `rehearsed`; (layers, heads, n)."""
    scores = reading.empty()

    def visit(layer: int, head: int, start: int, stop: int, weights: Tensor, keys: Any) -> None:
        part = scores[layer, head, start:stop]
        torch.maximum(part, weights.amax((0, 1)).cpu(), out=part)

    rehearsed(reading, chunk, visit, text)
    return scores


def rehearsed(reading: Reading, chunk: int, visit: Rehearsed, text: tuple[int, ...] | None = None) -> None:
    """Let the model repeat the slots to score, part by part, and show the attention that each part gets.

    `text`, as long as the slots to score, is fed in the place of their own tokens.

    `visit` is called with weights (group, queries, stop - start) for the slots `start` to `stop`, counted from the first
    one to score.
    """
    for start, stop, ids in _parts(reading, chunk, text or reading.token_ids):
        cache = reading.cache.view()

        def watch(layer: int, query: Tensor, keys: Any, start: int = start, stop: int = stop) -> None:
            n_heads = reading.cache.layers[layer].keys.shape[1]
            for head in range(n_heads):
                n_all = _n_held(keys, head)
                n_new = n_all - _n_held(reading.cache.layers[layer], head)
                first = n_all - n_new - reading.n  # the first slot to score, among those that this head holds
                sinks = torch.arange(min(N_SINK, first + start))
                part, new = torch.arange(first + start, first + stop), torch.arange(n_all - n_new, n_all)
                weights = group_weights(query, keys, head, torch.cat((sinks, part, new)))
                visit(layer, head, start, stop, weights[:, :, len(sinks) : len(sinks) + stop - start], keys)

        reading.watch(ids, cache, watch)
        cache.release()


def _parts(reading: Reading, chunk: int, text: tuple[int, ...]) -> Iterator[tuple[int, int, tuple[int, ...]]]:
    """Slots of each part, and what is fed to have it repeated: a request, and the part itself as the answer."""
    encode, opened = reading.codec.encode, reading.framing.answer_open
    for start in range(0, reading.n, chunk):
        stop = min(start + chunk, reading.n)
        lead = (*reading.before, *text[:start])[-_N_LEAD:]
        asked = (*encode(_GO_ON), *lead) if lead else encode(_REPEAT)
        yield start, stop, (*asked, *opened, *text[start:stop])


def _n_held(keys: Any, head: int) -> int:
    """Slots that a head holds, of a dense layer, a compacted one, or plain keys."""
    if isinstance(keys, Tensor):
        return keys.shape[2]
    kept = getattr(keys, "kept", None)
    return keys.keys.shape[2] + (len(kept.keys[head]) if kept is not None else 0)  # type: ignore[no-any-return]


register(KvZip())
