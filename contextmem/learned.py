"""What learned parts have in common: weights that belong to one model, its identity checked before they are attached."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Self
from weakref import WeakKeyDictionary

import torch

from contextmem.adapters import Adapter, StoredLora
from contextmem.backbone import Backbone
from contextmem.errors import IdentityMismatch, InvalidInput, ModelUnavailable, StorageError
from contextmem.identity import active_adapters, backbone_identity

__all__ = ["Learned", "LearnedConfig", "are_different_models", "folder_of", "lora_config", "stored_lora"]


@dataclass(frozen=True, kw_only=True)
class LearnedConfig:
    """What a learned part says about itself, beside its weights.

    Attributes:
        base_model: name of the model it was trained for.
        identity: see `identity.backbone_identity`; empty for published adapters, which do not say.
        training: how it was trained, for the reader.
    """

    FILE: ClassVar[str]
    base_model: str = ""
    identity: dict[str, str] = field(default_factory=dict)
    training: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def read(cls, folder: Path) -> Self:
        """What `folder` says.

        Raises:
            StorageError: it cannot be read.
        """
        try:
            return cls(**json.loads((folder / cls.FILE).read_text()))
        except (OSError, ValueError, TypeError) as error:
            raise StorageError(f"{folder / cls.FILE} cannot be read: {error}") from error

    def write(self, folder: Path) -> None:
        """Put it into `folder`."""
        (folder / self.FILE).write_text(json.dumps(asdict(self), indent=2) + "\n")

    def is_for(self, backbone: Backbone) -> bool:
        """Whether architecture and number of layers are those of the model: quick, and not enough."""
        shape = {"architecture": type(backbone.core).__name__, "layers": str(backbone.n_layers)}
        return all(self.identity.get(name) == value for name, value in shape.items())


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
