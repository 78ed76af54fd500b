"""A query engine whose retrieved nodes stay prefilled in one memory."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Generator, Sequence
from dataclasses import dataclass
from typing import Any

from llama_index.core.base.base_query_engine import BaseQueryEngine
from llama_index.core.base.response.schema import RESPONSE_TYPE, AsyncStreamingResponse, Response, StreamingResponse
from llama_index.core.callbacks.base import CallbackManager
from llama_index.core.postprocessor.types import BaseNodePostprocessor
from llama_index.core.prompts.mixin import PromptMixinType
from llama_index.core.schema import NodeWithScore, QueryBundle

from contextmem import AnswerStream, ContextMemory, Report, SegmentNotFound
from contextmem.arguments import check_choice
from contextmem.errors import InvalidInput
from contextmem.integrations.llama_index.bridge import Inserted, NodeBridge
from contextmem.integrations.llama_index.threads import begun, in_thread

__all__ = ["QUESTION", "ContextMemoryQueryEngine"]

QUESTION = "Answer the question from the text above.\nQuestion: {query_str}"


@dataclass(frozen=True)
class _Prepared:
    """A query that is ready to be asked.

    Attributes:
        nodes: what was retrieved and inserted.
        question: what to ask; None: the empty message is the answer.
        reused: tokens that were in the memory before and stayed.
    """

    nodes: Inserted
    question: str | None
    reused: int


class ContextMemoryQueryEngine(BaseQueryEngine):
    """Retrieves, prefills nodes that are not in the memory yet, and asks; the question itself is not kept.

    An answer is conditioned on every node in the memory, not only on those of its query. Answers are the same sync, async
    and streamed. `response.source_nodes` are the retrieved nodes that stood in the context; `response.metadata` counts
    tokens (`tokens_reused`, `tokens_prefilled`, `prompt_tokens`, `completion_tokens`) and names nodes (`new`, `resident`,
    `retracted`, `empty`, `forgotten`).

    Attributes:
        memory: where nodes stand.
        bridge: takes them in and out, see `NodeBridge`.
    """

    def __init__(
        self,
        retriever: Any,
        memory: ContextMemory,
        *,
        bridge: NodeBridge | None = None,
        node_postprocessors: Sequence[BaseNodePostprocessor] = (),
        question_template: str = QUESTION,
        streaming: bool = False,
        on_empty: str = "answer",
        empty_message: str = "No passage was found for this question.",
        on_full: str = "error",
        max_new_tokens: int = 256,
        callback_manager: CallbackManager | None = None,
        **options: Any,
    ) -> None:
        """
        Args:
            retriever: any LlamaIndex retriever.
            memory: a memory; segments of its own stand beside the nodes.
            bridge: to share between engines, or with `block_retracted=False`; default: one of its own.
            node_postprocessors: applied to what is retrieved.
            question_template: holds `{query_str}`.
            streaming: return `StreamingResponse`s.
            on_empty: what to do when no node with words in it is left: "answer" from what is in the memory, "message"
                returns `empty_message` without asking the model, "raise" a `SegmentNotFound`.
            on_full: "error" or "forget", see `NodeBridge.insert`.
            max_new_tokens: of an answer; so much room is kept for it.
            options: passed to `ContextMemory.ask`, such as `stop` or `temperature`.
        """
        super().__init__(callback_manager=callback_manager)
        check_choice("on_empty", on_empty, ("answer", "message", "raise"))
        check_choice("on_full", on_full, ("error", "forget"))
        if "{query_str}" not in question_template:
            raise InvalidInput("question_template must hold {query_str}.")
        self.memory, self.retriever = memory, retriever
        self.bridge = bridge if bridge is not None else NodeBridge(memory)
        if self.bridge.memory is not memory:
            raise InvalidInput("the bridge belongs to another memory.")
        self._postprocessors = list(node_postprocessors)
        self._template, self._streaming = question_template, streaming
        self._on_empty, self._empty_message, self._on_full = on_empty, empty_message, on_full
        self._options = {**options, "max_new_tokens": max_new_tokens}
        self._turn = threading.Lock()  # one query after the other

    def _get_prompt_modules(self) -> PromptMixinType:
        return {}

    def retract(self, node_id: str | None = None, *, ref_doc_id: str | None = None, **options: Any) -> Report:
        """Take a node, or a document's nodes, out of the memory; they stay out. See `NodeBridge.retract`."""
        report: Report = self.bridge.retract(node_id, ref_doc_id=ref_doc_id, **options)
        return report

    def retrieve(self, query_bundle: QueryBundle) -> list[NodeWithScore]:
        """Nodes for a query, postprocessed; nothing is put into the memory."""
        nodes = self.retriever.retrieve(query_bundle)
        for postprocessor in self._postprocessors:
            nodes = postprocessor.postprocess_nodes(nodes, query_bundle=query_bundle)
        return list(nodes)

    async def aretrieve(self, query_bundle: QueryBundle) -> list[NodeWithScore]:
        """As `retrieve`, through the async methods of retriever and postprocessors."""
        nodes = await self.retriever.aretrieve(query_bundle)
        for postprocessor in self._postprocessors:
            nodes = await postprocessor.apostprocess_nodes(nodes, query_bundle=query_bundle)
        return list(nodes)

    def synthesize(
        self,
        query_bundle: QueryBundle,
        nodes: list[NodeWithScore],
        additional_source_nodes: Sequence[NodeWithScore] | None = None,
    ) -> RESPONSE_TYPE:
        """Answer from given nodes, and what is in the memory."""
        if self._streaming:
            return self._streamed(query_bundle, nodes, additional_source_nodes)
        with self._turn:
            prepared = self._prepared(query_bundle, nodes)
            metadata = _metadata(prepared)
            text = "".join(self._pieces(prepared, metadata))
        return Response(text, _sources(prepared, additional_source_nodes), metadata)

    async def asynthesize(
        self,
        query_bundle: QueryBundle,
        nodes: list[NodeWithScore],
        additional_source_nodes: Sequence[NodeWithScore] | None = None,
    ) -> RESPONSE_TYPE:
        """As `synthesize`, in a thread."""
        response = await asyncio.to_thread(self.synthesize, query_bundle, nodes, additional_source_nodes)
        if isinstance(response, StreamingResponse):
            return AsyncStreamingResponse(in_thread(response.response_gen), response.source_nodes, response.metadata)
        return response

    def _query(self, query_bundle: QueryBundle) -> RESPONSE_TYPE:
        return self.synthesize(query_bundle, self.retrieve(query_bundle))

    async def _aquery(self, query_bundle: QueryBundle) -> RESPONSE_TYPE:
        return await self.asynthesize(query_bundle, await self.aretrieve(query_bundle))

    def _streamed(
        self, query: QueryBundle, nodes: list[NodeWithScore], more: Sequence[NodeWithScore] | None
    ) -> StreamingResponse:
        with self._turn:
            prepared = self._prepared(query, nodes)
            metadata = _metadata(prepared)  # what is counted at the end is filled in then
            pieces = begun(self._pieces(prepared, metadata))  # from now on the memory is busy with this answer
        return StreamingResponse(pieces, _sources(prepared, more), metadata)

    def _prepared(self, query: QueryBundle, nodes: list[NodeWithScore]) -> _Prepared:
        question = self._template.format(query_str=query.query_str)
        reserve = self.memory.count_tokens(question, asked=True) + self._options["max_new_tokens"]
        before = self.memory.seq_length
        inserted = self.bridge.insert(nodes, reserve=reserve, on_full=self._on_full)
        if not inserted.nodes and self._on_empty == "raise":
            raise SegmentNotFound(
                f"no usable node was retrieved: {len(inserted.empty)} empty, {len(inserted.retracted)} retracted before. "
                f"Nothing was changed."
            )
        is_asked = bool(inserted.nodes) or self._on_empty == "answer"
        reused = max(0, min(before, self.memory.seq_length - inserted.n_tokens))
        return _Prepared(inserted, question if is_asked else None, reused)

    def _pieces(self, prepared: _Prepared, metadata: dict[str, Any]) -> Generator[str, None, None]:
        if prepared.question is None:
            yield self._empty_message
            return
        stream: AnswerStream = self.memory.stream(prepared.question, **self._options)
        try:
            yield from stream
        finally:
            stream.close()
        answer = stream.answer
        metadata["tokens_prefilled"] += answer.tokens_prefilled
        metadata["prompt_tokens"] = answer.tokens_reused + answer.tokens_prefilled
        metadata["completion_tokens"] = len(answer.token_ids)
        metadata["finish_reason"] = answer.finish_reason


def _metadata(prepared: _Prepared) -> dict[str, Any]:
    nodes = prepared.nodes
    names = {kind: list(getattr(nodes, kind)) for kind in ("new", "resident", "retracted", "empty", "forgotten")}
    counts = {"prompt_tokens": 0, "completion_tokens": 0, "finish_reason": None}
    return {**names, "tokens_reused": prepared.reused, "tokens_prefilled": nodes.n_tokens, **counts}


def _sources(prepared: _Prepared, more: Sequence[NodeWithScore] | None) -> list[NodeWithScore]:
    return [*prepared.nodes.nodes, *(more or ())]
