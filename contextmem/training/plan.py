"""What determines a training run: settings from a file and flags, a folder that belongs to them, and the curve they gave."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, Self

from contextmem.errors import InvalidInput

__all__ = ["Plan", "claim", "curve"]


@dataclass(frozen=True)
class Plan:
    """Settings with defaults; subclasses are frozen dataclasses, whose fields are the names that files hold."""

    @classmethod
    def read(cls, path: str | Path | None, changes: Mapping[str, Any]) -> Self:
        """A plan from a TOML file, with `changes` that are not None on top.

        Raises:
            InvalidInput: the file cannot be read, or holds a name that a plan has not.
        """
        try:
            values = tomllib.loads(Path(path).read_text()) if path is not None else {}
        except (OSError, tomllib.TOMLDecodeError) as error:
            raise InvalidInput(f"the configuration {path} cannot be read: {error}") from None
        values |= {name: value for name, value in changes.items() if value not in (None, [], ())}
        known = {one.name for one in fields(cls)}
        if unknown := sorted(set(values) - known):
            raise InvalidInput(f"unknown setting {unknown[0]!r}; there are {', '.join(sorted(known))}.")
        return cls(**{name: _frozen(value) for name, value in values.items()})

    def record(self, before: Mapping[str, Any]) -> dict[str, Any]:
        """The settings as plain values, files by their names alone; `before` is the record of what was trained on."""
        settings: dict[str, Any] = json.loads(json.dumps(asdict(self)))
        for name in ("text", "qa"):
            settings[name] = [Path(path).name for path in settings.get(name, ())]
        settings["start"] = dict(before) if settings.get("start") else None
        return settings


def claim(folder: Path, plan: Plan, identity: Mapping[str, str]) -> None:
    """Bind the folder to the plan and the model, so that a resumed run cannot mix two.

    Raises:
        InvalidInput: it belongs to others.
    """
    record, text = folder / "plan.json", json.dumps({**asdict(plan), "identity": dict(identity)}, indent=2)
    if record.exists() and record.read_text() != text:
        raise InvalidInput(
            f"{folder} holds a run with another plan: choose another folder, or the settings in {record}."
        )
    folder.mkdir(parents=True, exist_ok=True)
    record.write_text(text)


def curve(logs: Mapping[str, list[dict[str, Any]]], path: Path, ylabel: str) -> None:
    """The loss over optimizer steps, a panel a stage, with its running mean."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(1, len(logs), figsize=(5.5 * len(logs), 3.6), layout="constrained", squeeze=False)
    for axis, (name, history) in zip(axes[0], logs.items(), strict=True):
        points = [(row["step"], row["loss"]) for row in history if "loss" in row]
        axis.plot(*zip(*points, strict=True), color="0.75", linewidth=1)
        smooth = [
            sum(v for _, v in points[max(0, i - 4) : i + 1]) / len(points[max(0, i - 4) : i + 1])
            for i in range(len(points))
        ]
        axis.plot([step for step, _ in points], smooth)
        axis.set(title=name, xlabel="optimizer steps", ylabel=ylabel, ylim=(0, None))
        axis.grid(alpha=0.3)
    figure.savefig(path, dpi=110)
    plt.close(figure)


def _frozen(value: Any) -> Any:
    return tuple(_frozen(one) for one in value) if isinstance(value, list | tuple) else value
