"""Several calls as one: what fails inside leaves nothing, and nobody else's work is lost to it."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
from oracle import assert_equals_reference, assert_unchanged, snapshot

from contextmem import ContextMemory, InvalidInput, MemoryBusy

Make = Callable[..., ContextMemory]


def in_another_thread(work: Callable[[], Any]) -> list[BaseException]:
    """What `work` raised there."""
    raised: list[BaseException] = []

    def run() -> None:
        try:
            work()
        except BaseException as error:
            raised.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    return raised


def test_all_or_nothing(llama_memory: Make) -> None:
    memory = llama_memory()
    memory.append("before")
    held = snapshot(memory)
    with pytest.raises(ZeroDivisionError), memory.transaction():
        memory.append("one")
        memory.retract(memory.segments()[0].id, method="recompute")
        1 / 0  # noqa: B018
    assert_unchanged(memory, held)
    with memory.transaction() as mark:
        memory.append("one")
        memory.restore(mark)
        memory.append("two")
    assert [segment.text for segment in memory.segments()] == ["before", "two"]
    assert_equals_reference(memory)


def test_nothing_is_logged_when_nothing_was_done(llama_memory: Make) -> None:
    memory = llama_memory()
    with pytest.raises(InvalidInput), memory.transaction():
        memory.append("x", kind="nonsense")
    assert not memory.events


def test_the_first_error_shows_when_the_memory_was_closed_inside(llama_memory: Make) -> None:
    memory = llama_memory()
    with pytest.raises(ZeroDivisionError), memory.transaction():
        memory.append("one")
        memory.close()
        1 / 0  # noqa: B018


def test_an_inner_transaction_can_fail_alone(llama_memory: Make) -> None:
    memory = llama_memory()
    with memory.transaction():
        memory.append("one")
        with pytest.raises(ZeroDivisionError), memory.transaction():
            memory.append("two")
            1 / 0  # noqa: B018
        raised = in_another_thread(lambda: memory.append("three"))
        memory.append("four")
    assert isinstance(raised[0], MemoryBusy), "the outer one goes on"
    assert [segment.text for segment in memory.segments()] == ["one", "four"]


@pytest.mark.parametrize(
    "work",
    [
        lambda m: m.append("mine"),
        lambda m: m.ask("?", max_new_tokens=1),
        lambda m: m.restore(m.checkpoint()),
        lambda m: m.transaction().__enter__(),
        lambda m: m.close(),
    ],
)
def test_other_threads_are_refused_until_the_end(llama_memory: Make, work: Callable[[ContextMemory], Any]) -> None:
    """They are told, so that what they wanted to do is not undone with the transaction."""
    memory = llama_memory()
    with pytest.raises(ZeroDivisionError), memory.transaction():
        memory.append("one")
        raised = in_another_thread(lambda: work(memory))
        1 / 0  # noqa: B018
    assert [type(error) for error in raised] == [MemoryBusy]
    assert in_another_thread(lambda: memory.append("mine")) == []
    assert [segment.text for segment in memory.segments()] == ["mine"]


def test_it_cannot_begin_while_a_call_is_at_work(llama_memory: Make) -> None:
    memory = llama_memory()
    stream = memory.stream("a question", max_new_tokens=4)
    next(iter(stream))
    with pytest.raises(MemoryBusy), memory.transaction():
        raise AssertionError("it did begin")
    stream.close()
    with memory.transaction():
        memory.append("one")


def test_a_fork_is_not_reserved(llama_memory: Make) -> None:
    memory = llama_memory()
    memory.append("one")
    with memory.transaction():
        fork = memory.fork()
        assert in_another_thread(lambda: fork.append("two")) == []
    assert len(fork.segments()) == 2
