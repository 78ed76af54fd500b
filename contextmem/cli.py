"""The `contextmem` command."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from contextmem.commands.evaluate import evaluate
from contextmem.commands.options import EMBEDDED, JsonOption, ModelOption, clean_errors, extra
from contextmem.commands.train import train

__all__ = ["app"]

app = typer.Typer(no_args_is_help=True, add_completion=False, help="An editable KV-cache memory for language models.")
app.add_typer(evaluate, name="eval")
app.add_typer(train, name="train")


@app.command()
def demo(model: ModelOption = EMBEDDED, as_json: JsonOption = False) -> None:
    """Retract a misleading passage: the wrong answer before, the right one after, every method beside full recompute."""
    with clean_errors():
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
    budget: Annotated[str | None, typer.Option(help="Most tokens to hold, or bytes as 512MB.")] = None,
    max_new_tokens: Annotated[int, typer.Option(help="Longest answer, in tokens.", min=1)] = 256,
) -> None:
    """Talk to a model and edit its context while you do. /help lists the commands."""
    with clean_errors():
        from contextmem.chat import Chat
        from contextmem.memory import ContextMemory

        limit: dict[str, Any] = {} if budget is None else {"budget": int(budget) if budget.isdecimal() else budget}
        memory = (
            ContextMemory.from_pretrained(model, system=system, **limit)
            if load is None
            else ContextMemory.load(load, **limit)
        )
        Chat(memory, Console(), max_new_tokens).run()


@app.command()
def inspect(
    path: Path,
    as_json: JsonOption = False,
    graph: Annotated[Path | None, typer.Option(help="Write who was derived from whom as a picture.")] = None,
) -> None:
    """Show what a saved memory holds, without loading a model."""
    with clean_errors(), extra("evals"):
        from contextmem.render import show_saved
        from contextmem.storage import ledger_of, read_manifest

        manifest = read_manifest(path)
        if graph is not None:
            from contextmem import provenance
            from contextmem.drawing import draw_graph

            draw_graph(provenance.graph(ledger_of(manifest)), graph)
        if as_json:
            for span in (*manifest["spans"], *manifest["gone"]):
                span.pop("token_ids")
            print(json.dumps({k: v for k, v in manifest.items() if k != "checksums"}, ensure_ascii=False))
        else:
            show_saved(manifest, Console())
