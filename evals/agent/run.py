"""`contextmem eval agent`: recorded traces with the policies off and on, and edited results that are retracted."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import mean
from typing import Any

from contextmem.errors import InvalidInput
from contextmem.evals.agent.replay import rate, replayed
from contextmem.evals.agent.stale import METHODS, cases_of, measure_case
from contextmem.evals.agent.traces import Trace, traces_of
from contextmem.evals.bootstrap import mean_interval
from contextmem.evals.published import published
from contextmem.evals.rows import RowLog
from contextmem.evals.subject import Subject
from contextmem.integrations.tool_loop import CollapseRepeats, RetractFailed, SupersedeReads

__all__ = ["run"]

OFF, ON = "off", "on"
_FRAME = 24  # tokens beside a result's own


def run(
    folder: Path,
    paths: Sequence[Path],
    *,
    model_name: str = "smollm2-135m-instruct",
    system: Path | None = None,
    longest: int = 4096,
    limit: int | None = None,
    seed: int = 0,
    command: str = "contextmem eval agent",
    say: Callable[[str], None] = print,
) -> str:
    """Measure what is missing in `folder`/rows.jsonl and write the report; returns the table.

    Args:
        folder: where rows, metrics and table go; a run resumes from its rows.
        paths: JSONL files of traces.
        system: a file with the system text.
        longest: most tokens of a trace; longer ones are left out.
        limit: most traces replayed; those in which a policy finds something come first.
        seed: of the edited results.

    Raises:
        InvalidInput: no trace can be read.
    """
    subject = Subject.loaded(model_name)
    text = system.read_text() if system is not None else None
    settings = subject.identity | {
        "traces": [path.name for path in paths],
        "system": system is not None,
        "longest": longest,
        "seed": seed,
    }
    traces = traces_of(paths)

    counter, eraser = subject.memory(), subject.eraser
    log = RowLog(folder / "rows.jsonl", settings, subject.variants("kveraser"))
    methods = [method for method in METHODS if eraser is not None or method != "kveraser"]
    short = [trace for trace in traces if sum(counter.count_tokens(t.text) + 8 for t in trace.turns) <= longest]
    chosen = sorted(short, key=lambda trace: not _is_eventful(trace))[:limit]
    if not chosen:
        raise InvalidInput(f"no trace of at most {longest:,} tokens among {len(traces)}.")
    policies = {
        OFF: (),
        ON: (CollapseRepeats(), RetractFailed(), SupersedeReads()),
        "on, masked": (CollapseRepeats(), RetractFailed("mask"), SupersedeReads("mask")),
    }
    longest_span = eraser.config.max_span_tokens - _FRAME if eraser is not None else longest
    for case in cases_of(traces, seed):
        if counter.count_tokens(case.stale.text) > longest_span:
            continue
        measure_case(subject.memory, case, methods, log)
    say(f"edited results: {len({row['id'] for row in log.of(kind='stale')})}")
    for number, trace in enumerate(chosen):
        for name, wanted in policies.items():
            if not log.has(trace.id, name):
                log.add(
                    trace.id,
                    name,
                    kind="replay",
                    **replayed(subject.memory(system=text), trace, wanted, rebuild=name == ON),
                )
        say(f"trace {number + 1} of {len(chosen)}")
    return _report(log, folder, command, seed, subject.described, list(policies))


def _is_eventful(trace: Trace) -> bool:
    """Whether there is anything for a policy to do: a failure, a call made twice, something read and then written."""
    calls = [turn.text for turn in trace.turns if turn.kind == "tool_call"]
    read: set[str] = set()
    for turn in trace.turns:
        if turn.is_error or read & set(turn.writes):
            return True
        read |= set(turn.reads)
    return len(set(calls)) < len(calls)


def _report(
    log: RowLog, folder: Path, command: str, seed: int, subject: Mapping[str, str], policies: Sequence[str]
) -> str:
    figures: dict[str, Any] = {"replay": {}, "stale": {}}
    lines = [
        "Traces of tau-bench (airline) and ToolTalk, turn by turn; the model is only scored. Policies: collapse_repeats,",
        "retract_failed, supersede_reads; `on` edits by `auto`, which is exact here. Sums and means over the traces in",
        "which a policy did something. `nats`: log-probability, a token, of the recorded assistant turns after the first",
        "change. `edits`: seconds of all retractions; `again`: of reading the context from nothing after each instead.",
        "",
        "| policies | traces | calls | failed | retracted | collapsed | tokens at last | at most | nats | edits | again |",
        "|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    on = {row["id"]: row for row in log.of(kind="replay", method=ON) if row["retracted"] + row["collapsed"]}
    for name in policies:
        rows = [row for row in log.of(kind="replay", method=name) if row["id"] in on]
        if not rows:
            continue
        sums = {key: sum(row[key] for row in rows) for key in ("n_calls", "n_failed", "retracted", "collapsed")}
        means = {key: mean(row[key] for row in rows) for key in ("tokens", "peak")}
        after = [rate(row["turns"][first:]) for row in rows if (first := on[row["id"]]["first"]) is not None]
        edits = sum(row["seconds"] for row in rows)
        again = sum(on[row["id"]]["again_s"] for row in rows if row["n_edits"])
        nats = mean(one for one in after if one is not None)
        figures["replay"][name] = {"n": len(rows), **sums, **means, "nats": nats, "edit_s": edits, "again_s": again}
        lines.append(
            f"| {name} | {len(rows)} | {sums['n_calls']} | {sums['n_failed']} | {sums['retracted']} | {sums['collapsed']} "
            f"| {means['tokens']:.0f} | {means['peak']:.0f} | {nats:.3f} "
            f"| {edits:.2f} | {again:.2f} |"
        )
    quiet = {row["id"] for row in log.of(kind="replay")} - set(on)
    lines += [
        "",
        *([f"In {len(quiet)} more traces no policy had anything to do.", ""] if quiet else []),
        "## An edited copy of a result, then the true one",
        "",
        "The same result twice: the first has another number in one place. Asked for the number; `margin`:",
        "log-probability of the true one above the copy's, nats. Brackets: 95 % bootstrap intervals. A small model cannot",
        "always find the number in a result that stands alone, and two alike make it copy: the last column is over the",
        "cases that `recompute` gets right.",
        "",
        "| copy retracted by | n | true number | copy's number | margin | true, where recompute is |",
        "|---|---|---|---|---|---|",
    ]
    by_method = {method: {row["id"]: row for row in log.of(kind="stale", method=method)} for method in METHODS}
    asked = set.intersection(*(set(rows) for rows in by_method.values() if rows), set(by_method["both"]))
    known = {name for name in asked if by_method["recompute"][name]["score"]}
    for method in METHODS:
        rows = [row for name, row in by_method[method].items() if name in asked]
        if rows:
            right, low, high = mean_interval([row["score"] for row in rows])
            wrong, margin = mean(row["wrong"] for row in rows), mean(row["margin"] for row in rows)
            there = [row["score"] for row in rows if row["id"] in known]
            figures["stale"][method] = {
                "n": len(rows),
                "n_known": len(there),
                "right_known": mean(there) if there else None,
                "right": right,
                "low": low,
                "high": high,
                "wrong": wrong,
                "margin": margin,
            }
            label = "nothing" if method == "both" else method
            lines.append(
                f"| {label} | {len(rows)} | {right:.2f} [{low:.2f}, {high:.2f}] | {wrong:.2f} | {margin:+.2f} "
                f"| {sum(there)} of {len(there)} |"
            )
    table: str = published(
        folder,
        "Recorded tool calls through a memory",
        lines,
        figures,
        command=command,
        seed=seed,
        subject=subject,
    )
    return table
