"""Attention through a function of our own, for the length of a forward: over what is no plain tensor, and watched.

Transformers looks its attention up by the name in the model's configuration. `switched` puts a name of ours there while a
forward runs. Our function hands plain keys to the attention that was there before, so a model that shares the
configuration and is called meanwhile, without our lock, computes what it always did.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol, runtime_checkable

from torch import Tensor
from torch.nn import functional as F
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from contextmem.errors import UnsupportedEdit

__all__ = ["Attended", "Watch", "switched"]

PREVIOUS = ("sdpa", "eager")  # attention that is stepped in for
_EXTRAS = ("softcap", "s_aux", "position_bias")  # what some models' attention adds
Watch = Callable[[int, Tensor, Any], None]  # layer, queries (1, heads, n, head_dim), the keys attended to

_PREFIX = "contextmem-"
_COUNTS: dict[int, int] = {}  # forwards under way, by configuration
_COUNTS_LOCK = threading.Lock()
_local = threading.local()


@runtime_checkable
class Attended(Protocol):
    """What a cache layer may return in the place of keys: it computes the attention itself."""

    def attend(self, query: Tensor, scaling: float, position_ids: Tensor) -> Tensor:
        """The output, (1, heads, n, head_dim), for queries of the same shape at `position_ids`, (1, n)."""
        ...


@contextmanager
def switched(core: Any, watch: Watch | None = None, *, masked: bool = True, grouped: bool = False) -> Iterator[None]:
    """Attention of `core` through our function; hold the backbone's lock round it. May be nested.

    Args:
        core: a causal language model.
        watch: called before the attention of every layer; None leaves an outer one in place.
        masked: whether masks are needed; what is `Attended` needs none.
        grouped: attend without copying keys and values for every query head of a group, which costs most where a few
            queries look at a long cache; the same up to rounding. False leaves what an outer one says.

    Raises:
        UnsupportedEdit: the model's attention implementation is another than sdpa or eager.
    """
    config = core.config
    previous = str(config._attn_implementation).removeprefix(_PREFIX)
    if previous not in PREVIOUS:
        raise UnsupportedEdit(
            f"attention implementation {previous!r} cannot be stepped in for; load the model with attn_implementation="
            f"'sdpa' or 'eager'. Nothing was changed."
        )
    before = vars(_local).copy()
    _local.watch, _local.masked = watch or before.get("watch"), masked
    _local.grouped = grouped or before.get("grouped", False)
    with _COUNTS_LOCK:  # models may share a configuration, each under a lock of its own
        _COUNTS[id(config)] = _COUNTS.get(id(config), 0) + 1
        config._attn_implementation = _PREFIX + previous
    try:
        yield
    finally:
        with _COUNTS_LOCK:
            _COUNTS[id(config)] -= 1
            if not _COUNTS[id(config)]:
                del _COUNTS[id(config)]
                config._attn_implementation = previous
        _local.__dict__.clear()
        _local.__dict__.update(before)


def _attention_of(previous: str) -> Callable[..., tuple[Tensor, Tensor | None]]:
    def attention(
        module: Any,
        query: Tensor,
        key: Any,
        value: Any,
        attention_mask: Any,
        dropout: float = 0.0,
        scaling: float | None = None,
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor | None]:
        scale = float(scaling if scaling is not None else query.shape[-1] ** -0.5)
        if (watch := getattr(_local, "watch", None)) is not None:
            watch(module.layer_idx, query * (scale * query.shape[-1] ** 0.5), key)
        if isinstance(key, Attended):
            if extra := [name for name in _EXTRAS if kwargs.get(name) is not None]:
                raise UnsupportedEdit(f"attention with {extra[0]} is not computed over a compacted cache")
            return key.attend(query, scale, kwargs["position_ids"]).transpose(1, 2).contiguous(), None
        plain = not any(kwargs.get(name) is not None for name in _EXTRAS)
        if getattr(_local, "grouped", False) and plain and isinstance(attention_mask, Tensor):
            return _grouped(query, key, value, attention_mask, scale).transpose(1, 2).contiguous(), None
        # Eager attention is a function of the model's own file, which no registry knows.
        eager = getattr(sys.modules[type(module).__module__], "eager_attention_forward", None)
        inner = ALL_ATTENTION_FUNCTIONS.get_interface(previous, eager)
        output: tuple[Tensor, Tensor | None] = inner(
            module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **kwargs
        )
        return output

    return attention


def _grouped(query: Tensor, keys: Tensor, values: Tensor, mask: Tensor, scale: float) -> Tensor:
    """What transformers does without a mask alone: with one it repeats keys and values first."""
    return F.scaled_dot_product_attention(query, keys, values, mask, scale=scale, enable_gqa=True)


def _mask_of(previous: str) -> Callable[..., Any]:
    def mask(*args: Any, **kwargs: Any) -> Any:
        return ALL_MASK_ATTENTION_FUNCTIONS[previous](*args, **kwargs) if getattr(_local, "masked", True) else None

    return mask


for _previous in PREVIOUS:
    AttentionInterface.register(_PREFIX + _previous, _attention_of(_previous))
    AttentionMaskInterface.register(_PREFIX + _previous, _mask_of(_previous))
