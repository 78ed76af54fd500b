"""Eviction: one file an evictor, one protocol, one registry."""

from contextmem.eviction import expected_attention, h2o, knorm, kvzip, random, snapkv, streaming_llm
from contextmem.eviction.base import EVICTORS, Evictor, Reading, evictor_named, register

__all__ = [
    "EVICTORS",
    "Evictor",
    "Reading",
    "evictor_named",
    "expected_attention",
    "h2o",
    "knorm",
    "kvzip",
    "random",
    "register",
    "snapkv",
    "streaming_llm",
]
