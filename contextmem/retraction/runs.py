"""Kept tokens that follow spans on their way out, in runs that one forward can compute again."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping

from torch import Tensor

from contextmem.ledger import Segment

__all__ = ["following", "runs"]


def following(spans: Iterable[Segment], going: Collection[str], n: int) -> dict[int, int]:
    """Slots and ids of the next `n` kept tokens after every span of `going`, up to another one, or to an erased one."""
    ids: dict[int, int] = {}
    left = 0
    for span in spans:
        if span.id in going:
            left = n
        elif span.state == "erased":
            left = 0
        else:
            ids |= zip(range(span.start, min(span.start + left, span.stop)), span.token_ids, strict=False)
            left = max(0, left - span.n_tokens)
    return ids


def runs(ids: Mapping[int, int], positions: Tensor) -> list[tuple[int, tuple[int, ...]]]:
    """First slot and ids of every run of consecutive slots at consecutive positions; `ids` in the order of slots."""
    found: list[tuple[int, list[int]]] = []
    for slot, token in ids.items():
        goes_on = bool(found) and slot == found[-1][0] + len(found[-1][1])
        if goes_on and int(positions[slot]) == int(positions[slot - 1]) + 1:
            found[-1][1].append(token)
        else:
            found.append((slot, [token]))
    return [(start, tuple(run)) for start, run in found]
