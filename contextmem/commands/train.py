"""`contextmem train ...`: train the learned parts for a model."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from contextmem.commands.options import EMBEDDED, ModelOption, clean_errors, extra

__all__ = ["train"]

train = typer.Typer(no_args_is_help=True, help="Train the learned parts for a model.")


@train.command("eraser")
def train_eraser(
    out: Annotated[
        Path, typer.Option(help="Folder for checkpoints, loss curve and the eraser; a stopped run goes on.")
    ],
    model: ModelOption = EMBEDDED,
    config: Annotated[Path | None, typer.Option(help="TOML file with the settings of a TrainingPlan.")] = None,
    dtype: Annotated[str, typer.Option(help="Type of the frozen model's weights.")] = "bfloat16",
    text: Annotated[list[str] | None, typer.Option(help="Files or folders of background text.")] = None,
    qa: Annotated[
        list[str] | None, typer.Option(help="JSONL files, or Hugging Face datasets, for distractor QA.")
    ] = None,
    start: Annotated[str | None, typer.Option(help="Folder or hub id of an eraser to train on.")] = None,
    adapter: Annotated[str | None, typer.Option(help="lora or full.")] = None,
    target: Annotated[str | None, typer.Option(help="teacher or answer: what the loss compares with.")] = None,
    conditioning: Annotated[str | None, typer.Option(help="prefix, none, query or suffix.")] = None,
    rank: Annotated[int | None, typer.Option(help="Of the LoRA matrices.")] = None,
    stage1_steps: Annotated[int | None, typer.Option(help="Optimizer steps of span-neighbour pre-training.")] = None,
    stage2_steps: Annotated[int | None, typer.Option(help="Optimizer steps on needles and distractors.")] = None,
    lr: Annotated[float | None, typer.Option(help="Peak learning rate of stage 1.")] = None,
    stage2_lr: Annotated[float | None, typer.Option(help="Peak learning rate of stage 2.")] = None,
    seed: Annotated[int | None, typer.Option(help="Of initial weights and samples.")] = None,
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
            "stage1_steps": stage1_steps,
            "stage2_steps": stage2_steps,
            "lr": lr,
            "stage2_lr": stage2_lr,
            "seed": seed,
        }
        plan = TrainingPlan.read(config, flags)
        train_eraser(*load_pretrained(model), plan, out, dtype=dtype)
        Console().print(f"the eraser is in {out / 'eraser'}, its loss curve in {out / 'loss.png'}", highlight=False)


@train.command("restorer")
def train_restorer(
    out: Annotated[
        Path, typer.Option(help="Folder for checkpoints, loss curve and the restorer; a stopped run goes on.")
    ],
    model: ModelOption = EMBEDDED,
    config: Annotated[Path | None, typer.Option(help="TOML file with the settings of a RestorerPlan.")] = None,
    dtype: Annotated[str, typer.Option(help="Type of the frozen model's weights.")] = "bfloat16",
    text: Annotated[list[str] | None, typer.Option(help="Files or folders of background text.")] = None,
    qa: Annotated[
        list[str] | None, typer.Option(help="JSONL files, or Hugging Face datasets, of questions with documents.")
    ] = None,
    start: Annotated[str | None, typer.Option(help="Folder or hub id of a restorer to train on.")] = None,
    evictor: Annotated[str | None, typer.Option(help="What chooses the slots that stay.")] = None,
    n: Annotated[int | None, typer.Option(help="Restore slots.")] = None,
    rank: Annotated[int | None, typer.Option(help="Of the LoRA matrices.")] = None,
    steps: Annotated[int | None, typer.Option(help="Optimizer steps.")] = None,
    lr: Annotated[float | None, typer.Option(help="Peak learning rate of the LoRA matrices.")] = None,
    seed: Annotated[int | None, typer.Option(help="Of initial weights and samples.")] = None,
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
        train_restorer(*load_pretrained(model), plan, out, dtype=dtype)
        Console().print(f"the restorer is in {out / 'restorer'}, its loss curve in {out / 'loss.png'}", highlight=False)
