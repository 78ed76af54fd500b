"""Which model this is: what a saved memory is bound to, because KV means nothing to another model."""

from __future__ import annotations

import hashlib
import json
from typing import Any

import torch
from torch import Tensor, nn

from contextmem.backbone import Backbone
from contextmem.codec import Codec, template_text
from contextmem.errors import IdentityMismatch

__all__ = ["active_adapters", "backbone_identity", "check_identity", "identity_of"]

_SAMPLES = 16_384  # values read a tensor, evenly spaced: every tensor of a fine-tuned model differs in some of them


def identity_of(backbone: Backbone, codec: Codec) -> dict[str, str]:
    """Architecture, weights, active adapters, tokenizer, template, dtype, RoPE and attention layers, each as a string.

    Adapters that are attached but inactive do not count: their presence renames weights and changes nothing else.
    """
    core = backbone.core
    config = core.config.get_text_config(decoder=True)
    with backbone.lock:  # an eraser of another memory may be attached
        weights, adapters = _weight_digests(core)
    tokenizer = codec.tokenizer
    vocabulary = json.dumps(sorted(tokenizer.get_vocab().items()), ensure_ascii=False)
    return {
        "architecture": type(core).__name__,
        "weights": weights,
        "adapters": adapters,
        "tokenizer": _digest(vocabulary.encode("utf-8", "surrogatepass")),
        "template": _digest(template_text(tokenizer).encode()),
        "dtype": str(backbone.dtype).removeprefix("torch."),
        "rope": _digest(json.dumps(getattr(config, "rope_parameters", None), sort_keys=True, default=str).encode()),
        "layers": f"{backbone.n_layers} ({', '.join(sorted(set(backbone.layer_types)))}; window {backbone.sliding_window})",
    }


def backbone_identity(backbone: Backbone) -> dict[str, str]:
    """What an eraser is bound to: architecture, layers, active adapters, and the weights whatever type they are kept in.

    The weights are compared as rounded to bfloat16 and to float16, so that weights trained beside a float32 model fit the
    same model in half precision.
    """
    core = backbone.core
    with backbone.lock:
        return {
            "architecture": type(core).__name__,
            "layers": str(backbone.n_layers),
            "rope": _digest(
                _plain(getattr(core.config.get_text_config(decoder=True), "rope_parameters", None)).encode()
            ),
            "adapters": active_adapters(core),
            "weights_bfloat16": _weight_digests(core, torch.bfloat16)[0],
            "weights_float16": _weight_digests(core, torch.float16)[0],
        }


def active_adapters(core: nn.Module) -> str:
    """Digest of the adapters that are active in `core`; "none" where there are none. Cheap in that case."""
    return _weight_digests(core)[1] if _active_adapters(core) else "none"


def check_identity(expected: dict[str, str], found: dict[str, str], what: str) -> None:
    """Raise `IdentityMismatch` naming both sides unless they are the same."""
    differing = [name for name in expected if expected[name] != found.get(name)]
    if differing:
        pairs = "; ".join(f"{name}: {expected[name]} there, {found.get(name)} here" for name in differing)
        raise IdentityMismatch(
            f"{what} belongs to another model ({pairs}). Load the model it was made with. Nothing was changed.",
            expected=expected,
            found=found,
        )


def _weight_digests(model: nn.Module, rounded: torch.dtype | None = None) -> tuple[str, str]:
    active = _active_adapters(model)
    base, adapters = hashlib.sha256(), hashlib.sha256()
    n_adapters = 0
    for name, tensor in sorted(model.state_dict(keep_vars=True).items(), key=lambda item: _base_name(item[0])):
        if _is_adapter(name):
            if any(f".{adapter}." in f"{name}." for adapter in active):
                _feed(adapters, name, tensor, None)
                n_adapters += 1
        else:
            _feed(base, _base_name(name), tensor, rounded)
    return base.hexdigest()[:16], adapters.hexdigest()[:16] if n_adapters else "none"


def _feed(digest: Any, name: str, tensor: Tensor, rounded: torch.dtype | None) -> None:
    flat = tensor.detach().reshape(-1)
    sample = flat[:: max(1, flat.numel() // _SAMPLES)].contiguous().cpu()
    if rounded is not None:
        sample = sample.to(rounded)
    digest.update(f"{name} {tuple(tensor.shape)} {sample.dtype}".encode())
    digest.update(sample.view(torch.uint8).numpy().tobytes())


def _base_name(name: str) -> str:
    """The name a weight had before adapters wrapped its layer."""
    return name.replace(".base_layer.", ".")


def _is_adapter(name: str) -> bool:
    return ".lora_" in name or ".modules_to_save." in name


def _active_adapters(model: nn.Module) -> set[str]:
    names: set[str] = set()
    for module in model.modules():
        is_adapted = hasattr(module, "base_layer") and hasattr(module, "active_adapters")
        if is_adapted and not getattr(module, "disable_adapters", False):
            names.update(module.active_adapters)  # type: ignore[arg-type]
    return names


def _plain(value: Any) -> str:
    """A nested value as text, whole numbers and floats alike."""
    if isinstance(value, dict):
        return "{" + ", ".join(f"{k}: {_plain(value[k])}" for k in sorted(value)) + "}"
    return str(float(value)) if isinstance(value, int | float) else str(value)


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:16]
