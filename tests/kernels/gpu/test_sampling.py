import numpy as np
import pytest
from device_arrays import checked, empty, view

from glm_gpu.kernels.gpu.sampling import argmax, num_blocks


def best(logits):
    num_rows, vocab = logits.shape
    values, blocks = empty((num_rows, num_blocks(vocab)), "f32"), empty((num_rows, num_blocks(vocab)), "i32")
    ids = empty(num_rows, "i32")
    argmax(checked(), view(logits), view(values), view(blocks), view(ids))
    return ids


@pytest.mark.parametrize(("num_rows", "vocab"), [(1, 320), (3, 2048), (17, 5001)])
def test_best_token_is_numpys(num_rows, vocab):
    logits = np.random.default_rng(vocab).standard_normal((num_rows, vocab)).astype(np.float32)
    np.testing.assert_array_equal(best(logits), logits.argmax(axis=1))


def test_ties_go_to_the_lowest_id_within_and_across_blocks():
    logits = np.zeros((2, 6000), np.float32)
    logits[0, [5999, 4100, 4099]] = 1
    np.testing.assert_array_equal(best(logits), [4099, 0])


def test_a_row_without_a_finite_best_logit_has_no_best_token():
    logits = np.zeros((5, 4100), np.float32)
    logits[0, 4099], logits[1, 3], logits[2, 2500], logits[3] = np.nan, np.inf, -np.inf, -np.inf
    logits[4, :], logits[4, 4000] = -np.inf, -5
    np.testing.assert_array_equal(best(logits), [-1, -1, 0, -1, 4000])
