"""Forks to measure edits on."""

from __future__ import annotations

from contextmem import ContextMemory
from contextmem.state import State

__all__ = ["unshared_fork"]


def unshared_fork(memory: ContextMemory) -> ContextMemory:
    """A fork with buffers of its own, so that no edit is charged for copying what only a measurement shares.

    A compacted memory's fork shares what was kept, which no edit writes to.
    """
    fork = memory.fork()
    state = fork._state
    if state.is_compacted:
        return fork
    fork._state = State(state.ledger, state.cache.select(((0, state.n_slots),)), state.exact_slots)
    return fork
