"""The next token from logits: penalties, temperature, top-k, top-p, min-p, in this order, and one draw."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from numbers import Integral, Real
from typing import Any

import numpy as np

from glm_gpu.errors import CheckpointError, RequestError

# Below this the divisor would be 0 or denormal in f32; it is greedy choice long before.
_MIN_TEMPERATURE = 1e-30
# Nearly every nucleus is found among so many best tokens, and to select them costs a quarter of sorting 154,880.
_NUCLEUS_GUESS = 4096

_SUM_BLOCK = 1024

_RANGES = {
    "temperature": (0.0, 100.0),
    "top_p": (0.0, 1.0),
    "top_k": (0, 2**31 - 1),
    "min_p": (0.0, 1.0),
    "repetition_penalty": (0.01, 100.0),
    "presence_penalty": (-100.0, 100.0),
    "frequency_penalty": (-100.0, 100.0),
    "seed": (-(2**63), 2**64 - 1),
}


@dataclass(frozen=True)
class SamplingParams:
    """How tokens are chosen; the defaults draw from the model's own distribution.

    Args:
        temperature: 0 takes the best token, ties the lowest id.
        top_p: keep the fewest best tokens whose probabilities reach this sum; 1 keeps all, 0 the best one.
        top_k: keep so many best tokens; 0 keeps all.
        min_p: keep tokens at least this many times as probable as the best one.
        repetition_penalty: divides positive and multiplies negative logits of every token seen so far.
        presence_penalty: taken off the logit of every token generated so far.
        frequency_penalty: taken off once for each time the token was generated.
        seed: the same seed and logits give the same tokens; None draws a new one.

    Raises:
        RequestError: a value is out of its range; the message names the parameter.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    seed: int | None = None

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if value is None and field.name == "seed":
                continue
            low, high = _RANGES[field.name]
            is_whole = isinstance(low, int)
            kind = Integral if is_whole else Real
            if isinstance(value, bool) or not isinstance(value, kind) or not low <= value <= high:
                expected = f"{'a whole number' if is_whole else 'a number'} from {low:g} to {high:g}"
                raise RequestError(f"{field.name} is {value!r:.100}, expected {expected}")

    @classmethod
    def from_generation_config(cls, config: Mapping[str, Any]) -> "SamplingParams":
        """The defaults that a checkpoint recommends in its generation_config.json; {} gives our own.

        Raises:
            CheckpointError: a value is out of its range.
        """
        names = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
        given = {name: config[name] for name in names if config.get(name) is not None}
        if config.get("do_sample") is False:
            given["temperature"] = 0.0
        try:
            return cls(**given)
        except RequestError as error:
            raise CheckpointError(f"generation_config.json: {error}; correct or remove it") from error

    @property
    def is_greedy(self) -> bool:
        """Whether no draw is made."""
        return self.temperature == 0

    @property
    def has_penalties(self) -> bool:
        """Whether tokens seen before change the logits."""
        return (self.repetition_penalty, self.presence_penalty, self.frequency_penalty) != (1, 0, 0)


def make_rng(seed: int | None) -> np.random.Generator:
    """The draws of one request: nothing but the seed decides them, whatever else runs beside it."""
    return np.random.Generator(np.random.Philox(key=None if seed is None else seed % 2**64))


