"""How good a model is: perplexity of texts, and multiple-choice accuracy in the manner of lm-eval; two side by side."""

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np

from glm_gpu.engine import Engine
from glm_gpu.errors import RequestError
from glm_gpu.sampling import logprobs

TASKS_DIR = Path(__file__).parent / "tasks"
TASK_FILE = TASKS_DIR / "continuations.jsonl"
# Tokens scored as one context. Neighbouring tokens share what makes them easy or hard, so the bootstrap draws windows.
WINDOW = 256
NUM_RESAMPLES = 2000
_SEED = 1


@dataclass(frozen=True)
class Item:
    """One question: which choice goes on from the context? A space is put between them."""

    context: str
    choices: tuple[str, ...]
    answer: int


@dataclass(frozen=True, eq=False)
class Evaluation:
    """What was measured of one model; equal tasks give arrays in the same order, so that two can be compared.

    Attributes:
        nats: for each window of text, the summed surprise of its tokens: f64 [windows].
        tokens: for each window, how many those are: [windows].
        texts: for each window, the name of its text.
        is_right: for each item, whether the likeliest choice is the right one: bool [items].
        is_right_norm: the same when each log-likelihood is divided by the choice's length in characters.
    """

    nats: np.ndarray
    tokens: np.ndarray
    texts: tuple[str, ...]
    is_right: np.ndarray
    is_right_norm: np.ndarray

    def text_perplexity(self, text: str) -> float:
        """Perplexity a token of one text."""
        chosen = np.array([name == text for name in self.texts])
        return _perplexity(self.nats[chosen], self.tokens[chosen])

    @cached_property
    def measures(self) -> dict[str, Callable[[np.ndarray], float]]:
        """Each measure as a function of drawn indices of its units, for the bootstrap."""
        found: dict[str, Callable[[np.ndarray], float]] = {}
        if len(self.nats):
            found["perplexity"] = lambda drawn: _perplexity(self.nats[drawn], self.tokens[drawn])
        if len(self.is_right):
            found["acc"] = lambda drawn: float(self.is_right[drawn].mean())
            found["acc_norm"] = lambda drawn: float(self.is_right_norm[drawn].mean())
        return found

    def num_units(self, measure: str) -> int:
        """How many independent units a measure is a mean over: windows or items."""
        return len(self.nats) if measure == "perplexity" else len(self.is_right)


@dataclass(frozen=True)
class Estimate:
    """A measure of one model, or the difference of two, with its 95 % interval from the bootstrap."""

    value: float
    low: float
    high: float


def evaluate(engine: Engine, texts: Mapping[str, str], items: Sequence[Item]) -> Evaluation:
    """Measure a model.

    Args:
        engine: with a tokenizer.
        texts: by name; each is cut in windows of 256 tokens, all but the first token of a window are scored.
        items: questions, each choice scored behind its context.

    Raises:
        RequestError: the model has no tokenizer, or a text has fewer than 2 tokens.
    """
    if engine.tokenizer is None:
        raise RequestError(f"{engine.checkpoint.path} has no tokenizer.json, and texts cannot be scored without one")
    nats, tokens, names = [], [], []
    for name, text in texts.items():
        ids = engine.tokenizer.encode(text)
        if len(ids) < 2:
            raise RequestError(f"text {name!r} has {len(ids)} tokens, expected at least 2")
        window = min(WINDOW, engine.context)
        for start in range(0, len(ids) - 1, window - 1):
            window_ids = ids[start : start + window]
            nats.append(-continuation_likelihood(engine, window_ids, len(window_ids) - 1)[0])
            tokens.append(len(window_ids) - 1)
            names.append(name)
    likelihoods = [
        np.array([log_likelihood(engine, item.context, " " + choice)[0] for choice in item.choices]) for item in items
    ]
    lengths = [np.array([len(choice) + 1 for choice in item.choices]) for item in items]
    answers = [item.answer for item in items]
    return Evaluation(
        np.array(nats, np.float64),
        np.array(tokens, np.int64),
        tuple(names),
        np.array([found.argmax() == a for found, a in zip(likelihoods, answers, strict=True)], bool),
        np.array([(found / n).argmax() == a for found, n, a in zip(likelihoods, lengths, answers, strict=True)], bool),
    )


