"""The pace on simulated machines, with noise as on a busy one."""

import numpy as np
import pytest

from glm_gpu.pace import Pace


def run(pace, cost, num_steps, noise=0.3, num_answers=4, context=lambda step: 0):
    """Steps beside an endless prompt: (rows, seconds on a quiet machine) of each.

    Args:
        cost: (rows of a prompt, context) -> seconds on a quiet machine.
    """
    rng, steps = np.random.default_rng(1), []
    for step in range(num_steps):
        rows = pace.rows(num_answers, context(step))
        seconds = cost(rows, context(step))
        pace.record(seconds * (1 + noise * rng.exponential()), num_answers, rows, context(step))
        steps.append((rows, seconds))
    return np.array(steps)


def linear(alone_s, fixed_s, row_s):
    return lambda rows, context: alone_s + (fixed_s + row_s * rows if rows else 0)


@pytest.mark.parametrize(
    ("alone_s", "fixed_s", "row_s"), [(0.004, 0.001, 1e-4), (0.05, 0, 0.001), (1.0, 0.3, 0.01), (0.06, 0.02, 0.045)]
)
def test_no_step_lasts_five_times_one_without_a_prompt(alone_s, fixed_s, row_s):
    steps = run(Pace(512), linear(alone_s, fixed_s, row_s), 400)
    assert steps[:, 1].max() < 5 * alone_s
    # and prompts are not starved
    quiet = run(Pace(512), linear(alone_s, fixed_s, row_s), 400, noise=0.05)
    assert quiet[100:, 0].mean() > 0.4 * (1.5 * alone_s - fixed_s) / row_s


def test_a_growing_context_makes_parts_smaller():
    def cost(rows, context):
        return 0.01 + rows * (0.0005 + 2e-7 * context)

    steps = run(Pace(512), cost, 1500, context=lambda step: 10 * step)
    assert steps[:, 1].max() < 5 * 0.01
    assert steps[100:200, 0].mean() > 3 * steps[-200:, 0].mean() > 3


def test_behind_a_far_longer_context_the_first_part_is_the_smallest():
    def cost(rows, context):
        return 0.01 + rows * (0.0005 + 1e-6 * context)

    steps = run(Pace(512), cost, 300, context=lambda step: 0 if step < 200 else 10_000)
    assert steps[100:200, 0].mean() > 6 and steps[200, 0] == 1
    assert steps[:, 1].max() < 5 * 0.01


def test_where_even_one_row_costs_too_much_few_are_taken():
    rows = run(Pace(512), linear(0.0024, 0.009, 0.004), 300)[:, 0]
    assert np.median(rows) <= 4 and rows.max() <= 24


def test_where_all_rows_cost_little_more_than_one_all_are_taken():
    """Experts on disk: a step of one row more reads most of them, one of 512 all."""
    assert run(Pace(512), linear(1.0, 30.0, 0.02), 400, noise=0.05)[200:, 0].mean() > 200


def test_one_bad_moment_is_not_believed_for_ever():
    pace, cost = Pace(512), linear(0.01, 0, 0.001)
    before = run(pace, cost, 200)[100:, 0].mean()
    for _ in range(20):
        pace.record(1.0, 4, pace.rows(4) or 1)
    assert run(pace, cost, 300)[150:, 0].mean() > 0.7 * before


def test_where_one_row_is_just_too_much_parts_do_not_grow_step_by_step_into_a_stall():
    """Each size lasts little longer than the one below it, and all of them together ten times a step without."""
    steps = run(Pace(512), linear(0.0022, 0.0046, 0.00004), 400, noise=0.05)
    assert steps[:, 1].max() < 5 * 0.0022


@pytest.mark.parametrize("num_busy", [40, 90, 150, 400])
def test_what_a_busy_machine_showed_is_soon_unlearned_on_a_quiet_one(num_busy):
    pace, cost = Pace(512), linear(0.0022, 0.0008, 0.00025)
    run(pace, cost, 50, noise=0.1)
    run(pace, lambda rows, context: 2.5 * cost(rows, context), num_busy, noise=1.0)
    assert run(pace, cost, 500, noise=0.1)[60:, 1].max() < 4 * 0.0022


def test_alone_a_prompt_gets_all_rows_and_beside_an_answer_steps_without_one_are_measured_first():
    pace = Pace(300)
    assert pace.rows(0) == 300 and pace.rows(1) == 0
    pace.record(0.5, 0, 300)
    for _ in range(3):
        assert pace.rows(1) == 0
        pace.record(0.01, 1, 0)
    assert pace.rows(1) == 1
    assert pace.rows(8) == 0  # more answers are another kind of step
    assert Pace(5).rows(0) == 5
