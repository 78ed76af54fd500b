"""What a retraction method is, and what it is given."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

from contextmem.backbone import Backbone
from contextmem.codec import Codec
from contextmem.eraser import KVEraser
from contextmem.errors import InvalidInput, UnsupportedEdit
from contextmem.ledger import Segment, complement, slot_ranges
from contextmem.state import State

__all__ = ["METHODS", "Edit", "Method", "Plan", "check_cached", "method_named", "register"]


@dataclass(frozen=True)
class Edit:
    """A retraction to be done: the state before it and what shall go.

    Attributes:
        state: the state before; methods never change it.
        targets: live content segments to retract, in slot order.
        frames: template frames that go with them.
        backbone, codec: the model and its tokenizer.
        new_id: makes ids for segments that a method adds.
        chunk: tokens a forward when something is prefilled again.
        eraser: the memory's eraser; raises `UnsupportedEdit` if it has none.
        step: progress, called with tokens done; may raise to cancel.
    """

    state: State
    targets: tuple[Segment, ...]
    frames: tuple[Segment, ...]
    backbone: Backbone
    codec: Codec
    new_id: Callable[[], str]
    chunk: int
    eraser: Callable[[], KVEraser]
    step: Callable[[int], None] | None = None

    @property
    def ids(self) -> tuple[str, ...]:
        """Ids of everything that goes, frames included."""
        return tuple(segment.id for segment in (*self.targets, *self.frames))

    @property
    def is_hollow(self) -> bool:
        """Whether the KV of the state is gone, so that its text must be read again whatever is done."""
        return self.state.cache.n_slots < self.state.n_slots

    @cached_property
    def ranges(self) -> tuple[tuple[int, int], ...]:
        """Slots that go, sorted and merged."""
        return slot_ranges((*self.targets, *self.frames))

    @cached_property
    def kept(self) -> tuple[tuple[int, int], ...]:
        """Slots that stay."""
        return complement(self.ranges, self.state.n_slots)

    @property
    def start(self) -> int:
        """First slot that goes; the number of slots if none does."""
        return self.ranges[0][0] if self.ranges else self.state.n_slots

    @property
    def n_removed(self) -> int:
        """Number of slots that go."""
        return sum(stop - start for start, stop in self.ranges)

    @property
    def n_kept(self) -> int:
        """Number of slots that stay."""
        return self.state.n_slots - self.n_removed

    @property
    def tail_start(self) -> int:
        """First slot of what goes at the very end; the number of slots if the last one stays."""
        return self.ranges[-1][0] if self.ranges and self.ranges[-1][1] == self.state.n_slots else self.state.n_slots

    @cached_property
    def inner(self) -> tuple[Segment, ...]:
        """What goes and has something that stays after it, in slot order; spans without tokens are left out."""
        spans = (s for s in (*self.targets, *self.frames) if s.n_tokens and s.start < self.tail_start)
        return tuple(sorted(spans, key=lambda span: span.start))

    @property
    def n_suffix(self) -> int:
        """Number of slots that stay after the first one that goes."""
        return self.state.n_slots - self.start - self.n_removed

    @property
    def is_tail(self) -> bool:
        """Whether nothing stays after the first slot that goes."""
        return self.n_suffix == 0


@dataclass(frozen=True)
class Plan:
    """What a method would do.

    Attributes:
        method: name of the method that will really run.
        tokens: tokens to compute (again, or for the first time in the case of an instruction).
        reused: slots whose KV is kept.
        guarantee: "exact" (as if never seen), "approximate" (later segments keep traces) or "none".
        why: one line for the report, if there is something to say.
    """

    method: str
    tokens: int
    reused: int
    guarantee: str
    why: str = ""


class Method(Protocol):
    """One way to retract. Adding one is a file with a frozen dataclass and a `register` line."""

    @property
    def name(self) -> str:
        """Name in the registry and in reports."""
        ...

    def plan(self, edit: Edit) -> Plan:
        """What would be done; raises `UnsupportedEdit` before anything changes if it cannot be."""
        ...

    def apply(self, edit: Edit) -> State:
        """The state after; `edit.state` stays as it was."""
        ...


METHODS: dict[str, Method] = {}


def check_cached(edit: Edit, method: Method) -> None:
    """Raise `UnsupportedEdit` if `method` needs KV that was evicted."""
    if edit.is_hollow and method.name != "recompute":
        raise UnsupportedEdit(
            f"method {method.name!r} edits cached KV, but part of it was evicted and no full tier is kept. Use "
            f"method='recompute', or a memory with full_tier='cpu'. Nothing was changed."
        )


def register(method: Method) -> None:
    """Make `method` available by its name."""
    METHODS[method.name] = method


def method_named(method: str | Method) -> Method:
    """The method of that name, or `method` itself if it is one.

    Raises:
        InvalidInput: no such method.
    """
    if isinstance(method, str) and method in METHODS:
        return METHODS[method]
    if isinstance(method, str) or not all(hasattr(method, part) for part in ("name", "plan", "apply")):
        raise InvalidInput(f"unknown method {method!r}; there are auto, {', '.join(METHODS)}. Nothing was changed.")
    return method
