"""Per-sample metric rows on disk: long evaluations add up over runs and resume where they stopped."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from contextmem.errors import InvalidInput

__all__ = ["RowLog"]


class RowLog:
    """An append-only JSONL file of flat rows `{id, method, score, seconds, ...}`; no text is ever written to it.

    Raises:
        InvalidInput: the rows that are there were measured with other `settings`, which would mix two things in one table.
    """

    def __init__(self, path: Path, settings: Mapping[str, Any] | None = None) -> None:
        self.path = path
        path.parent.mkdir(parents=True, exist_ok=True)
        if settings is not None:
            _bind(path.with_name("settings.json"), dict(settings))
        lines = path.read_text().splitlines() if path.exists() else []
        self.rows: list[dict[str, Any]] = [json.loads(line) for line in lines if line.strip()]

    def has(self, sample: str, method: str) -> bool:
        """Whether that sample was measured with that method already."""
        return any(row["id"] == sample and row["method"] == method for row in self.rows)

    def add(self, sample: str, method: str, **metrics: Any) -> None:
        """Write one row at once, so that a killed run loses at most the sample it was in."""
        row = {"id": sample, "method": method, **metrics}
        self.rows.append(row)
        with self.path.open("a") as file:
            file.write(json.dumps(row) + "\n")

    def of(self, **wanted: Any) -> Iterator[dict[str, Any]]:
        """Rows whose fields have these values."""
        return (row for row in self.rows if all(row.get(name) == value for name, value in wanted.items()))


def _bind(record: Path, settings: dict[str, Any]) -> None:
    if not record.exists():
        record.write_text(json.dumps(settings, indent=1) + "\n")
        return
    there = json.loads(record.read_text())
    if differing := sorted(name for name in settings if there.get(name) != settings[name]):
        pairs = "; ".join(f"{name}: {there.get(name)} there, {settings[name]} here" for name in differing)
        raise InvalidInput(
            f"the rows in {record.parent} were measured with other settings ({pairs}). Choose another folder."
        )