def sample(
    logits: np.ndarray,
    params: SamplingParams,
    history_ids: Sequence[int] | np.ndarray,
    rng: np.random.Generator,
    num_prompt: int = 0,
) -> int:
    """The next token's id. Takes exactly one number from `rng`, or none when greedy; changes no argument otherwise.

    Args:
        logits: [V] f32, finite, or -inf for tokens that must not come.
        history_ids: all tokens so far; read only when `params.has_penalties`.
        rng: from `make_rng`.
        num_prompt: how many of `history_ids` are the prompt's.

    Raises:
        CheckpointError: a logit is NaN or +inf.
        RequestError: no token may come.
    """
    logits = np.asarray(logits, dtype=np.float32)
    _check(logits)
    if params.has_penalties:
        logits = apply_penalties(logits, params, np.asarray(history_ids, dtype=np.int64), num_prompt)
    if params.is_greedy:
        return int(np.argmax(logits))
    logits = apply_temperature(logits, params.temperature)
    ids = None
    for keep, value, is_on in (
        (keep_top_k, params.top_k, params.top_k > 0),
        (keep_top_p, params.top_p, params.top_p < 1),
        (keep_min_p, params.min_p, params.min_p > 0),
    ):
        if is_on:
            kept = keep(logits, value)
            logits = logits[kept]
            ids = kept if ids is None else ids[kept]
    at = draw(logits, rng.random())
    return at if ids is None else int(ids[at])


def greedy(logits: np.ndarray) -> int:
    """The id of the greatest logit, the lowest of equals.

    Args:
        logits: [V].

    Raises:
        CheckpointError: a logit is NaN or +inf.
        RequestError: no token may come.
    """
    _check(logits)
    return int(np.argmax(logits))


def found_elsewhere(token_id: int) -> int:
    """What `greedy` gives, where the best token was found without the logits coming here.

    Args:
        token_id: -1 where a logit was NaN or infinite.

    Raises:
        CheckpointError: it is -1.
    """
    if token_id < 0:
        raise _damaged("NaN or infinity")
    return token_id


def apply_penalties(
    logits: np.ndarray, params: SamplingParams, history_ids: np.ndarray, num_prompt: int = 0
) -> np.ndarray:
    """New logits after the three penalties.

    A token seen anywhere: l / r where l > 0, else l * r, once however often it was seen. Then for a token generated
    c > 0 times: l - presence - frequency * c. The prompt counts for r only.

    Args:
        logits: [V] f32.
        history_ids: [S] int64, prompt first.
        num_prompt: how many of them are the prompt's.

    Returns:
        [V] f32.

    Source: repetition, CTRL (arXiv 1909.05858) section 4.1; presence and frequency, OpenAI's API reference.
    """
    logits = logits.copy()
    if params.repetition_penalty != 1:
        seen = np.unique(history_ids)
        penalty = np.float32(params.repetition_penalty)
        logits[seen] = np.where(logits[seen] > 0, logits[seen] / penalty, logits[seen] * penalty)
    if params.presence_penalty or params.frequency_penalty:
        generated, counts = np.unique(history_ids[num_prompt:], return_counts=True)
        logits[generated] -= (params.presence_penalty + params.frequency_penalty * counts).astype(np.float32)
    return logits


def apply_temperature(logits: np.ndarray, temperature: float) -> np.ndarray:
    """(l - max l) / temperature, so that the best token is at 0 whatever the temperature.

    Args:
        logits: [n] f32, at least one of them finite.
        temperature: above 0; below 1e-30 it counts as 1e-30.

    Returns:
        [n] f32.
    """
    with np.errstate(over="ignore"):  # a quotient beyond f32 becomes -inf: probability 0, as it should
        return (logits - logits.max()) / np.float32(max(temperature, _MIN_TEMPERATURE))


def keep_top_k(logits: np.ndarray, k: int) -> np.ndarray:
    """Positions of the k greatest logits, the lowest positions of equals; all when there are no more than k.

    Args:
        logits: [n].
        k: at least 1.

    Returns:
        [min(k, n)] int64, ascending.
    """
    if k >= len(logits):
        return np.arange(len(logits))
    cut = len(logits) - k
    threshold = np.partition(logits, cut)[cut]
    above = np.flatnonzero(logits > threshold)
    equal = np.flatnonzero(logits == threshold)[: k - len(above)]
    return np.sort(np.concatenate([above, equal]))


