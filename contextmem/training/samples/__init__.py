"""Training samples: one file a source, one protocol, one registry."""

from contextmem.training.samples import distractor_qa, niah, span_neighbour
from contextmem.training.samples.base import SOURCES, Erasure, Sample, Source, register

__all__ = [
    "SOURCES",
    "Erasure",
    "Sample",
    "Source",
    "distractor_qa",
    "niah",
    "register",
    "span_neighbour",
]
