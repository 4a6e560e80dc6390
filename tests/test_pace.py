"""The pace on simulated machines, with noise as on a busy one."""

import numpy as np
import pytest

from glm_gpu.pace import Pace


def run(pace, decode_s, fixed_s, slope_s, num_steps, noise=0.3):
    """Steps of four answers beside an endless prompt: the sizes proposed, after some steps without a prompt."""
    rng, sizes = np.random.default_rng(1), []
    for step in range(num_steps + 10):
        rows = pace.rows(4) if step >= 10 else 0
        seconds = decode_s + (fixed_s + slope_s * rows if rows else 0)
        pace.record(seconds * (1 + noise * rng.exponential()), 4, rows)
        sizes.append(rows)
    return sizes[10:]


@pytest.mark.parametrize(("decode_s", "fixed_s", "slope_s"), [(0.004, 0.001, 1e-4), (0.05, 0, 0.001), (1.0, 0.3, 0.01)])
def test_no_step_lasts_five_times_one_without_a_prompt(decode_s, fixed_s, slope_s):
    sizes = run(Pace(512), decode_s, fixed_s, slope_s, 300)
    longest = max(decode_s + fixed_s + slope_s * rows for rows in sizes)
    assert longest < 5 * decode_s
    assert np.mean(sizes[100:]) > 0.15 * (2 * decode_s - fixed_s) / slope_s  # and prompts are not starved


def test_where_even_a_few_rows_cost_more_the_fewest_are_taken():
    sizes = run(Pace(512), 0.0024, 0.006, 0.0004, 300)
    assert max(sizes) <= 32 and np.mean(sizes) < 16


def test_where_all_rows_cost_little_more_than_few_all_are_taken():
    """Experts on disk: a step of 8 rows reads half of them, one of 512 all."""
    assert np.mean(run(Pace(512), 1.0, 30.0, 0.02, 100, noise=0.05)[20:]) > 200


def test_alone_a_prompt_gets_all_rows_and_the_first_beside_an_answer_few():
    pace = Pace(300)
    assert pace.rows(0) == 300 and pace.rows(1) == 8
    pace.record(0.01, 1, 0)
    pace.record(0.5, 0, 300)
    assert pace.rows(1) == 8
    assert Pace(5).rows(1) == 5
