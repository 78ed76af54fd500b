"""Training an eraser in two stages: span-neighbour recitation, then needles and distractors."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from accelerate import PartialState

from contextmem.adapters import LoraAdapter
from contextmem.arguments import check_choice
from contextmem.backbone import Backbone
from contextmem.codec import Codec
from contextmem.eraser import KVEraser
from contextmem.framing import framing_of
from contextmem.identity import backbone_identity
from contextmem.training.layout import Layout
from contextmem.training.objective import EraserObjective
from contextmem.training.plan import Plan, claim, curve
from contextmem.training.prose import TRAIN, prose_of
from contextmem.training.samples import Source
from contextmem.training.samples.distractor_qa import DistractorQaSource, questions_of
from contextmem.training.samples.niah import NiahSource
from contextmem.training.samples.span_neighbour import SpanNeighbourSource
from contextmem.training.trainer import Samples, Stage, fit

__all__ = ["TrainingPlan", "train_eraser"]


_YLABELS = {
    "teacher": "KL from the teacher, nats / 8",
    "answer": "cross-entropy, nats a token",
}
_SHARE_LONE = 0.15  # of needle contexts


@dataclass(frozen=True)
class TrainingPlan(Plan):
    """Everything that determines a training run, together with the model. Files hold the same names (TOML).

    Attributes:
        text: files or folders of background text; none: half of the topics of Python's language reference.
        qa: JSONL files for distractor QA; none leaves it out.
        start: folder or hub id of an eraser to train on, in place of a fresh one with the four next settings.
            `targets` beyond those that it has are added to it (LoRA only).
        adapter, conditioning, rank, alpha, targets: see `KVEraser.untrained`.
        stage1_steps, stage2_steps: optimizer steps of span-neighbour pre-training, and of needles and distractors.
        contexts_per_step: contexts whose gradients are added up in one step.
        lr, stage2_lr: peak learning rates.
        target: "teacher" (what the model says without the span) or "answer" (the right answer, as in the paper).
        pool: different contexts a stage, which are kept prefilled and come again and again; 0: every one is new. Costs about
            25 kB a token for SmolLM2 in bfloat16, and saves the prefill, which is most of a step.
        easy, sharpness: see `EraserObjective`.
        qa_share: share of distractor QA among the contexts of stage 2.
        recall_share: share of span-neighbour samples among the contexts of stage 2.
        ruler_share: share of needle contexts in RULER's wording, see `NiahSource`.
        sizes: (tokens, weight) of needle contexts.
        max_span_tokens: longest span that the eraser will take; spans of up to 300 tokens are trained.
        slots: see `EraserConfig`; 0: all of a span's stay in their places. Default: as those of `start`, else all.
        save_steps: optimizer steps between checkpoints.
        seed: of initial weights and samples.
    """

    text: tuple[str, ...] = ()
    qa: tuple[str, ...] = ()
    start: str = ""
    adapter: str = "lora"
    conditioning: str = "prefix"
    rank: int = 16
    alpha: int = 32
    targets: tuple[str, ...] = ()
    stage1_steps: int = 150
    stage2_steps: int = 250
    contexts_per_step: int = 2
    lr: float = 1e-3
    stage2_lr: float = 1e-3
    target: str = "teacher"
    pool: int = 0
    easy: float = 1.0
    sharpness: float = 1.0
    qa_share: float = 0.2
    recall_share: float = 0.15
    ruler_share: float = 0.0
    sizes: tuple[tuple[int, float], ...] = ((512, 0.55), (1024, 0.28), (2048, 0.12), (4096, 0.05))
    max_span_tokens: int = 512
    slots: int | None = None
    save_steps: int = 25
    seed: int = 42

    def __post_init__(self) -> None:
        check_choice("target", self.target, ("teacher", "answer"))

    def stages(self) -> tuple[Stage, Stage]:
        """The two runs."""
        qa = self.qa_share if self.qa else 0.0
        second = {"niah": 1 - qa - self.recall_share, "distractor_qa": qa, "span_neighbour": self.recall_share}
        return (
            Stage("stage-1", self.stage1_steps, self.contexts_per_step, self.lr, {"span_neighbour": 1.0}),
            Stage("stage-2", self.stage2_steps, self.contexts_per_step, self.stage2_lr, second),
        )


def train_eraser(
    model: Any, tokenizer: Any, plan: TrainingPlan, folder: str | Path, *, dtype: torch.dtype | str = torch.bfloat16
) -> KVEraser:
    """Train an eraser for `model` and save it in `folder`/eraser; stage 1 alone is in `folder`/stage-1/eraser.

    A run that was stopped goes on from its last checkpoint when it is started again with the same plan and folder.

    Args:
        model: frozen here, cast to `dtype`, and moved to the device of this process. The eraser fits it in any type.
        dtype: of the frozen weights while training; bfloat16 trains at twice the speed of float32.

    Raises:
        InvalidInput: `folder` holds a run with another plan, or of another model.
    """
    folder = Path(folder)
    sources = _sources(plan)
    model.eval().requires_grad_(False)
    process = PartialState(cpu=not torch.cuda.is_available())
    backbone, codec = Backbone.of(model), Codec.of(tokenizer)
    layout = Layout(codec, framing_of(codec))
    eraser = _eraser(model, plan)
    before = eraser.config.training
    model.to(process.device, getattr(torch, dtype) if isinstance(dtype, str) else dtype)
    adapter = eraser.adapter_for(backbone)
    adapter.module.float().requires_grad_(True)
    with process.main_process_first():
        claim(folder, plan, eraser.config.identity)
    logs: dict[str, list[dict[str, Any]]] = {}
    for stage in plan.stages():
        if stage.steps:
            n = stage.steps * stage.contexts_per_step * process.num_processes
            samples = Samples(layout, sources, stage.mix, n, f"{plan.seed}-{stage.name}", plan.pool)
            objective = EraserObjective(
                backbone,
                adapter,
                eraser.config,
                plan.target,
                pool=plan.pool,
                easy=plan.easy,
                sharpness=plan.sharpness,
            )
            logs[stage.name] = fit(
                objective, samples, stage, folder / stage.name, seed=plan.seed, save_steps=plan.save_steps
            )
            if process.is_main_process:
                _described(eraser, plan, logs, before).save_pretrained(folder / stage.name / "eraser")
    adapter.module.eval().requires_grad_(False)
    trained = _described(eraser, plan, logs, before)
    if process.is_main_process:
        trained.save_pretrained(folder / "eraser")
        curve(logs, folder / "loss.png", _YLABELS[plan.target])
    return trained


def _eraser(model: Any, plan: TrainingPlan) -> KVEraser:
    """A fresh eraser, or the one to go on from; bound to the model as it is before it is cast."""
    if plan.start:
        eraser = KVEraser.from_pretrained(plan.start)
        adapter = eraser.adapter_for(Backbone.of(model))
        if plan.targets and isinstance(adapter, LoraAdapter):
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(plan.seed)
                eraser = KVEraser(eraser.config, adapter.widened(Backbone.of(model).core, plan.targets))
        identity = backbone_identity(Backbone.of(model))
        slots = eraser.config.slots if plan.slots is None else plan.slots or None
        span = plan.max_span_tokens
        eraser.config = replace(eraser.config, identity=identity, max_span_tokens=span, slots=slots)
        return eraser
    return KVEraser.untrained(
        model,
        adapter=plan.adapter,
        conditioning=plan.conditioning,
        rank=plan.rank,
        alpha=plan.alpha,
        targets=plan.targets or None,
        max_span_tokens=plan.max_span_tokens,
        slots=plan.slots or None,
        seed=plan.seed,
    )


def _sources(plan: TrainingPlan) -> dict[str, Source]:
    prose = prose_of(*plan.text, part=None if plan.text else TRAIN)
    sources: dict[str, Source] = {
        "span_neighbour": SpanNeighbourSource(prose),
        "niah": NiahSource(
            prose,
            sizes=plan.sizes,
            share_lone=_SHARE_LONE if plan.target == "teacher" else 0.0,
            share_ruler=plan.ruler_share,
        ),
    }
    if plan.qa:
        sources["distractor_qa"] = DistractorQaSource(questions_of(*plan.qa))
    return sources


def _described(eraser: KVEraser, plan: TrainingPlan, logs: Mapping[str, Any], before: Mapping[str, Any]) -> KVEraser:
    """The eraser with a record of its training, and of the one before if it was trained on."""
    settings = plan.record(before)
    settings["contexts"] = {
        stage.name: stage.steps * stage.contexts_per_step for stage in plan.stages() if stage.name in logs
    }
    eraser.config = replace(eraser.config, training=settings)
    return eraser
