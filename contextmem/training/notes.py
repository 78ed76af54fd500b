"""What preparing a context costs most, on disk: the evictor's scores and the teacher's answers."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor

from contextmem.training.recall import RecallSample

__all__ = ["Notes"]


class Notes:
    """A folder with a file a sample, named by the sample and by what it was prepared with.

    Args:
        folder: made when something is written; several processes may share it.
        about: what scores and answers depend on beside the sample.
    """

    def __init__(self, folder: Path, about: Any) -> None:
        self._folder, self._about = folder, about

    def read(self, sample: RecallSample) -> tuple[Tensor, tuple[tuple[int, ...], ...]] | None:
        """Scores, and answers in the order of the questions; None if there are none that can be read."""
        from safetensors.torch import load_file

        try:
            held = load_file(self._place(sample))
            answers = tuple(tuple(held[f"answer.{number}"].tolist()) for number in range(len(sample.questions)))
            return held["scores"], answers
        except (OSError, KeyError, SafetensorError):
            return None

    def write(self, sample: RecallSample, scores: Tensor, answers: Sequence[Sequence[int]]) -> None:
        """Keep them; a file appears whole or not at all."""
        from safetensors.torch import save_file

        self._folder.mkdir(parents=True, exist_ok=True)
        place = self._place(sample)
        partial = place.with_suffix(f".{os.getpid()}")
        held = {f"answer.{number}": torch.tensor(list(ids)) for number, ids in enumerate(answers)}
        save_file({"scores": scores.contiguous(), **held}, partial)
        partial.replace(place)

    def _place(self, sample: RecallSample) -> Path:
        said = repr((self._about, sample.context, sample.questions, sample.drafts, sample.end))
        return self._folder / f"{hashlib.sha256(said.encode()).hexdigest()[:24]}.safetensors"
