"""Plots as SVG files that come out the same from the same numbers (`pip install '.[bench]'`).

with plot("decode_ladder", "Decode by memory", "share of experts in memory", "tok/s") as axes:
    axes.plot(shares, rates, marker="o", label="measured")
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import matplotlib
from matplotlib.figure import Figure
from record import RESULTS

if TYPE_CHECKING:
    from matplotlib.axes import Axes

STYLE = {
    # identifiers in the file and its text must not change from run to run, nor depend on fonts
    "svg.hashsalt": "glm-gpu",
    "svg.fonttype": "none",
    "font.family": "sans-serif",
    "font.size": 10,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.alpha": 0.3,
    "legend.frameon": False,
}


@contextmanager
def plot(name: str, title: str, x_label: str, y_label: str, inches: tuple[float, float] = (6.4, 4)) -> "Iterator[Axes]":
    """Axes to draw on; afterwards bench/results/NAME.svg is written, with a legend if anything has a label."""
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=inches, layout="constrained")
        axes = figure.subplots()
        axes.set(title=title, xlabel=x_label, ylabel=y_label)
        yield axes
        if axes.get_legend_handles_labels()[0]:
            axes.legend()
        RESULTS.mkdir(parents=True, exist_ok=True)
        figure.savefig(RESULTS / f"{name}.svg", metadata={"Date": None, "Creator": "glm-gpu bench/plots.py"})
