"""Token ids of contexts and questions, laid out as a memory lays them out."""

from __future__ import annotations

from collections.abc import Sequence

from contextmem.codec import Codec
from contextmem.framing import Framing

__all__ = ["Layout"]


class Layout:
    """Puts texts together as a memory does: each tokenised alone, the template's frames round them."""

    def __init__(self, codec: Codec, framing: Framing) -> None:
        self.codec, self.framing = codec, framing

    def context(self, texts: Sequence[str | tuple[int, ...]]) -> tuple[tuple[int, ...], list[tuple[int, int]]]:
        """Ids of a context of `texts` (or ids), and the slots of each."""
        ids, spans = [*self.framing.bare_opening], []
        for text in texts:
            start = len(ids)
            ids += self.codec.encode(text) if isinstance(text, str) else text
            spans.append((start, len(ids)))
        return tuple(ids), spans

    @property
    def end(self) -> tuple[int, ...]:
        """The token that ends an answer, where the template has one."""
        close = self.framing.answer_close[:1]
        return close if close and close[0] in self.codec.control_ids else ()

    def question(self, text: str, prefix: str = "") -> tuple[int, ...]:
        """Ids of a question, the opened answer, and the answer's given beginning."""
        return (*self.codec.encode(text), *self.framing.answer_open, *self.codec.encode(prefix))
