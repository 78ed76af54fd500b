"""The model: one place that runs it over a `SpanCache`, knows what it can do, and says which model it is.

`Backbone.of(model)` returns the same object for the same model, so every memory on one model shares one lock. The lock
covers one forward and is never held across a yield.
"""

from __future__ import annotations

import contextlib
import inspect
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any
from weakref import WeakKeyDictionary, ref

import torch
from torch import Tensor, nn

from contextmem.attention import switched
from contextmem.cache import SpanCache
from contextmem.errors import InvalidInput, OutOfMemory, UnsupportedEdit
from contextmem.ragged import RaggedCache
from contextmem.rope import layer_angles, rerotated

__all__ = ["Backbone"]

# Tokens a forward during prefill. Over a cached prefix chunks beat one pass, which needs a mask as wide as the context; into
# an empty cache one pass needs no mask and is a little faster as long as it is short.
CHUNK, FIRST_CHUNK = 1024, 4096

_ATTENTION_LAYERS = {"full_attention", "sliding_attention"}
_REGIME_ROPES = {"dynamic", "longrope"}  # frequencies depend on the context length
_REGISTRY: WeakKeyDictionary[nn.Module, Backbone] = WeakKeyDictionary()
_REGISTRY_LOCK = threading.Lock()


class Backbone:
    """A frozen causal language model and what may be done with its cache.

    Attributes:
        lock: held for one forward at a time, by every memory on this model.
        context_length: most positions the model takes; for RoPE types that change their frequencies with length, the
            length up to which they do not.
        layer_types: the attention type of every layer.
        sliding_window: tokens a sliding layer sees, or None.
        tokens_per_second: speed of the last long recomputation, for estimates.
    """

    @classmethod
    def of(cls, model: nn.Module) -> Backbone:
        """The backbone of `model`; one object a model.

        Raises:
            UnsupportedEdit: the model cannot carry an editable cache (recurrent layers, an encoder, a quantized cache).
        """
        unwrap = getattr(model, "get_base_model", None)
        core = unwrap() if callable(unwrap) else model  # adapters stay in the layers of a model that PEFT wraps
        with _REGISTRY_LOCK:
            backbone = _REGISTRY.get(core)
            if backbone is None:
                backbone = _REGISTRY[core] = cls(core)
            return backbone

    def __init__(self, core: Any) -> None:
        self._core = ref(core)
        self.lock = threading.RLock()
        config = core.config.get_text_config(decoder=True)
        _refuse_unsupported(core, config)
        self.n_layers: int = config.num_hidden_layers
        self.sliding_window: int | None = getattr(config, "sliding_window", None)
        declared = getattr(config, "layer_types", None)
        self._mask_by_type = declared is not None
        default = "sliding_attention" if self.sliding_window else "full_attention"
        self.layer_types: list[str] = list(declared or [default] * self.n_layers)
        self.has_sliding_layers = self.sliding_window is not None and "sliding_attention" in self.layer_types
        self.rope_types = _rope_types(config)
        self.context_length = _context_length(config, self.rope_types)
        parameters = inspect.signature(core.forward).parameters
        # 5.24 renames the argument; 5.2 swallows the new name without using it.
        self.cache_argument = "cache" if "cache" in parameters else "past_key_values"
        self.tokens_per_second: float | None = None
        self._angles: list[Callable[[Tensor], Any]] | UnsupportedEdit | None = None

    @property
    def core(self) -> Any:
        """The causal language model itself, without a PEFT wrapper round it."""
        core = self._core()
        if core is None:
            raise UnsupportedEdit("the model of this memory no longer exists")
        return core

    @property
    def device(self) -> torch.device:
        """Where the input embeddings are."""
        device: torch.device = self.core.get_input_embeddings().weight.device
        return device

    @property
    def dtype(self) -> torch.dtype:
        """The model's parameter type."""
        dtype: torch.dtype = self.core.get_input_embeddings().weight.dtype
        return dtype

    @cached_property
    def slot_nbytes(self) -> int:
        """Bytes of one slot over all layers, keys and values."""
        cache = self.new_cache()
        self.forward([0], cache)
        return sum(layer.keys.nbytes + layer.values.nbytes for layer in cache.layers)

    def new_cache(self) -> SpanCache:
        """An empty cache for this model."""
        return SpanCache(self.n_layers)

    def forward(self, token_ids: Sequence[int] | Tensor, cache: SpanCache, all_logits: bool = False) -> Tensor:
        """Run `token_ids` after what `cache` holds and extend it, at `cache.next_position` and on.

        Args:
            token_ids: n ids, n >= 1.
            cache: extended in place by n slots.
            all_logits: return logits after every token instead of the last one.

        Returns:
            float32 logits, (vocab,) or (n, vocab).

        Raises:
            OutOfMemory: the forward or the growth of the cache ran out of memory.
        """
        with _typed_out_of_memory(len(token_ids), len(token_ids), cache):
            return self._forward(token_ids, cache, all_logits)

    def forward_embeddings(self, embeddings: Tensor, cache: SpanCache) -> Tensor:
        """As `forward`, of n embeddings, (n, hidden_size), in the place of tokens; returns the last logits."""
        with _typed_out_of_memory(len(embeddings), len(embeddings), cache):
            return self._run({"inputs_embeds": embeddings[None]}, len(embeddings), cache)

    def _forward(self, token_ids: Sequence[int] | Tensor, cache: SpanCache, all_logits: bool = False) -> Tensor:
        ids = torch.as_tensor(token_ids, dtype=torch.long, device=self.device).reshape(1, -1)
        return self._run({"input_ids": ids}, ids.shape[-1], cache, all_logits)

    def _run(self, fed: Mapping[str, Tensor], n: int, cache: SpanCache, all_logits: bool = False) -> Tensor:
        before = cache.n_slots
        positions = torch.arange(cache.next_position, cache.next_position + n, device=self.device).unsqueeze(0)
        with self.lock, torch.no_grad(), _inference_mode(self.core), self._attention_over(cache):
            if "dynamic" in self.rope_types:
                _reset_dynamic_rope(self.core)
            output = self.core(
                **fed,
                position_ids=positions,
                attention_mask=self._mask(cache, n),
                use_cache=True,
                logits_to_keep=0 if all_logits else 1,
                **{self.cache_argument: cache},
            )
        short = [i for i, layer in enumerate(cache.layers) if layer.get_seq_length() != before + n]
        if short:
            raise UnsupportedEdit(
                f"{type(self.core).__name__} did not extend the cache in layers {short[:4]}: it shares KV between layers "
                f"or ignores the cache it is given. Nothing was changed."
            )
        cache.grew(n)
        logits: Tensor = output.logits[0] if all_logits else output.logits[0, -1]
        return logits.float()

    def prefill(
        self,
        token_ids: Sequence[int],
        cache: SpanCache,
        *,
        chunk: int = CHUNK,
        step: Callable[[int], None] | None = None,
    ) -> Tensor:
        """Run `token_ids` in chunks and return the (vocab,) logits after the last one.

        Args:
            token_ids: n ids, n >= 1.
            cache: extended in place.
            chunk: tokens a forward; the default takes more at once while the cache is empty.
            step: called with the number of tokens done, before every chunk and at the end; may raise to cancel.

        Raises:
            OutOfMemory: a forward or the growth of the cache ran out of memory; the message names the chunk size.
        """
        n_rows = self.core.get_input_embeddings().weight.shape[0]
        if max(token_ids) >= n_rows:
            raise InvalidInput(
                f"the tokenizer gives id {max(token_ids):,}, beyond the {n_rows:,} rows of the model's embedding: they do "
                f"not belong together. Nothing was changed."
            )
        logits: Tensor | None = None
        with _typed_out_of_memory(len(token_ids), chunk, cache):
            cache.reserve(len(token_ids))
            start = 0
            while start < len(token_ids):
                if step is not None:
                    step(start)
                stop = start + (FIRST_CHUNK if chunk == CHUNK and not cache.n_slots else chunk)
                logits = self._forward(token_ids[start:stop], cache)
                start = stop
        if step is not None:
            step(len(token_ids))
        assert logits is not None
        return logits

    def angles(self) -> list[Callable[[Tensor], Any]]:
        """One function a layer from positions to the cosines and sines of its RoPE.

        The first call measures, on this model, that re-rotating a cached key gives the key at the other position.

        Raises:
            UnsupportedEdit: it does not (no RoPE, interleaved layout, position-dependent states).
        """
        if self._angles is None:
            try:
                self._angles = self._measured_angles()
            except UnsupportedEdit as refusal:
                self._angles = refusal
        if isinstance(self._angles, UnsupportedEdit):
            raise self._angles
        return self._angles

    def _measured_angles(self) -> list[Callable[[Tensor], Any]]:
        rotary = getattr(self.core.get_decoder(), "rotary_emb", None)
        name = type(self.core).__name__
        if rotary is None:
            raise UnsupportedEdit(f"{name} has no rotary embedding: cached keys cannot be moved. Nothing was changed.")
        per_type = "layer_type" in inspect.signature(type(rotary).forward).parameters
        kinds = self.layer_types if per_type else [None] * self.n_layers
        by_kind = {kind: layer_angles(rotary, kind, self.device) for kind in kinds}
        angles = [by_kind[kind] for kind in kinds]
        # With one token in the context, attention is the identity and position enters through the RoPE alone, so every
        # layer's key at one position must be the re-rotated key at the other.
        old, new = torch.tensor([3]), torch.tensor([min(41, self.context_length - 1)])
        at_old, at_new = self._lone_token(int(old)), self._lone_token(int(new))
        tolerance = 1e-4 if self.dtype == torch.float32 else 4 * torch.finfo(self.dtype).eps
        with self.lock:
            for layer, (a, b) in enumerate(zip(at_old.layers, at_new.layers, strict=True)):
                moved = rerotated(a.keys, old, new, angles[layer])
                if (moved - b.keys).abs().max() > tolerance * b.keys.abs().max():
                    raise UnsupportedEdit(
                        f"re-rotated keys of {name} (RoPE types {sorted(self.rope_types)}) differ from computed ones in "
                        f"layer {layer}: cached keys cannot be moved. Nothing was changed."
                    )
        return angles

    def _lone_token(self, position: int) -> SpanCache:
        cache = self.new_cache()
        cache.next_position = position
        self.forward([min(5, self.core.config.get_text_config().vocab_size - 1)], cache)
        return cache

    def _attention_over(self, cache: SpanCache) -> contextlib.AbstractContextManager[None]:
        """What a forward over this kind of cache runs in; a ragged one computes its attention and masks itself."""
        return switched(self.core, masked=False) if isinstance(cache, RaggedCache) else contextlib.nullcontext()

    @property
    def windows(self) -> list[int | None]:
        """Tokens that each layer sees, None for all."""
        return [self.sliding_window if kind == "sliding_attention" else None for kind in self.layer_types]

    def _mask(self, cache: SpanCache, n_new: int) -> Any:
        """None, or explicit masks made from positions where the stock ones, made from slot counts, would be wrong.

        Stock sliding masks count slots. With a gap in the positions less than a window behind, counting slots lets a
        query see further back than its window.
        """
        if not self.has_sliding_layers or isinstance(cache, RaggedCache):
            return None
        window = self.sliding_window or 0
        new = torch.arange(cache.next_position, cache.next_position + n_new)
        keys = torch.cat((cache.positions, new))
        seen = keys[-(window + n_new) :]
        if int(seen[-1] - seen[0]) == len(seen) - 1:
            return None
        ahead = new[:, None] - keys[None, :]
        allowed = {"full_attention": ahead >= 0, "sliding_attention": (ahead >= 0) & (ahead < window)}
        masks = {kind: self._as_attention_mask(allowed[kind]) for kind in set(self.layer_types)}
        return masks if self._mask_by_type else masks[self.layer_types[0]]

    def _as_attention_mask(self, allowed: Tensor) -> Tensor:
        """A (1, 1, n_new, n_slots) mask in the form the attention implementation reads."""
        implementation = self.core.config._attn_implementation.removeprefix("contextmem-")
        mask = allowed[None, None].to(self.device)
        if implementation == "sdpa":
            return mask
        if implementation == "eager":
            lowest = torch.finfo(self.dtype).min
            return torch.zeros(mask.shape, dtype=self.dtype, device=self.device).masked_fill_(~mask, lowest)
        raise UnsupportedEdit(
            f"attention implementation {implementation!r} takes no explicit mask, and positions have a gap inside the "
            f"sliding window of {self.sliding_window} tokens. Use 'sdpa' or 'eager', or settle(). Nothing was changed."
        )


