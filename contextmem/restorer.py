"""RestoreKV: a few generated slots beside an evicted cache, which carry what the evicted ones said.

Source: RestoreKV. n learned embeddings are run once through the adapter-carrying backbone over the full cache, at the
positions after it; the KV they get joins the evicted cache in every layer and head. The adapter is off for everything else.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Self

import torch
from safetensors import SafetensorError
from torch import Tensor, nn

from contextmem.adapters import Adapter, LoraAdapter, StoredLora, default_targets
from contextmem.attention import switched
from contextmem.backbone import Backbone
from contextmem.cache import Slots, SpanCache
from contextmem.errors import InvalidInput, StorageError
from contextmem.identity import backbone_identity
from contextmem.learned import Learned, LearnedConfig, folder_of, lora_config, stored_lora

__all__ = ["RestoreKV", "RestorerConfig"]

_EMBEDDINGS = "restore_embeddings.safetensors"
_INITIAL_DEVIATION = 0.02


@dataclass(frozen=True, kw_only=True)
class RestorerConfig(LearnedConfig):
    """What a restorer is, beside its weights.

    Attributes:
        evictor: name of the evictor it was trained beside; with another one it is a transfer.
        largest_share: most of the context that may be kept beside its slots; where a budget keeps more they are left out.
    """

    FILE = "restorer_config.json"
    evictor: str = ""
    largest_share: float = 1.0


class RestoreKV(Learned):
    """Learned restoring for one model.

    Made by `from_pretrained` (a folder or a hub id) or `untrained`; `contextmem.training` trains one.

    Attributes:
        config: what it is.
        embeddings: (n, hidden_size) float32.
    """

    what = "restorer"
    config: RestorerConfig

    def __init__(self, config: RestorerConfig, adapter: Adapter | StoredLora, embeddings: Tensor) -> None:
        super().__init__(config, adapter)
        self.embeddings = nn.Parameter(embeddings.float(), requires_grad=False)

    @classmethod
    def untrained(
        cls,
        model: Any,
        *,
        n: int = 8,
        rank: int = 8,
        alpha: int = 16,
        evictor: str = "kvzip",
        targets: Sequence[str] | None = None,
        seed: int = 0,
    ) -> Self:
        """A fresh restorer for `model`: embeddings from N(0, 0.02), LoRA on attention and MLP projections.

        Args:
            n: restore slots.
            rank, alpha: of the LoRA matrices.
            evictor: what it will be trained beside.
            targets: names of the modules to adapt; default: the projections of attention and MLP.
            seed: of the initial weights.
        """
        if not isinstance(n, int) or n < 1:
            raise InvalidInput(f"a restorer has at least one slot, not {n!r}.")
        backbone = Backbone.of(model)
        core = backbone.core
        config = RestorerConfig(
            evictor=evictor,
            base_model=str(getattr(core, "name_or_path", "") or ""),
            identity=backbone_identity(backbone),
        )
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            width = core.get_input_embeddings().weight.shape[1]
            embeddings = torch.randn(n, width) * _INITIAL_DEVIATION
            lora = lora_config(rank, alpha, list(targets or default_targets(core, mlp=True)))
            return cls(config, LoraAdapter.untrained(core, lora), embeddings)

    @classmethod
    def from_pretrained(cls, name: str | Path) -> Self:
        """A restorer from a local folder or a hub id: a LoRA in PEFT's layout and `restore_embeddings.safetensors`.

        Raises:
            ModelUnavailable: there is nothing by that name.
            StorageError: the files are not a restorer's.
        """
        from safetensors.torch import load_file

        folder = folder_of(str(name), cls.what)
        try:
            stored = stored_lora(folder)
            (embeddings,) = load_file(folder / _EMBEDDINGS).values()
            known = RestorerConfig(base_model=stored.config.base_model_name_or_path or "")
            config = RestorerConfig.read(folder) if (folder / RestorerConfig.FILE).exists() else known
            return cls(config, stored, embeddings.reshape(-1, embeddings.shape[-1]))
        except (OSError, ValueError, TypeError, KeyError, SafetensorError) as error:
            raise StorageError(f"{name} holds no restorer that can be read: {error}") from error

    def save_pretrained(self, folder: str | Path, dtype: torch.dtype = torch.float16) -> None:
        """Write configuration, LoRA and embeddings in the published layout, weights as `dtype`.

        Raises:
            StorageError: the folder cannot be written.
        """
        from safetensors.torch import save_file

        place = Path(folder)
        try:
            place.mkdir(parents=True, exist_ok=True)
            self._adapter.save(place, dtype)
            save_file(
                {"restore_embeddings": self.embeddings.detach().to("cpu", dtype).contiguous()}, place / _EMBEDDINGS
            )
            self.config.write(place)
        except OSError as error:
            raise StorageError(f"the restorer cannot be written to {place}: {error}") from error

    @property
    def n(self) -> int:
        """Restore slots."""
        return len(self.embeddings)

    def first(self, n: int) -> RestoreKV:
        """The same restorer with only its first `n` embeddings."""
        if not 1 <= n <= self.n:
            raise InvalidInput(f"this restorer has {self.n} embeddings, {n!r} cannot be used.")
        return type(self)(replace(self.config), self._adapter, self.embeddings.detach()[:n])

    def slots(self, backbone: Backbone, cache: SpanCache) -> Slots:
        """The KV of the restore slots over `cache`, (1, heads, n, head_dim) a layer; `cache` stays as it is.

        They stand at `cache.next_position` and on.

        Raises:
            IdentityMismatch: see `adapter_for`.
            UnsupportedEdit: the model's attention is another than sdpa or eager.
        """
        adapter = self.adapter_for(backbone)
        seen = cache.view()
        with backbone.lock, adapter.attached(backbone.core) as core, switched(core, grouped=True):
            runner = Backbone.of(core)
            embeddings = self.embeddings.detach().to(runner.device, runner.dtype)
            runner.forward_embeddings(embeddings, seen)
        first = seen.n_slots - seen.offset - self.n
        slots = [(layer.keys[:, :, first:].clone(), layer.values[:, :, first:].clone()) for layer in seen.layers]
        seen.release()
        return slots
