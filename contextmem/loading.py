"""Models by name: the embedded one, a local directory, or a hub id."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from torch import nn

from contextmem.embedded import EMBEDDED, embedded_model_folder
from contextmem.errors import InvalidInput, ModelUnavailable

__all__ = ["load_pretrained", "no_progress_bars"]


@contextlib.contextmanager
def no_progress_bars() -> Iterator[None]:
    """Keep transformers' bars off anything that is not a terminal."""
    from transformers.utils import logging

    if sys.stderr.isatty() or not logging.is_progress_bar_enabled():
        yield
        return
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.enable_progress_bar()


def load_pretrained(name: str | os.PathLike[str], *, dtype: Any = None, device: Any = None) -> tuple[nn.Module, Any]:
    """A causal language model in evaluation mode, and its tokenizer.

    Args:
        name: the embedded model's name, a local directory, or a hub id.
        dtype: torch dtype or its name; None takes the checkpoint's.
        device: torch device; None leaves it on the CPU.

    Raises:
        ModelUnavailable: it cannot be loaded; the message says why.
    """
    from transformers import AutoModelForCausalLM, AutoTokenizer

    name = os.fspath(name)
    if not name:
        raise InvalidInput("no model name was given.")
    try:
        with no_progress_bars():
            place: str | Path = embedded_model_folder() if name.lower() == EMBEDDED else name
            tokenizer = AutoTokenizer.from_pretrained(place)
            model = AutoModelForCausalLM.from_pretrained(place, dtype=dtype or "auto")
    except (OSError, ValueError) as error:
        raise ModelUnavailable(f"the model {name!r} cannot be loaded: {error}") from error
    model.eval()
    if device is not None:
        model.to(device)
    if name.lower() == EMBEDDED:
        model.name_or_path = EMBEDDED  # saved memories name it, not a folder of this machine
    return model, tokenizer
