"""auto: the method that `retract` takes when none is named."""

from __future__ import annotations

from contextmem.errors import IdentityMismatch, InvalidInput, StorageError, UnsupportedEdit
from contextmem.retraction.base import METHODS, Edit, Method

__all__ = ["choose"]

_LEAST_SAVING = 2  # what erasing must divide the computed tokens by to be worth its approximation


def choose(edit: Edit) -> tuple[Method, str]:
    """Cut the tail; else erase, if an eraser fits and computes less than half of what recomputing would; else recompute.

    Returns:
        The method, and why in a line.
    """
    if edit.is_hollow:
        return METHODS["recompute"], "what was evicted is in no full tier: the text is read again, which is exact"
    if edit.is_tail:
        return METHODS["crop"], "the span is the tail: nothing has seen it, so it is cut"
    tokens = METHODS["recompute"].plan(edit).tokens
    exact = f"{tokens:,} tokens after the span have seen it: recomputing them is exact"
    n_inner = sum(span.n_tokens for span in edit.inner)
    if tokens <= _LEAST_SAVING * n_inner:
        return METHODS["recompute"], f"{exact} and costs little more than erasing {n_inner:,}, or less"
    if any(span.kind == "frame" for span in edit.inner):
        return METHODS["recompute"], f"{exact}; a turn of the dialogue is not erased but removed"
    try:
        plan = METHODS["kveraser"].plan(edit)
    except (UnsupportedEdit, IdentityMismatch, StorageError, InvalidInput) as refusal:
        why = str(refusal).partition(". ")[0].removesuffix(".")
        return METHODS["recompute"], f"{exact}; not erased: {why}"
    if plan.method != "kveraser":
        return METHODS[plan.method], plan.why
    return METHODS[
        "kveraser"
    ], f"erasing computes {plan.tokens:,} tokens, recomputing {tokens:,}; settle() makes it exact"
