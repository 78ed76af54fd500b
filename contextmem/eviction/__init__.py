"""Eviction: one file an evictor, one protocol, one registry."""

from contextmem.eviction import (
    contrastkv,
    expected_attention,
    h2o,
    knorm,
    kvzip,
    kvzip_plus,
    random,
    snapkv,
    streaming_llm,
)
from contextmem.eviction.base import EVICTORS, Evictor, Reading, evictor_named, register
from contextmem.eviction.kvpress import KVPressEvictor

__all__ = [
    "EVICTORS",
    "Evictor",
    "KVPressEvictor",
    "Reading",
    "contrastkv",
    "evictor_named",
    "expected_attention",
    "h2o",
    "knorm",
    "kvzip",
    "kvzip_plus",
    "random",
    "register",
    "snapkv",
    "streaming_llm",
]
