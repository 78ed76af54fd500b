"""LlamaIndex: its own classes over a memory; what is retracted is gone everywhere, and sync, async and streams agree."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from typing import Any

import pytest
from llama_index.core import Document, MockEmbedding, SummaryIndex, VectorStoreIndex
from llama_index.core.base.llms.types import ChatMessage, ImageBlock, MessageRole, TextBlock, ToolCallBlock
from llama_index.core.memory import Memory
from llama_index.core.query_engine import RetrieverQueryEngine
from llama_index.core.retrievers import BaseRetriever
from llama_index.core.schema import NodeWithScore, QueryBundle, TextNode
from oracle import assert_equals_reference, assert_unchanged, snapshot

from contextmem import ContextMemory, ContextOverflow, InvalidInput, MemoryBusy, SegmentNotFound
from contextmem.integrations.llama_index import (
    ContextMemoryBlock,
    ContextMemoryChatEngine,
    ContextMemoryLLM,
    ContextMemoryQueryEngine,
    DropRetracted,
    NodeBridge,
    SentenceEmbedding,
)
from contextmem.training.prose import prose_of

Make = Callable[..., ContextMemory]


class Given(BaseRetriever):
    """Retrieves what it is told to."""

    def __init__(self, *texts: str) -> None:
        super().__init__()
        self.nodes = [node(text) for text in texts]

    def _retrieve(self, query_bundle: QueryBundle) -> list[NodeWithScore]:
        return list(self.nodes)


def node(text: str, name: str | None = None, document: str | None = None) -> NodeWithScore:
    name = name or f"id of {hashlib.sha256(text.encode()).hexdigest()[:8]}"
    made = TextNode(text=text, id_=name)
    if document is not None:
        from llama_index.core.schema import NodeRelationship, RelatedNodeInfo

        made.relationships[NodeRelationship.SOURCE] = RelatedNodeInfo(node_id=document)
    return NodeWithScore(node=made, score=0.5)


def engine_over(memory: ContextMemory, *texts: str, **options: Any) -> ContextMemoryQueryEngine:
    return ContextMemoryQueryEngine(Given(*texts), memory, **{"max_new_tokens": 6, **options})


def ids(nodes: Any) -> list[str]:
    return [one.node.node_id for one in nodes]


@pytest.fixture
def index() -> VectorStoreIndex:
    documents = [Document(text=f"passage {n} of the book", id_=f"doc-{n}") for n in range(4)]
    return VectorStoreIndex.from_documents(documents, embed_model=MockEmbedding(embed_dim=8))


class TestQueryEngine:
    def test_only_new_nodes_are_prefilled(self, llama_memory: Make) -> None:
        memory = llama_memory(system="Be brief.")
        engine = engine_over(memory, "one", "two")
        first = engine.query("what?")
        assert ids(first.source_nodes) == first.metadata["new"] and first.metadata["resident"] == []
        length = memory.seq_length
        engine.retriever.nodes = [node("three"), *engine.retriever.nodes]
        second = engine.query("what else?")
        assert second.metadata["new"] == ids([node("three")])
        assert second.metadata["resident"] == first.metadata["new"]
        assert ids(second.source_nodes) == ids(engine.retriever.nodes)
        assert second.metadata["tokens_reused"] == length
        assert second.metadata["tokens_prefilled"] == memory.seq_length - length + memory.count_tokens(
            engine._template.format(query_str="what else?"), asked=True
        )
        assert [s.text for s in memory.segments(kind="document")] == ["one\n\n", "two\n\n", "three\n\n"]
        assert_equals_reference(memory)

    def test_counts_are_the_model_tokenizers_with_the_template(self, llama_memory: Make) -> None:
        memory = llama_memory(system="Be brief.")
        response = engine_over(memory, "one", question_template="Q: {query_str}").query("what?")
        messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "one\n\nQ: what?"}]
        text = memory.tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
        pieces = [text.partition("one\n\n")[0], "one\n\n", *text.partition("one\n\n")[2].partition("Q: what?")[1:]]
        counted = sum(len(memory.tokenizer(piece, add_special_tokens=False).input_ids) for piece in pieces)
        assert response.metadata["prompt_tokens"] == counted
        assert response.metadata["tokens_reused"] + response.metadata["tokens_prefilled"] <= counted

    def test_sync_async_and_streams_agree(self, llama_memory: Make) -> None:
        texts = ["one", "two"]
        plain = engine_over(llama_memory(), *texts).query("what?")
        later = asyncio.run(engine_over(llama_memory(), *texts).aquery("what?"))
        streamed = engine_over(llama_memory(), *texts, streaming=True).query("what?")
        pieces = list(streamed.response_gen)

        async def collected() -> tuple[str, Any]:
            response = await engine_over(llama_memory(), *texts, streaming=True).aquery("what?")
            return "".join([piece async for piece in response.async_response_gen()]), response

        text, astreamed = asyncio.run(collected())
        assert plain.response == later.response == "".join(pieces) == text
        assert plain.metadata == later.metadata == streamed.metadata == astreamed.metadata
        assert ids(plain.source_nodes) == ids(later.source_nodes) == ids(streamed.source_nodes)

    def test_async_queries_run_one_after_the_other(self, llama_memory: Make) -> None:
        engine = engine_over(llama_memory(), "one")

        async def both() -> list[Any]:
            return await asyncio.gather(*(engine.aquery("what?") for _ in range(4)))

        assert len({response.response for response in asyncio.run(both())}) == 1

    def test_a_query_during_a_stream_is_refused(self, llama_memory: Make) -> None:
        engine = engine_over(llama_memory(), "one", streaming=True)
        stream = engine.query("what?").response_gen
        next(stream)
        with pytest.raises(MemoryBusy):
            engine.query("what?")
        stream.close()
        assert "".join(engine.query("what?").response_gen)

    def test_nodes_that_fail_to_go_in_undo_nothing_of_another_threads(self, llama_memory: Make) -> None:
        """Between two nodes another thread is refused, not undone."""
        memory, refused = llama_memory(), []

        bridge, append = NodeBridge(memory), memory.append

        def appending(*arguments: Any, **options: Any) -> Any:
            if memory.segments():
                with ThreadPoolExecutor() as other:
                    refused.append(other.submit(append, "mine").exception())
                raise ValueError("broken")
            return append(*arguments, **options)

        memory.append = appending  # type: ignore[method-assign]
        with pytest.raises(ValueError, match="broken"):
            bridge.insert([node("one"), node("two")])
        memory.append = append  # type: ignore[method-assign]
        assert isinstance(refused[0], MemoryBusy) and not memory.segments()

    def test_a_stream_is_begun_when_it_is_returned(self, llama_memory: Make) -> None:
        """Its sources are those of the answer, whatever happens before it is read."""
        engine = engine_over(llama_memory(), "one", streaming=True)
        expected = str(engine_over(llama_memory(), "one").query("what?"))
        response = engine.query("what?")
        with pytest.raises(MemoryBusy):
            engine.retract(ids(response.source_nodes)[0])
        assert "".join(response.response_gen) == expected

    def test_tokens_read_again_count_as_computed(self, llama_memory: Make) -> None:
        memory = llama_memory()
        engine = engine_over(memory, on_full="forget")
        size = memory.context_length // memory.count_tokens("word " * 3)
        for name in "ab":
            engine.retriever.nodes = [node("word " * size, name)]
            engine.query("what?")
        kept = engine.bridge.resident()["b"].n_tokens
        engine.retriever.nodes = [node("word " * size, "c")]
        response = engine.query("what?")
        assert response.metadata["forgotten"] == ["a"]
        new = engine.bridge.resident()["c"].n_tokens
        question = memory.count_tokens(engine._template.format(query_str="what?"), asked=True)
        assert response.metadata["tokens_prefilled"] == kept + new + question
        assert response.metadata["tokens_reused"] == memory.seq_length - kept - new

    def test_a_timeout_is_a_timeout(self, llama_memory: Make) -> None:
        engine = engine_over(llama_memory(), "one", streaming=True)
        expected = "".join(engine.query("what?").response_gen)

        async def hurried() -> str:
            response = await engine.aquery("what?")
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(1e-6):
                    async for _ in response.async_response_gen():
                        pass
            await response.response_gen.aclose()
            again = await engine.aquery("what?")
            return "".join([piece async for piece in again.async_response_gen()])

        assert asyncio.run(hurried()) == expected

    def test_a_changed_node_replaces_its_old_version(self, llama_memory: Make) -> None:
        engine = engine_over(llama_memory())
        engine.retriever.nodes = [node("thirty days", "policy")]
        engine.query("how long?")
        engine.retriever.nodes = [node("fourteen days", "policy")]
        response = engine.query("how long?")
        assert response.metadata["new"] == ["policy"] and response.metadata["retracted"] == []
        assert [s.text for s in engine.memory.segments()] == ["fourteen days\n\n"]

    def test_a_node_retrieved_twice_counts_once(self, llama_memory: Make) -> None:
        engine = engine_over(llama_memory(), "one", "two", "one")
        assert len(engine.query("what?").source_nodes) == 2 == len(engine.memory.segments())


class TestEmpty:
    """U33: no nodes, empty nodes."""

    @pytest.mark.parametrize("texts", [(), ("",), ("  \n",), ("", " ")])
    def test_the_model_is_asked_all_the_same(self, llama_memory: Make, texts: tuple[str, ...]) -> None:
        memory = llama_memory(system="Be brief.")
        engine = engine_over(memory, *texts, question_template="{query_str}")
        expected = memory.ask("what?", max_new_tokens=6).text
        response = engine.query("what?")
        assert response.response == expected and response.source_nodes == []
        assert len(response.metadata["empty"]) == len(texts)
        assert [segment.kind for segment in memory.segments()] == ["system"]
        assert asyncio.run(engine.aquery("what?")).response == expected

    @pytest.mark.parametrize("streaming", [False, True])
    def test_a_fixed_message(self, llama_memory: Make, streaming: bool) -> None:
        engine = engine_over(llama_memory(), on_empty="message", empty_message="Nothing.", streaming=streaming)
        response = engine.query("what?")
        assert str(response) == "Nothing." and response.metadata["completion_tokens"] == 0
        engine.retriever.nodes = [node("one")]
        assert str(engine.query("what?")) != "Nothing."

    def test_an_error(self, llama_memory: Make) -> None:
        engine = engine_over(llama_memory(), "", on_empty="raise")
        before = snapshot(engine.memory)
        with pytest.raises(SegmentNotFound, match="1 empty"):
            engine.query("what?")
        assert_unchanged(engine.memory, before)


class TestOverflow:
    """U32: errors that say which nodes do not fit, and by how much."""

    def test_more_nodes_than_fit(self, llama_memory: Make) -> None:
        memory = llama_memory(system="Be brief.")
        engine = engine_over(memory)
        size = memory.context_length // memory.count_tokens("word " * 4)  # a quarter of the context
        engine.retriever.nodes = [node("word " * size, f"node-{n}") for n in range(8)]
        before = snapshot(memory)
        with pytest.raises(ContextOverflow, match=r"exceed.*context length") as raised:
            engine.query("what?")
        assert_unchanged(memory, before)
        assert "node-7" in str(raised.value) and "node-0" not in str(raised.value)
        assert raised.value.needed > raised.value.available > 0
        assert raised.value.limit == memory.context_length
        engine.retriever.nodes = [node("a short one")]
        assert engine.query("what?").source_nodes

    def test_forgetting_takes_what_was_retrieved_longest_ago(self, llama_memory: Make) -> None:
        memory = llama_memory(system="Be brief.")
        engine = engine_over(memory, on_full="forget")
        size = memory.context_length // memory.count_tokens("word " * 4)
        nodes = [node("word " * size, f"node-{n}") for n in range(6)]
        for n in (0, 1, 0, 2):
            engine.retriever.nodes = [nodes[n]]
            engine.query("what?")
        engine.retriever.nodes = nodes[3:5]
        response = engine.query("what?")
        assert response.metadata["forgotten"][0] == "node-1"
        assert memory.segments(kind="system") and memory.next_position <= memory.context_length
        assert not engine.bridge.is_retracted("node-1")
        engine.retriever.nodes = [nodes[1]]
        again = engine.query("what?")
        assert again.metadata["new"] == ["node-1"] and again.metadata["retracted"] == []
        memory.verify()

    def test_a_full_memory_does_not_forget_at_every_query(self, llama_memory: Make) -> None:
        """Forgetting computes what stays again; room for several nodes is made at once."""
        memory, times = llama_memory(), []
        engine = engine_over(memory, on_full="forget")
        size = memory.context_length // memory.count_tokens("word " * 16)
        for n in range(48):
            engine.retriever.nodes = [node("word " * size, f"node-{n}")]
            times.append(len(engine.query("what?").metadata["forgotten"]))
        forgetting = [n for n, gone in enumerate(times) if gone]
        assert len(forgetting) >= 2, "it was full more than once"
        assert all(later - earlier >= 3 for earlier, later in pairwise(forgetting))


class TestRetraction:
    """U24: gone in one store, gone in the other."""

    @pytest.mark.parametrize("method", ["auto", "recompute", "mask", "delete_and_shift"])
    def test_a_retracted_node_is_not_put_in_again(self, llama_memory: Make, method: str) -> None:
        engine = engine_over(llama_memory(), "one", "two", "three")
        response = engine.query("what?")
        gone = response.metadata["new"][1]
        assert engine.retract(gone, method=method).segments
        again = engine.query("what?")
        assert again.metadata["retracted"] == [gone] and again.metadata["new"] == []
        assert gone not in ids(again.source_nodes) and gone not in engine.bridge.resident()
        assert "two" not in "".join(segment.text for segment in engine.memory.segments())

    def test_retracting_through_the_memory_counts_as_well(self, llama_memory: Make) -> None:
        engine = engine_over(llama_memory(), "one", "two")
        gone = engine.query("what?").metadata["new"][0]
        engine.memory.retract(gone, method="mask")
        assert engine.query("what?").metadata["retracted"] == [gone]

    def test_it_stays_out_after_saving_and_loading(self, llama_memory: Make, tmp_path: Any) -> None:
        engine = engine_over(llama_memory(), "one", "two")
        gone = engine.query("what?").metadata["new"][0]
        engine.retract(gone)
        memory = engine.memory
        loaded = ContextMemory.load(memory.save(tmp_path / "saved"), memory.model, memory.tokenizer)
        assert engine_over(loaded, "one", "two").query("what?").metadata["retracted"] == [gone]

    def test_without_the_block_list_it_comes_back_and_that_is_said(self, llama_memory: Make) -> None:
        memory = llama_memory()
        engine = engine_over(memory, "one", "two", bridge=NodeBridge(memory, block_retracted=False))
        gone = engine.query("what?").metadata["new"][0]
        engine.retract(gone)
        again = engine.query("what?")
        assert again.metadata["retracted"] == [gone] == again.metadata["new"]
        assert gone in ids(again.source_nodes)
        assert gone in ids(again.source_nodes)
        assert engine.query("what?").metadata["retracted"] == []
        memory.retract(gone, method="recompute", reason="made room for other nodes")
        assert not engine.bridge.is_retracted(gone)  # the wish ended when it was put in again

    def test_a_forgotten_node_can_be_retracted(self, llama_memory: Make) -> None:
        memory = llama_memory()
        engine = engine_over(memory, on_full="forget")
        size = memory.context_length // memory.count_tokens("word " * 2)
        for name in ("a", "b"):
            engine.retriever.nodes = [node("word " * size, name)]
            engine.query("what?")
        assert list(engine.bridge.resident()) == ["b"] and not engine.bridge.is_retracted("a")
        assert engine.retract("a").method == "none"
        engine.retriever.nodes = [node("word " * size, "a")]
        assert engine.query("what?").metadata["retracted"] == ["a"]

    def test_other_parts_of_a_retracted_document_stay_out(self, llama_memory: Make) -> None:
        engine = engine_over(llama_memory())
        engine.retriever.nodes = [node("a1", document="a")]
        engine.query("what?")
        engine.retract(ref_doc_id="a")
        engine.retriever.nodes = [node("a2", document="a"), node("b1", document="b")]
        response = engine.query("what?")
        assert len(response.metadata["retracted"]) == 1 and len(response.source_nodes) == 1

    def test_going_back_does_not_bring_it_back(self, llama_memory: Make) -> None:
        """The bridge reads wishes off the event log, which going back does not shorten."""
        memory = llama_memory()
        engine = engine_over(memory, "one", "two")
        engine.query("what?")
        gone = next(iter(engine.bridge.resident()))
        mark = memory.checkpoint()
        engine.retract(gone, method="recompute")
        memory.restore(mark)
        assert gone in engine.bridge.resident()
        engine.bridge.keep_out()
        assert gone not in engine.bridge.resident() and engine.query("what?").metadata["retracted"] == [gone]

    def test_room_made_in_a_turn_that_failed_is_no_excuse(self, llama_memory: Make) -> None:
        memory = llama_memory()
        engine = ContextMemoryChatEngine(memory, retriever=Given(), on_full="forget", max_new_tokens=4)
        size = memory.context_length // memory.count_tokens("word " * 2)
        engine._retriever.nodes = [node("word " * size, "a")]
        engine.bridge.insert(engine._retriever.nodes)
        engine._retriever.nodes = [node("word " * size, "b")]
        broken, memory.ask = memory.ask, lambda *a, **k: 1 / 0  # type: ignore[method-assign,assignment]
        with pytest.raises(ZeroDivisionError):
            engine.chat("hello")
        memory.ask = broken  # type: ignore[method-assign]
        assert list(engine.bridge.resident()) == ["a"]
        engine.retract("a", method="recompute")
        assert engine.bridge.is_retracted("a")

    def test_a_node_with_the_key_of_something_else_is_refused(self, llama_memory: Make) -> None:
        engine = engine_over(llama_memory())
        engine.memory.append("mine", key="policy")
        engine.retriever.nodes = [node("theirs", "policy")]
        before = snapshot(engine.memory)
        with pytest.raises(InvalidInput, match="'policy'"):
            engine.query("what?")
        assert_unchanged(engine.memory, before)
        with pytest.raises(InvalidInput, match="shared"):
            engine.bridge.insert([], on_duplicate="share")

    def test_slots_of_erased_nodes_make_room(self, llama_memory: Make) -> None:
        memory = llama_memory()
        engine = engine_over(memory, on_full="forget")
        size = memory.context_length // memory.count_tokens("word " * 2)
        engine.retriever.nodes = [node("word " * size, "a"), node("a short one", "b")]
        engine.query("what?")
        engine.retract("a", method="mask")
        engine.retriever.nodes = [node("word " * size, "c")]
        response = engine.query("what?")
        assert response.metadata["new"] == ["c"] and response.metadata["forgotten"] == []
        assert_equals_reference(memory)

    def test_a_deletion_that_cannot_be_done_is_refused_before_the_index(
        self, llama_memory: Make, index: VectorStoreIndex
    ) -> None:
        engine = ContextMemoryQueryEngine(index.as_retriever(similarity_top_k=4), llama_memory(), max_new_tokens=4)
        engine.query("what?")
        with pytest.raises(InvalidInput):
            engine.bridge.delete_ref_doc(index, "doc-1", method="bogus")
        assert "doc-1" in index.ref_doc_info

    def test_a_whole_document(self, llama_memory: Make) -> None:
        engine = engine_over(llama_memory())
        engine.retriever.nodes = [node("a1", document="a"), node("b1", document="b"), node("a2", document="a")]
        engine.query("what?")
        report = engine.retract(ref_doc_id="a", method="recompute")
        assert len(report.segments) == 2 and [s.source for s in engine.memory.segments()] == ["b"]
        assert_equals_reference(engine.memory)

    def test_unknown_and_ambiguous_names_are_refused(self, llama_memory: Make) -> None:
        engine = engine_over(llama_memory(), "one")
        engine.query("what?")
        with pytest.raises(SegmentNotFound):
            engine.retract("nobody")
        with pytest.raises(InvalidInput, match="node_id"):
            engine.retract()
        with pytest.raises(InvalidInput, match="not both"):
            engine.retract("one", ref_doc_id="two")

    def test_both_stores_are_deleted_from(self, llama_memory: Make, index: VectorStoreIndex) -> None:
        memory = llama_memory()
        engine = ContextMemoryQueryEngine(index.as_retriever(similarity_top_k=4), memory, max_new_tokens=4)
        first = engine.query("what?")
        assert len(first.metadata["new"]) == 4
        report = engine.bridge.delete_ref_doc(index, "doc-2")
        assert len(report.segments) == 1 and memory.segments(source="doc-2", state="live") == []
        assert "doc-2" not in index.ref_doc_info
        after = engine.query("what?")
        assert len(after.source_nodes) == 3 and after.metadata["retracted"] == []
        assert engine.bridge.reconcile(index) == type(engine.bridge.reconcile(index))((), ())

    def test_what_was_never_inserted_is_deleted_from_the_index(
        self, llama_memory: Make, index: VectorStoreIndex
    ) -> None:
        assert NodeBridge(llama_memory()).delete_ref_doc(index, "doc-1") is None
        assert "doc-1" not in index.ref_doc_info

    def test_what_the_index_no_longer_holds_is_reported(self, llama_memory: Make, index: VectorStoreIndex) -> None:
        engine = ContextMemoryQueryEngine(index.as_retriever(similarity_top_k=4), llama_memory(), max_new_tokens=4)
        engine.query("what?")
        nodes = {segment.source: name for name, segment in engine.bridge.resident().items()}
        index.delete_ref_doc("doc-0")
        engine.retract(nodes["doc-3"])
        report = engine.bridge.reconcile(index)
        assert report.orphans == (nodes["doc-0"],) and report.blocked == (nodes["doc-3"],)

    def test_a_list_index_tells_what_it_holds(self, llama_memory: Make) -> None:
        index = SummaryIndex.from_documents([Document(text="a"), Document(text="b", id_="b")])
        engine = ContextMemoryQueryEngine(index.as_retriever(), llama_memory(), max_new_tokens=4)
        engine.query("what?")
        assert engine.bridge.reconcile(index).orphans == ()
        index.delete_ref_doc("b")
        assert len(engine.bridge.reconcile(index).orphans) == 1

    def test_other_engines_can_drop_retracted_nodes(self, llama_memory: Make) -> None:
        memory = llama_memory()
        engine = engine_over(memory, "one", "two")
        gone = engine.query("what?").metadata["new"][0]
        engine.retract(gone)
        stock = RetrieverQueryEngine.from_args(
            engine.retriever,
            llm=ContextMemoryLLM(llama_memory(), max_new_tokens=4),
            node_postprocessors=[DropRetracted(engine.bridge)],
        )
        assert gone not in ids(stock.query("what?").source_nodes)


class TestLLM:
    def test_complete_asks_after_what_the_memory_holds(self, llama_memory: Make) -> None:
        memory = llama_memory(system="Be brief.")
        memory.append("a passage ")
        llm, before = ContextMemoryLLM(memory, max_new_tokens=5), snapshot(memory)
        expected = memory.ask("what?", max_new_tokens=5)
        response = llm.complete("what?")
        assert response.text == expected.text
        counts = response.additional_kwargs
        assert counts["prompt_tokens"] == expected.tokens_reused + expected.tokens_prefilled
        assert counts["completion_tokens"] == len(expected.token_ids)
        assert llm.complete("what?", max_tokens=2).additional_kwargs["completion_tokens"] <= 2
        assert_unchanged(memory, before)
        assert llm.metadata.context_window == memory.context_length - memory.next_position

    def test_sync_async_and_streams_agree(self, llama_memory: Make) -> None:
        messages = [ChatMessage("Be brief.", role="system"), ChatMessage("hello", role="user")]

        async def twins() -> list[str]:
            llm = ContextMemoryLLM(llama_memory(), max_new_tokens=6)
            chat = [piece async for piece in await llm.astream_chat(messages)]
            complete = [piece async for piece in await llm.astream_complete("hello")]
            assert "".join(p.delta for p in chat) == chat[-1].message.content
            return [
                (await llm.achat(messages)).message.content or "",
                chat[-1].message.content or "",
                (await llm.acomplete("hello")).text,
                complete[-1].text,
            ]

        llm = ContextMemoryLLM(llama_memory(), max_new_tokens=6)
        chat, complete = llm.chat(messages).message.content, llm.complete("hello").text
        assert asyncio.run(twins()) == [chat, chat, complete, complete]
        assert list(llm.stream_chat(messages))[-1].message.content == chat
        assert list(llm.stream_complete("hello"))[-1].text == complete

    def test_a_growing_list_of_messages_reuses_what_it_shares(self, llama_memory: Make) -> None:
        llm = ContextMemoryLLM(llama_memory(system="Be brief."), max_new_tokens=6)
        messages = [ChatMessage("Be brief.", role="system"), ChatMessage("hello", role="user")]
        first = llm.chat(messages)
        longer = [*messages, first.message, ChatMessage("and now?", role="user")]
        second = llm.chat(longer)
        n_new = second.additional_kwargs["prompt_tokens"] - second.additional_kwargs["tokens_reused"]
        assert n_new == llm.memory.count_tokens("and now?", asked=True)
        plain = llama_memory(system="Be brief.")
        plain.ask("hello", keep=True, max_new_tokens=6)
        assert plain.ask("and now?", max_new_tokens=6).text == second.message.content
        regenerated = llm.chat(messages)
        assert regenerated.message.content == first.message.content
        fresh = ContextMemoryLLM(llama_memory(system="Be brief."), max_new_tokens=6)
        other = [*messages[:1], ChatMessage("something else", role="user")]
        assert llm.chat(other).message.content == fresh.chat(other).message.content

    def test_a_retraction_in_the_memory_reaches_the_next_list(self, llama_memory: Make) -> None:
        memory = llama_memory()
        bad = memory.append("a misleading passage ")
        memory.append("a good one ")
        llm, messages = ContextMemoryLLM(memory, max_new_tokens=6), [ChatMessage("what?", role="user")]
        llm.chat(messages)
        memory.retract(bad, method="recompute")
        clean = llama_memory()
        clean.append("a good one ")
        assert (
            llm.chat(messages).message.content
            == ContextMemoryLLM(clean, max_new_tokens=6).chat(messages).message.content
        )

    def test_every_role_is_read(self, llama_memory: Make) -> None:
        llm = ContextMemoryLLM(llama_memory(), max_new_tokens=4)
        messages = [
            ChatMessage("Be brief.", role=MessageRole.DEVELOPER),
            ChatMessage("call it", role=MessageRole.USER),
            ChatMessage("calling", role=MessageRole.ASSISTANT),
            ChatMessage("the result", role=MessageRole.TOOL),
        ]
        assert llm.chat(messages).message.content
        assert [s.kind for s in llm._turns._fork.segments()] == [
            "system",
            "user",
            "assistant",
            "tool_result",
            "assistant",
        ]

    def test_a_system_message_of_somebody_elses_is_read(self, llama_memory: Make) -> None:
        """As those of LlamaIndex's own prompts: the system text where the memory is empty, before the messages elsewhere."""
        messages = [ChatMessage("Be verbose.", role="system"), ChatMessage("hello", role="user")]
        empty = llama_memory(budget=512)
        llm = ContextMemoryLLM(empty, max_new_tokens=4)
        told = llama_memory(system="Be verbose.").ask("hello", max_new_tokens=4).text
        assert llm.chat(messages).message.content == told == llm.chat(messages).message.content
        assert llm.memory is empty and not empty.seq_length and llm._turns._fork.budget.n_tokens == 512
        other = [ChatMessage("Be brief.", role="system"), messages[1]]
        brief = llama_memory(system="Be brief.").ask("hello", max_new_tokens=4).text
        assert llm.chat(other).message.content == brief

        memory = llama_memory(system="Be brief.")
        memory.append("a passage ")
        llm = ContextMemoryLLM(memory, max_new_tokens=4)
        text = llm.chat(messages).message.content
        memory.append("Be verbose.\n\n", kind="user")
        assert memory.ask("hello", max_new_tokens=4).text == text

    def test_stock_engines_answer_over_a_memory_that_holds_something(self, llama_memory: Make) -> None:
        """Their prompts bring a system message; an error would be swallowed and a canned text returned."""
        for system in (None, "Be brief."):
            memory = llama_memory(system=system)
            memory.append("a passage ")
            stock = RetrieverQueryEngine.from_args(Given("one"), llm=ContextMemoryLLM(memory, max_new_tokens=4))
            assert str(stock.query("what?")) != "Empty Response"

    def test_messages_that_cannot_be_read_are_refused(self, llama_memory: Make) -> None:
        llm = ContextMemoryLLM(llama_memory(system="Be brief."))
        with pytest.raises(InvalidInput, match="image"):
            llm.chat([ChatMessage(blocks=[ImageBlock(image=b"x")], role="user")])
        with pytest.raises(InvalidInput, match="no messages"):
            llm.chat([])

    def test_an_abandoned_stream_leaves_nothing(self, llama_memory: Make) -> None:
        llm = ContextMemoryLLM(llama_memory(), max_new_tokens=6)
        messages = [ChatMessage("hello", role="user")]
        stream = llm.stream_chat(messages)
        next(stream)
        stream.close()
        fresh = ContextMemoryLLM(llama_memory(), max_new_tokens=6)
        assert llm.chat(messages).message.content == fresh.chat(messages).message.content


