"""What commands share: options, errors as messages, and lists that are written with commas."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape

from contextmem.errors import ContextMemoryError, InvalidInput

__all__ = [
    "EMBEDDED",
    "DtypeOption",
    "JsonOption",
    "ModelOption",
    "ResultsOption",
    "SeedOption",
    "TextOption",
    "clean_errors",
    "command",
    "counts",
    "extra",
    "labelled",
    "names",
    "ratios",
]

EMBEDDED = "smollm2-135m-instruct"
ModelOption = Annotated[str, typer.Option("--model", "-m", help="Embedded name, hub id or local directory.")]
JsonOption = Annotated[bool, typer.Option("--json", help="Print one JSON object instead of tables.")]
ResultsOption = Annotated[
    Path, typer.Option("--out", help="Folder for rows, metrics, table and plot; a run adds to its rows.")
]
DtypeOption = Annotated[str | None, typer.Option("--dtype", help="Type of the weights; default: the checkpoint's.")]
TextOption = Annotated[
    list[Path] | None,
    typer.Option("--text", help="Files or folders of background text; default: Python's language reference."),
]
SeedOption = Annotated[int, typer.Option("--seed", help="Of the samples.")]


@contextmanager
def clean_errors() -> Iterator[None]:
    """A message and an exit code instead of a traceback, for errors that are the user's to mend."""
    try:
        yield
    except ContextMemoryError as error:
        Console(stderr=True).print(f"[red]{type(error).__name__}[/red]: {escape(str(error))}", highlight=False)
        raise typer.Exit(1) from None
    except KeyboardInterrupt:
        Console(stderr=True).print("interrupted")
        raise typer.Exit(130) from None


@contextmanager
def extra(name: str) -> Iterator[None]:
    """Say which extra to install when a module of it is missing."""
    try:
        yield
    except ImportError as error:
        Console(stderr=True).print(f"[red]{error}[/red]: pip install 'contextmem\\[{name}]'")
        raise typer.Exit(1) from None


def names(names: str) -> tuple[str, ...]:
    return tuple(name.strip() for name in names.split(",") if name.strip())


def ratios(numbers: str) -> tuple[float, ...]:
    try:
        ratios = tuple(float(number) for number in names(numbers))
    except ValueError:
        ratios = (0.0,)
    if not all(0 < ratio < 1 for ratio in ratios):
        raise InvalidInput(f"ratios are numbers between 0 and 1, with commas between them, not {numbers!r}.")
    return ratios


def labelled(pair: str) -> tuple[str, str]:
    """`"LABEL=PLACE"` as a pair; a place alone is labelled by its last part."""
    label, given, place = pair.partition("=")
    return (label, place) if given else (Path(pair).name, pair)


def command() -> str:
    """The command line as it is printed beside figures: files by their names, for where they lie is nobody's business."""
    return " ".join(["contextmem", *(shlex.quote(_named(word)) for word in sys.argv[1:])])


def _named(word: str) -> str:
    """A word of the command line without the folders of `FILE` or `LABEL=FILE`."""
    label, equals, value = ("", "", word) if Path(word).is_absolute() else word.rpartition("=")
    return f"{label}{equals}{Path(value).name}" if Path(value).is_absolute() else word


def counts(pairs: list[str] | None) -> dict[int, int] | None:
    """`["512=60"]` as `{512: 60}`."""
    if not pairs:
        return None
    try:
        return {int(size): int(n) for size, n in (pair.split("=") for pair in pairs)}
    except ValueError:
        raise InvalidInput(f"samples are given as TOKENS=N, such as 512=60, not {' '.join(pairs)!r}.") from None