@contextlib.contextmanager
def _inference_mode(model: nn.Module) -> Iterator[None]:
    """Dropout off, and every module's training flag as it was afterwards."""
    if not model.training:
        yield
        return
    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        yield
    finally:
        for module in training:
            module.training = True


def _reset_dynamic_rope(core: Any) -> None:
    """Undo frequencies that a longer forward of the owner's left behind: transformers 5.2 never resets them itself."""
    rotary: Any = getattr(core.get_decoder(), "rotary_emb", None)
    original = getattr(rotary, "original_inv_freq", None)
    if original is not None and not torch.equal(rotary.inv_freq, original.to(rotary.inv_freq.device)):
        rotary.inv_freq = original.to(rotary.inv_freq.device).clone()


def _refuse_unsupported(model: nn.Module, config: Any) -> None:
    name = type(model).__name__
    if getattr(config, "is_encoder_decoder", False):
        raise UnsupportedEdit(f"{name} is an encoder-decoder: only decoder-only models have one editable cache.")
    parameters = inspect.signature(model.forward).parameters
    if "position_ids" not in parameters or not {"cache", "past_key_values"} & set(parameters):
        raise UnsupportedEdit(f"{name}.forward takes no position_ids or no cache: spans cannot be addressed.")
    foreign = sorted(set(getattr(config, "layer_types", None) or ()) - _ATTENTION_LAYERS)
    recurrent = [m for m in ("mamba", "ssm", "linear_attention", "recurrent") if m in str(config.model_type).lower()]
    if foreign or recurrent or getattr(model, "_is_stateful", False):
        raise UnsupportedEdit(
            f"{name} has layers of type {', '.join(foreign or recurrent or ['stateful'])}: their state "
            f"cannot be edited by span. Models with full and sliding-window attention are supported."
        )
    wanted = getattr(getattr(model, "generation_config", None), "cache_implementation", None)
    if wanted is not None and "quant" in str(wanted):
        raise UnsupportedEdit(
            f"generation_config asks for a {wanted!r} cache (QuantizedCache): quantized keys cannot be edited by span. "
            f"Unset generation_config.cache_implementation to use a SpanCache in {getattr(model, 'dtype', 'full')}."
        )


