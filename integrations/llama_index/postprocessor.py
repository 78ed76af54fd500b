"""A node postprocessor for other engines: nodes that were retracted from a memory are dropped."""

from __future__ import annotations

from llama_index.core.bridge.pydantic import PrivateAttr
from llama_index.core.postprocessor.types import BaseNodePostprocessor
from llama_index.core.schema import NodeWithScore, QueryBundle

from contextmem.integrations.llama_index.bridge import NodeBridge

__all__ = ["DropRetracted"]


class DropRetracted(BaseNodePostprocessor):
    """Drops retrieved nodes that were retracted from the bridge's memory."""

    _bridge: NodeBridge = PrivateAttr()

    def __init__(self, bridge: NodeBridge) -> None:
        super().__init__()
        self._bridge = bridge

    @classmethod
    def class_name(cls) -> str:
        """As LlamaIndex names components."""
        return "ContextMemoryDropRetracted"

    def _postprocess_nodes(
        self, nodes: list[NodeWithScore], query_bundle: QueryBundle | None = None
    ) -> list[NodeWithScore]:
        return [node for node in nodes if not self._bridge.is_retracted(node.node.node_id, node.node.ref_doc_id)]
