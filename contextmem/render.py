"""Tables for the terminal."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Literal

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from contextmem.demo import Demonstration
from contextmem.ledger import Segment
from contextmem.reports import Report, Stats
from contextmem.storage import segment_of

__all__ = ["report_line", "segments_table", "show_demo", "show_saved", "stats_table"]


def segments_table(segments: Iterable[Segment], title: str, width: int, marked: str | None = None) -> Table:
    """Segments by number, with the beginning of their text; `marked` is shown in red.

    Args:
        width: columns of the terminal; what the other columns leave is the text's.
    """
    is_wide = width >= 100
    table = _table(title, ">#", *(("id", "source") if is_wide else ()), "what", ">tokens", "text")
    for number, segment in enumerate(segments, 1):
        state = "" if segment.state == "live" else segment.state
        table.add_row(
            str(number),
            *((segment.id, escape(_excerpt(segment.source or "", 18))) if is_wide else ()),
            escape(_excerpt(" ".join(filter(None, (segment.kind, segment.key, state))), 28)),
            f"{segment.n_tokens:,}",
            escape(_excerpt(segment.text, max(16, width - (72 if is_wide else 38)))),
            style="red" if segment.id == marked else None,
        )
    return table


def show_demo(result: Demonstration, console: Console) -> None:
    """The story of the demo: segments, wrong answer, methods, right answer."""
    shown = _around(result.segments_before)
    title = "Before: the two that contradict each other, and their neighbours"
    console.print(segments_table(shown, title, console.width, result.false_id))
    console.print(f"{result.n_tokens:,} tokens in the context, read in {result.prefill_seconds:.1f} s\n")
    console.print(f"[bold]Question[/bold]  {result.question}   (true: {result.expected})")
    console.print(f"[bold]Before[/bold]    [red]{escape(result.before)}[/red]\n")
    table = _table(
        "The passage retracted by each method, on a fork",
        "method",
        "~answer",
        "",
        "guarantee",
        ">tokens",
        ">seconds",
    )
    for name, one in result.methods.items():
        table.add_row(
            name,
            escape(_excerpt(one.answer, 70)),
            "[green]right[/green]" if one.is_right else "[red]wrong[/red]",
            one.guarantee,
            f"{one.tokens_recomputed:,}",
            f"{one.seconds:.3f}",
        )
    table.add_section()
    table.add_row(
        "whole context again", "", "", "exact", f"{result.n_tokens:,}", f"{result.rebuild_seconds:.3f}", style="dim"
    )
    console.print(table)
    console.print()
    left = {segment.id for segment in result.segments_after}
    console.print(segments_table([segment for segment in shown if segment.id in left], "After", console.width))
    console.print(f"[bold]Retracted[/bold] {report_line(result.report)}")
    console.print(f"[bold]After[/bold]     [green]{escape(result.after)}[/green]")


def show_saved(manifest: dict[str, Any], console: Console) -> None:
    """What a saved memory's manifest says."""
    console.print(f"[bold]model[/bold] {escape(str(manifest['model']))}   [bold]format[/bold] {manifest['version']}")
    for name, value in manifest["identity"].items():
        console.print(f"  {name}: {value}", highlight=False)
    resident = [segment_of(span) for span in manifest["spans"] if span["kind"] != "frame"]
    gone = [segment_of(span) for span in manifest["gone"]]
    table = segments_table((*resident, *gone), "Segments", console.width)
    console.print(table)
    slots = manifest["spans"][-1]["stop"] if manifest["spans"] else 0
    console.print(
        f"{slots:,} tokens resident, frames included; {manifest['exact_slots']:,} of them exact; "
        f"{len(manifest['events'])} events"
    )


def stats_table(stats: Stats) -> Table:
    """Share of every span in the cache."""
    table = _table("Context", "id", "kind", "state", ">tokens", ">held", ">KiB")
    for row in stats.segments:
        table.add_row(row.id, row.kind, row.state, f"{row.n_tokens:,}", f"{row.held:.0%}", f"{row.nbytes / 1024:,.0f}")
    table.add_section()
    held = f"{stats.tokens_held / max(1, stats.n_tokens):.0%}"
    table.add_row("in use", "", "", f"{stats.n_tokens:,}", held, f"{stats.nbytes_used / 1024:,.0f}")
    if stats.restore_slots:
        table.add_row("restore slots", "", "", f"{stats.restore_slots:,}", "", "")
    table.add_row("capacity", "", "", "", "", f"{stats.nbytes_held / 1024:,.0f}")
    if stats.budget is not None:
        table.add_row("budget", "", "", f"{stats.budget:,}", "", "")
    table.add_row("context length", "", "", f"{stats.context_length:,}", "", "")
    return table


def report_line(report: Report) -> str:
    """One line about an edit."""
    seconds = f" in {report.seconds:.2f} s" if report.seconds is not None else ""
    return (
        f"by {report.method} ({report.guarantee}): {report.tokens_removed:,} tokens removed, "
        f"{report.tokens_recomputed:,} recomputed, {report.tokens_reused:,} reused{seconds}; {report.why}"
    )


def _around(segments: list[Segment]) -> list[Segment]:
    """Segments with a key, and their neighbours."""
    keyed = [i for i, segment in enumerate(segments) if segment.key]
    near = {j for i in keyed for j in (i - 1, i, i + 1)}
    return [segment for i, segment in enumerate(segments) if i in near]


def _table(title: str, *columns: str) -> Table:
    """Columns whose name begins with '>' hold numbers; those that begin with '~' may wrap."""
    table = Table(title=title, title_justify="left", header_style="bold", box=box.SIMPLE_HEAD, pad_edge=False)
    for column in columns:
        justify: Literal["right", "left"] = "right" if column.startswith(">") else "left"
        table.add_column(column.lstrip(">~"), justify=justify, no_wrap=not column.startswith("~"))
    return table


def _excerpt(text: str, length: int) -> str:
    line = " ".join(text.split())
    return line if len(line) <= length else line[: length - 1] + "…"
