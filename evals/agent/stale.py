"""An edited copy of a tool result, then the true one: which does the model follow before and after the copy is retracted?"""

from __future__ import annotations

import json
import random
import re
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from contextmem import ContextMemory
from contextmem.evals.agent.replay import put
from contextmem.evals.agent.traces import Trace, Turn
from contextmem.evals.rows import RowLog

__all__ = ["METHODS", "Case", "cases_of", "measure_case"]

METHODS = ("both", "kveraser", "recompute", "mask")
_LONGEST = 1500  # characters of a result


@dataclass(frozen=True)
class Case:
    """A result with a number in it, and a copy with another.

    Attributes:
        opening: what the user said last before the call.
        true, stale: results.
        field: the key that the number stands under.
        value, wrong: the true number, and the copy's.
    """

    id: str
    opening: Turn
    true: Turn
    stale: Turn
    field: str
    value: str
    wrong: str


def cases_of(traces: list[Trace], seed: int) -> Iterator[Case]:
    """The first usable result of every trace."""
    for trace in traces:
        opening = Turn("user", "")
        for call, result in zip(trace.turns, trace.turns[1:], strict=False):
            opening = call if call.kind == "user" else opening
            found = _number(result) if call.kind == "tool_call" else None
            if found is None:
                continue
            field, value = found
            rng = random.Random(f"stale-{seed}-{trace.id}")
            wrong = value
            while wrong == value:
                wrong = str(rng.randrange(10 ** (len(value) - 1), 10 ** len(value)))
            key = json.dumps(field) + ": "
            stale = replace(result, text=result.text.replace(key + value, key + wrong))
            yield Case(trace.id, opening, result, stale, field, value, wrong)
            break


def _number(result: Turn) -> tuple[str, str] | None:
    """A key that comes once, with a whole number of two digits or more that stands nowhere else in the result."""
    if result.kind != "tool_result" or result.is_error or len(result.text) > _LONGEST:
        return None
    for field, value in re.findall(r'"(\w+)": (\d{2,6})(?=[,}])', result.text):
        if result.text.count(json.dumps(field)) == 1 and len(re.findall(rf"(?<!\d){value}(?!\d)", result.text)) == 1:
            return field, value
    return None


def measure_case(new_memory: Any, case: Case, methods: Sequence[str], log: RowLog) -> None:
    """Rows for every method that `log` lacks: is the true number likelier than the copy's, and what is answered?"""
    missing = [method for method in methods if not log.has(f"stale-{case.id}", method)]
    if not missing:
        return
    memory: ContextMemory = new_memory()
    put(memory, case.opening, None)
    copy = put(memory, case.stale, None)  # as data of the user turn: a call of its own would have to go with it
    put(memory, case.true, None)
    question = f"What is the {case.field} in the result of {case.true.tool}?"
    prefix = f"The {case.field} is"
    for method in missing:
        edited, seconds = memory.fork(), 0.0
        if method != "both":
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                seconds = edited.retract(copy.id, method=method).seconds or 0.0
        true, wrong = (edited.score(f" {v}", question=question, prefix=prefix) for v in (case.value, case.wrong))
        said = edited.ask(question, prefix=prefix, max_new_tokens=12).text
        first = re.search(r"\d[\d,]*", said)
        answered = first[0].replace(",", "").rstrip(",") if first else ""
        log.add(
            f"stale-{case.id}",
            method,
            kind="stale",
            score=int(answered == case.value),
            wrong=int(answered == case.wrong),
            margin=round(true - wrong, 3),
            seconds=round(seconds, 3),
        )
