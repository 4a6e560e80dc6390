"""The map: every layer a line, within 80 columns, tier and heat readable without colour."""

import numpy as np

from glm_gpu.tiers.placement import NO_TIER, TIERS
from glm_gpu.tiers.tier_map import GLYPHS, map_rows, map_text

DISK, RAM, LOCKED = (TIERS.index(name) for name in ("disk", "ram", "locked"))


def test_one_cell_an_expert_tells_tier_and_heat():
    placement = np.array([[NO_TIER] * 4, [LOCKED, RAM, DISK, DISK]], np.uint8)
    uses = np.array([[0.0] * 4, [10.0, 3.0, 1.0, 2.0]])  # 4 on average
    (row,) = map_rows(placement, uses)
    assert (row.layer, row.tiers, row.heat) == (1, f"{LOCKED}{RAM}{DISK}{DISK}", "3101")
    assert map_text([row], 4).splitlines()[0] == "  1 ▇▒ ."


def test_a_cell_of_several_experts_shows_the_tier_of_most():
    placement = np.full((1, 256), DISK, np.uint8)
    placement[0, :3] = RAM
    placement[0, 4:6] = RAM  # two of four: the faster counts
    placement[0, 8:9] = RAM
    (row,) = map_rows(placement, np.ones((1, 256)))
    assert len(row.tiers) == 64
    assert row.tiers[:4] == f"{RAM}{RAM}{DISK}{DISK}"
    assert set(row.heat) == {"2"}


def test_maps_of_all_sizes_fit_a_terminal():
    for num_layers, num_experts in ((1, 1), (16, 64), (76, 256), (5, 73), (3, 1000)):
        placement = np.full((num_layers, num_experts), RAM, np.uint8)
        text = map_text(map_rows(placement, np.zeros((num_layers, num_experts))), num_experts)
        assert len(text.splitlines()) == num_layers + 1
        assert max(map(len, text.splitlines())) <= 80


def test_every_tier_has_four_glyphs_of_its_own():
    glyphs = [glyph for name in TIERS for glyph in GLYPHS[name]]
    assert len(glyphs) == len(set(glyphs)) == 4 * len(TIERS)
