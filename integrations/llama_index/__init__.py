"""LlamaIndex over one persistent KV cache: a query engine, a chat engine, a language model, a memory block.

Needs `pip install 'contextmem[llama-index]'`.
"""

from contextmem.integrations.llama_index.block import ContextMemoryBlock
from contextmem.integrations.llama_index.bridge import Inserted, NodeBridge, Reconciled
from contextmem.integrations.llama_index.chat_engine import ContextMemoryChatEngine
from contextmem.integrations.llama_index.embedding import SentenceEmbedding
from contextmem.integrations.llama_index.llm import ContextMemoryLLM
from contextmem.integrations.llama_index.postprocessor import DropRetracted
from contextmem.integrations.llama_index.query_engine import ContextMemoryQueryEngine

__all__ = [
    "ContextMemoryBlock",
    "ContextMemoryChatEngine",
    "ContextMemoryLLM",
    "ContextMemoryQueryEngine",
    "DropRetracted",
    "Inserted",
    "NodeBridge",
    "Reconciled",
    "SentenceEmbedding",
]
