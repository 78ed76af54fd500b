"""What is set side by side: every method, and erasing with a repair of the tokens that follow."""

from __future__ import annotations

from contextmem import KVErase
from contextmem.eraser import KVEraser
from contextmem.retraction import COMPARED, Method

__all__ = ["LEARNED", "METHODS", "REPAIRED", "method_of", "usable"]

REPAIRED = "kveraser+64"  # KVErase(repair=64)
LEARNED = ("kveraser", REPAIRED)
METHODS = ("recompute", "none", *LEARNED, *(m for m in COMPARED if m not in ("recompute", "kveraser")))


def method_of(name: str) -> str | Method:
    """What `retract` takes for a name of `METHODS`."""
    return KVErase(repair=64) if name == REPAIRED else name


def usable(names: tuple[str, ...], eraser: KVEraser | None) -> list[str]:
    """The names that `eraser` can be measured by: none of the learned ones without it, no repair where it closes no gap."""
    lacking = LEARNED if eraser is None else (REPAIRED,) if eraser.config.slots is None else ()
    return [name for name in names if name not in lacking]
