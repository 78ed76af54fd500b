"""The `contextmem` command."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape

from contextmem.arguments import check_choice
from contextmem.errors import ContextMemoryError, InvalidInput

__all__ = ["app"]

app = typer.Typer(no_args_is_help=True, add_completion=False, help="An editable KV-cache memory for language models.")
evaluate = typer.Typer(no_args_is_help=True, help="Measure what the library claims.")
train = typer.Typer(no_args_is_help=True, help="Train the learned parts for a model.")
app.add_typer(evaluate, name="eval")
app.add_typer(train, name="train")

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
    budget: Annotated[str | None, typer.Option(help="Most tokens to hold, or bytes as 512MB.")] = None,
    max_new_tokens: Annotated[int, typer.Option(help="Longest answer, in tokens.", min=1)] = 256,
) -> None:
    """Talk to a model and edit its context while you do. /help lists the commands."""
    with _clean_errors():
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
    with _clean_errors(), _extra("evals"):
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


@contextmanager
def _extra(name: str) -> Iterator[None]:
    """Say which extra to install when a module of it is missing."""
    try:
        yield
    except ImportError as error:
        Console(stderr=True).print(f"[red]{error}[/red]: pip install 'contextmem\\[{name}]'")
        raise typer.Exit(1) from None


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
    with _clean_errors(), _extra("evals"):
        from contextmem.evals.latency.run import run

        sizes = {"prefill": (512,), "decode": (512,), "suffixes": (256, 512), "budgets": (512,)} if quick else {}
        print(run(out, model_name=model, repeats=repeats, command=_command(), **sizes))  # type: ignore[arg-type]


@evaluate.command()
def niah(
    out: Annotated[Path, typer.Option(help="Folder for rows, metrics, table and plot; a run adds to its rows.")] = Path(
        "evals/niah/results"
    ),
    model: ModelOption = EMBEDDED,
    eraser: Annotated[str, typer.Option(help="'auto', a folder or a hub id.")] = "auto",
    dtype: Annotated[str | None, typer.Option(help="Type of the weights; default: the checkpoint's.")] = None,
    text: Annotated[
        list[Path] | None,
        typer.Option(help="Files or folders of background text; default: Python's language reference."),
    ] = None,
    samples: Annotated[
        list[str] | None, typer.Option(help="TOKENS=N contexts, repeatable; default: 60 at 512 and 1024, 40, 20, 10.")
    ] = None,
    methods: Annotated[str, typer.Option(help="Comma-separated; default: all.")] = "",
    derived: Annotated[int, typer.Option(min=0, help="Contexts with a sentence derived from the erased needle.")] = 20,
    latency_at: Annotated[
        list[int] | None, typer.Option(help="Tokens to measure latency at, repeatable, on an idle machine.")
    ] = None,
    seed: Annotated[int, typer.Option(help="Of the samples.")] = 0,
    quick: Annotated[bool, typer.Option("--quick", help="Two short contexts, beside --out, to try it out.")] = False,
) -> None:
    """Erase one of two contradicting needles: exact match, leaks and latency of every method."""
    with _clean_errors(), _extra("evals"):
        from contextmem.evals.niah.measure import METHODS
        from contextmem.evals.niah.run import run

        chosen = _names(methods) or METHODS
        for name in chosen:
            check_choice("a method", name, METHODS)
        print(
            run(
                out.with_name("quick") if quick else out,
                model_name=model,
                eraser=eraser,
                dtype=dtype,
                text=text or (),
                samples={512: 2} if quick else _counts(samples),
                methods=chosen,
                n_derived=1 if quick else derived,
                latency_sizes=latency_at or (),
                seed=seed,
                command=_command(),
            )
        )


@evaluate.command()
def rag(
    qa: Annotated[list[str], typer.Option(help="JSONL files, or Hugging Face datasets, of questions with documents.")],
    out: Annotated[Path, typer.Option(help="Folder for rows, metrics and table; a run adds to its rows.")] = Path(
        "evals/rag/results"
    ),
    model: ModelOption = EMBEDDED,
    passages: Annotated[int, typer.Option(min=1, help="Passages in the index, at least.")] = 220,
    queries: Annotated[int, typer.Option(min=1, help="Questions, one after the other.")] = 20,
    top_k: Annotated[int, typer.Option(min=1, help="Passages retrieved for each.")] = 3,
    seed: Annotated[int, typer.Option(help="Of the wrong answers.")] = 0,
) -> None:
    """Query a LlamaIndex vector index over one memory; plant passages with a wrong answer and retract them."""
    with _clean_errors(), _extra("llama-index,recall"):
        from contextmem.evals.rag.run import run

        print(
            run(
                out,
                qa,
                model_name=model,
                n_passages=passages,
                n_queries=queries,
                top_k=top_k,
                seed=seed,
                command=_command(),
            )
        )


@evaluate.command()
def agent(
    traces: Annotated[list[Path], typer.Option(help="JSONL files of traces with tool calls, repeatable.")],
    out: Annotated[Path, typer.Option(help="Folder for rows, metrics and table; a run adds to its rows.")] = Path(
        "evals/agent/results"
    ),
    model: ModelOption = EMBEDDED,
    system: Annotated[Path | None, typer.Option(help="A file with the system text of the traces.")] = None,
    longest: Annotated[int, typer.Option(min=1, help="Most tokens of a trace; longer ones are left out.")] = 4096,
    limit: Annotated[int | None, typer.Option(min=1, help="Most traces replayed; default: all.")] = None,
    seed: Annotated[int, typer.Option(help="Of the edited results.")] = 0,
) -> None:
    """Replay recorded tool calls with the policies off and on, and retract edited copies of results."""
    with _clean_errors(), _extra("tools"):
        from contextmem.evals.agent.run import run

        print(
            run(
                out,
                traces,
                model_name=model,
                system=system,
                longest=longest,
                limit=limit,
                seed=seed,
                command=_command(),
            )
        )


@evaluate.command("span-neighbour")
def span_neighbour(
    eraser: Annotated[list[str], typer.Option(help="LABEL=FOLDER or hub id, repeatable.")],
    out: Annotated[Path, typer.Option(help="Folder for rows, metrics and table; a run adds to its rows.")] = Path(
        "evals/span_neighbour/results"
    ),
    model: ModelOption = EMBEDDED,
    dtype: Annotated[str | None, typer.Option(help="Type of the weights; default: the checkpoint's.")] = None,
    text: Annotated[
        list[Path] | None, typer.Option(help="Files or folders of documents; default: Python's language reference.")
    ] = None,
    samples: Annotated[int, typer.Option(min=1, help="Documents.")] = 60,
    seed: Annotated[int, typer.Option(help="Of the samples.")] = 0,
) -> None:
    """Recite a document across a chunk that was erased from it, with one or several erasers side by side."""
    with _clean_errors(), _extra("evals"):
        from contextmem.evals.span_neighbour.run import run

        erasers = dict(_labelled(pair) for pair in eraser)
        print(
            run(
                out,
                erasers,
                model_name=model,
                dtype=dtype,
                text=text or (),
                n_samples=samples,
                seed=seed,
                command=_command(),
            )
        )


@evaluate.command()
def ruler(
    out: Annotated[Path, typer.Option(help="Folder for rows, metrics, table and plot; a run adds to its rows.")] = Path(
        "evals/ruler/results"
    ),
    model: ModelOption = EMBEDDED,
    restorer: Annotated[
        list[str] | None, typer.Option(help="EVICTOR=FOLDER or hub id, repeatable; default: the shipped ones.")
    ] = None,
    dtype: Annotated[str | None, typer.Option(help="Type of the weights; default: the checkpoint's.")] = None,
    text: Annotated[
        list[Path] | None, typer.Option(help="Files or folders of background text; default: Python's reference.")
    ] = None,
    qa: Annotated[list[Path] | None, typer.Option(help="JSONL files of questions with one document, for qa_1.")] = None,
    hops: Annotated[
        list[Path] | None, typer.Option(help="JSONL files of questions with several documents, for qa_2.")
    ] = None,
    tasks: Annotated[str, typer.Option(help="Names with commas; default: all.")] = "",
    evictors: Annotated[str, typer.Option(help="Names with commas; default: all.")] = "",
    ratios: Annotated[str, typer.Option(help="Parts that are kept, with commas, such as 0.1,0.3.")] = "",
    samples: Annotated[
        list[str] | None, typer.Option(help="TOKENS=N, repeatable; default: 25 cases a task at 1,024 and 2,048.")
    ] = None,
    seed: Annotated[int, typer.Option(help="Of the cases.")] = 0,
) -> None:
    """Ask a compacted memory: RULER-style tasks by evictor and budget, with and without restore slots."""
    with _clean_errors(), _extra("evals"):
        from contextmem.evals.ruler import TASKS
        from contextmem.evals.ruler.run import run
        from contextmem.eviction import EVICTORS

        for name in _names(tasks):
            check_choice("a task", name, tuple(TASKS))
        for name in _names(evictors):
            check_choice("an evictor", name, tuple(EVICTORS))
        print(
            run(
                out,
                model_name=model,
                restorers=dict(_labelled(pair) for pair in restorer) if restorer else None,
                dtype=dtype,
                text=text or (),
                qa=qa or (),
                hops=hops or (),
                tasks=_names(tasks),
                evictors=_names(evictors),
                ratios=_ratios(ratios),
                samples=_counts(samples),
                seed=seed,
                command=_command(),
            )
        )


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
    with _clean_errors(), _extra("train"):
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
    with _clean_errors(), _extra("train"):
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


def _names(names: str) -> tuple[str, ...]:
    return tuple(name.strip() for name in names.split(",") if name.strip())


def _ratios(numbers: str) -> tuple[float, ...]:
    try:
        ratios = tuple(float(number) for number in _names(numbers))
    except ValueError:
        ratios = (0.0,)
    if not all(0 < ratio < 1 for ratio in ratios):
        raise InvalidInput(f"ratios are numbers between 0 and 1, with commas between them, not {numbers!r}.")
    return ratios


def _labelled(pair: str) -> tuple[str, str]:
    """`"LABEL=PLACE"` as a pair; a place alone is labelled by its last part."""
    label, given, place = pair.partition("=")
    return (label, place) if given else (Path(pair).name, pair)


def _command() -> str:
    return "contextmem " + " ".join(sys.argv[1:])


def _counts(pairs: list[str] | None) -> dict[int, int] | None:
    """`["512=60"]` as `{512: 60}`."""
    if not pairs:
        return None
    try:
        return {int(size): int(n) for size, n in (pair.split("=") for pair in pairs)}
    except ValueError:
        raise InvalidInput(f"samples are given as TOKENS=N, such as 512=60, not {' '.join(pairs)!r}.") from None


if __name__ == "__main__":  # for `accelerate launch -m contextmem.cli train eraser ...`
    app()
