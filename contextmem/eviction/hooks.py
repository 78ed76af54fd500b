"""What the attention layers of a model are given, for as long as somebody looks, and by this thread's forwards only."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

__all__ = ["attention_layers", "given"]

Look = Callable[[int, dict[str, Any]], None]  # layer, its keyword arguments, hidden_states among them


def attention_layers(core: Any) -> list[Any]:
    """The attention module of every layer."""
    return [layer.self_attn for layer in core.get_decoder().layers]


@contextmanager
def given(modules: Sequence[Any], look: Look) -> Iterator[None]:
    """Show the arguments of every attention layer before it runs."""
    owner = threading.get_ident()

    def hook(index: int) -> Any:
        def show(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            if threading.get_ident() == owner:
                look(index, {"hidden_states": args[0], **kwargs} if args else kwargs)

        return show

    handles = [m.register_forward_pre_hook(hook(i), with_kwargs=True) for i, m in enumerate(modules)]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
