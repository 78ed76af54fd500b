"""Policies of a tool loop, one a file, by name."""

from contextmem.integrations.tool_loop.policies.base import POLICIES, Change, Policy, policy_named, register
from contextmem.integrations.tool_loop.policies.collapse_repeats import CollapseRepeats
from contextmem.integrations.tool_loop.policies.quarantine import Quarantine
from contextmem.integrations.tool_loop.policies.refuse_oversize import RefuseOversize, oversize
from contextmem.integrations.tool_loop.policies.retract_failed import RetractFailed
from contextmem.integrations.tool_loop.policies.supersede_reads import SupersedeReads

__all__ = [
    "POLICIES",
    "Change",
    "CollapseRepeats",
    "Policy",
    "Quarantine",
    "RefuseOversize",
    "RetractFailed",
    "SupersedeReads",
    "oversize",
    "policy_named",
    "register",
]
