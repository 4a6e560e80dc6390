"""The multi-token drafter against the reference, and its cache against a fresh one."""

import numpy as np
import pytest
from small_models import open_model, prefill

from glm_gpu.batch import Batch
from glm_gpu.model.mtp import MtpHead
from glm_gpu.speculative import MtpDrafter
from glm_gpu.speculative import mtp as mtp_module
from glm_gpu.speculative.mtp import draft_together


@pytest.fixture(scope="module")
def tiny_glm(oracle_dir):
    return open_model(oracle_dir / "tiny_glm")


@pytest.fixture(scope="module")
def long_text(tiny_glm, oracle_dir):
    """512 tokens and the trunk's hidden states for them."""
    with np.load(oracle_dir / "tiny_glm/reference_long.npz") as arrays:
        ids = arrays["input_ids"].tolist()
    return ids, prefill(tiny_glm, ids)[0].hidden


@pytest.fixture(scope="module")
def reference(oracle_dir):
    with np.load(oracle_dir / "tiny_glm/reference.npz") as arrays:
        return dict(arrays)


def new_drafter(model, shares_selection: bool = True) -> MtpDrafter:
    return MtpDrafter(MtpHead(model), 640, is_bf16=False, shares_selection=shares_selection)


def assert_cache_is_fresh(drafter: MtpDrafter, model, ids: list[int], hidden: np.ndarray) -> None:
    """The drafter's rows are, bit for bit, those of one pass over the text's pairs."""
    num_rows, head = drafter.cache.length, MtpHead(model)
    cache = head.new_cache(640, is_bf16=False)
    head.forward(Batch.of([(ids[1 : num_rows + 1], cache)], "prefill"), hidden[:num_rows])
    for stream in ("latent", "index_key"):
        assert np.array_equal(drafter.cache.read(0, stream, num_rows), cache.read(0, stream, num_rows))


@pytest.mark.parametrize("chain", ["share", "recompute"])
def test_drafts_at_depths_one_to_four_are_the_reference_s(tiny_glm, reference, chain):
    drafter = new_drafter(tiny_glm, shares_selection=chain == "share")
    prompt = reference["input_ids"].tolist()
    drafter.observe(prompt, reference["final_hidden"])
    first = int(reference["greedy_ids"][0])
    assert drafter.draft([*prompt, first], 4).token_ids == reference[f"mtp_chain_ids_{chain}"].tolist()


def test_first_drafts_along_an_answer_are_the_reference_s(tiny_glm, reference):
    """Each after drafts of other widths, which must leave nothing behind."""
    prompt, answer = reference["input_ids"].tolist(), reference["greedy_ids"].tolist()
    hidden = prefill(tiny_glm, prompt + answer)[0].hidden
    drafter = new_drafter(tiny_glm)
    drafter.observe(prompt, hidden[: len(prompt)])
    for n, expected in enumerate(reference["mtp_greedy_draft_ids"].tolist()):
        assert drafter.draft([*prompt, *answer[: n + 1]], 1 + n % 4).token_ids[0] == expected
        drafter.observe(answer[n : n + 1], hidden[len(prompt) + n][None])


def test_after_200_drafts_accepted_in_every_pattern_the_cache_is_a_fresh_one(tiny_glm, long_text):
    ids, hidden = long_text
    rng = np.random.default_rng(2)
    patterns = {"none": lambda: 1, "one of three": lambda: 2, "all": lambda: 4, "random": lambda: rng.integers(1, 5)}
    drafter, length = new_drafter(tiny_glm), 3
    drafter.observe(ids[:length], hidden[:length])
    for num_kept in patterns.values():
        for _ in range(50):
            drafter.draft(ids[: length + 1], 3)
            stop = length + int(num_kept())
            drafter.observe(ids[length:stop], hidden[length:stop])
            length = stop
        drafter.draft(ids[: length + 1], 1)
        assert drafter.cache.length == length
        assert_cache_is_fresh(drafter, tiny_glm, ids, hidden)


def test_a_token_other_than_the_one_drafted_behind_replaces_its_row(tiny_glm, long_text):
    ids, hidden = long_text
    drafter = new_drafter(tiny_glm)
    drafter.observe(ids[:20], hidden[:20])
    drafter.draft([*ids[:20], ids[20] + 1], 3)
    drafter.observe(ids[20:25], hidden[20:25])
    drafter.draft(ids[:26], 1)
    assert_cache_is_fresh(drafter, tiny_glm, ids, hidden)


@pytest.mark.parametrize("shares_selection", [True, False])
def test_later_steps_attend_over_the_first_step_s_selection_where_the_config_says_so(
    tiny_glm, long_text, monkeypatch, shares_selection
):
    ids, hidden = long_text
    used, forward = [], MtpHead.forward

    def spy(self, batch, hidden, selections=None, probe=None):
        output, found = forward(self, batch, hidden, selections, probe)
        used.append((selections, found))
        return output, found

    monkeypatch.setattr(MtpHead, "forward", spy)
    drafter = new_drafter(tiny_glm, shares_selection)
    drafter.observe(ids[:40], hidden[:40])
    drafter.draft(ids[:41], 3)
    (first, found), *later = used
    assert first is None and len(later) == 2
    for selections, _ in later:
        if shares_selection:
            assert np.array_equal(selections[0].rows, found[0].rows[-1:])
        else:
            assert selections is None


