"""Trained weights that come with the library, one folder each, and those that the user keeps beside converted models."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

from contextmem.backbone import Backbone
from contextmem.embedded import cache_home
from contextmem.eraser import EraserConfig, KVEraser
from contextmem.errors import StorageError
from contextmem.restorer import RestoreKV, RestorerConfig

__all__ = ["eraser_for", "restorer_for"]

_ERASERS: WeakKeyDictionary[Any, KVEraser] = WeakKeyDictionary()
_RESTORERS: WeakKeyDictionary[Any, dict[str, RestoreKV]] = WeakKeyDictionary()


def eraser_for(backbone: Backbone) -> KVEraser | None:
    """The eraser that was trained for this model: shipped here, or in `cache_home()/weights`; None if there is none."""
    core = backbone.core
    for folder in () if core in _ERASERS else _folders("eraser_config.json"):
        try:
            if EraserConfig.read(folder).is_for(backbone) and (eraser := KVEraser.from_pretrained(folder)).fits(
                backbone
            ):
                _ERASERS[core] = eraser
                break
        except StorageError:  # somebody's damaged folder must not keep others from being found
            continue
    return _ERASERS.get(core)


def restorer_for(backbone: Backbone, evictor: str) -> RestoreKV | None:
    """The restorer that was trained for this model beside this evictor; None if there is none."""
    found = _RESTORERS.setdefault(backbone.core, {})
    for folder in () if evictor in found else _folders("restorer_config.json"):
        try:
            config = RestorerConfig.read(folder)
            if config.evictor != evictor or not config.is_for(backbone):
                continue
            if (restorer := RestoreKV.from_pretrained(folder)).fits(backbone):
                found[evictor] = restorer
                break
        except StorageError:
            continue
    return found.get(evictor)


def _folders(config: str) -> list[Path]:
    homes = (Path(__file__).parent, cache_home() / "weights")
    return sorted(file.parent for home in homes for file in home.glob(f"*/{config}"))
