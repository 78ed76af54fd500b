"""The range of transformers releases this library was tested with, checked once at import."""

from __future__ import annotations

import warnings
from importlib.metadata import version

__all__ = ["NEWEST", "OLDEST", "check_versions"]

OLDEST, NEWEST = (5, 2), (5, 24)


def check_versions() -> None:
    """Raise ImportError below the range; warn above it."""
    found = version("transformers")
    release = tuple(int(part) for part in found.split(".")[:2])
    span = f"{OLDEST[0]}.{OLDEST[1]} to {NEWEST[0]}.{NEWEST[1]}"
    if release < OLDEST:
        raise ImportError(f"contextmem needs transformers {span}, found {found}: pip install -U transformers")
    if release > NEWEST:
        warnings.warn(f"contextmem was tested with transformers {span}, found {found}", stacklevel=3)
