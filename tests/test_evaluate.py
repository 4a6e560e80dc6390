"""Scores against sums made by hand, over a toy model whose next token depends on the last alone."""

import json
import sys
import types
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import pytest

from glm_gpu import cli, evaluate
from glm_gpu.errors import RequestError
from glm_gpu.evaluate import Item, differences, estimates, log_likelihood, read_items

WORDS = ["<eos>", "the", "lord", "said", "unto", "moses", "a", "horse"]


class WordTokenizer:
    """A token a word; a space belongs to the word behind it."""

    def encode(self, text: str) -> list[int]:
        return [WORDS.index(word) for word in text.split()]

    def stream(self):
        return types.SimpleNamespace(push=lambda token_id: WORDS[token_id] + " ", finish=lambda: "")


@dataclass
class ToyEngine:
    """A bigram model: row i of `table` is the logits behind token i."""

    table: np.ndarray
    context: int = 64
    eos_ids: frozenset = frozenset({0})

    def __post_init__(self):
        self.tokenizer = WordTokenizer()

    def logits(self, ids):
        rows = self.table[list(ids)]
        for start in range(0, len(rows), 3):
            yield rows[start : start + 3]

    def score(self, ids):
        return np.array([self.log_p(a, b) for a, b in pairwise(ids)])

    def log_p(self, before: int, token: int) -> float:
        row = self.table[before].astype(np.float64)
        return float(row[token] - np.log(np.exp(row).sum()))


@pytest.fixture
def toy():
    return ToyEngine(np.random.default_rng(0).normal(0, 2, (len(WORDS), len(WORDS))).astype(np.float32))


def test_log_likelihood_is_the_sum_over_the_continuation_alone(toy):
    ids = WordTokenizer().encode("the lord said unto moses")
    expected = sum(toy.log_p(a, b) for a, b in pairwise(ids[2:]))
    for context, continuation in [("the lord said", " unto moses"), ("the lord said ", "unto moses")]:
        found, _ = log_likelihood(toy, context, continuation)
        assert found == pytest.approx(expected, abs=1e-12)


def test_empty_context_is_an_end_of_text_token(toy):
    assert log_likelihood(toy, "", "the")[0] == pytest.approx(toy.log_p(0, 1), abs=1e-12)


def test_continuation_is_greedy_only_when_every_token_is_the_likeliest(toy):
    first = int(toy.table[1].argmax())
    second = int(toy.table[first].argmax())
    assert log_likelihood(toy, "the", f" {WORDS[first]} {WORDS[second]}")[1]
    other = WORDS[(second + 1) % len(WORDS)]
    assert not log_likelihood(toy, "the", f" {WORDS[first]} {other}")[1]


def test_context_that_is_too_long_is_cut_in_front(toy):
    toy.context = 4
    long = "horse a moses unto said lord the lord said"
    assert log_likelihood(toy, long, " unto moses") == log_likelihood(toy, "lord said", " unto moses")


def test_model_that_knows_nothing_has_the_perplexity_of_its_vocabulary():
    engine = ToyEngine(np.zeros((len(WORDS), len(WORDS)), np.float32))
    found = evaluate.evaluate(engine, {"text": "the lord said unto moses " * 40}, [])
    assert estimates(found)["perplexity"].value == pytest.approx(len(WORDS))


def test_every_token_but_the_first_is_scored_once_however_long_the_text(toy, monkeypatch):
    monkeypatch.setattr(evaluate, "WINDOW", 7)
    text = "the lord said unto moses a horse " * 9
    found = evaluate.evaluate(toy, {"text": text}, [])
    ids = WordTokenizer().encode(text)
    assert found.tokens.sum() == len(ids) - 1
    assert found.nats.sum() == pytest.approx(-toy.score(ids).sum())


def test_length_normalised_choice_divides_by_characters():
    # "a" is likelier than "moses moses", and a character of "moses moses" likelier than one of " a"
    table = np.full((len(WORDS), len(WORDS)), -9.0, np.float32)
    table[:, WORDS.index("moses")] = 0.0
    table[:, WORDS.index("a")] = 0.5
    items = [Item("the", ("a", "moses moses"), 0), Item("the", ("a", "moses moses"), 1)]
    found = evaluate.evaluate(ToyEngine(table), {}, items)
    assert found.is_right.tolist() == [True, False]
    assert found.is_right_norm.tolist() == [False, True]


