"""The `contextmem` command."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape

from contextmem.errors import ContextMemoryError

__all__ = ["app"]

app = typer.Typer(no_args_is_help=True, add_completion=False, help="An editable KV-cache memory for language models.")
evaluate = typer.Typer(no_args_is_help=True, help="Measure what the library claims.")
app.add_typer(evaluate, name="eval")

ModelOption = Annotated[str, typer.Option("--model", "-m", help="Embedded name, hub id or local directory.")]
JsonOption = Annotated[bool, typer.Option("--json", help="Print one JSON object instead of tables.")]
EMBEDDED = "smollm2-135m-instruct"


@contextmanager
def _clean_errors() -> Iterator[None]:
    """A message and an exit code instead of a traceback, for errors that are the user's to mend."""
    try:
        yield
    except ContextMemoryError as error:
        Console(stderr=True).print(f"[red]{type(error).__name__}[/red]: {escape(str(error))}", highlight=False)
        raise typer.Exit(1) from None
    except KeyboardInterrupt:
        Console(stderr=True).print("interrupted")
        raise typer.Exit(130) from None


@app.command()
def demo(model: ModelOption = EMBEDDED, as_json: JsonOption = False) -> None:
    """Retract a misleading passage: the wrong answer before, the right one after, every method beside full recompute."""
    with _clean_errors():
        from contextmem.demo import run_demo
        from contextmem.memory import ContextMemory
        from contextmem.render import show_demo

        result = run_demo(ContextMemory.from_pretrained(model))
        if as_json:
            print(json.dumps(result.as_json(), ensure_ascii=False))
        else:
            show_demo(result, Console())
        if not result.is_right:
            Console(stderr=True).print("[red]This model did not behave as the demo expects.[/red]")
            raise typer.Exit(1)


@app.command()
def chat(
    model: ModelOption = EMBEDDED,
    system: Annotated[str | None, typer.Option(help="System text.")] = None,
    load: Annotated[Path | None, typer.Option(help="Continue a saved memory.")] = None,
    max_new_tokens: Annotated[int, typer.Option(help="Longest answer, in tokens.", min=1)] = 256,
) -> None:
    """Talk to a model and edit its context while you do. /help lists the commands."""
    with _clean_errors():
        from contextmem.chat import Chat
        from contextmem.memory import ContextMemory

        memory = ContextMemory.from_pretrained(model, system=system) if load is None else ContextMemory.load(load)
        Chat(memory, Console(), max_new_tokens).run()


@app.command()
def inspect(path: Path, as_json: JsonOption = False) -> None:
    """Show what a saved memory holds, without loading a model."""
    with _clean_errors():
        from contextmem.render import show_saved
        from contextmem.storage import read_manifest

        manifest = read_manifest(path)
        if as_json:
            for span in (*manifest["spans"], *manifest["gone"]):
                span.pop("token_ids")
            print(json.dumps({k: v for k, v in manifest.items() if k != "checksums"}, ensure_ascii=False))
        else:
            show_saved(manifest, Console())


@evaluate.command()
def latency(
    out: Annotated[Path, typer.Option(help="Folder for rows, metrics, table and plot.")] = Path(
        "evals/latency/results"
    ),
    model: ModelOption = EMBEDDED,
    repeats: Annotated[int, typer.Option(min=1, help="Repetitions of each measurement.")] = 5,
    quick: Annotated[bool, typer.Option("--quick", help="Short contexts only, to try it out.")] = False,
) -> None:
    """Prefill, decode, retraction and fork, as ratios against plain transformers in one run."""
    with _clean_errors():
        try:
            from contextmem.evals.latency.run import run
        except ImportError as error:
            Console(stderr=True).print(f"[red]{error}[/red]: pip install 'contextmem\\[evals]'")
            raise typer.Exit(1) from None

        sizes = {"prefill": (512,), "decode": (512,), "suffixes": (256, 512)} if quick else {}
        command = "contextmem " + " ".join(sys.argv[1:])
        print(run(out, model_name=model, repeats=repeats, command=command, **sizes))  # type: ignore[arg-type]
