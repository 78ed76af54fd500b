"""Who was derived from whom. The graph is read off the segments' `parents`, so it is never out of step with them."""

from __future__ import annotations

from collections.abc import Iterable

import networkx as nx

from contextmem.ledger import Ledger, Segment

__all__ = ["dependents", "graph", "paired"]


def graph(ledger: Ledger) -> nx.DiGraph:
    """Edges source -> derived over every segment ever seen, with `kind`, `state` and `key` on the nodes."""
    digraph = nx.DiGraph()
    for segment in ledger.by_id.values():
        if segment.kind == "frame":
            continue
        digraph.add_node(segment.id, kind=segment.kind, state=segment.state, key=segment.key)
        digraph.add_edges_from((parent, segment.id) for parent in segment.parents)
    return digraph


def dependents(ledger: Ledger, ids: Iterable[str]) -> tuple[str, ...]:
    """Ids of live segments derived, directly or not, from `ids`; in slot order, without `ids` themselves."""
    digraph = graph(ledger)
    sources = set(ids)
    derived = set().union(*(nx.descendants(digraph, i) for i in sources if i in digraph)) - sources
    return tuple(segment.id for segment in ledger.content() if segment.id in derived and segment.state != "erased")


def paired(ledger: Ledger, segments: Iterable[Segment]) -> tuple[Segment, ...]:
    """`segments` with the other half of every tool call among them: a call and its results go together.

    A result is one of its call's when the call is a parent of it.
    """
    ids = {segment.id for segment in segments}
    content = ledger.content()
    calls = {s.id for s in content if s.kind == "tool_call"}
    concerned = {p for s in content if s.kind == "tool_result" and s.id in ids for p in s.parents if p in calls}
    concerned |= ids & calls
    ids |= concerned | {s.id for s in content if s.kind == "tool_result" and concerned & set(s.parents)}
    return tuple(s for s in content if s.id in ids)
