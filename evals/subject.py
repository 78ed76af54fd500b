"""What is measured: a model, its tokenizer, and the eraser tried on it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from contextmem import ContextMemory, KVEraser
from contextmem.backbone import Backbone
from contextmem.codec import Codec
from contextmem.framing import framing_of
from contextmem.identity import backbone_identity
from contextmem.loading import load_pretrained
from contextmem.training.layout import Layout
from contextmem.weights import eraser_for

__all__ = ["Subject"]


@dataclass(frozen=True)
class Subject:
    """A loaded model; memories on it; and what figures and rows say of it.

    Attributes:
        name: that it was loaded by.
        eraser: None where none was trained for it.
    """

    name: str
    model: Any
    tokenizer: Any
    eraser: KVEraser | None

    @classmethod
    def loaded(cls, name: str, *, dtype: str | None = None, eraser: str = "auto") -> Subject:
        """Load a model.

        Args:
            name, dtype: see `load_pretrained`.
            eraser: "auto", or a folder or hub id.
        """
        model, tokenizer = load_pretrained(name, dtype=dtype)
        found = eraser_for(Backbone.of(model)) if eraser == "auto" else KVEraser.from_pretrained(eraser)
        return cls(name, model, tokenizer, found)

    def memory(self, **options: Any) -> ContextMemory:
        """An empty memory."""
        return ContextMemory(self.model, self.tokenizer, **{"eraser": self.eraser, **options})

    @property
    def layout(self) -> Layout:
        """How texts and questions are laid out for it."""
        codec = Codec.of(self.tokenizer)
        return Layout(codec, framing_of(codec))

    @property
    def identity(self) -> dict[str, str]:
        """What rows depend on."""
        return {"model": backbone_identity(Backbone.of(self.model))["weights_bfloat16"], "dtype": self._dtype}

    @property
    def described(self) -> dict[str, str]:
        """What is printed beside figures."""
        return {"model": self.name, "dtype": self._dtype}

    def variants(self, *methods: str) -> dict[str, str | None]:
        """The eraser's fingerprint for every method that uses it, see `RowLog`."""
        return dict.fromkeys(methods, self.eraser.fingerprint if self.eraser is not None else None)

    @property
    def _dtype(self) -> str:
        return str(self.model.dtype).removeprefix("torch.")