class TestChatEngine:
    def test_the_history_is_the_memory(self, llama_memory: Make) -> None:
        engine = ContextMemoryChatEngine(llama_memory(system="Be brief."), max_new_tokens=5)
        first = engine.chat("hello")
        assert [m.content for m in engine.chat_history] == ["Be brief.", "hello", first.response]
        turn = engine.memory.segments(kind="assistant")[0]
        engine.memory.retract(turn, method="recompute")
        assert [m.role.value for m in engine.chat_history] == ["system", "user"]
        assert_equals_reference(engine.memory)
        engine.reset()
        assert [m.role.value for m in engine.chat_history] == ["system"]

    def test_sync_async_and_streams_agree(self, llama_memory: Make) -> None:
        async def twins() -> tuple[str, str]:
            plain = await ContextMemoryChatEngine(llama_memory(), max_new_tokens=5).achat("hello")
            streamed = await ContextMemoryChatEngine(llama_memory(), max_new_tokens=5).astream_chat("hello")
            return plain.response, "".join([piece async for piece in streamed.async_response_gen()])

        engine = ContextMemoryChatEngine(llama_memory(), max_new_tokens=5)
        text = "".join(engine.stream_chat("hello").response_gen)
        assert engine.chat_history[-1].content == text
        assert asyncio.run(twins()) == (text, text)
        assert ContextMemoryChatEngine(llama_memory(), max_new_tokens=5).chat("hello").response == text

    def test_passages_are_prefilled_once_and_retracted(self, llama_memory: Make) -> None:
        engine = ContextMemoryChatEngine(llama_memory(), retriever=Given("one", "two"), max_new_tokens=5)
        first, second = engine.chat("hello"), engine.chat("and?")
        assert ids(first.source_nodes) == ids(second.source_nodes) == list(engine.bridge.resident())
        with pytest.warns(match="derived"):
            engine.retract(ids(first.source_nodes)[0])
        assert engine.chat("so?").metadata["retracted"] == ids(first.source_nodes)[:1]

    def test_a_given_history_replaces_the_conversation(self, llama_memory: Make) -> None:
        engine = ContextMemoryChatEngine(llama_memory(), max_new_tokens=5)
        engine.chat("forget this")
        history = [ChatMessage("hello", role="user"), ChatMessage("hi", role="assistant")]
        engine.chat("and now?", chat_history=history)
        assert [m.content for m in engine.chat_history][:3] == ["hello", "hi", "and now?"]

    def test_retracted_passages_stay_out_of_every_history(self, llama_memory: Make) -> None:
        memory = llama_memory()
        NodeBridge(memory).insert([node("one", "a"), node("two", "b")])
        engine = ContextMemoryChatEngine(memory, retriever=Given("one"), max_new_tokens=4)
        engine._retriever.nodes = [node("one", "a"), node("two", "b")]
        engine.retract("a", method="recompute")
        engine.chat("hello", chat_history=[ChatMessage("hi", role="user")])
        assert list(engine.bridge.resident()) == ["b"]
        engine.reset()
        assert list(engine.bridge.resident()) == ["b"]

    def test_a_stream_that_is_abandoned_or_fails_keeps_nothing(self, llama_memory: Make) -> None:
        engine = ContextMemoryChatEngine(llama_memory(), retriever=Given("one"), max_new_tokens=40)
        first = engine.chat("hello")
        before = snapshot(engine.memory)
        engine._retriever.nodes = [node("another")]
        stream = engine.stream_chat("and?", chat_history=[]).response_gen
        next(stream)
        stream.close()
        assert_unchanged(engine.memory, before)
        with pytest.raises(ContextOverflow):
            engine.stream_chat("word " * engine.memory.context_length, chat_history=[])
        assert_unchanged(engine.memory, before)
        assert engine.chat_history[-1].content == first.response

    def test_a_foreign_system_message_is_refused(self, llama_memory: Make) -> None:
        engine = ContextMemoryChatEngine(llama_memory(system="Be brief."), max_new_tokens=4)
        before = snapshot(engine.memory)
        with pytest.raises(InvalidInput, match="system="):
            engine.chat("hello", chat_history=[ChatMessage("Be verbose.", role="system")])
        assert_unchanged(engine.memory, before)
        assert engine.chat("hello", chat_history=[ChatMessage("Be brief.", role="system")]).response

    def test_a_failure_keeps_nothing(self, llama_memory: Make) -> None:
        engine = ContextMemoryChatEngine(llama_memory(), retriever=Given("one"), max_new_tokens=5)
        before = snapshot(engine.memory)
        with pytest.raises(ContextOverflow):
            engine.chat("word " * engine.memory.context_length)
        assert_unchanged(engine.memory, before)


