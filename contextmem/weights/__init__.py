"""Trained weights that come with the library, one folder each, and those that the user keeps beside converted models."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

from contextmem.backbone import Backbone
from contextmem.embedded import cache_home
from contextmem.eraser import EraserConfig, KVEraser
from contextmem.errors import IdentityMismatch, InvalidInput, StorageError, UnsupportedEdit
from contextmem.restorer import RestoreKV, RestorerConfig

__all__ = ["eraser_for", "eraser_option", "restorer_for", "restorer_option"]

_ERASERS: WeakKeyDictionary[Any, KVEraser] = WeakKeyDictionary()
_RESTORERS: WeakKeyDictionary[Any, dict[str, RestoreKV | None]] = WeakKeyDictionary()


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
    if evictor not in found:
        found[evictor] = _restorer_in_folders(backbone, evictor)
    return found[evictor]


def _restorer_in_folders(backbone: Backbone, evictor: str) -> RestoreKV | None:
    for folder in _folders("restorer_config.json"):
        try:
            config = RestorerConfig.read(folder)
            if config.evictor != evictor or not config.is_for(backbone):
                continue
            if (restorer := RestoreKV.from_pretrained(folder)).fits(backbone):
                return restorer
        except StorageError:
            continue
    return None


def eraser_option(option: Any, backbone: Backbone) -> Callable[[], KVEraser]:
    """What gives a memory's eraser when it is needed; raises `UnsupportedEdit` then if there is none."""
    if isinstance(option, KVEraser):
        return lambda: option
    if option is not None and option != "auto" and not isinstance(option, str | os.PathLike):
        raise InvalidInput(f"eraser must be 'auto', a KVEraser, a folder, a hub id or None, not {option!r}.")
    if option not in (None, "auto"):
        named = KVEraser.from_pretrained(os.fspath(option))
        return lambda: named

    def find() -> KVEraser:
        found = eraser_for(backbone) if option == "auto" else None
        if found is None:
            why = (
                "no eraser was trained for this model" if option == "auto" else "erasing is switched off (eraser=None)"
            )
            raise UnsupportedEdit(
                f"{why}. Train one with 'contextmem train eraser' or pass eraser=. Nothing was changed."
            )
        return found

    return find


def restorer_option(option: Any) -> Callable[[Backbone, str], RestoreKV | None]:
    """What gives a memory's restorer for a model and an evictor when it is needed."""
    if option is None or isinstance(option, RestoreKV):
        return lambda backbone, evictor: option
    if option == "auto":
        return _fitting_restorer
    if not isinstance(option, str | os.PathLike):
        raise InvalidInput(f"restorer must be 'auto', a RestoreKV, a folder, a hub id or None, not {option!r}.")
    named = RestoreKV.from_pretrained(os.fspath(option))
    return lambda backbone, evictor: named


def _fitting_restorer(backbone: Backbone, evictor: str) -> RestoreKV | None:
    """The restorer that was trained for the model as it is, the user's own adapters included."""
    found = restorer_for(backbone, evictor)
    try:
        if found is not None:
            found.adapter_for(backbone)
    except IdentityMismatch:
        return None
    return found


def _folders(config: str) -> list[Path]:
    homes = (Path(__file__).parent, cache_home() / "weights")
    return sorted(file.parent for home in homes for file in home.glob(f"*/{config}"))
