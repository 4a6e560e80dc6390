"""`glm-gpu bench serve`: clients against a server of its own."""

from glm_gpu.bench.serve import measure_serve
from glm_gpu.engine import DEMO_MODEL


def test_the_server_is_measured_and_every_answer_is_the_one_given_alone():
    part = measure_serve(DEMO_MODEL, threads=1, num_clients=6, window_s=0.3, load_s=1.0, prompt_tokens=100)
    one, eight, first, gap, load = part.rows
    assert one.limit.name == "the engine without a server" and eight.more["gain"] > 0
    assert first.median > 0 and gap.median > 0
    assert load.more["ended"] > 0 and load.more["differed"] == 0 and load.more["requests"]["running"] == 0
    assert part.notes == []