def log_likelihood(engine: Engine, context: str, continuation: str) -> tuple[float, bool]:
    """How likely a continuation is behind a context: its summed log-probability, and whether greedy decoding gives it.

    Spaces at the end of the context count as the beginning of the continuation, and both are encoded together, as in
    lm-eval. An empty context is one end-of-text token. What does not fit the context window is cut off in front.

    Source: lm-evaluation-harness, `TemplateLM._encode_pair` and `loglikelihood`.
    """
    spaces = len(context) - len(context.rstrip())
    if spaces:
        context, continuation = context[:-spaces], context[-spaces:] + continuation
    if context:
        ids = engine.tokenizer.encode(context + continuation)
        num_context = len(engine.tokenizer.encode(context))
    else:
        ids = [min(engine.eos_ids, default=0), *engine.tokenizer.encode(continuation)]
        num_context = 1
    num_scored = max(len(ids) - num_context, 1)
    return continuation_likelihood(engine, ids[-engine.context :], num_scored)


def continuation_likelihood(engine: Engine, ids: Sequence[int], num_scored: int) -> tuple[float, bool]:
    """The summed log-probability of the last tokens, and whether each is its position's likeliest."""
    total, is_greedy, position = 0.0, True, 0
    first = len(ids) - 1 - num_scored
    for logits in engine.logits(ids):
        for row in logits:
            if first <= position < len(ids) - 1:
                next_id = ids[position + 1]
                total += float(logprobs(row)[next_id])
                is_greedy &= int(row.argmax()) == next_id
            position += 1
    return total, is_greedy


def estimates(one: Evaluation) -> dict[str, Estimate]:
    """Every measure of a model with its interval."""
    return {name: _bootstrap(function, one.num_units(name)) for name, function in one.measures.items()}


def differences(one: Evaluation, other: Evaluation) -> dict[str, Estimate]:
    """Every measure of the second model less the first's; of perplexity, their ratio less 1.

    Both are drawn alike (paired bootstrap), so what is hard for both cancels out.
    """
    assert one.texts == other.texts and len(one.is_right) == len(other.is_right)
    found = {}
    for name in one.measures:
        first, second = one.measures[name], other.measures[name]
        if name == "perplexity":
            found[name] = _bootstrap(lambda d, a=first, b=second: b(d) / a(d) - 1, one.num_units(name))
        else:
            found[name] = _bootstrap(lambda d, a=first, b=second: b(d) - a(d), one.num_units(name))
    return found


def heldout_texts() -> dict[str, str]:
    """The texts that come with the package, by name: what the demo model was not trained on, and anyone may share."""
    files = sorted((TASKS_DIR / "heldout").glob("*.txt"))
    return {path.stem: path.read_text(encoding="utf-8") for path in files}


def read_items(path: Path = TASK_FILE) -> list[Item]:
    """The questions in a JSON-lines file: {"context": text, "choices": [text, ...], "answer": index} each.

    Raises:
        RequestError: the file cannot be read, or a line is not such an object; names the line.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise RequestError(f"{path}: cannot be read ({error}); expected a JSON-lines file") from None
    items = []
    for number, line in enumerate(lines, 1):
        try:
            values = json.loads(line)
            item = Item(values["context"], tuple(values["choices"]), values["answer"])
            if not isinstance(item.context, str) or not all(isinstance(c, str) and c for c in item.choices):
                raise TypeError("context and choices must be text")
            item.choices[item.answer]
        except (ValueError, KeyError, TypeError, IndexError, RecursionError) as error:
            raise RequestError(
                f'{path}, line {number}: {error!r:.80}; expected {{"context": ..., "choices": [...], "answer": 0}}'
            ) from None
        items.append(item)
    return items


def _perplexity(nats: np.ndarray, tokens: np.ndarray) -> float:
    return math.exp(nats.sum() / tokens.sum())


def _bootstrap(measure: Callable[[np.ndarray], float], num_units: int) -> Estimate:
    rng = np.random.default_rng(_SEED)
    drawn = [measure(rng.integers(0, num_units, num_units)) for _ in range(NUM_RESAMPLES)]
    low, high = np.quantile(drawn, [0.025, 0.975])
    return Estimate(measure(np.arange(num_units)), float(low), float(high))
