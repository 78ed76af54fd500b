"""Per-sample metric rows on disk: long evaluations add up over runs and resume where they stopped."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

from contextmem.errors import InvalidInput

__all__ = ["RowLog"]


class RowLog:
    """A JSONL file of flat rows `{id, method, score, seconds, ...}`, only ever added to; no text is written to it.

    Args:
        settings: what every row depends on.
        variants: what the rows of one method depend on beside that, such as the weights it runs with. Rows of that method
            that were measured with another variant are dropped here, so that they are measured again and the rest is kept.
        timed: kinds of rows that hold times alone, which do not depend on variants.

    Raises:
        InvalidInput: the rows that are there were measured with other `settings`, which would mix two things in one table.
    """

    def __init__(
        self,
        path: Path,
        settings: Mapping[str, Any] | None = None,
        variants: Mapping[str, str | None] | None = None,
        timed: Collection[str] = (),
    ) -> None:
        self.path, self._variants, self._timed = path, dict(variants or {}), set(timed)
        path.parent.mkdir(parents=True, exist_ok=True)
        if settings is not None:
            _bind(path.with_name("settings.json"), dict(settings))
        lines = path.read_text().splitlines() if path.exists() else []
        rows = [json.loads(line) for line in lines if line.strip()]
        self.rows: list[dict[str, Any]] = [row for row in rows if self._is_current(row)]
        self.n_dropped = len(rows) - len(self.rows)
        if self.n_dropped:
            rest = path.with_suffix(".part")
            rest.write_text("".join(json.dumps(row) + "\n" for row in self.rows))
            rest.replace(path)

    def _is_current(self, row: Mapping[str, Any]) -> bool:
        if row.get("kind") in self._timed:
            return True
        return row["method"] not in self._variants or row.get("variant") == self._variants[row["method"]]

    def has(self, sample: str, method: str) -> bool:
        """Whether that sample was measured with that method already."""
        return any(row["id"] == sample and row["method"] == method for row in self.rows)

    def add(self, sample: str, method: str, **metrics: Any) -> None:
        """Write one row at once, so that a killed run loses at most the sample it was in."""
        row = {"id": sample, "method": method, **metrics}
        if method in self._variants:
            row["variant"] = self._variants[method]
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
