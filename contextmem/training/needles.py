"""Needles: short facts with a key and a value that stand in unrelated text, and questions for them."""

from __future__ import annotations

import random
from dataclasses import dataclass

__all__ = ["EVALUATED_FORMS", "RULER", "TRAIN_FORMS", "Form", "Needle", "new_code", "new_key", "new_value"]


@dataclass(frozen=True)
class Form:
    """How a fact is stated and asked. `{key}` and `{value}` are filled in.

    Attributes:
        fact: the sentence in the text.
        question: put after the context.
        prefix: the beginning of the answer that is given to the model.
        derived: a later sentence that repeats the value as something already known.
    """

    fact: str
    question: str
    prefix: str
    derived: str = "As noted, the {key} goes with {value}."


@dataclass(frozen=True)
class Needle:
    """A fact about `key`."""

    form: Form
    key: str
    value: str

    @property
    def fact(self) -> str:
        """The sentence in the text."""
        return self.form.fact.format(key=self.key, value=self.value)

    @property
    def question(self) -> str:
        """What is asked."""
        return self.form.question.format(key=self.key)

    @property
    def prefix(self) -> str:
        """The beginning of the answer."""
        return self.form.prefix.format(key=self.key)

    @property
    def derived(self) -> str:
        """A later sentence that repeats the value."""
        return self.form.derived.format(key=self.key, value=self.value)


RULER = Form(  # the wording of RULER's needle tasks
    "One of the special magic numbers for {key} is: {value}.",
    "What is the special magic number for {key} mentioned in the provided text?",
    "The special magic number for {key} mentioned in the provided text is",
    "Since the special magic number for {key} is {value}, the form was filled in with {value}.",
)
_CODE = Form(
    "The access code for the {key} is {value}.",
    "What is the access code for the {key}?",
    "The access code for the {key} is",
    "Since the access code for the {key} is {value}, the guard entered {value} at the gate.",
)
EVALUATED_FORMS = (RULER, _CODE)
TRAIN_FORMS = (
    RULER,
    _CODE,
    Form("The price of the {key} is {value} dollars.", "How many dollars is the {key}?", "The price of the {key} is"),
    Form("The {key} weighs {value} grams.", "How many grams does the {key} weigh?", "The {key} weighs"),
    Form(
        "Room {value} was booked for the {key}.", "Which room was booked for the {key}?", "The {key} was booked in room"
    ),
    Form("Please note: the {key} costs {value} euros.", "How many euros does the {key} cost?", "The {key} costs"),
    Form(
        "The {key} was registered under number {value}.",
        "What is the number of the {key}?",
        "The number of the {key} is",
    ),
    Form(
        "According to the log, the {key} left at gate {value}.",
        "At which gate did the {key} leave?",
        "The {key} left at gate",
    ),
    Form(
        "Tickets for the {key} cost {value} dollars.",
        "How much is a ticket for the {key}?",
        "A ticket for the {key} costs",
    ),
    Form(
        "The serial number of the {key} is {value}.",
        "What is the serial number of the {key}?",
        "The serial number of the {key} is",
    ),
    Form("The {key} has {value} members.", "How many members does the {key} have?", "The {key} has"),
    Form(
        "Phone extension of the {key}: {value}.",
        "What is the phone extension of the {key}?",
        "The phone extension of the {key} is",
    ),
)

_FIRST = (
    "amber brisk coral dusty eager frosty gentle hollow ivory jolly keen lunar mellow nimble olive proud "
    "quiet rustic silver tidy urban vivid wooden young zesty ancient bitter crimson distant elegant faded "
    "golden humble"
).split()
_SECOND = (
    "anchor basket candle dragon engine falcon garden hammer island jacket kettle lantern magnet needle "
    "orchard pepper quarry ribbon saddle timber umbrella violin walnut yacht zipper archive bridge "
    "compass dialect estate fountain guild harbor"
).split()


def new_key(rng: random.Random, joint: str | None = None) -> str:
    """Two words, such as "amber-anchor"."""
    return f"{rng.choice(_FIRST)}{joint or rng.choice('- ')}{rng.choice(_SECOND)}"


def new_value(rng: random.Random, digits: int) -> str:
    """A number of that many digits."""
    return str(rng.randrange(10 ** (digits - 1), 10**digits))


def new_code(rng: random.Random, groups: int) -> str:
    """Groups of four hexadecimal digits, such as "3f0a-77c1"."""
    return "-".join(f"{rng.getrandbits(16):04x}" for _ in range(groups))