def _rope_types(config: Any) -> set[str]:
    parameters = getattr(config, "rope_parameters", None) or {}
    groups = [parameters] if "rope_type" in parameters else [p for p in parameters.values() if isinstance(p, dict)]
    return {group.get("rope_type", "default") for group in groups}


def _context_length(config: Any, rope_types: set[str]) -> int:
    longest = int(getattr(config, "max_position_embeddings", None) or 1 << 20)
    if not rope_types & _REGIME_ROPES:
        return longest
    # Beyond this length the frequencies change, and keys cached before no longer fit those computed after.
    parameters = config.rope_parameters
    original = parameters.get("original_max_position_embeddings") or getattr(
        config, "original_max_position_embeddings", None
    )
    return min(longest, int(original or longest))


@contextlib.contextmanager
def _typed_out_of_memory(n_tokens: int, chunk: int, cache: SpanCache) -> Iterator[None]:
    try:
        yield
    except (torch.OutOfMemoryError, RuntimeError, MemoryError) as error:
        if not _is_out_of_memory(error):
            raise
        raise OutOfMemory(
            f"out of memory while computing {n_tokens:,} tokens in chunks of {chunk:,} over {cache.n_slots:,} cached ones. "
            f"Retry with a smaller chunk_size. Nothing was changed.",
            tokens=n_tokens,
            chunk=chunk,
        ) from error


def _is_out_of_memory(error: BaseException) -> bool:
    text = str(error).lower()
    return (
        isinstance(error, torch.OutOfMemoryError | MemoryError) or "out of memory" in text or "can't allocate" in text
    )
