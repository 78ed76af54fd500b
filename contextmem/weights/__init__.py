"""Trained weights that come with the library, one folder each, and those that the user keeps beside converted models."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

from contextmem.backbone import Backbone
from contextmem.embedded import cache_home
from contextmem.eraser import KVEraser
from contextmem.errors import IdentityMismatch, StorageError

__all__ = ["eraser_for"]

_FOUND: WeakKeyDictionary[Any, KVEraser | None] = WeakKeyDictionary()


def eraser_for(backbone: Backbone) -> KVEraser | None:
    """The eraser that was trained for this model: shipped here, or in `cache_home()/weights`; None if there is none."""
    core = backbone.core
    if core not in _FOUND:
        _FOUND[core] = next(filter(None, (_fitting(folder, backbone) for folder in _folders())), None)
    return _FOUND[core]


def _folders() -> list[Path]:
    homes = (Path(__file__).parent, cache_home() / "weights")
    return sorted(file.parent for home in homes for file in home.glob("*/eraser_config.json"))


def _fitting(folder: Path, backbone: Backbone) -> KVEraser | None:
    try:
        eraser = KVEraser.from_pretrained(folder)
        return eraser if eraser.fits(backbone) else None
    except (IdentityMismatch, StorageError):
        return None