def keep_top_p(logits: np.ndarray, p: float) -> np.ndarray:
    """Positions of the fewest best tokens whose probabilities reach the sum p; at least one.

    The token that reaches p is kept. Probabilities are those of the given logits alone (after top-k: of the k).

    Args:
        logits: [n] f32, the greatest finite.
        p: 0 to 1.

    Returns:
        [m] int64, ascending.

    Source: nucleus sampling, arXiv 1904.09751.
    """
    probs = _unnormalized(logits)
    target = p * probs.sum(dtype=np.float64)
    for num_best in (min(_NUCLEUS_GUESS, len(probs)), len(probs)):
        cut = len(probs) - num_best
        best = np.sort(np.partition(probs, cut)[cut:] if cut else probs)[::-1]
        count = _first_passing(best, target, "left") + 1
        if count <= num_best:
            break
    return keep_top_k(logits, count)


def keep_min_p(logits: np.ndarray, p: float) -> np.ndarray:
    """Positions of tokens at least p times as probable as the best one.

    Args:
        logits: [n] f32, the greatest finite.
        p: above 0, to 1.

    Returns:
        [m] int64, ascending.

    Source: arXiv 2407.01082.
    """
    return np.flatnonzero(logits >= logits.max() + np.float32(math.log(p)))


def draw(logits: np.ndarray, uniform: float) -> int:
    """The position at which the cumulative probability first exceeds `uniform`; never one at -inf.

    Args:
        logits: [n] f32, the greatest finite.
        uniform: from 0 up to, not including, 1.
    """
    probs = _unnormalized(logits)
    at = _first_passing(probs, uniform * probs.sum(dtype=np.float64), "right")
    return at if at < len(probs) else int(np.flatnonzero(probs)[-1])  # the product may round up to the whole sum


def logprobs(logits: np.ndarray) -> np.ndarray:
    """Natural logarithms of the model's own probabilities, before any sampling parameter.

    Args:
        logits: [V].

    Returns:
        [V] f64; -inf where the logit is.

    Raises:
        CheckpointError: a logit is NaN or +inf.
        RequestError: no token may come.
    """
    _check(logits)
    shifted = logits.astype(np.float64) - float(logits.max())
    return shifted - math.log(np.exp(shifted).sum())


def top_logprobs(values: np.ndarray, num: int) -> list[tuple[int, float]]:
    """The best `num` of `logprobs`' values as (id, value), best first, the lowest id of equals first."""
    if num < 1:
        return []
    best = keep_top_k(values, num)
    best = best[np.argsort(-values[best], kind="stable")]
    return [(int(token_id), float(values[token_id])) for token_id in best]


def _unnormalized(logits: np.ndarray) -> np.ndarray:
    return np.exp(logits - logits.max())


def _first_passing(probs: np.ndarray, target: float, side: str) -> int:
    """The first position whose running sum (f64) is at least (`left`) or above (`right`) a target; n if there is none.

    Sums blocks first: an f64 array of the whole vocabulary takes fresh pages each time, which doubles the cost.
    """
    blocks = np.cumsum(np.add.reduceat(probs, np.arange(0, len(probs), _SUM_BLOCK), dtype=np.float64))
    block = int(np.searchsorted(blocks, target, side))
    if block == len(blocks):
        return len(probs)
    start = block * _SUM_BLOCK
    within = np.cumsum(probs[start : start + _SUM_BLOCK], dtype=np.float64)
    # The two sums of a block may differ in the last bit; the position is in this block even so.
    remaining = min(target - (blocks[block - 1] if block else 0.0), np.nextafter(within[-1], 0))
    return start + int(np.searchsorted(within, remaining, side))


def _check(logits: np.ndarray) -> None:
    greatest = logits.max()
    if np.isfinite(greatest):
        return
    if greatest == -np.inf:
        raise RequestError("no token may come next: every logit is -inf; loosen the constraint on the output")
    raise _damaged(greatest)


def _damaged(logit: object) -> CheckpointError:
    return CheckpointError(
        f"the model gave {logit} as a logit; its weights are damaged or of another model: check the shards"
    )
