"""Re-rotation of cached keys: move a key from one position to another without running the model.

Keys are cached rotated. Rotating by R(new) R(old)^-1 uses the model's own cosines and sines at both positions, in
float32, divided by their squared norm (which removes attention scaling such as YaRN's): about 1e-7 relative at any
position, where the textbook `inv_freq * delta` loses 1e-4 at position 8,000.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

__all__ = ["layer_angles", "rerotated", "rotated", "rotation"]


def rerotated(keys: Tensor, old: Tensor, new: Tensor, angles: Callable[[Tensor], tuple[Tensor, Tensor]]) -> Tensor:
    """Keys as they would be cached at other positions.

    Args:
        keys: (1, heads, n, head_dim), rotated for `old`.
        old, new: (n,) positions.
        angles: positions (n,) -> cos, sin (n, rotary_dim), float32, as the model uses them.

    Returns:
        (1, heads, n, head_dim) in the dtype of `keys`. Dimensions beyond `rotary_dim` (partial rotary) are untouched.
    """
    return rotated(keys, *rotation(old, new, angles))


def rotation(old: Tensor, new: Tensor, angles: Callable[[Tensor], tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    """The cosines and sines, (n, rotary_dim), that take keys from `old` to `new`; alike in layers that share `angles`."""
    cos_old, sin_old = angles(old)
    cos_new, sin_new = angles(new)
    scale = cos_old.square() + sin_old.square()
    cos = (cos_new * cos_old + sin_new * sin_old) / scale
    return cos, (sin_new * cos_old - cos_new * sin_old) / scale


def rotated(keys: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Keys, (1, heads, n, head_dim), turned by a `rotation`."""
    n_rotary = cos.shape[-1]
    rotary = keys[..., :n_rotary].float()
    turned = (rotary * cos + _rotate_half(rotary) * sin).to(keys.dtype)
    return torch.cat((turned, keys[..., n_rotary:]), dim=-1) if n_rotary < keys.shape[-1] else turned


def layer_angles(rotary_emb: Any, layer_type: str | None, device: torch.device) -> Callable[[Tensor], Any]:
    """The cosines and sines a layer uses, as a function of positions. Models with several RoPEs name a layer type."""
    probe = torch.empty(1, device=device, dtype=torch.float32)

    def angles(positions: Tensor) -> tuple[Tensor, Tensor]:
        where = positions.to(device).unsqueeze(0)
        cos, sin = rotary_emb(probe, where) if layer_type is None else rotary_emb(probe, where, layer_type)
        return cos[0].float(), sin[0].float()

    return angles


def _rotate_half(x: Tensor) -> Tensor:
    half = x.shape[-1] // 2
    return torch.cat((-x[..., half:], x[..., :half]), dim=-1)
