"""`glm-gpu bench serve`: clients against a server of its own."""

import pytest

from glm_gpu.bench.serve import Gap, Stall, measure_serve
from glm_gpu.engine import DEMO_MODEL
from glm_gpu.kernels import cpu


@pytest.mark.skipif(cpu.active is None, reason="on NumPy too few answers end in a few seconds; test_load.py has a toy")
def test_the_demo_under_load_gives_every_answer_that_it_gives_alone_and_keeps_nothing():
    """Twelve clients of mixed lengths, of whom one in five leaves in the middle."""
    part = measure_serve(DEMO_MODEL, threads=1, num_clients=12, window_s=0.5, load_s=2.0, prompt_tokens=100)
    one, eight, first, gap, load = part.rows
    assert one.limit.name == "the engine without a server" and eight.more["gain"] > 0
    assert first.median > 0 and gap.median > 0
    found = load.more
    assert found["ended"] > 0 and found["left"] > 0 and found["differed"] == 0
    assert found["requests"]["running"] == found["requests"]["queued"] == 0
    assert found["requests"]["ended"]["cancelled"] > 0 and found["requests"]["ended"]["error"] == 0
    assert found["cache"]["taken_pages"] == found["cache"]["remembered_pages"]
    # The pool that renders prompts comes to four threads.
    assert not found["after"] or found["after"]["threads"] <= found["before"]["threads"] + 4
    assert part.notes == []


def test_a_gap_in_which_the_hypervisor_had_a_processor_is_no_stall_of_the_server():
    beside = [Gap(0.012, is_stolen=False), Gap(0.038, is_stolen=True), Gap(0.009, is_stolen=False)]
    assert Stall([], beside, 1.0).longest_s == 0.012
    assert Stall([], beside[1:2], 1.0).longest_s == 0.0
