"""What turns a frozen model into an eraser: adapters that are part of the model only inside one guard.

`Adapter.attached` is the only way in and out. Outside it the user's model is untouched: same modules, same names, same
speed, whatever adapters the user has of their own.
"""

from __future__ import annotations

import copy
import hashlib
import threading
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from contextmem.errors import IdentityMismatch, InvalidInput, UnsupportedEdit

__all__ = ["Adapter", "FullCopy", "LoraAdapter", "StoredLora", "default_targets"]

_NAME = "default"  # PEFT's own name for the one adapter of a model; it is not part of the files
_PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj", "qkv_proj")
_MLP_PROJECTIONS = ("gate_proj", "up_proj", "down_proj", "gate_up_proj")


class Adapter(Protocol):
    """Trained weights that change what a model computes while they are attached."""

    @property
    def module(self) -> nn.Module:
        """Holds the parameters that are trained, and nothing else."""
        ...

    def attached(self, core: nn.Module) -> AbstractContextManager[Any]:
        """The model to run, with the weights in effect; `core` is as it was afterwards, whatever happens."""
        ...

    def save(self, folder: Path, dtype: torch.dtype) -> None:
        """Write the weights into `folder` as `dtype`."""
        ...

    def digest(self) -> str:
        """Digest of the weights, as they are in float16."""
        ...


class LoraAdapter:
    """A PEFT LoRA whose layers are swapped into the model for as long as it is attached.

    PEFT injects the layers into a shadow of the model, which has its structure and none of its weights. While attached, each
    layer stands in the place of the module it wraps, whatever that is: a linear layer, or a layer of the user's own adapter.
    """

    def __init__(self, shadow: Any) -> None:
        from peft.tuners.tuners_utils import BaseTunerLayer

        self._shadow = shadow
        self._lock = threading.RLock()  # the layers stand in one model at a time
        self._layers: dict[str, Any] = {
            name: layer for name, layer in shadow.get_base_model().named_modules() if isinstance(layer, BaseTunerLayer)
        }
        for layer in self._layers.values():
            layer.base_layer = nn.Identity()
            layer.to_empty(device="cpu")
        self._module = nn.ModuleDict({name.replace(".", "/"): layer for name, layer in self._layers.items()})

    @classmethod
    def untrained(cls, core: Any, config: Any) -> LoraAdapter:
        """Freshly initialised: B is zero, so the model computes what it did.

        Args:
            config: a `peft.LoraConfig`.
        """
        adapter = cls(_shadow_of(core, config))
        for layer in adapter._layers.values():
            layer.reset_lora_parameters(_NAME, config.init_lora_weights)
        return adapter

    @classmethod
    def of(cls, core: Any, config: Any, weights: Mapping[str, Tensor], what: str) -> LoraAdapter:
        """From weights in the layout of PEFT's files.

        Raises:
            IdentityMismatch: names or shapes are not those of `core`; the message names both.
        """
        adapter = cls(_shadow_of(core, config))
        here = {name: tuple(tensor.shape) for name, tensor in adapter.weights.items()}
        there = {name: tuple(tensor.shape) for name, tensor in weights.items()}
        if here != there:
            wrong = sorted(name for name in here.keys() | there.keys() if here.get(name) != there.get(name))
            raise IdentityMismatch(
                f"{what} does not fit {type(core).__name__}: {len(wrong)} weights differ, first {wrong[0]}: "
                f"{there.get(wrong[0], 'missing')} there, {here.get(wrong[0], 'missing')} here. Nothing was changed.",
                expected={name: str(there.get(name)) for name in wrong},
                found={name: str(here.get(name)) for name in wrong},
            )
        for name, tensor in adapter.weights.items():
            tensor.copy_(weights[name])
        adapter._module.eval().requires_grad_(False)
        return adapter

    def widened(self, core: Any, targets: Sequence[str]) -> LoraAdapter:
        """The same with matrices on more modules of `core`, freshly initialised: it computes what this one does.

        Raises:
            InvalidInput: a module that is adapted now is not among `targets`.
        """
        config = copy.deepcopy(self._shadow.peft_config[_NAME])
        if missing := sorted(set(config.target_modules) - set(targets)):
            raise InvalidInput(f"targets leave out {missing[0]!r}, which the adapter has: name it as well.")
        config.target_modules = set(targets)
        wider, own = LoraAdapter.untrained(core, config), self.weights
        for name, tensor in wider.weights.items():
            if name in own:
                tensor.copy_(own[name])
        return wider

    @property
    def module(self) -> nn.Module:
        return self._module

    @property
    def weights(self) -> dict[str, Tensor]:
        """The weights by the names that PEFT's files use."""
        return {name: parameter.detach() for name, parameter in _named_parameters(self._shadow).items()}

    @contextmanager
    def attached(self, core: nn.Module) -> Iterator[Any]:
        swapped: list[tuple[dict[str, Any], str, nn.Module]] = []  # not by `setattr`, which is slow on modules
        with self._lock:
            try:
                for name, layer in self._layers.items():
                    parent_name, _, leaf = name.rpartition(".")
                    children: dict[str, Any] = core.get_submodule(parent_name)._modules
                    original = children[leaf]
                    device = original.weight.device
                    if layer.lora_A[_NAME].weight.device != device:
                        layer.to(device)
                    layer._modules["base_layer"] = original
                    swapped.append((children, leaf, original))
                    children[leaf] = layer
                yield core
            finally:
                for children, leaf, original in swapped:
                    children[leaf] = original
                detached = nn.Identity()
                for layer in self._layers.values():
                    layer._modules["base_layer"] = detached

    def save(self, folder: Path, dtype: torch.dtype) -> None:
        StoredLora(self._shadow.peft_config[_NAME], self.weights).save(folder, dtype)

    def digest(self) -> str:
        return _digest(self.weights)


