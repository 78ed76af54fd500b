"""`contextmem eval ...`: measure what the library claims."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from contextmem.arguments import check_choice
from contextmem.commands.options import (
    EMBEDDED,
    DtypeOption,
    ModelOption,
    ResultsOption,
    SeedOption,
    TextOption,
    clean_errors,
    command,
    counts,
    extra,
    labelled,
    names,
)
from contextmem.commands.options import (
    ratios as ratios_of,
)

__all__ = ["evaluate"]

evaluate = typer.Typer(no_args_is_help=True, help="Measure what the library claims.")


@evaluate.command()
def latency(
    out: ResultsOption = Path("evals/latency/results"),
    model: ModelOption = EMBEDDED,
    repeats: Annotated[int, typer.Option(min=1, help="Repetitions of each measurement.")] = 5,
    quick: Annotated[bool, typer.Option("--quick", help="Short contexts only, to try it out.")] = False,
) -> None:
    """Prefill, decode, retraction and fork, as ratios against plain transformers in one run."""
    with clean_errors(), extra("evals"):
        from contextmem.evals.latency.run import run

        sizes = {"prefill": (512,), "decode": (512,), "suffixes": (256, 512), "budgets": (512,)} if quick else {}
        print(run(out, model_name=model, repeats=repeats, command=command(), **sizes))  # type: ignore[arg-type]


@evaluate.command()
def niah(
    out: ResultsOption = Path("evals/niah/results"),
    model: ModelOption = EMBEDDED,
    eraser: Annotated[str, typer.Option(help="'auto', a folder or a hub id.")] = "auto",
    dtype: DtypeOption = None,
    text: TextOption = None,
    samples: Annotated[
        list[str] | None, typer.Option(help="TOKENS=N contexts, repeatable; default: 60 at 512 and 1024, 40, 20, 10.")
    ] = None,
    methods: Annotated[str, typer.Option(help="Comma-separated; default: all.")] = "",
    derived: Annotated[int, typer.Option(min=0, help="Contexts with a sentence derived from the erased needle.")] = 20,
    kept: Annotated[
        float | None,
        typer.Option(min=0.1, max=1.0, help="Part of the context that a budget leaves; needs a folder of its own."),
    ] = None,
    latency_at: Annotated[
        list[int] | None, typer.Option(help="Tokens to measure latency at, repeatable, on an idle machine.")
    ] = None,
    seed: SeedOption = 0,
    quick: Annotated[bool, typer.Option("--quick", help="Two short contexts, beside --out, to try it out.")] = False,
) -> None:
    """Erase one of two contradicting needles: exact match, leaks and latency of every method."""
    with clean_errors(), extra("evals"):
        from contextmem.evals.niah.measure import METHODS
        from contextmem.evals.niah.run import run

        chosen = names(methods) or METHODS
        for name in chosen:
            check_choice("a method", name, METHODS)
        print(
            run(
                out.with_name("quick") if quick else out,
                model_name=model,
                eraser=eraser,
                dtype=dtype,
                text=text or (),
                samples={512: 2} if quick else counts(samples),
                methods=chosen,
                n_derived=1 if quick else derived,
                kept=kept,
                latency_sizes=latency_at or (),
                seed=seed,
                command=command(),
            )
        )


@evaluate.command("distractor-qa")
def distractor_qa(
    qa: Annotated[list[str], typer.Option(help="JSONL files, or Hugging Face datasets, of questions with documents.")],
    out: ResultsOption = Path("evals/distractor_qa/results"),
    cases: Annotated[Path, typer.Option(help="Folder for the built cases, which hold texts.")] = Path("cases"),
    pool: Annotated[list[Path] | None, typer.Option(help="JSONL files of passages to retrieve from.")] = None,
    model: ModelOption = EMBEDDED,
    eraser: Annotated[str, typer.Option(help="'auto', a folder or a hub id.")] = "auto",
    dtype: DtypeOption = None,
    lengths: Annotated[str, typer.Option(help="short, middle, long, with commas.")] = "short",
    methods: Annotated[str, typer.Option(help="Comma-separated; default: all.")] = "",
    limit: Annotated[int | None, typer.Option(min=1, help="Most questions a file or dataset; default: all.")] = None,
    insertions: Annotated[int, typer.Option(min=1, help="Most passages a question, each a case of its own.")] = 3,
    build: Annotated[bool, typer.Option("--build", help="Only build the cases, and count them at every step.")] = False,
    injected: Annotated[int, typer.Option(min=0, help="Cases of skill files with an injected instruction.")] = 0,
    transcripts: Annotated[Path | None, typer.Option(help="A file to add the answers to.")] = None,
    seed: SeedOption = 0,
) -> None:
    """Erase a misleading passage from real documents: every method beside full recompute."""
    with clean_errors(), extra("evals,recall"):
        from contextmem.evals.distractor_qa.methods import METHODS
        from contextmem.evals.distractor_qa.run import run

        chosen = names(methods) or METHODS
        for name in chosen:
            check_choice("a method", name, METHODS)
        print(
            run(
                out,
                qa,
                cases=cases,
                pool=pool or (),
                model_name=model,
                eraser=eraser,
                dtype=dtype,
                lengths=names(lengths),
                methods=chosen,
                limit=limit,
                insertions=insertions,
                only_build=build,
                n_injected=injected,
                transcripts=transcripts,
                seed=seed,
                command=command(),
            )
        )


@evaluate.command()
def rag(
    qa: Annotated[list[str], typer.Option(help="JSONL files, or Hugging Face datasets, of questions with documents.")],
    out: ResultsOption = Path("evals/rag/results"),
    model: ModelOption = EMBEDDED,
    passages: Annotated[int, typer.Option(min=1, help="Passages in the index, at least.")] = 220,
    queries: Annotated[int, typer.Option(min=1, help="Questions, one after the other.")] = 20,
    planted: Annotated[int, typer.Option(min=0, help="Questions with a planted passage that is retracted.")] = 40,
    top_k: Annotated[int, typer.Option(min=1, help="Passages retrieved for each.")] = 3,
    seed: SeedOption = 0,
) -> None:
    """Query a LlamaIndex vector index over one memory; plant passages with a wrong answer and retract them."""
    with clean_errors(), extra("llama-index,recall"):
        from contextmem.evals.rag.run import run

        print(
            run(
                out,
                qa,
                model_name=model,
                n_passages=passages,
                n_queries=queries,
                n_planted=planted,
                top_k=top_k,
                seed=seed,
                command=command(),
            )
        )


@evaluate.command()
def agent(
    traces: Annotated[list[Path], typer.Option(help="JSONL files of traces with tool calls, repeatable.")],
    out: ResultsOption = Path("evals/agent/results"),
    model: ModelOption = EMBEDDED,
    system: Annotated[Path | None, typer.Option(help="A file with the system text of the traces.")] = None,
    longest: Annotated[int, typer.Option(min=1, help="Most tokens of a trace; longer ones are left out.")] = 4096,
    limit: Annotated[int | None, typer.Option(min=1, help="Most traces replayed; default: all.")] = None,
    seed: SeedOption = 0,
) -> None:
    """Replay recorded tool calls with the policies off and on, and retract edited copies of results."""
    with clean_errors(), extra("tools"):
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
                command=command(),
            )
        )


@evaluate.command("span-neighbour")
def span_neighbour(
    eraser: Annotated[list[str], typer.Option(help="LABEL=FOLDER or hub id, repeatable.")],
    out: ResultsOption = Path("evals/span_neighbour/results"),
    model: ModelOption = EMBEDDED,
    dtype: DtypeOption = None,
    text: TextOption = None,
    samples: Annotated[int, typer.Option(min=1, help="Documents.")] = 60,
    seed: SeedOption = 0,
) -> None:
    """Recite a document across a chunk that was erased from it, with one or several erasers side by side."""
    with clean_errors(), extra("evals"):
        from contextmem.evals.span_neighbour.run import run

        erasers = dict(labelled(pair) for pair in eraser)
        print(
            run(
                out,
                erasers,
                model_name=model,
                dtype=dtype,
                text=text or (),
                n_samples=samples,
                seed=seed,
                command=command(),
            )
        )


@evaluate.command()
def kvpress(
    out: ResultsOption = Path("evals/kvpress/results"),
    model: ModelOption = EMBEDDED,
    dtype: DtypeOption = None,
    samples: Annotated[list[str] | None, typer.Option(help="TOKENS=N, repeatable; default: 10 cases a task.")] = None,
    seed: SeedOption = 0,
) -> None:
    """KVzip here and in kvpress, in one run: score, bytes held, decoding. Needs kvpress (`make test-kvpress`)."""
    with clean_errors(), extra("evals"):
        from contextmem.evals.kvpress.run import run

        print(run(out, model_name=model, dtype=dtype, samples=counts(samples), seed=seed, command=command()))


@evaluate.command()
def ruler(
    out: ResultsOption = Path("evals/ruler/results"),
    model: ModelOption = EMBEDDED,
    restorer: Annotated[
        list[str] | None,
        typer.Option(
            help="EVICTOR=FOLDER or hub id, EVICTOR/NAME=FOLDER for a further one, repeatable; default: the shipped ones."
        ),
    ] = None,
    dtype: DtypeOption = None,
    text: TextOption = None,
    qa: Annotated[list[Path] | None, typer.Option(help="JSONL files of questions with one document, for qa_1.")] = None,
    hops: Annotated[
        list[Path] | None, typer.Option(help="JSONL files of questions with several documents, for qa_2.")
    ] = None,
    tasks: Annotated[str, typer.Option(help="Names with commas; default: all.")] = "",
    evictors: Annotated[str, typer.Option(help="Names with commas; default: all.")] = "",
    ratios: Annotated[str, typer.Option(help="Parts that are kept, with commas, such as 0.1,0.3.")] = "",
    controls: Annotated[
        str,
        typer.Option(
            help="What else to put in the place of restore slots, with commas: positions-only, without-lora, from-evicted, "
            "dropped."
        ),
    ] = "",
    published: Annotated[
        str,
        typer.Option(help="Hub id or local copy of the published RULER set, such as simonjegou/ruler, in their place."),
    ] = "",
    samples: Annotated[
        list[str] | None,
        typer.Option(
            help="TOKENS=N, repeatable; default: 25 cases a task at 1,024 and 2,048, of the published set at 4,096."
        ),
    ] = None,
    seed: SeedOption = 0,
) -> None:
    """Ask a compacted memory: RULER-style tasks by evictor and budget, with and without restore slots."""
    with clean_errors(), extra("evals,datasets" if published else "evals"):
        from contextmem.evals.ruler import TASKS
        from contextmem.evals.ruler.controls import CONTROLS
        from contextmem.evals.ruler.run import run
        from contextmem.eviction import EVICTORS

        for name in names(tasks):
            check_choice("a task", name, tuple(TASKS))
        for name in names(evictors):
            check_choice("an evictor", name, tuple(EVICTORS))
        for name in names(controls):
            check_choice("a control", name, tuple(CONTROLS))
        print(
            run(
                out,
                model_name=model,
                restorers=dict(labelled(pair) for pair in restorer) if restorer else None,
                dtype=dtype,
                text=text or (),
                qa=qa or (),
                hops=hops or (),
                tasks=names(tasks),
                evictors=names(evictors),
                ratios=ratios_of(ratios),
                controls=names(controls),
                published=published,
                samples=counts(samples),
                seed=seed,
                command=command(),
            )
        )
