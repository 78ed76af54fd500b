"""The sentence embedding model of `memory.find` as a LlamaIndex embedding, so that an index needs no network."""

from __future__ import annotations

import asyncio

from llama_index.core.base.embeddings.base import BaseEmbedding

from contextmem.meaning import embedder

__all__ = ["SentenceEmbedding"]


class SentenceEmbedding(BaseEmbedding):
    """all-MiniLM-L6-v2; texts beyond 256 word pieces are cut. See `contextmem.meaning.embedder` for where it comes from."""

    model_name: str = "all-MiniLM-L6-v2"

    @classmethod
    def class_name(cls) -> str:
        """As LlamaIndex names components."""
        return "ContextMemorySentenceEmbedding"

    def _get_text_embeddings(self, texts: list[str]) -> list[list[float]]:
        vectors: list[list[float]] = embedder()(texts).tolist()
        return vectors

    def _get_text_embedding(self, text: str) -> list[float]:
        return self._get_text_embeddings([text])[0]

    def _get_query_embedding(self, query: str) -> list[float]:
        return self._get_text_embedding(query)

    async def _aget_query_embedding(self, query: str) -> list[float]:
        return await asyncio.to_thread(self._get_text_embedding, query)
