"""A map of layers and experts that fits a terminal: where each expert lives, and how hot it is."""

from dataclasses import dataclass

import numpy as np

from glm_gpu.tiers.placement import NO_TIER, TIERS

# With the layer's number in front a row stays within 80 columns.
MAX_CELLS = 72
# One glyph for each tier and level of heat, so that the map needs no colour.
GLYPHS = {"vram": "○◔◑●", "locked": "▁▃▅▇", "ram": "░▒▓█", "page cache": "-=≡#", "disk": " .:+"}
# A level begins at so many times the uses of an expert of average heat.
_LEVELS = (0.5, 1.0, 2.0)


@dataclass(frozen=True)
class MapRow:
    """One layer's cells, each a run of consecutive experts.

    Attributes:
        layer: its number.
        tiers: a digit a cell, the tier that most of its experts are in, an index into TIERS.
        heat: a digit a cell, its mean heat: 0 below half of the average, 1 below it, 2 below twice, 3 above.
    """

    layer: int
    tiers: str
    heat: str


def map_rows(placement: np.ndarray, uses: np.ndarray) -> list[MapRow]:
    """The map of every layer that has experts.

    Args:
        placement: [L, E] uint8, an index into TIERS; NO_TIER in layers without experts.
        uses: [L, E] f64, how often each expert is used, in any unit.
    """
    num_experts = placement.shape[1]
    starts = np.arange(0, num_experts, -(-num_experts // MAX_CELLS))
    counts = np.diff([*starts, num_experts])
    rows = []
    for layer in np.flatnonzero((placement != NO_TIER).any(axis=1)):
        members = [np.add.reduceat(placement[layer] == code, starts, dtype=int) for code in range(len(TIERS))]
        average = uses[layer].mean() or 1.0
        mean = np.add.reduceat(uses[layer], starts) / counts / average
        tiers = np.argmax(members, axis=0)  # of equals the faster
        heat = np.searchsorted(_LEVELS, mean, side="right")
        rows.append(MapRow(int(layer), "".join(map(str, tiers)), "".join(map(str, heat))))
    return rows


def map_text(rows: list[MapRow], num_experts: int) -> str:
    """The map as lines of at most 80 columns, with a line that explains it."""
    lines = [f"{row.layer:>3} {_glyphs(row)}" for row in rows]
    used = sorted({int(tier) for row in rows for tier in row.tiers})
    legend = "  ".join(f"{GLYPHS[TIERS[tier]]} {TIERS[tier]}" for tier in used)
    per_cell = -(-num_experts // len(rows[0].tiers)) if rows else 1
    lines.append(f"{legend}   cold to hot; a cell is {per_cell} expert{'s' if per_cell > 1 else ''}")
    return "\n".join(lines)


def _glyphs(row: MapRow) -> str:
    return "".join(GLYPHS[TIERS[int(tier)]][int(heat)] for tier, heat in zip(row.tiers, row.heat, strict=True))
