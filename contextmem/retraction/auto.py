"""auto: the method that `retract` takes when none is named."""

from __future__ import annotations

from contextmem.retraction.base import METHODS, Edit, Method

__all__ = ["choose"]


def choose(edit: Edit) -> tuple[Method, str]:
    """The exact method that costs least, and why: the tail is cut, anything else is recomputed."""
    if edit.is_tail:
        return METHODS["crop"], "the span is the tail: nothing has seen it, so it is cut"
    tokens = METHODS["recompute"].plan(edit).tokens
    return METHODS["recompute"], f"{tokens:,} tokens after the span have seen it: recomputing them is exact"
