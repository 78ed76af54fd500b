"""The training loop: transformers' `Trainer` over contexts, one a micro-batch, so that `accelerate launch` spreads it."""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import nn
from torch.utils.data import Dataset, SequentialSampler
from transformers import Trainer, TrainingArguments

from contextmem.training.layout import Layout

__all__ = ["Samples", "Stage", "fit"]


@dataclass(frozen=True)
class Stage:
    """One run of the trainer.

    Attributes:
        name: names its folder.
        steps: optimizer steps.
        contexts_per_step: contexts whose gradients are added up in one step.
        lr: peak learning rate; warm-up over a twentieth of the steps, then cosine.
        mix: share of each source of samples.
        rates: learning rates of parameters by the beginning of their names, as multiples of `lr`.
    """

    name: str
    steps: int
    contexts_per_step: int
    lr: float
    mix: Mapping[str, float]
    rates: Mapping[str, float] = field(default_factory=dict)


class Drawing(Protocol):
    """What samples are drawn from."""

    def sample(self, layout: Layout, rng: random.Random) -> Any:
        """A new sample; the same `rng` state gives the same one."""
        ...


class Samples(Dataset[Any]):
    """Samples by number: the same seed and number give the same sample, on any machine and after any restart."""

    def __init__(
        self,
        layout: Layout,
        sources: Mapping[str, Drawing],
        mix: Mapping[str, float],
        n: int,
        seed: str,
        pool: int = 0,
        again: Callable[[Any, random.Random], Any] = lambda sample, rng: sample,
    ) -> None:
        self._layout, self._sources, self._mix, self._n, self._seed = layout, sources, mix, n, seed
        self._pool = pool or n  # different samples, after which they come again
        self._again = again  # what changes in them then

    def __len__(self) -> int:
        return self._n

    def __getitem__(self, number: int) -> Any:
        rng = random.Random(f"{self._seed}-{number % self._pool}")
        name = rng.choices(list(self._mix), weights=list(self._mix.values()))[0]
        sample = self._sources[name].sample(self._layout, rng)
        return sample if number < self._pool else self._again(sample, random.Random(f"{self._seed}-{number}"))


def fit(
    objective: nn.Module,
    samples: Samples,
    stage: Stage,
    folder: Path,
    *,
    seed: int,
    save_steps: int = 25,
    weight_decay: float = 0.01,
) -> list[dict[str, Any]]:
    """Train `objective` on `samples`, from the last checkpoint in `folder` on if there is one; returns the log."""
    arguments = TrainingArguments(
        output_dir=str(folder),
        max_steps=stage.steps,
        per_device_train_batch_size=1,
        gradient_accumulation_steps=stage.contexts_per_step,
        learning_rate=stage.lr,
        lr_scheduler_type="cosine",
        warmup_steps=max(1, stage.steps // 20),
        weight_decay=weight_decay,
        max_grad_norm=1.0,
        logging_steps=5,
        save_steps=save_steps,
        save_total_limit=2,
        seed=seed,
        report_to=[],
        remove_unused_columns=False,
        disable_tqdm=not sys.stderr.isatty(),
        use_cpu=not torch.cuda.is_available(),
        dataloader_pin_memory=False,
    )
    arguments._n_gpu = min(arguments.n_gpu, 1)  # several devices are for `accelerate launch`, a process each
    trainer = _Trainer(model=objective, args=arguments, train_dataset=samples, data_collator=_only_one)
    trainer.rates = stage.rates
    trainer.train(resume_from_checkpoint=_last_checkpoint(folder))
    history: list[dict[str, Any]] = trainer.state.log_history
    if trainer.is_world_process_zero():
        (folder / "log.json").write_text(json.dumps(history, indent=1))
    return history


def _last_checkpoint(folder: Path) -> str | None:
    """The newest checkpoint that was written to its end; the trainer's state comes last."""
    whole = [file.parent for file in folder.glob("checkpoint-*/trainer_state.json")]
    return str(max(whole, key=lambda place: int(place.name.rpartition("-")[2]))) if whole else None


class _Trainer(Trainer):  # type: ignore[misc]
    """Saves and loads what is trained, and takes the samples in order: they are random by their number already."""

    rates: Mapping[str, float]

    def create_optimizer(self, *args: Any, **kwargs: Any) -> Any:
        if getattr(self, "optimizer", None) is None and self.rates:
            named = [(n, p) for n, p in self.model.named_parameters() if p.requires_grad]
            groups = [
                {"params": [p for n, p in named if n.startswith(start)], "lr": rate * self.args.learning_rate}
                for start, rate in self.rates.items()
            ]
            groups.append({"params": [p for n, p in named if not n.startswith(tuple(self.rates))]})
            decay = self.args.weight_decay
            self.optimizer = torch.optim.AdamW(groups, lr=self.args.learning_rate, weight_decay=decay)
        return super().create_optimizer(*args, **kwargs)

    def _get_train_sampler(self, train_dataset: Any = None) -> Any:
        return SequentialSampler(self.train_dataset)

    def _save(self, output_dir: str | None = None, state_dict: Any = None) -> None:
        from safetensors.torch import save_model

        folder = Path(output_dir or self.args.output_dir)
        folder.mkdir(parents=True, exist_ok=True)
        save_model(self.accelerator.unwrap_model(self.model), str(folder / "model.safetensors"))

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        from safetensors.torch import load_model

        load_model(self.model, str(Path(resume_from_checkpoint) / "model.safetensors"))

    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        objective = self.accelerator.unwrap_model(self.model)
        if "loss" in logs and objective.kept:
            logs["loss"] = (
                objective.total / objective.kept
            )  # the mean over what was trained on, not over what was dropped
            logs["kept"] = round(objective.kept / objective.seen, 3)
            objective.seen, objective.kept, objective.total = 0, 0, 0.0
        super().log(logs, *args, **kwargs)


def _only_one(batch: Sequence[Any]) -> dict[str, Any]:
    return {"sample": batch[0]}
