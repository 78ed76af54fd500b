"""The eight needle tasks: one or several facts among noise, prose, or other facts.

After RULER (arXiv 2404.06654), its kinds of haystacks, keys, values and numbers of needles, in wordings of our own.
"""

from __future__ import annotations

import random
import uuid
from functools import partial

from contextmem.evals.ruler.base import Case, Material, register
from contextmem.training.haystack import haystack
from contextmem.training.needles import new_key, new_value

__all__ = ["needles"]

_NOISE = "The lamps are lit. The road is long. The rain has stopped. Nobody came by. The clock ticks on. "
_FACT = "The secret {kind} of {key} is: {value}. "
_PLURAL = {"number": "numbers", "code": "codes"}


def needles(
    material: Material,
    rng: random.Random,
    n_tokens: int,
    *,
    hay: str,
    kind: str = "number",
    long_keys: bool = False,
    n_keys: int = 1,
    n_values: int = 1,
    n_asked: int = 1,
) -> Case:
    """A case.

    Args:
        hay: "noise", "prose", or "facts" (nothing but other facts).
        kind: "number" (seven digits) or "code" (a UUID) as values.
        long_keys: UUIDs as keys too.
        n_keys, n_values: keys, and values of each key that is asked for.
        n_asked: keys that are asked for.
    """
    keys = _distinct(rng, max(n_keys, n_asked), lambda: _uuid(rng) if long_keys else new_key(rng, "-"))
    asked = keys[:n_asked]
    pairs = [(key, _value(rng, kind)) for key in keys for _ in range(n_values if key in asked else 1)]
    rng.shuffle(pairs)
    facts = [_FACT.format(kind=kind, key=key, value=value) for key, value in pairs]
    several = n_asked * n_values > 1
    what = f"{_PLURAL[kind] if several else kind} of {' and of '.join(asked)}"
    question = f"\n\nWhat {'are all the' if several else 'is the'} secret {what} in the text above?"
    prefix = f"In the text above, the secret {what} {'are' if several else 'is'}"
    values = tuple(value for key, value in pairs if key in asked)
    context = _hidden(material, rng, n_tokens, hay, facts, kind, long_keys)
    return Case(context, question, prefix, values, longest=24 * len(values) if kind == "number" else 48)


def _hidden(
    material: Material, rng: random.Random, n_tokens: int, hay: str, facts: list[str], kind: str, long_keys: bool
) -> str:
    if hay == "prose":
        texts, _ = haystack(material.layout, rng, material.prose, facts, n_tokens)
        return "".join(texts)
    lines: list[str] = []
    left = n_tokens - sum(map(material.length, facts))
    while left > 0:
        other = _uuid(rng) if long_keys else new_key(rng, "-") + f"-{rng.randrange(100)}"
        line = _NOISE if hay == "noise" else _FACT.format(kind=kind, key=other, value=_value(rng, kind))
        lines.append(line)
        left -= material.length(line)
    for fact in facts:
        lines.insert(rng.randrange(len(lines) + 1), fact)
    return "\n".join(line.strip() for line in lines)


def _distinct(rng: random.Random, n: int, make: partial[str] | object) -> list[str]:
    made: dict[str, None] = {}
    while len(made) < n:
        made[make()] = None  # type: ignore[operator]
    return list(made)


def _value(rng: random.Random, kind: str) -> str:
    return new_value(rng, 7) if kind == "number" else _uuid(rng)


def _uuid(rng: random.Random) -> str:
    return str(uuid.UUID(int=rng.getrandbits(128), version=4))


register("niah_single_1", partial(needles, hay="noise"))
register("niah_single_2", partial(needles, hay="prose"))
register("niah_single_3", partial(needles, hay="prose", kind="code"))
register("niah_multikey_1", partial(needles, hay="prose", n_keys=4))
register("niah_multikey_2", partial(needles, hay="facts"))
register("niah_multikey_3", partial(needles, hay="facts", kind="code", long_keys=True))
register("niah_multivalue", partial(needles, hay="prose", n_values=4))
register("niah_multiquery", partial(needles, hay="prose", n_asked=4))
