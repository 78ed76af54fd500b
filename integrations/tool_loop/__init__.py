"""A loop of constrained tool calls over one memory: failed, repeated and stale results leave the context again.

Needs `pip install 'contextmem[tools]'`.
"""

from contextmem.integrations.tool_loop.formats import ToolFormat, format_of
from contextmem.integrations.tool_loop.grammar import CallGrammar, call_schema
from contextmem.integrations.tool_loop.loop import RunReport, ToolLoop
from contextmem.integrations.tool_loop.pairs import Pair, pairs_of
from contextmem.integrations.tool_loop.policies import (
    POLICIES,
    Change,
    CollapseRepeats,
    Policy,
    Quarantine,
    RefuseOversize,
    RetractFailed,
    SupersedeReads,
    register,
)
from contextmem.integrations.tool_loop.tools import Outcome, Tool, tool

__all__ = [
    "POLICIES",
    "CallGrammar",
    "Change",
    "CollapseRepeats",
    "Outcome",
    "Pair",
    "Policy",
    "Quarantine",
    "RefuseOversize",
    "RetractFailed",
    "RunReport",
    "SupersedeReads",
    "Tool",
    "ToolFormat",
    "ToolLoop",
    "call_schema",
    "format_of",
    "pairs_of",
    "register",
    "tool",
]
