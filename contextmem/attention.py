"""Attention through a function of our own, for the length of a forward: over what is no plain tensor, watched, or folded.

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
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from contextmem.errors import UnsupportedEdit

__all__ = ["Attended", "Watch", "implementation_of", "switched"]

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


def implementation_of(core: Any) -> str:
    """The name of the model's own attention, also while ours is in its place."""
    return str(core.config._attn_implementation).removeprefix(_PREFIX)


@contextmanager
def switched(core: Any, watch: Watch | None = None, *, masked: bool = True, folded: bool = False) -> Iterator[None]:
    """Attention of `core` through our function; hold the backbone's lock round it. May be nested.

    Args:
        core: a causal language model.
        watch: called before the attention of every layer; None leaves an outer one in place.
        masked: whether masks are needed; what is `Attended` needs none.
        folded: whether sdpa attention over plain keys is computed with the query heads of a group as one; see `_folded`.

    Raises:
        UnsupportedEdit: the model's attention implementation is another than sdpa or eager.
    """
    config = core.config
    previous = implementation_of(core)
    if previous not in PREVIOUS:
        raise UnsupportedEdit(
            f"attention implementation {previous!r} cannot be stepped in for; load the model with attn_implementation="
            f"'sdpa' or 'eager'. Nothing was changed."
        )
    before = vars(_local).copy()
    _local.watch, _local.masked, _local.folded = watch or before.get("watch"), masked, folded
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
        is_plain = not dropout and all(kwargs.get(name) is None for name in _EXTRAS)
        if getattr(_local, "folded", False) and is_plain and attention_mask is not None:
            return _folded(query, key, value, attention_mask, scale).transpose(1, 2).contiguous(), None
        # Eager attention is a function of the model's own file, which no registry knows.
        eager = getattr(sys.modules[type(module).__module__], "eager_attention_forward", None)
        inner = ALL_ATTENTION_FUNCTIONS.get_interface(previous, eager)
        output: tuple[Tensor, Tensor | None] = inner(
            module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **kwargs
        )
        return output

    return attention


def _folded(query: Tensor, keys: Tensor, values: Tensor, mask: Tensor, scale: float) -> Tensor:
    """Grouped-query attention that reads keys and values once a group, where stock copies them for every query head.

    With few queries over a long cache the copies cost more than the attention. Equal to stock bit for bit on a CPU.

    Args:
        query: (1, heads, n, head_dim).
        keys, values: (1, KV heads, m, head_dim).
        mask: (1, 1, n, m), as sdpa takes it.
    """
    _, n_heads, n, width = query.shape
    group = n_heads // keys.shape[1]
    grouped = query.reshape(1, keys.shape[1], group * n, width)
    mask = mask.expand(1, group, n, mask.shape[-1]).reshape(1, 1, group * n, -1)
    output = scaled_dot_product_attention(grouped, keys, values, attn_mask=mask, scale=scale)
    return output.reshape(1, n_heads, n, -1)


def _mask_of(previous: str) -> Callable[..., Any]:
    def mask(*args: Any, **kwargs: Any) -> Any:
        return ALL_MASK_ATTENTION_FUNCTIONS[previous](*args, **kwargs) if getattr(_local, "masked", True) else None

    return mask


for _previous in PREVIOUS:
    AttentionInterface.register(_PREFIX + _previous, _attention_of(_previous))
    AttentionMaskInterface.register(_PREFIX + _previous, _mask_of(_previous))
