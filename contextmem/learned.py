"""What learned parts have in common: weights that belong to one model, its identity checked before they are attached."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar, Protocol
from weakref import WeakKeyDictionary

import torch

from contextmem.adapters import Adapter, StoredLora
from contextmem.backbone import Backbone
from contextmem.errors import IdentityMismatch, InvalidInput, ModelUnavailable, StorageError
from contextmem.identity import active_adapters, backbone_identity

__all__ = ["Learned", "LearnedConfig", "are_different_models", "folder_of", "lora_config", "stored_lora"]


class LearnedConfig(Protocol):
    """What the configuration of a learned part says about the model it is for."""

    @property
    def base_model(self) -> str:
        """Name of the model it was trained for."""
        ...

    @property
    def identity(self) -> Mapping[str, str]:
        """See `identity.backbone_identity`; empty for published adapters, which do not say."""
        ...


class Learned:
    """A configuration and weights, attached to the model only while the part is at work."""

    what: ClassVar[str]  # what it is, for messages

    def __init__(self, config: Any, adapter: Adapter | StoredLora) -> None:
        self.config = config
        self._adapter = adapter
        self._fitting: WeakKeyDictionary[Any, int] = (
            WeakKeyDictionary()
        )  # models that were checked, and how they were then

    @property
    def fingerprint(self) -> str:
        """Digest of the weights, as they are saved in float16."""
        return self._adapter.digest()

    def adapter_for(self, backbone: Backbone) -> Adapter:
        """The weights, ready to be attached to this model.

        Raises:
            IdentityMismatch: they belong to another model, or another set of active adapters; the message names both.
        """
        core = backbone.core
        with backbone.lock:  # outside the guard of another memory on this model
            mark = _mark_of(core)
            if self._fitting.get(core) != mark:
                self._check_names(backbone, backbone_identity(backbone))
                if isinstance(self._adapter, StoredLora):
                    self._adapter = self._adapter.on(core, f"the {self.what} for {self.config.base_model!r}")
                self._fitting[core] = mark
            self._check_adapters(core)
        assert not isinstance(self._adapter, StoredLora)
        return self._adapter

    def fits(self, backbone: Backbone) -> bool:
        """Whether it was trained for this model; active adapters of the user's are checked when it is used."""
        try:
            self._check_names(backbone, backbone_identity(backbone))
        except IdentityMismatch:
            return False
        return True

    def _check_names(self, backbone: Backbone, found: dict[str, str]) -> None:
        expected: dict[str, str] = self.config.identity
        here = getattr(backbone.core, "name_or_path", "") or type(backbone.core).__name__
        left_out = {"adapters", "weights_bfloat16" if backbone.dtype == torch.float16 else "weights_float16"}
        differing = [name for name in expected if name not in left_out and expected[name] != found.get(name)]
        if not expected and are_different_models(self.config.base_model, getattr(backbone.core, "name_or_path", "")):
            differing = ["name"]
        if differing:
            raise IdentityMismatch(
                f"this {self.what} was trained for {self.config.base_model or 'another model'!r}, the model loaded is "
                f"{here!r} (differing: {', '.join(differing)}). Nothing was changed.",
                expected=expected or {"name": self.config.base_model},
                found={**found, "name": here},
            )

    def _check_adapters(self, core: Any) -> None:
        expected, found = self.config.identity.get("adapters", "none"), active_adapters(core)
        if expected != found:
            raise IdentityMismatch(
                f"this {self.what} was trained with active adapters {expected!r}, the model has {found!r}: the KV it would "
                f"write is another model's. Disable the adapter or train the {self.what} with it. Nothing was changed.",
                expected={"adapters": expected},
                found={"adapters": found},
            )


def lora_config(rank: int, alpha: int, targets: list[str]) -> Any:
    """A `peft.LoraConfig`."""
    from peft import LoraConfig

    if rank < 1 or alpha <= 0:
        raise InvalidInput(f"rank and alpha must be positive, not {rank} and {alpha}.")
    return LoraConfig(r=rank, lora_alpha=alpha, lora_dropout=0.0, target_modules=targets, task_type="CAUSAL_LM")


def stored_lora(folder: Path) -> StoredLora:
    """A LoRA in PEFT's layout.

    Raises:
        StorageError: it is another kind of adapter.
    """
    from peft import LoraConfig
    from safetensors.torch import load_file

    config = LoraConfig.from_pretrained(str(folder))
    if not isinstance(config, LoraConfig):
        raise StorageError(f"{folder} holds an adapter of type {config.peft_type}, not a LoRA.")
    return StoredLora(config, load_file(folder / "adapter_model.safetensors"))


def folder_of(name: str, what: str) -> Path:
    """The folder of that name, or of what is fetched from the hub by it.

    Raises:
        ModelUnavailable: neither is there.
    """
    if Path(name).is_dir():
        return Path(name)
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        return Path(snapshot_download(name))
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
        raise ModelUnavailable(f"the {what} {name!r} is no folder and cannot be fetched: {error}") from error


def are_different_models(there: str, here: str) -> bool:
    """Whether two names surely name different models: both are hub ids. A local copy may lie in any folder."""
    are_hub_ids = all(name.count("/") == 1 and not name.startswith((".", "/")) for name in (there, here))
    return are_hub_ids and there.lower() != here.lower()


def _mark_of(core: Any) -> int:
    """Changes when a weight is replaced or written to; cheap."""
    return hash(tuple((p.data_ptr(), p._version, p.dtype) for p in core.parameters()))
