"""The eraser that comes with the library: it fits the embedded model in any type, and erases on a small sample."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import contextmem.weights
from contextmem import ContextMemory
from contextmem.backbone import Backbone
from contextmem.evals.niah.measure import measure_sample
from contextmem.evals.niah.samples import haystack_of
from contextmem.evals.rows import RowLog
from contextmem.training.layout import Layout
from contextmem.training.prose import HELD_OUT, prose_of
from contextmem.weights import eraser_for

FOLDER = Path(contextmem.weights.__file__).parent

pytestmark = pytest.mark.smollm2


def test_the_weights_are_small_and_half_precision_with_a_card_each() -> None:
    assert sum(file.stat().st_size for file in FOLDER.rglob("*") if file.is_file()) <= 10 * 2**20
    for folder in (place for place in FOLDER.iterdir() if (place / "eraser_config.json").exists()):
        assert {t.dtype for t in load_file(folder / "adapter_model.safetensors").values()} == {torch.float16}
        assert "## Where it is worse than recompute" in (folder / "README.md").read_text()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_it_fits_the_embedded_model_in_any_type(smollm2: tuple[Any, Any], dtype: torch.dtype) -> None:
    model = smollm2[0] if dtype == torch.float32 else copy.deepcopy(smollm2[0]).to(dtype)
    backbone = Backbone.of(model)
    eraser = eraser_for(backbone)
    assert eraser is not None and eraser.fits(backbone)


def test_needles_that_mislead_are_erased(smollm2: tuple[Any, Any], tmp_path: Path) -> None:
    """Eight contexts: wherever the answer was wrong with the needle and right without, it is right after erasing."""
    memory = ContextMemory(*smollm2)
    layout, prose, log = (
        Layout(memory._codec, memory._framing),
        prose_of(part=HELD_OUT),
        RowLog(tmp_path / "rows.jsonl"),
    )
    for number in range(8):
        sample = haystack_of(layout, prose, 384, 1000 + number, 0)
        measure_sample(lambda: ContextMemory(*smollm2), sample, ("none", "recompute", "kveraser"), log)
    scores = {
        method: {row["id"]: row["score"] for row in log.of(method=method)}
        for method in ("none", "recompute", "kveraser")
    }
    telling = [i for i, right in scores["recompute"].items() if right and not scores["none"][i]]
    assert len(telling) >= 4
    assert all(scores["kveraser"][i] for i in telling)
    assert sum(row["leak"] for row in log.of(method="kveraser")) == 0
