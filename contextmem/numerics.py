"""How far two computations of the same context may differ, and how far a state is from its rebuild."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from contextmem.backbone import CHUNK, Backbone
from contextmem.state import State, rebuilt

__all__ = ["Verification", "noise_floor", "verified"]

_CHUNKS = (1, 16, 64)


@dataclass(frozen=True)
class Verification:
    """A state against a context rebuilt from its token log.

    Attributes:
        max_difference: largest difference between next-token logits.
        kl: KL(rebuilt || current) of the next-token distributions, in nats.
        floor: largest logit difference that only comes from the order of computation, here and now.
        n_tokens: tokens in the rebuilt context.
        same_argmax: whether greedy decoding starts with the same token.
    """

    max_difference: float
    kl: float
    floor: float
    n_tokens: int
    same_argmax: bool

    @property
    def is_equal(self) -> bool:
        """Whether the state equals its rebuild: at most 5 noise floors apart."""
        return self.max_difference <= 5 * self.floor


def noise_floor(backbone: Backbone, token_ids: Sequence[int], window: int | None = None) -> float:
    """Largest last-token logit difference between prefilling `token_ids` in one pass and in chunks of 1, 16 and 64.

    At least 1e-6 of the largest logit.

    Args:
        window: chunk only the last `window` tokens differently, over one shared prefix; None chunks all of them.
    """
    start = max(0, len(token_ids) - (window or len(token_ids)))
    prefix = backbone.new_cache()
    if start:
        backbone.prefill(token_ids[:start], prefix)
    tail = token_ids[start:]
    whole = backbone.prefill(tail, prefix.view(), chunk=len(tail))
    differences = [float((backbone.prefill(tail, prefix.view(), chunk=chunk) - whole).abs().max()) for chunk in _CHUNKS]
    return max(*differences, 1e-6 * float(whole.abs().max()))


def verified(
    backbone: Backbone,
    state: State,
    probe: Sequence[int],
    *,
    window: int = 64,
    step: Callable[[int], None] | None = None,
) -> Verification:
    """Measure `state` against its rebuild through the logits after `probe`, tokens fed to both."""
    ledger = state.ledger.without_erased()
    fresh = rebuilt(backbone, state, ledger, 0, chunk=CHUNK, step=step)
    current_logits = backbone.forward(probe, state.cache.view())
    fresh_logits = backbone.forward(probe, fresh.cache.view())
    return Verification(
        max_difference=float((current_logits - fresh_logits).abs().max()),
        kl=_kl(fresh_logits, current_logits),
        floor=noise_floor(backbone, (*ledger.token_ids, *probe), window),
        n_tokens=ledger.n_slots,
        same_argmax=bool(current_logits.argmax() == fresh_logits.argmax()),
    )


def _kl(reference: Tensor, other: Tensor) -> float:
    p, q = reference.double().log_softmax(-1), other.double().log_softmax(-1)
    return max(0.0, float(torch.sum(p.exp() * (p - q))))