def test_a_block_recalls_what_short_term_memory_let_go(llama_memory: Make) -> None:
    memory = llama_memory()
    block = ContextMemoryBlock(memory, top_k=1)
    store = Memory.from_defaults(
        session_id="s", token_limit=60, token_flush_size=30, memory_blocks=[block], tokenizer_fn=str.split
    )

    async def conversation() -> Any:
        for n in range(12):
            text = "The wine cellar's code is 4821." if n == 0 else f"Message {n} is about the weather in spring."
            await store.aput(ChatMessage(text, role="user"))
        return await block.aget([ChatMessage("Which number opens the cellar?", role="user")], session_id="s")

    assert "4821" in asyncio.run(conversation())
    code = memory.find("wine cellar")[0].segment
    assert code.source == "s" and code.kind == "user"
    memory.retract(code)
    recalled = asyncio.run(block.aget([ChatMessage("Which number opens the cellar?", role="user")]))
    assert recalled and "4821" not in recalled
    assert asyncio.run(block.atruncate("a b\nc d", 1)) == "a b" and asyncio.run(block.atruncate("a b", 99)) is None
    assert asyncio.run(block.aget([])) == ""
    called = ChatMessage(blocks=[TextBlock(text="looking it up"), ToolCallBlock(tool_name="look", tool_kwargs={})])
    asyncio.run(block.aput([called, ChatMessage("and more", role="user")]))
    assert [segment.text for segment in memory.segments()][-2:] == ["looking it up", "and more"]


