"""Nodes of an index as segments of a memory: put in once, taken out of both, and kept in step.

A node's segment has the node's id as `key` and its document's id as `source`. What was retracted is known from the
memory's own records, so it survives saving and loading, and `memory.retract` is heeded like `bridge.retract`.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from llama_index.core.schema import MetadataMode, NodeWithScore

from contextmem import ContextMemory, ContextOverflow, DependentsWarning, InvalidInput, Report, Segment, SegmentNotFound
from contextmem.arguments import check_choice

__all__ = ["Inserted", "NodeBridge", "Reconciled"]

_ROOM = "made room for other nodes"
_REPLACED = "replaced by a newer version"
_SHARE_FREED = 0.25  # of the context, beside what is needed: forgetting reads what stays again, and so comes seldom


@dataclass(frozen=True)
class Inserted:
    """What became of retrieved nodes.

    Attributes:
        nodes: those that stand in the memory now, in the order they were retrieved.
        new, resident: ids of those that were prefilled, and of those that were there already.
        retracted: ids of those that were retracted before: left out, or put in again if the bridge does not block them.
        empty: ids of those without a word.
        forgotten: ids of those that were taken out to make room.
        n_tokens: tokens computed, those included that were read again to make room or to replace a version.
    """

    nodes: tuple[NodeWithScore, ...] = ()
    new: tuple[str, ...] = ()
    resident: tuple[str, ...] = ()
    retracted: tuple[str, ...] = ()
    empty: tuple[str, ...] = ()
    forgotten: tuple[str, ...] = ()
    n_tokens: int = 0


@dataclass(frozen=True)
class Reconciled:
    """How a memory and an index differ.

    Attributes:
        orphans: ids of nodes that stand in the memory and that the index does not hold any more.
        blocked: ids of nodes that were retracted from the memory and that the index still holds.
    """

    orphans: tuple[str, ...]
    blocked: tuple[str, ...]


class NodeBridge:
    """The nodes of one memory.

    Attributes:
        memory: where they stand.
        block_retracted: whether a node that was retracted stays out when it is retrieved again.
    """

    def __init__(self, memory: ContextMemory, *, block_retracted: bool = True, separator: str = "\n\n") -> None:
        """
        Args:
            memory: where nodes are put; segments of its own may stand beside them.
            block_retracted: False puts a retracted node in again when it is retrieved again.
            separator: put after every node's text.
        """
        self.memory, self.block_retracted, self._separator = memory, block_retracted, separator
        self._last_seen: dict[str, int] = {}  # when a node was last retrieved
        self._clock = 0
        self._unwanted: set[str] = set()  # nodes and documents that were retracted through this bridge

    def resident(self) -> dict[str, Segment]:
        """Live segments of nodes by node id, in slot order."""
        return {s.key: s for s in self.memory.segments() if s.key is not None and "node_hash" in s.metadata}

    def is_retracted(self, node_id: str, ref_doc_id: str | None = None) -> bool:
        """Whether somebody wanted the node, or its whole document, out of the memory, and it was not put in again."""
        if node_id in self.resident():
            return False
        return node_id in self._wished_away() or not self._unwanted.isdisjoint((node_id, ref_doc_id))

    def _wished_away(self) -> set[str]:
        """Keys whose last version was retracted on somebody's wish; the event log survives going back and saving."""
        gone: set[str] = set()
        for event in self.memory.events:
            keys = {record.key for record in event.segments if record.key is not None}
            if event.operation == "append":
                gone -= keys
            elif event.operation == "retract" and event.reason not in (_ROOM, _REPLACED):
                gone |= keys
        return gone

    def keep_out(self) -> None:
        """Take out again what was retracted and came back, as it does when the memory goes back to a checkpoint."""
        wished = self._wished_away() | self._unwanted
        back = [s for name, s in self.resident().items() if name in wished or s.source in self._unwanted]
        if back and self.block_retracted:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", DependentsWarning)
                self.memory.retract(back, reason="retracted before")

    def insert(
        self, nodes: Sequence[NodeWithScore], *, reserve: int = 0, on_full: str = "error", **options: Any
    ) -> Inserted:
        """Put nodes into the memory that are not there yet; all of them or none.

        A node whose text has changed replaces its old version.

        Args:
            nodes: as a retriever returns them; repeated ones count once.
            reserve: tokens to leave free, for a question and its answer.
            on_full: what to do if they do not fit: "error", or "forget" nodes that are not among `nodes`, the ones
                retrieved longest ago first. What stays is read again then, so a quarter of the context is freed at once.
            options: passed to `ContextMemory.append`.

        Raises:
            ContextOverflow: they do not fit; the message names those that do not.
            MemoryBusy: another thread is working on the memory; from here on, others are refused until the nodes are in.
        """
        check_choice("on_full", on_full, ("error", "forget"))
        if options.get("on_duplicate", "keep") == "share":
            raise InvalidInput("nodes are known by their ids and cannot be shared. Nothing was changed.")
        with self.memory.transaction():
            residents, n_events = self.resident(), len(self.memory.events)
            sorted_in = self._sorted(nodes, residents)
            wanted = [node for kind in ("resident", "new") for node in sorted_in[kind]]
            self._clock += 1
            self._last_seen |= {node.node.node_id: self._clock for node in wanted}
            texts = {node.node.node_id: self._text(node) for node in sorted_in["new"]}
            sizes = {name: self.memory.count_tokens(text) for name, text in texts.items()}
            forgotten = self._make_room(sizes, reserve, residents, on_full)
            for node in sorted_in["new"]:
                self._append(node, texts[node.node.node_id], options)
        self._unwanted -= set(texts)  # put in again, if they were wished away
        used = {node.node.node_id for node in wanted}
        return Inserted(
            nodes=tuple(node for node in _once(nodes) if node.node.node_id in used),
            forgotten=forgotten,
            n_tokens=sum(event.tokens_computed for event in self.memory.events[n_events:]),
            **{kind: tuple(node.node.node_id for node in found) for kind, found in sorted_in.items()},
        )

    def _sorted(self, nodes: Sequence[NodeWithScore], residents: dict[str, Segment]) -> dict[str, list[NodeWithScore]]:
        found: dict[str, list[NodeWithScore]] = {"new": [], "resident": [], "retracted": [], "empty": []}
        unwanted = self._wished_away() | self._unwanted
        for node in _once(nodes):
            name = node.node.node_id
            was_retracted = name not in residents and not unwanted.isdisjoint((name, node.node.ref_doc_id))
            if was_retracted:
                found["retracted"].append(node)
            if not self._text(node).strip():
                found["empty"].append(node)
            elif name in residents and residents[name].metadata["node_hash"] == node.node.hash:
                found["resident"].append(node)
            elif not (was_retracted and self.block_retracted):
                found["new"].append(node)
        return found

    def _append(self, node: NodeWithScore, text: str, options: dict[str, Any]) -> None:
        name = node.node.node_id
        if [s.id for s in self.memory.segments(key=name, state="live") if "node_hash" not in s.metadata]:
            raise InvalidInput(f"key {name!r} is that of a segment that is no node. Nothing was changed.")
        self.memory.append(
            text,
            key=name,
            source=node.node.ref_doc_id,
            metadata={"node_hash": node.node.hash},
            on_conflict="replace",
            **options,
        )

    def _make_room(
        self, sizes: dict[str, int], reserve: int, residents: dict[str, Segment], on_full: str
    ) -> tuple[str, ...]:
        """Ids of the nodes that were forgotten so that texts of these sizes, and the reserve, fit."""
        needed, memory = sum(sizes.values()) + reserve, self.memory
        excess = needed - (memory.context_length - memory.next_position)
        if excess > 0 and on_full == "forget" and memory.next_position > len(memory.token_ids):
            memory.settle()  # erased slots and gaps are free then
            excess = needed - (memory.context_length - memory.next_position)
        if excess <= 0:
            return ()
        spare = sorted(
            (name for name in residents if self._last_seen.get(name, 0) < self._clock and not residents[name].pinned),
            key=lambda name: self._last_seen.get(name, 0),
        )
        going: list[str] = []
        freed, ample = 0, excess + int(_SHARE_FREED * memory.context_length)
        while on_full == "forget" and spare and freed < ample:
            going.append(spare.pop(0))
            freed += residents[going[-1]].n_tokens
        if freed < excess:
            raise self._overflow(sizes, reserve)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DependentsWarning)
            memory.retract([residents[name].id for name in going], method="recompute", reason=_ROOM)
        return tuple(going)

    def _overflow(self, sizes: dict[str, int], reserve: int) -> ContextOverflow:
        limit = self.memory.context_length
        available = limit - self.memory.next_position - reserve
        fitting, total = [], 0
        for name, size in sizes.items():
            total += size
            if total <= available:
                fitting.append(name)
        left = [name for name in sizes if name not in fitting]
        return ContextOverflow(
            f"{len(sizes)} new nodes of {sum(sizes.values()):,} tokens and a reserve of {reserve:,} for question and answer "
            f"exceed what is left of the context length of {limit:,}: {available + reserve:,} tokens. These do not fit: "
            f"{', '.join(left) or 'none; the question and its answer do not'}. Retrieve fewer, retract some, or pass "
            f"on_full='forget'. Nothing was changed.",
            needed=sum(sizes.values()) + reserve,
            available=available + reserve,
            limit=limit,
        )

    def retract(self, node_id: str | None = None, *, ref_doc_id: str | None = None, **options: Any) -> Report:
        """Take a node, or all nodes of a document, out of the memory, and keep them out.

        What was in the memory is kept out by the memory's own records. Nodes of the document that were not, and nodes that
        had made room for others, are kept out by this bridge alone.

        Args:
            node_id, ref_doc_id: one of them.
            options: passed to `ContextMemory.retract`.

        Raises:
            SegmentNotFound: no such node was ever in the memory.
        """
        if (node_id is None) == (ref_doc_id is None):
            raise InvalidInput("give a node_id or a ref_doc_id, not both. Nothing was changed.")
        filters = {"key": node_id} if node_id is not None else {"source": ref_doc_id}
        report = self.memory.retract(**filters, **options)
        if not report.dry_run:
            self._unwanted.add(node_id or ref_doc_id or "")
        return report

    def delete_ref_doc(self, index: Any, ref_doc_id: str, **options: Any) -> Report | None:
        """Delete a document from an index, with its stores, and from the memory.

        Args:
            index: a LlamaIndex index.
            ref_doc_id: of the document.
            options: passed to `ContextMemory.retract`.

        Returns:
            The report of the retraction; None if no node of the document was in the memory.
        """
        try:
            self.memory.retract(source=ref_doc_id, **{**options, "dry_run": True})
        except SegmentNotFound:
            index.delete_ref_doc(ref_doc_id, delete_from_docstore=True)
            return None
        index.delete_ref_doc(ref_doc_id, delete_from_docstore=True)
        return self.memory.retract(source=ref_doc_id, **options)

    def reconcile(self, index: Any) -> Reconciled:
        """What differs between the memory and an index, which announces no deletions itself.

        Raises:
            InvalidInput: the index does not tell what it holds.
        """
        resident = list(self.resident())
        retracted = sorted(name for name in self._wished_away() if name not in resident)
        held = _held(index, [*resident, *retracted])
        return Reconciled(
            tuple(name for name in resident if name not in held), tuple(name for name in retracted if name in held)
        )

    def _text(self, node: NodeWithScore) -> str:
        text = node.node.get_content(metadata_mode=MetadataMode.LLM)
        return text + self._separator if text.strip() else ""


def _once(nodes: Iterable[NodeWithScore]) -> list[NodeWithScore]:
    """Every node the first time it comes."""
    return list({node.node.node_id: node for node in reversed(list(nodes))}.values())[::-1]


def _held(index: Any, node_ids: Sequence[str]) -> set[str]:
    """Those of the nodes that an index would still retrieve."""
    store = getattr(index, "vector_store", None)
    data = getattr(store, "data", None)
    if data is not None and hasattr(data, "embedding_dict"):
        return set(data.embedding_dict) & set(node_ids)
    try:
        if store is not None:
            return {node.node_id for node in store.get_nodes(node_ids=list(node_ids))} if node_ids else set()
        nodes = index.index_struct.nodes
    except (NotImplementedError, AttributeError) as error:
        raise InvalidInput(f"{type(index).__name__} does not tell which nodes it holds: {error}") from None
    return set(nodes) & set(node_ids)
