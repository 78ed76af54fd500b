"""From a dense state to one within budget, and back to the dense one that an edit works on."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from contextmem.backbone import Backbone
from contextmem.budget import Budget
from contextmem.cache import SpanCache
from contextmem.codec import Codec
from contextmem.compaction import chosen, compacted, unseen_last
from contextmem.errors import ContextOverflow, InvalidInput, StorageError, UnsupportedEdit
from contextmem.eviction.base import N_SINK, Reading
from contextmem.eviction.question import Asked
from contextmem.framing import Framing
from contextmem.ledger import Ledger, Segment
from contextmem.ragged import RaggedCache
from contextmem.restorer import RestoreKV
from contextmem.state import State, Step, rebuilt

__all__ = ["carried", "check_budget", "n_tokens_held", "opened", "recalled", "restores", "shares_held", "within"]


_LEAST_ROOM = 16  # positions left after restore slots
_N_BEFORE = 8  # tokens before those to score that an evictor is told
_LEAST = torch.finfo(torch.float32).min


def n_tokens_held(state: State) -> float:
    """What the active cache holds, in tokens: pairs over layers times heads."""
    if isinstance(state.cache, RaggedCache):
        return state.cache.n_held / sum(len(kept.slots) for kept in state.cache.kept)
    return float(state.n_slots)


def shares_held(state: State) -> list[float]:
    """The part of every span's key-value pairs that is held, in the ledger's order."""
    if not isinstance(state.cache, RaggedCache):
        return [1.0] * len(state.ledger.spans)
    each = state.cache.held().float().mean((0, 1))
    return [float(each[span.start : span.stop].mean()) if span.n_tokens else 1.0 for span in state.ledger.spans]


def is_protected(span: Segment) -> bool:
    """Whether every layer and head keeps a span: system text, frames that open the dialogue, pinned text, steering."""
    return (
        span.pinned or span.kind == "system" or span.state == "erased" or (span.kind == "frame" and span.owner is None)
    )


def protected(ledger: Ledger, n_recent: int = 0, most: int = 0) -> Tensor:
    """Which slots a compaction keeps whole, (n_slots,): those of `is_protected`, and the last `n_recent` up to `most`."""
    mask = torch.zeros(ledger.n_slots, dtype=torch.bool)
    mask[:N_SINK] = True
    mask[-1:] = True  # the next token may have to be told from it alone
    for span in filter(is_protected, ledger.spans):
        mask[span.start : span.stop] = True
    n_recent = max(0, min(n_recent, most - int(mask.sum())))
    mask[len(mask) - n_recent :] = True
    return mask


def check_budget(budget: Budget, ledger: Ledger) -> None:
    """Raise `ContextOverflow` if what must be kept leaves no room within `budget`."""
    needed = int(protected(ledger).sum()) + 1 if ledger.n_slots else N_SINK + 1
    if (needed > budget.target and ledger.n_slots > budget.n_tokens) or budget.target < N_SINK + 1:
        raise ContextOverflow(
            f"system text, pinned segments, steering blocks and the first {N_SINK} tokens take {needed:,} tokens, which "
            f"exceeds the {budget.target:,} of the budget's {budget.n_tokens:,} that are not in reserve. Set a budget of at "
            f"least {needed + budget.reserve:,}, or unpin something. Nothing was changed.",
            needed=needed + budget.reserve,
            available=budget.target,
            limit=budget.n_tokens,
        )


def within(
    backbone: Backbone,
    codec: Codec,
    framing: Framing,
    budget: Budget,
    state: State,
    restorer: RestoreKV | None = None,
    *,
    chunk: int,
    step: Step = None,
) -> State:
    """`state` itself if it is within `budget`; else one in which enough was evicted to leave the reserve free.

    Steering blocks that take more than a quarter of the budget are recomputed away first. The slots of a `restorer` are
    generated over everything that is still there, the full tier where there is one, and take their part of the budget; where
    they would not help (see `restores`) they are left out.
    """
    if n_tokens_held(state) <= budget.n_tokens:
        return state
    n_steering = sum(span.n_tokens for span in state.ledger.spans if span.state == "erased")
    if 4 * n_steering > budget.n_tokens:
        dense = opened(backbone, state)
        ledger = dense.ledger.without_erased()
        start = min(dense.exact_slots, ledger.n_slots)
        dense = rebuilt(backbone, dense, ledger, start, chunk=chunk, step=step)
        state = carried(state, dense)
        if n_tokens_held(state) <= budget.n_tokens:
            return state
    check_budget(budget, state.ledger)
    kept_whole = protected(state.ledger, getattr(budget.evictor, "n_recent", 0), budget.target // 2)
    n_restore = 0
    if restorer is not None and restores(restorer, backbone, budget, state, int(kept_whole.sum())):
        n_restore = restorer.n
    scores = _scored(backbone, codec, framing, budget, state, step)
    held = state.cache.held() if isinstance(state.cache, RaggedCache) else torch.ones_like(scores, dtype=torch.bool)
    ranked = scores.masked_fill(~held, float("-inf"))
    ranked = unseen_last(ranked, state.cache.positions, state.cache.next_position, backbone.windows)
    n_keep = (budget.target - n_restore) * scores.shape[0] * scores.shape[1]
    keep = chosen(ranked, kept_whole, n_keep, budget.allocation)
    whole = opened(backbone, state).cache if _keeps_all(state, budget) else None
    full = _stored(whole, budget) if whole is not None else None
    cache = compacted(state.cache, keep, backbone.windows)
    if n_restore:
        assert restorer is not None
        seen = whole if whole is not None else state.cache
        cache = cache.restored(restorer.slots(backbone, seen), seen.next_position)
    return State(
        ledger=state.ledger,
        cache=cache,
        exact_slots=state.exact_slots if full is not None else 0,
        full=full,
        scores=scores,
    )


def recalled(
    backbone: Backbone,
    codec: Codec,
    framing: Framing,
    budget: Budget,
    state: State,
    question: tuple[int, ...],
    step: Step = None,
) -> State:
    """A compacted state in which every layer and head holds what `question` attends to most in the full tier.

    Raises:
        UnsupportedEdit: there is no full tier to bring anything back from.
    """
    if not state.is_compacted:
        return state
    if state.full is None:
        raise UnsupportedEdit(
            "what was evicted is in no full tier and cannot be brought back: make the memory with full_tier='cpu' or "
            "'disk'. Nothing was changed."
        )
    dense = opened(backbone, state)
    reading = Reading(backbone, codec, framing, dense.cache, (), 0, step=step)
    scores = unseen_last(
        Asked(question).scores(reading), dense.cache.positions, dense.cache.next_position, backbone.windows
    )
    keep = chosen(scores, protected(state.ledger), budget.target * scores.shape[0] * scores.shape[1], budget.allocation)
    known = _scored(backbone, codec, framing, budget, state, step)
    cache = compacted(dense.cache, keep, backbone.windows)
    full = _stored(dense.cache, budget) if _keeps_all(state, budget) else None
    return replace(state, cache=cache, full=full, scores=known)


def restores(restorer: RestoreKV, backbone: Backbone, budget: Budget, state: State, n_whole: int) -> bool:
    """Whether restore slots are worth their place.

    No larger share is kept than they are for, they take at most a quarter of what is kept, there is room beside the
    `n_whole` slots that are kept whole, and positions are left for them and for what comes after.
    """
    if budget.target > restorer.config.largest_share * state.n_slots:
        return False
    n, left = restorer.n, backbone.context_length - state.cache.next_position
    return 4 * n <= budget.target and n_whole + n <= budget.target and n + max(budget.reserve, _LEAST_ROOM) <= left


def opened(backbone: Backbone, state: State) -> State:
    """The dense state that an edit of `state` starts from.

    With a full tier, what it holds and what was appended since; without one, nothing: the text must be read again.
    """
    if not state.is_compacted:
        return replace(state, scores=None)
    if state.full is None:
        return State(state.ledger, backbone.new_cache(), 0)
    whole = _whole(state)
    if backbone.device.type != "cpu":
        whole = whole.placed(lambda buffer: buffer.to(backbone.device))
    return State(state.ledger, whole, state.exact_slots)


def carried(before: State, after: State) -> State:
    """`after`, an edit of `before`, with the scores of the leading slots that are where they were."""
    if before.scores is None:
        return after
    n = 0
    for old, new in zip(before.ledger.spans, after.ledger.spans, strict=False):
        if (old.id, old.start, old.stop) != (new.id, new.start, new.stop):
            break
        n = new.stop
    n = min(n, before.scores.shape[-1])
    return replace(after, scores=before.scores[..., :n] if n else None)


def _scored(backbone: Backbone, codec: Codec, framing: Framing, budget: Budget, state: State, step: Step) -> Tensor:
    """Scores of every slot: those known, and those of what was appended since."""
    known = state.scores.shape[-1] if state.scores is not None else 0
    if isinstance(state.cache, RaggedCache):
        known = max(known, state.cache.offset)
    if known == state.n_slots and state.scores is not None:
        return state.scores
    stand_in = codec.encode("\n")[:1] or state.ledger.token_ids[:1]
    ids = [
        token
        for span in state.ledger.spans
        for token in (span.token_ids if span.state != "erased" else stand_in * span.n_tokens)
    ]
    before = tuple(ids[max(0, known - _N_BEFORE) : known])
    reading = Reading(backbone, codec, framing, state.cache, tuple(ids[known:]), known, before, step)
    new = torch.as_tensor(budget.evictor.scores(reading)).detach().to("cpu", torch.float32)
    if new.shape != reading.empty().shape:
        raise InvalidInput(
            f"evictor {budget.evictor.name!r} gave scores of shape {tuple(new.shape)}, not (layers, heads, slots) "
            f"{tuple(reading.empty().shape)}. Nothing was changed."
        )
    new = new.nan_to_num(nan=_LEAST, neginf=_LEAST)  # minus infinity is for what is gone
    if state.scores is None:
        return new
    return torch.cat((state.scores, new), dim=-1)


def _keeps_all(state: State, budget: Budget) -> bool:
    """Whether a full tier is kept, and nothing was lost before."""
    return budget.full_tier is not None and (not state.is_compacted or state.full is not None)


def _stored(whole: SpanCache, budget: Budget) -> SpanCache:
    """A copy of every slot where the full tier is kept."""
    return whole.placed(_PLACES[budget.full_tier or "cpu"])


def _on_disk(buffer: Tensor) -> Tensor:
    """The same values in a file of their own, which is mapped and has no name any more."""
    with tempfile.NamedTemporaryFile(prefix="contextmem-") as file:  # mode 0600
        try:
            os.posix_fallocate(
                file.fileno(), 0, max(1, buffer.nbytes)
            )  # a full disk is told here, not by a signal later
        except OSError as error:
            raise StorageError(f"no room for the full tier on disk: {error}. Nothing was changed.") from error
        mapped = torch.from_file(file.name, shared=True, size=buffer.numel(), dtype=buffer.dtype)
    return mapped.view(buffer.shape).copy_(buffer)


_PLACES: dict[str, Callable[[Tensor], Tensor]] = {
    "cpu": lambda buffer: buffer.to("cpu", copy=True),
    "disk": _on_disk,
}


def _whole(state: State) -> SpanCache:
    """Every slot of a state, dense; restore slots are no part of it."""
    if not state.is_compacted:
        return state.cache
    assert state.full is not None
    whole = state.full.joined(state.cache, state.full.n_slots)
    whole.next_position = int(whole.positions[-1]) + 1
    return whole
