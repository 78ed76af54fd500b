"""`contextmem train ...`: train the learned parts for a model."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from contextmem.commands.options import EMBEDDED, ModelOption, clean_errors, extra

__all__ = ["train"]

OutOption = Annotated[
    Path, typer.Option("--out", help="Folder for checkpoints, loss curve and result; a stopped run goes on.")
]
ConfigOption = Annotated[
    Path | None, typer.Option("--config", help="TOML file with the settings of a plan; flags go before it.")
]
WeightsOption = Annotated[str, typer.Option("--dtype", help="Type of the frozen model's weights.")]
BackgroundOption = Annotated[list[str] | None, typer.Option("--text", help="Files or folders of background text.")]
QuestionsOption = Annotated[
    list[str] | None, typer.Option("--qa", help="JSONL files, or Hugging Face datasets, of questions with documents.")
]
StartOption = Annotated[str | None, typer.Option("--start", help="Folder or hub id of weights to train on.")]
RankOption = Annotated[int | None, typer.Option("--rank", help="Of the LoRA matrices.")]
SeedOfRunOption = Annotated[int | None, typer.Option("--seed", help="Of initial weights and samples.")]

train = typer.Typer(no_args_is_help=True, help="Train the learned parts for a model.")


@train.command("eraser")
def train_eraser(
    out: OutOption,
    model: ModelOption = EMBEDDED,
    config: ConfigOption = None,
    dtype: WeightsOption = "bfloat16",
    text: BackgroundOption = None,
    qa: QuestionsOption = None,
    start: StartOption = None,
    adapter: Annotated[str | None, typer.Option(help="lora or full.")] = None,
    target: Annotated[str | None, typer.Option(help="teacher or answer: what the loss compares with.")] = None,
    conditioning: Annotated[str | None, typer.Option(help="prefix, none, query or suffix.")] = None,
    rank: RankOption = None,
    slots: Annotated[int | None, typer.Option(help="Steering slots of a span that stay; 0: all.")] = None,
    stage1_steps: Annotated[int | None, typer.Option(help="Optimizer steps of span-neighbour pre-training.")] = None,
    stage2_steps: Annotated[int | None, typer.Option(help="Optimizer steps on needles and distractors.")] = None,
    lr: Annotated[float | None, typer.Option(help="Peak learning rate of stage 1.")] = None,
    stage2_lr: Annotated[float | None, typer.Option(help="Peak learning rate of stage 2.")] = None,
    seed: SeedOfRunOption = None,
) -> None:
    """Train an eraser in two stages; stop it at any time and start it again to go on."""
    with clean_errors(), extra("train"):
        from contextmem.loading import load_pretrained
        from contextmem.training.eraser import TrainingPlan, train_eraser

        flags = {
            "text": text,
            "qa": qa,
            "start": start,
            "adapter": adapter,
            "conditioning": conditioning,
            "target": target,
            "rank": rank,
            "slots": slots,
            "stage1_steps": stage1_steps,
            "stage2_steps": stage2_steps,
            "lr": lr,
            "stage2_lr": stage2_lr,
            "seed": seed,
        }
        plan = TrainingPlan.read(config, flags)
        train_eraser(*load_pretrained(model), plan, out, dtype=dtype)
        _announce("eraser", out)


@train.command("restorer")
def train_restorer(
    out: OutOption,
    model: ModelOption = EMBEDDED,
    config: ConfigOption = None,
    dtype: WeightsOption = "bfloat16",
    text: BackgroundOption = None,
    qa: QuestionsOption = None,
    start: StartOption = None,
    evictor: Annotated[str | None, typer.Option(help="What chooses the slots that stay.")] = None,
    n: Annotated[int | None, typer.Option(help="Restore slots.")] = None,
    rank: RankOption = None,
    steps: Annotated[int | None, typer.Option(help="Optimizer steps.")] = None,
    lr: Annotated[float | None, typer.Option(help="Peak learning rate of the LoRA matrices.")] = None,
    seed: SeedOfRunOption = None,
    notes: Annotated[
        Path | None,
        typer.Option(help="Folder for scores and teacher's answers, which runs may share; default: in OUT."),
    ] = None,
) -> None:
    """Train a restorer; stop it at any time and start it again to go on."""
    with clean_errors(), extra("train"):
        from contextmem.loading import load_pretrained
        from contextmem.training.restorer import RestorerPlan, train_restorer

        flags = {
            "text": text,
            "qa": qa,
            "start": start,
            "evictor": evictor,
            "n": n,
            "rank": rank,
            "steps": steps,
            "lr": lr,
            "seed": seed,
        }
        plan = RestorerPlan.read(config, flags)
        train_restorer(*load_pretrained(model), plan, out, notes=notes, dtype=dtype)
        _announce("restorer", out)


def _announce(what: str, out: Path) -> None:
    """Say where the result lies, once for all processes of a launch."""
    from accelerate import PartialState

    if PartialState().is_main_process:
        Console().print(f"the {what} is in {out / what}, its loss curve in {out / 'loss.png'}", highlight=False)