def test_model_beside_itself_differs_by_nothing(toy):
    items = read_items_of_toy()
    one = evaluate.evaluate(toy, {"text": "the lord said unto moses " * 99}, items)
    for estimate in differences(one, one).values():
        assert (estimate.value, estimate.low, estimate.high) == (0, 0, 0)


def test_difference_that_every_unit_shows_has_an_interval_beside_zero(toy):
    text = {"text": "the lord said unto moses a horse " * 200}
    worse = ToyEngine(toy.table * 0)
    better = ToyEngine(toy.table.copy())
    ids = WordTokenizer().encode(text["text"])
    for before, token in pairwise(ids):
        better.table[before, token] = 9
    change = differences(evaluate.evaluate(worse, text, []), evaluate.evaluate(better, text, []))["perplexity"]
    assert change.low <= change.value <= change.high < 0


def read_items_of_toy() -> list[Item]:
    return [Item("the lord", ("said unto", "a horse"), 0), Item("unto", ("moses", "said"), 0)]


def test_bundled_items_are_fair():
    items = read_items()
    assert len(items) == 72
    answers = [item.answer for item in items]
    assert all(10 <= answers.count(position) <= 26 for position in range(4))
    assert all(len(set(item.choices)) == 4 for item in items)


@pytest.mark.parametrize(
    "line", ["no json", '{"context": "a"}', '{"context": "a", "choices": ["b"], "answer": 1}',
             '{"context": 1, "choices": ["b"], "answer": 0}', '{"context": "a", "choices": [""], "answer": 0}'],
)  # fmt: skip
def test_bad_item_is_refused_with_its_line(line, tmp_path):
    good = json.dumps({"context": "a", "choices": ["b", "c"], "answer": 0})
    (tmp_path / "task.jsonl").write_text(f"{good}\n{line}\n")
    with pytest.raises(RequestError, match="line 2"):
        read_items(tmp_path / "task.jsonl")


def test_eval_compares_two_widths_of_the_same_model(tmp_path, capsys):
    text = tmp_path / "text.txt"
    text.write_text("And it came to pass in those days, that there went out a decree.")
    task = tmp_path / "task.jsonl"
    task.write_text(json.dumps({"context": "And it came", "choices": ["to pass", "horse"], "answer": 0}) + "\n")
    with pytest.raises(SystemExit) as left:
        cli.main(["eval", "--text", str(text), "--task", str(task), "--against", "@f32", "--json"])
    assert not left.value.code
    found = json.loads(capsys.readouterr().out)
    assert found["models"].keys() == {"model", "@f32"}
    assert found["models"]["model"]["acc"]["value"] == 1
    assert abs(found["differences"]["perplexity"]["value"]) < 0.05


@pytest.mark.parametrize("against", ["@", "@8", "@eight/eight"])
def test_second_model_that_is_not_understood_is_refused(against, capsys):
    with pytest.raises(SystemExit) as left:
        cli.main(["eval", "--against", against])
    assert left.value.code == 2 and "--against" in capsys.readouterr().err


@pytest.fixture
def lm_eval_stub(monkeypatch):
    """What glm_gpu.lm_eval_model needs of lm_eval."""
    module = types.ModuleType("lm_eval.api.model")
    module.LM = type("LM", (), {"__init__": lambda self: None})
    for name in ("lm_eval", "lm_eval.api"):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    monkeypatch.setitem(sys.modules, "lm_eval.api.model", module)
    monkeypatch.delitem(sys.modules, "glm_gpu.lm_eval_model", raising=False)


def test_lm_eval_model_answers_the_three_questions(lm_eval_stub, toy):
    from glm_gpu.lm_eval_model import GlmGpuModel

    model = GlmGpuModel.__new__(GlmGpuModel)
    model.engine = toy
    ids = WordTokenizer().encode("the lord said unto moses")

    def ask(question, *args):
        return question([types.SimpleNamespace(args=args)])[0]

    assert ask(model.loglikelihood, "the lord", " said") == log_likelihood(toy, "the lord", " said")
    toy.context = 3
    expected = sum(toy.log_p(a, b) for a, b in zip([0, *ids], ids, strict=False))
    assert ask(model.loglikelihood_rolling, "the lord said unto moses") == pytest.approx(expected)
    toy.context = 64
    toy.session = lambda: types.SimpleNamespace(generate=lambda ids, params, max_tokens: iter([3, 4, 7, 5]))
    assert ask(model.generate_until, "the lord", {"until": ["horse"], "max_gen_toks": 8}) == "said unto "