def test_rows_wait_until_a_draft_needs_them_or_there_are_many(tiny_glm, long_text, monkeypatch):
    ids, hidden = long_text
    monkeypatch.setattr(mtp_module, "MAX_PENDING", 40)
    drafter = new_drafter(tiny_glm)
    drafter.observe(ids[:40], hidden[:40])
    assert (drafter.cache.length, drafter.num_pending) == (0, 39)
    drafter.observe(ids[40:50], hidden[40:50])
    assert (drafter.cache.length, drafter.num_pending) == (49, 0)
    drafter.observe(ids[50:60], hidden[50:60])
    drafter.draft(ids[:61], 2)
    assert drafter.num_pending == 0
    assert_cache_is_fresh(drafter, tiny_glm, ids, hidden)


def test_a_cut_keeps_all_it_can_and_what_follows_is_as_fresh(tiny_glm, long_text):
    ids, hidden = long_text
    drafter = new_drafter(tiny_glm)
    drafter.observe(ids[:30], hidden[:30])
    assert drafter.cut(30) == 30
    assert drafter.cut(20) == 20  # its hidden states were still waiting
    drafter.draft(ids[:21], 2)
    assert drafter.cut(20) == 20
    assert drafter.cut(12) == 11  # the state behind the twelfth token is gone
    drafter.observe(ids[11:25], hidden[11:25])
    drafter.draft(ids[:26], 1)
    assert_cache_is_fresh(drafter, tiny_glm, ids, hidden)
    other = [*ids[:9], 7, 8, 9]
    other_hidden = prefill(tiny_glm, other)[0].hidden
    kept = drafter.cut(9)
    drafter.observe(other[kept:], other_hidden[kept:])
    drafter.draft([*other, 5], 1)
    assert_cache_is_fresh(drafter, tiny_glm, [*other, 5], other_hidden)
    assert drafter.cut(0) == 0


def test_behind_a_beginning_that_was_skipped_it_drafts_from_the_rest(tiny_glm, long_text):
    ids, hidden = long_text
    resumed, fresh = new_drafter(tiny_glm), new_drafter(tiny_glm)
    resumed.skip(100)
    resumed.observe(ids[100:130], hidden[100:130])
    fresh.observe(ids[100:130], hidden[100:130])
    assert resumed.draft(ids[:131], 3) == fresh.draft(ids[100:131], 3)
    assert resumed.cut(120) == 119
    resumed.observe(ids[119:140], hidden[119:140])
    fresh.observe(ids[130:140], hidden[130:140])
    assert resumed.draft(ids[:141], 3) == fresh.draft(ids[100:141], 3)
    assert resumed.cut(90) == 90
    again = new_drafter(tiny_glm)
    for drafter in (resumed, again):
        drafter.observe(ids[90:100], hidden[90:100])
    assert resumed.draft(ids[:101], 2) == again.draft(ids[90:101], 2)


@pytest.mark.parametrize("shares_selection", [True, False])
def test_drafts_of_several_sequences_in_one_pass_are_those_of_each_alone(tiny_glm, long_text, shares_selection):
    ids, hidden = long_text
    lengths, widths = (20, 90, 3, 41), (3, 1, 4, 2)
    together, alone = ([new_drafter(tiny_glm, shares_selection) for _ in lengths] for _ in range(2))
    for step in range(0, 6, 2):
        for drafters in (together, alone):
            for drafter, length in zip(drafters, lengths, strict=True):
                start = length + step - 2 if step else 0
                drafter.observe(ids[start : length + step], hidden[start : length + step])
        turns = [(drafter, ids[: n + step + 1], w) for drafter, n, w in zip(together, lengths, widths, strict=True)]
        drafts = draft_together(turns)
        for drafter, other, (_, before, width), draft in zip(alone, together, turns, drafts, strict=True):
            assert draft == drafter.draft(before, width)
            assert_cache_is_fresh(other, tiny_glm, ids, hidden)


def test_what_is_observed_while_nobody_wants_drafts_is_forgotten_and_drafts_go_on_from_behind_it(tiny_glm, long_text):
    ids, hidden = long_text
    drafter = new_drafter(tiny_glm)
    drafter.observe(ids[:30], hidden[:30])
    drafter.draft(ids[:31], 2)
    drafter.is_idle = True
    for start in range(30, 55):
        drafter.observe(ids[start : start + 1], hidden[start : start + 1])
        assert drafter.cache.length == drafter.num_pending == 0 and not drafter.is_ready
    drafter.is_idle = False
    drafter.observe(ids[55:75], hidden[55:75])
    fresh = new_drafter(tiny_glm)
    fresh.observe(ids[55:75], hidden[55:75])
    assert drafter.draft(ids[:76], 3) == fresh.draft(ids[55:76], 3)
    assert drafter.cut(72) == 71
    assert drafter.cut(40) == 40 and not drafter.is_ready
