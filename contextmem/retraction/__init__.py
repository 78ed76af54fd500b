"""Retraction: one file a method, one protocol, one registry."""

from contextmem.retraction import crop, delete_and_shift, instruct, kveraser, mask, recompute, refill, suffix_repair
from contextmem.retraction.auto import choose
from contextmem.retraction.base import METHODS, Edit, Method, Plan, check_cached, method_named, register
from contextmem.retraction.kveraser import KVErase
from contextmem.retraction.suffix_repair import SuffixRepair

__all__ = [
    "COMPARED",
    "METHODS",
    "Edit",
    "KVErase",
    "Method",
    "Plan",
    "SuffixRepair",
    "check_cached",
    "choose",
    "crop",
    "delete_and_shift",
    "instruct",
    "kveraser",
    "mask",
    "method_named",
    "recompute",
    "refill",
    "register",
    "suffix_repair",
]

# What demo and evaluations set side by side: every way to retract a span in the middle, the exact one first.
COMPARED = (
    "recompute",
    "kveraser",
    "delete_and_shift",
    "suffix_repair",
    "suffix_repair_query",
    "refill",
    "mask",
    "instruct",
)
