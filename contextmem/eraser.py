"""KVEraser: steering KV that stands where a segment stood, so that what follows reads as if it had never been there.

Source: KVEraser (arXiv 2606.17034). For a context p + e + s, the erase pass runs e once through the adapter-carrying
backbone over KV(p), at the positions e has; the KV it computes takes e's place, and p and s stay bit for bit.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import ceil
from pathlib import Path
from typing import Any, Self

import torch
from safetensors import SafetensorError

from contextmem.adapters import Adapter, FullCopy, LoraAdapter, default_targets
from contextmem.arguments import check_choice
from contextmem.backbone import Backbone
from contextmem.cache import Slots, SpanCache
from contextmem.errors import InvalidInput, StorageError, UnsupportedEdit
from contextmem.identity import backbone_identity
from contextmem.learned import Learned, LearnedConfig, folder_of, lora_config, stored_lora
from contextmem.loading import no_progress_bars

__all__ = ["CONDITIONINGS", "EraserConfig", "KVEraser"]

CONDITIONINGS = ("prefix", "none", "query", "suffix")
SUFFIX_SHARE = 0.15  # of the suffix, seen by an eraser with conditioning "suffix"


@dataclass(frozen=True, kw_only=True)
class EraserConfig(LearnedConfig):
    """What an eraser is, beside its weights.

    Attributes:
        adapter: "lora" (low-rank matrices on the frozen backbone) or "full" (a trained copy of it).
        conditioning: what the erase pass attends to beside e itself: "prefix" (KV(p), the paper's choice), "none",
            "query" (KV(p) and the question, which must be known) or "suffix" (KV(p) and the first 15 % of KV(s)).
        max_span_tokens: longest span to erase in one go; beyond what was trained, quality is not known.
        slots: steering slots of a span that stay, its last ones; the others go, and what stands after them is moved up.
            None: all stay, and nothing is moved (the paper's form).
    """

    FILE = "eraser_config.json"
    adapter: str = "lora"
    conditioning: str = "prefix"
    max_span_tokens: int = 512
    slots: int | None = None

    def n_gone(self, n_tokens: int) -> int:
        """How many of a span's `n_tokens` slots go."""
        return 0 if self.slots is None else max(0, n_tokens - self.slots)

    def __post_init__(self) -> None:
        if self.slots is not None and self.slots < 1:
            raise InvalidInput(f"slots must be at least 1, not {self.slots}.")
        check_choice("adapter", self.adapter, ("lora", "full"))
        check_choice("conditioning", self.conditioning, CONDITIONINGS)


class KVEraser(Learned):
    """Learned erasing for one model: a configuration and weights, attached to the model only during the erase pass.

    Made by `from_pretrained` (a folder or a hub id) or `untrained`. An untrained eraser computes what the model computed
    when the span was prefilled, so it erases nothing; `contextmem.training` trains one.

    Attributes:
        config: what it is.
    """

    what = "eraser"
    config: EraserConfig

    @classmethod
    def untrained(
        cls,
        model: Any,
        *,
        adapter: str = "lora",
        conditioning: str = "prefix",
        rank: int = 16,
        alpha: int = 32,
        targets: Sequence[str] | None = None,
        max_span_tokens: int = 512,
        slots: int | None = None,
        seed: int = 0,
    ) -> Self:
        """A fresh eraser for `model`.

        Args:
            adapter, conditioning, max_span_tokens, slots: see `EraserConfig`.
            rank, alpha: of the LoRA matrices.
            targets: names of the modules to adapt; default: the attention projections.
            seed: of the initial weights.
        """
        backbone = Backbone.of(model)
        core = backbone.core
        config = EraserConfig(
            adapter=adapter,
            conditioning=conditioning,
            max_span_tokens=max_span_tokens,
            slots=slots,
            base_model=str(getattr(core, "name_or_path", "") or ""),
            identity=backbone_identity(backbone),
        )
        if adapter == "full":
            return cls(config, FullCopy.untrained(core))
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            lora = lora_config(rank, alpha, list(targets or default_targets(core)))
            return cls(config, LoraAdapter.untrained(core, lora))

    @classmethod
    def from_pretrained(cls, name: str | Path) -> Self:
        """An eraser from a local folder or a hub id: what `save_pretrained` wrote, or any LoRA in PEFT's layout.

        Raises:
            ModelUnavailable: there is nothing by that name.
            StorageError: the files are not an eraser's.
        """
        folder = folder_of(str(name), "eraser")
        try:
            config = EraserConfig.read(folder) if (folder / EraserConfig.FILE).exists() else None
            if config is not None and config.adapter == "full":
                return cls._full_from(folder, config)
            return cls._lora_from(folder, config)
        except (OSError, ValueError, TypeError, KeyError, SafetensorError) as error:
            raise StorageError(f"{name} holds no eraser that can be read: {error}") from error

    @classmethod
    def _lora_from(cls, folder: Path, config: EraserConfig | None) -> Self:
        stored = stored_lora(folder)
        return cls(config or EraserConfig(base_model=stored.config.base_model_name_or_path or ""), stored)

    @classmethod
    def _full_from(cls, folder: Path, config: EraserConfig) -> Self:
        from transformers import AutoModelForCausalLM

        with no_progress_bars():
            model = AutoModelForCausalLM.from_pretrained(folder, dtype="auto")
        return cls(config, FullCopy(model.eval().requires_grad_(False)))

    def save_pretrained(self, folder: str | Path, dtype: torch.dtype = torch.float16) -> None:
        """Write configuration and weights in PEFT's layout (for a full copy: transformers'), weights as `dtype`.

        Raises:
            StorageError: the folder cannot be written.
        """
        place = Path(folder)
        try:
            place.mkdir(parents=True, exist_ok=True)
            self._adapter.save(place, dtype)
            self.config.write(place)
        except OSError as error:
            raise StorageError(f"the eraser cannot be written to {place}: {error}") from error

    def checked(self, backbone: Backbone, *, has_question: bool = False) -> Adapter:
        """The adapter to attach; raises what `steer` would raise, before anything is computed."""
        adapter = self.adapter_for(backbone)
        if self.config.conditioning in ("query", "suffix") and backbone.has_sliding_layers:
            raise UnsupportedEdit(
                f"conditioning {self.config.conditioning!r} lets a span see later positions, which sliding-window layers "
                f"mask out. Nothing was changed."
            )
        if self.config.conditioning == "query" and not has_question:
            raise InvalidInput(
                "this eraser is conditioned on the question: pass method=KVErase(question=...). Nothing was changed."
            )
        return adapter

    def steer(
        self,
        backbone: Backbone,
        cache: SpanCache,
        spans: Sequence[tuple[int, Sequence[int]]],
        question: Sequence[int] = (),
        *,
        chunk: int = 1024,
        step: Callable[[int], None] | None = None,
    ) -> list[Slots]:
        """The steering KV for each span, computed over the prefix with the earlier spans erased already.

        Args:
            cache: an `owned` cache; written to for the time of the call, and bit for bit as it was afterwards.
            spans: first slot and token ids of every span, in order.
            question: ids of the question, for conditioning "query".
            chunk: tokens a forward.
            step: called with tokens done; may raise to cancel.

        Raises:
            IdentityMismatch: see `adapter_for`.
            InvalidInput: conditioning "query" and no question.
            UnsupportedEdit: conditioning on later positions, and the model has sliding-window layers.
        """
        adapter = self.checked(backbone, has_question=bool(question))
        steering: list[Slots] = []
        done = 0
        with backbone.lock, cache.borrowed([(start, start + len(ids)) for start, ids in spans]):
            for start, ids in spans:
                if step is not None:
                    step(done)
                seen = self._seen(backbone, cache, start, start + len(ids), question)
                with adapter.attached(backbone.core) as core:
                    Backbone.of(core).prefill(ids, seen, chunk=chunk)
                steering.append(seen.read(seen.n_slots - len(ids), seen.n_slots))
                cache.write(start, steering[-1])
                done += len(ids)
        return steering

    def _seen(self, backbone: Backbone, cache: SpanCache, start: int, stop: int, question: Sequence[int]) -> SpanCache:
        """What the erase pass of the span attends to, as a cache that continues at the span's first position."""
        conditioning = self.config.conditioning
        if conditioning == "prefix":
            return cache.over(start, stop)
        if conditioning == "none":
            seen = backbone.new_cache()
        elif conditioning == "suffix":
            seen = cache.select(((0, start), (stop, stop + ceil(SUFFIX_SHARE * (cache.n_slots - stop)))))
        else:
            asked = cache.view()
            backbone.prefill(question, asked)
            seen = asked.select(((0, start), (cache.n_slots, asked.n_slots)))
        seen.next_position = int(cache.positions[start])
        return seen
