"""Trained weights that come with the library, one folder each, and those that the user keeps beside converted models."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

from contextmem.backbone import Backbone
from contextmem.embedded import cache_home
from contextmem.eraser import EraserConfig, KVEraser
from contextmem.errors import StorageError

__all__ = ["eraser_for"]

_FOUND: WeakKeyDictionary[Any, KVEraser] = WeakKeyDictionary()


def eraser_for(backbone: Backbone) -> KVEraser | None:
    """The eraser that was trained for this model: shipped here, or in `cache_home()/weights`; None if there is none."""
    core = backbone.core
    for folder in () if core in _FOUND else _folders():
        try:
            if EraserConfig.read(folder).is_for(backbone) and (eraser := KVEraser.from_pretrained(folder)).fits(
                backbone
            ):
                _FOUND[core] = eraser
                break
        except StorageError:  # somebody's damaged folder must not keep others from being found
            continue
    return _FOUND.get(core)


def _folders() -> list[Path]:
    homes = (Path(__file__).parent, cache_home() / "weights")
    return sorted(file.parent for home in homes for file in home.glob("*/eraser_config.json"))
