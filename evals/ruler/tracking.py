"""vt: which names come to stand for a value, over a chain of assignments in noise. After RULER, in words of our own."""

from __future__ import annotations

import itertools
import random
import string

from contextmem.evals.ruler.base import Case, Material, register

__all__ = ["tracking"]

_NOISE = "The lamps are lit. The road is long. The rain has stopped. Nobody came by. The clock ticks on."
_HOPS = 4


def tracking(material: Material, rng: random.Random, n_tokens: int) -> Case:
    """One chain of five names."""
    names = ["".join(rng.choices(string.ascii_uppercase, k=5)) for _ in range(_HOPS + 1)]
    value = str(rng.randrange(10_000, 100_000))
    chain = [f"SET {names[0]} = {value}"]
    chain += [f"SET {new} = {old}" for old, new in itertools.pairwise(names)]
    n_lines = max(len(chain), (n_tokens - sum(map(material.length, chain))) // (material.length(_NOISE) + 1))
    places = sorted(rng.choices(range(n_lines + 1), k=len(chain)))
    lines: list[str] = []
    at = 0
    for place, assignment in zip(places, chain, strict=True):
        lines += [_NOISE] * (place - at) + [assignment]
        at = place
    lines += [_NOISE] * (n_lines - at)
    question = f"\n\nWhich names have been set to the value {value}, directly or through other names?"
    prefix = f"The {len(names)} names that have been set to {value} are:"
    return Case("\n".join(lines), question, prefix, tuple(names), longest=40)


register("vt", tracking)