@pytest.mark.smollm2
class TestEmbeddedModels:
    """A real vector index, the embedded language model, the embedded sentence embedding model."""

    FEE = "The yearly fee of the Larkspur library is {} dollars. It is described in the guide for visitors."
    QUESTION = "What is the yearly fee of the Larkspur library?"

    @pytest.fixture(scope="class")
    def index(self) -> VectorStoreIndex:
        passages = [p for document in prose_of().documents for p in document if len(p) < 400][:200]
        documents = [Document(text=text, id_=f"reference-{n}") for n, text in enumerate(passages)]
        documents.append(Document(text="From the county almanac. " + self.FEE.format(35), id_="almanac"))
        documents.append(Document(text="From a visitor's letter. " + self.FEE.format(90), id_="letter"))
        assert len(documents) == 202
        return VectorStoreIndex.from_documents(documents, embed_model=SentenceEmbedding())

    def test_a_misleading_passage_flips_an_answer_and_retracting_it_flips_it_back(
        self, smollm2: tuple[Any, Any], index: VectorStoreIndex
    ) -> None:
        memory = ContextMemory(*smollm2)
        engine = ContextMemoryQueryEngine(index.as_retriever(similarity_top_k=4), memory, max_new_tokens=24)
        misled = engine.query(self.QUESTION)
        assert {"almanac", "letter"} <= {source.node.ref_doc_id for source in misled.source_nodes}
        assert "90" in misled.response and "35" not in misled.response
        assert engine.retract(ref_doc_id="letter").method == "kveraser"
        right = engine.query(self.QUESTION)
        assert "35" in right.response and "90" not in right.response
        assert right.metadata["new"] == [] and len(right.metadata["retracted"]) == 1
        assert right.metadata["tokens_prefilled"] < 40 < right.metadata["tokens_reused"]
        assert "letter" not in {source.node.ref_doc_id for source in right.source_nodes}

    def test_later_queries_prefill_only_what_is_new(self, smollm2: tuple[Any, Any], index: VectorStoreIndex) -> None:
        memory = ContextMemory(*smollm2)
        engine = ContextMemoryQueryEngine(index.as_retriever(similarity_top_k=3), memory, max_new_tokens=2)
        asked = ["What does the assert statement do?", "When does an assertion fail?", "What is a lambda expression?"]
        first, *later = [engine.query(question) for question in asked]
        assert first.metadata["resident"] == [] and sum(len(r.metadata["resident"]) for r in later) > 0
        for response in later:
            new = [s for s in memory.segments() if s.key in response.metadata["new"]]
            question = response.metadata["tokens_prefilled"] - sum(segment.n_tokens for segment in new)
            assert 0 < question < 40 and response.metadata["tokens_reused"] >= first.metadata["prompt_tokens"] - 40
        assert memory.verify().is_equal
