"""A table and its figures on disk, with the command, seed and versions that they come from."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from contextmem.evals.environment import environment

__all__ = ["published"]


def published(
    folder: Path,
    title: str,
    body: Sequence[str],
    figures: Mapping[str, Any],
    *,
    command: str,
    seed: int,
    subject: Mapping[str, str],
) -> str:
    """Write metrics.json and table.md into `folder`; returns the table: title, provenance, and the lines of `body`.

    What a reader must know about how the rows were measured stands in `folder`/conditions.md, written by hand.

    Args:
        subject: what was measured, see `Subject.described`.
    """
    used = {**subject, **environment()}
    record = {"command": command, "seed": seed, "environment": used, "figures": figures}
    (folder / "metrics.json").write_text(json.dumps(record, indent=1) + "\n")
    told = ", ".join(f"{name} {value}" for name, value in used.items())
    noted = folder / "conditions.md"
    conditions = [noted.read_text().strip(), ""] if noted.exists() else []
    table = "\n".join([f"# {title}", "", f"`{command}`, seed {seed}; {told}.", "", *conditions, *body]) + "\n"
    (folder / "table.md").write_text(table)
    return table
