"""Models and tokenizers that tests share: tiny random ones of every supported architecture, and the embedded one."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
from tiny import ARCHITECTURES, tiny_model, tiny_tokenizer

from contextmem import ContextMemory, KVEraser
from contextmem.backbone import Backbone

_N_WORKERS = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
torch.set_num_threads(max(1, int(os.environ.get("OMP_NUM_THREADS", "2")) // _N_WORKERS))


@cache
def eraser_of(model: Any, slots: int | None = None) -> KVEraser:
    """An eraser that changes what it erases, as a trained one does."""
    return moved(KVEraser.untrained(model, slots=slots), model)


def moved(eraser: KVEraser, model: Any) -> KVEraser:
    """The same eraser with random weights added."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in eraser.adapter_for(Backbone.of(model)).module.parameters():
            parameter.add_(0.3 * torch.randn(parameter.shape, generator=generator))
    return eraser


@pytest.fixture(scope="session")
def tokenizer() -> Any:
    return tiny_tokenizer()


@pytest.fixture(params=[f"{name}-{attention}" for name in ARCHITECTURES for attention in ("eager", "sdpa")])
def model(request: pytest.FixtureRequest) -> Any:
    name, attention = request.param.rsplit("-", 1)
    return tiny_model(name, attention)


@pytest.fixture
def memory(model: Any, tokenizer: Any) -> ContextMemory:
    return ContextMemory(model, tokenizer, eraser=eraser_of(model))


@pytest.fixture
def llama_memory(tokenizer: Any) -> Callable[..., ContextMemory]:
    return lambda **options: ContextMemory(tiny_model("llama", "sdpa"), tokenizer, **options)


@cache
def _smollm2() -> tuple[Any, Any]:
    from contextmem.loading import load_pretrained

    return load_pretrained("smollm2-135m-instruct")


@pytest.fixture(scope="session")
def smollm2() -> tuple[Any, Any]:
    """The embedded model and its tokenizer, loaded once."""
    return _smollm2()


@pytest.fixture
def smol(smollm2: tuple[Any, Any]) -> ContextMemory:
    return ContextMemory(*smollm2)


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Tests passed per architecture."""
    counts: Counter[str] = Counter()
    for report in terminalreporter.stats.get("passed", []):
        for name in (*ARCHITECTURES, "smol"):
            if name in report.nodeid.lower():
                counts["smollm2" if name == "smol" else name] += 1
    terminalreporter.write_line("tests per architecture: " + ", ".join(f"{n} {counts[n]}" for n in sorted(counts)))
