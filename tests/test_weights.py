"""The weights that come with the library: they fit the embedded model in any type, and help on a small sample."""

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
from contextmem.evals.ruler import Material, case_of
from contextmem.evals.ruler.measure import Configuration, measure_case
from contextmem.eviction import evictor_named
from contextmem.training.layout import Layout
from contextmem.training.prose import HELD_OUT, prose_of
from contextmem.weights import eraser_for, restorer_for

FOLDER = Path(contextmem.weights.__file__).parent

pytestmark = pytest.mark.smollm2


def test_the_weights_are_small_and_half_precision_with_a_card_each() -> None:
    """At most 10 MiB of erasers and 8 MB of restorers."""
    for kind, most in (("eraser", 10 * 2**20), ("restorer", 8 * 10**6)):
        folders = [place.parent for place in FOLDER.glob(f"*/{kind}_config.json")]
        assert folders and sum(f.stat().st_size for folder in folders for f in folder.iterdir()) <= most
        for folder in folders:
            weights = [tensor for file in folder.glob("*.safetensors") for tensor in load_file(file).values()]
            assert {tensor.dtype for tensor in weights} == {torch.float16}
            assert "## Where it is worse than" in (folder / "README.md").read_text()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_it_fits_the_embedded_model_in_any_type(smollm2: tuple[Any, Any], dtype: torch.dtype) -> None:
    model = smollm2[0] if dtype == torch.float32 else copy.deepcopy(smollm2[0]).to(dtype)
    backbone = Backbone.of(model)
    eraser, restorer = eraser_for(backbone), restorer_for(backbone, "kvzip")
    assert eraser is not None and eraser.fits(backbone)
    assert restorer is not None and restorer.fits(backbone)
    memory = ContextMemory(model, smollm2[1], budget=96, reserve=0)
    memory.append("The town of Ashby lies on the river Mere, and its bridge is old. " * 30)
    assert memory.stats().tokens_held <= 96 and memory.stats().restore_slots == restorer.n


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


def test_restore_slots_bring_answers_nearer(smollm2: tuple[Any, Any], tmp_path: Path) -> None:
    """Four short contexts of which a twentieth is kept: less divergence from the full cache with the slots than without."""
    memory = ContextMemory(*smollm2)
    layout, log = Layout(memory._codec, memory._framing), RowLog(tmp_path / "rows.jsonl")
    restorer = restorer_for(memory.backbone, "kvzip")
    compared = [Configuration(evictor_named("kvzip"), 0.05, one) for one in (None, restorer)]
    material = Material(layout, prose_of(part=HELD_OUT))
    for number, task in enumerate(("niah_single_2", "niah_multikey_1") * 2):
        case = case_of(material, task, 640, 2000 + number, 0)
        assert case is not None
        measure_case(lambda: ContextMemory(*smollm2, restorer=None), task, 2000 + number, 640, case, compared, log)
    plain, restored = ({row["id"]: row["kl"] for row in log.of(method=one.label)} for one in compared)
    assert plain and plain.keys() == restored.keys()
    assert sum(restored.values()) < 0.8 * sum(plain.values())
