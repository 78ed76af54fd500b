"""RULER-style tasks on a compacted memory: one file a family of tasks, one registry."""

from contextmem.evals.ruler import documents, needles, tracking, words
from contextmem.evals.ruler.base import NEEDLE_FAMILY, TASKS, Case, Material, case_of, register

__all__ = [
    "NEEDLE_FAMILY",
    "TASKS",
    "Case",
    "Material",
    "case_of",
    "documents",
    "needles",
    "register",
    "tracking",
    "words",
]