@dataclass(frozen=True)
class StoredLora:
    """What PEFT's files hold, before it has met a model.

    Attributes:
        config: a `peft.LoraConfig`.
        weights: by the names that PEFT's files use.
    """

    config: Any
    weights: Mapping[str, Tensor]

    def digest(self) -> str:
        """See `Adapter.digest`."""
        return _digest(self.weights)

    def on(self, core: Any, what: str) -> LoraAdapter:
        """The adapter for `core`, see `LoraAdapter.of`."""
        return LoraAdapter.of(core, self.config, self.weights, what)

    def save(self, folder: Path, dtype: torch.dtype) -> None:
        """Write both into `folder`."""
        from safetensors.torch import save_file

        config = copy.deepcopy(self.config)
        config.inference_mode = True
        config.save_pretrained(str(folder))
        weights = {name: tensor.to("cpu", dtype).contiguous() for name, tensor in self.weights.items()}
        save_file(weights, folder / "adapter_model.safetensors", metadata={"format": "pt"})


class FullCopy:
    """A second model that runs in the place of the first: the paper's full-parameter eraser."""

    def __init__(self, model: Any) -> None:
        self._model = model

    @classmethod
    def untrained(cls, core: Any) -> FullCopy:
        """A copy of `core`."""
        return cls(copy.deepcopy(core))

    @property
    def module(self) -> nn.Module:
        model: nn.Module = self._model
        return model

    @contextmanager
    def attached(self, core: Any) -> Iterator[Any]:
        parameter = next(iter(core.parameters()))
        own = next(iter(self._model.parameters()))
        if own.requires_grad:  # under training: in a type of its own
            self._model.to(parameter.device)
        elif own.device != parameter.device or own.dtype != parameter.dtype:
            self._model.to(parameter.device, parameter.dtype)
        yield self._model

    def save(self, folder: Path, dtype: torch.dtype) -> None:
        weights = {name: tensor.to(dtype) for name, tensor in self._model.state_dict().items()}
        self._model.save_pretrained(folder, state_dict=weights)

    def digest(self) -> str:
        return _digest(self._model.state_dict())


def default_targets(core: nn.Module, *, mlp: bool = False) -> list[str]:
    """The attention projections of `core`, by the names it uses.

    Args:
        mlp: the projections of the MLP as well.

    Raises:
        UnsupportedEdit: it has none of the usual names.
    """
    leaves = {name.rpartition(".")[2] for name, _ in core.named_modules()}
    found = [name for name in (*_PROJECTIONS, *(_MLP_PROJECTIONS if mlp else ())) if name in leaves]
    if not found:
        raise UnsupportedEdit(
            f"{type(core).__name__} has no modules named {', '.join(_PROJECTIONS)}: name the ones to adapt with targets=."
        )
    return found


def _shadow_of(core: Any, config: Any) -> Any:
    """A PEFT model with the structure of `core`, on the meta device: no weights, no memory, nothing of the user's."""
    from peft import get_peft_model

    with torch.device("meta"), warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # PEFT reads an attribute that transformers renames
        skeleton = type(core)(copy.deepcopy(core.config))
        skeleton.name_or_path = config.base_model_name_or_path or getattr(core, "name_or_path", "") or ""
        try:
            shadow = get_peft_model(skeleton, copy.deepcopy(config), autocast_adapter_dtype=False)
        except ValueError as error:
            raise UnsupportedEdit(f"the adapter cannot be put on {type(core).__name__}: {error}") from error
    extra = [name for name in _named_parameters(shadow) if ".lora_A." not in name and ".lora_B." not in name]
    if extra or not _named_parameters(shadow):
        raise UnsupportedEdit(
            f"only adapters of LoRA matrices can be attached; this one holds {extra[:1] or 'nothing'}."
        )
    return shadow


def _digest(weights: Mapping[str, Tensor]) -> str:
    digest = hashlib.sha256()
    for name in sorted(weights):
        half = weights[name].detach().to("cpu", torch.float16).contiguous()
        digest.update(name.encode() + half.view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()[:16]


def _named_parameters(shadow: Any) -> dict[str, Tensor]:
    """Adapter parameters by the names that PEFT's files use."""
    return {
        name.replace(f".{_NAME}.", ".").removesuffix(f".{_NAME}"): parameter
        for name, parameter in shadow.named_parameters()
        if f".{_NAME}" in name
    }
