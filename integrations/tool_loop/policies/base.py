"""What a policy may do with a result: before it is prefilled, while it is the tail, and afterwards."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from contextmem import ContextMemory, DependentsWarning, InvalidInput, Segment
from contextmem.integrations.tool_loop.pairs import Pair
from contextmem.integrations.tool_loop.tools import Outcome

__all__ = ["POLICIES", "Change", "Policy", "policy_named", "register", "taken_out"]


@dataclass(frozen=True)
class Change:
    """Something a policy did.

    Attributes:
        policy: its name.
        what: "retracted", "collapsed" or "withheld".
        tools: names of the tools whose pairs or results it concerns, an entry a pair.
        n_tokens: tokens that are not in the context any more, or never got there.
        was_error: whether what went had failed.
    """

    policy: str
    what: str
    tools: tuple[str, ...]
    n_tokens: int
    was_error: bool


@dataclass(frozen=True)
class Policy:
    """Base of policies; the default does nothing."""

    name: ClassVar[str] = ""

    def before(self, memory: ContextMemory, tool: str, outcome: Outcome) -> Outcome:
        """What is shown of a result, decided before any of it is prefilled."""
        return outcome

    def objection(self, memory: ContextMemory, result: Segment) -> str | None:
        """Why a result that is the memory's tail must go again, or None."""
        return None

    def after(self, memory: ContextMemory, pair: Pair, earlier: Sequence[Pair]) -> list[Change]:
        """Take out what the new pair makes stale; `earlier` are the live pairs before it."""
        return []


POLICIES: dict[str, type[Policy]] = {}


def register(policy: type[Policy]) -> type[Policy]:
    """Make a policy known by its name."""
    POLICIES[policy.name] = policy
    return policy


def policy_named(policy: str | Policy) -> Policy:
    """A policy by name, or as it is.

    Raises:
        InvalidInput: there is none of that name, or it needs arguments.
    """
    if isinstance(policy, Policy):
        return policy
    if policy not in POLICIES:
        raise InvalidInput(f"unknown policy {policy!r}; there are {', '.join(sorted(POLICIES))}.")
    try:
        return POLICIES[policy]()
    except TypeError as error:
        raise InvalidInput(f"policy {policy!r} is given as an object: {error}") from None


def taken_out(memory: ContextMemory, policy: str, pairs: Sequence[Pair], what: str, **options: Any) -> list[Change]:
    """Retract whole pairs in one step."""
    if not pairs:
        return []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DependentsWarning)  # later calls saw them: that is why they go
        memory.retract([pair.call for pair in pairs], reason=f"policy {policy}", **options)
    tools, n_tokens = tuple(pair.tool for pair in pairs), sum(pair.n_tokens for pair in pairs)
    return [Change(policy, what, tools, n_tokens, all(pair.is_error for pair in pairs))]
