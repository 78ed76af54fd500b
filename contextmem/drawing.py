"""A picture of who was derived from whom."""

from __future__ import annotations

import textwrap
from pathlib import Path

import networkx as nx

from contextmem.errors import InvalidInput, StorageError

__all__ = ["draw_graph"]

_COLOURS = {"live": "#9ecae1", "evicted": "#c7e9c0", "erased": "#fdd0a2", "retracted": "#e0e0e0"}


def draw_graph(graph: nx.DiGraph, path: str | Path) -> None:
    """Write `graph`, as of `ContextMemory.graph`, as a picture: sources above what was derived from them.

    An edge that follows from others is left out.

    Args:
        path: its ending names the format, such as .png, .svg or .pdf.

    Raises:
        InvalidInput: matplotlib does not know the ending, or there is nothing to draw.
        StorageError: the file cannot be written.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt
    from matplotlib.lines import Line2D

    if not graph:
        raise InvalidInput("there are no segments to draw.")
    for generation, names in enumerate(nx.topological_generations(graph)):
        for name in names:
            graph.nodes[name]["generation"] = generation
    places = nx.multipartite_layout(_in_order(graph), subset_key="generation", align="horizontal")
    edges = nx.transitive_reduction(graph).edges
    places = {name: (x, -y) for name, (x, y) in places.items()}
    widest = max(
        sum(1 for _, g in graph.nodes(data="generation") if g == generation) for generation in range(len(graph))
    )
    n_rows = 1 + max(g for _, g in graph.nodes(data="generation"))
    figure, axis = plt.subplots(figsize=(max(4, 1.5 * widest), 1 + 1.6 * n_rows), layout="constrained")
    colours = [_COLOURS[graph.nodes[name].get("state", "retracted")] for name in graph]
    nx.draw_networkx_edges(graph, places, edges, ax=axis, edge_color="0.6", node_size=2600, arrowsize=12)
    nx.draw_networkx_nodes(graph, places, ax=axis, node_color=colours, node_size=2600)
    labels = {name: _label(name, fields) for name, fields in graph.nodes(data=True)}
    nx.draw_networkx_labels(graph, places, labels, ax=axis, font_size=7)
    present = {graph.nodes[name].get("state", "retracted") for name in graph}
    dots = [
        Line2D([], [], marker="o", linestyle="", color=colour, label=state)
        for state, colour in _COLOURS.items()
        if state in present
    ]
    axis.legend(handles=dots, loc="upper left", bbox_to_anchor=(0, -0.02), ncols=len(dots), frameon=False, fontsize=8)
    axis.margins(0.15)
    axis.set_axis_off()
    try:
        figure.savefig(path, dpi=130)
    except ValueError as error:
        raise InvalidInput(f"{path}: {error}") from None
    except OSError as error:
        raise StorageError(f"{path} cannot be written: {error.strerror}") from None
    finally:
        plt.close(figure)


def _in_order(graph: nx.DiGraph) -> nx.DiGraph:
    """The same nodes, a generation after the other, each in the order they came in."""
    ordered = nx.DiGraph()
    ordered.add_nodes_from(sorted(graph.nodes(data=True), key=lambda node: node[1]["generation"]))
    ordered.add_edges_from(graph.edges)
    return ordered


def _label(name: str, fields: dict[str, str | None]) -> str:
    lines = textwrap.wrap(str(fields.get("key") or name), 14)[:2]
    return "\n".join([*lines, str(fields.get("kind", "unknown"))])
