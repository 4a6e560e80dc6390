"""Routing as GLM-5.2's is: how skewed and how repetitive was measured, which expert is hot is drawn from a seed.

Each expert of a layer has a score, and the best K are a token's. A score is a sum of Gaussians: what the expert is
always worth (popularity), what it is worth to the text's subject, two that wander from token to token and forget in a
few and in some thirty tokens, and the token's own noise, of spread 1. The five spreads and memories are fitted to
published measurements; `routing.json` has both, with their sources, and a test compares them.
"""

import json
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from statistics import NormalDist

import numpy as np

from glm_gpu.batch import Phase
from glm_gpu.tiers.heat import Heat
from glm_gpu.tiers.trace import Routing

PROFILE = Path(__file__).with_name("routing.json")
# Tokens of other texts that a heat is learned from: as many as weigh between runs (`heat.CARRIED_TOKENS`).
LEARNED_TOKENS = 256
_LEARNED_SUBJECTS = 4


@dataclass(frozen=True)
class RoutingProfile:
    """Spreads of the parts of an expert's score, in units of the token's own noise, and what the wandering ones keep.

    Attributes:
        popularity, subject, fast, slow: standard deviations.
        fast_memory, slow_memory: correlation from one token to the next.
    """

    popularity: float
    subject: float
    fast: float
    fast_memory: float
    slow: float
    slow_memory: float

    @property
    def spread(self) -> float:
        """Of everything but popularity."""
        return (self.subject**2 + self.fast**2 + self.slow**2 + 1) ** 0.5


@cache
def published_profile() -> RoutingProfile:
    """What ships: GLM-5.2's, fitted to published measurements."""
    return RoutingProfile(**json.loads(PROFILE.read_text(encoding="utf-8"))["fitted"])


class Router:
    """Draws tokens' experts, all layers at once; the same seed draws the same.

    Args:
        shape: (layers with experts, E).
        experts_per_tok: K.
        popularity: [layers, E] f32, worth of each expert; drawn when not given.
    """

    def __init__(
        self,
        profile: RoutingProfile,
        shape: tuple[int, int],
        experts_per_tok: int,
        seed: int,
        popularity: np.ndarray | None = None,
    ) -> None:
        self._profile, self._shape, self._experts_per_tok = profile, shape, experts_per_tok
        self._rng = np.random.default_rng(seed)
        drawn = profile.popularity * self._normal()
        self.popularity = drawn if popularity is None else popularity.astype(np.float32)
        self.begin_subject()

    def begin_subject(self) -> None:
        """What comes next is another text."""
        self._subject = self.popularity + self._profile.subject * self._normal()
        self._fast, self._slow = self._normal(), self._normal()

    def draw(self, num_tokens: int) -> np.ndarray:
        """The next tokens' experts: [T, layers, K] int, distinct in each row, in no order."""
        profile = self._profile
        ids = np.empty((num_tokens, self._shape[0], self._experts_per_tok), np.intp)
        for token in range(num_tokens):
            self._fast = self._wander(self._fast, profile.fast_memory)
            self._slow = self._wander(self._slow, profile.slow_memory)
            scores = self._subject + profile.fast * self._fast + profile.slow * self._slow + self._normal()
            best = np.argpartition(scores, -self._experts_per_tok, axis=1)
            ids[token] = best[:, -self._experts_per_tok :]
        return ids

    def _wander(self, values: np.ndarray, memory: float) -> np.ndarray:
        return np.float32(memory) * values + np.float32((1 - memory**2) ** 0.5) * self._normal()

    def _normal(self) -> np.ndarray:
        return self._rng.standard_normal(self._shape, np.float32)


def popularity_of(uses: np.ndarray, spread: float) -> np.ndarray:
    """The popularity that makes a router choose experts as often as they were used: [layers, E] f32.

    Args:
        uses: [layers, E] f64, uses a token of each expert, below 1; what was never used counts as used once in 10^4.
        spread: of everything else in a score.
    """
    table = NormalDist()
    shares = np.clip(uses, 1e-4, 1 - 1e-4)
    grid = np.linspace(shares.min(), shares.max(), 1024) if shares.min() < shares.max() else shares.ravel()[:1]
    scores = np.array([table.inv_cdf(share) for share in grid])
    return (spread * np.interp(shares, grid, scores)).astype(np.float32)


def routings(ids: np.ndarray, layers: list[int], phase: Phase, rows: int) -> list[Routing]:
    """Drawn experts as passes of at most so many rows, layer after layer.

    Args:
        ids: [T, len(layers), K].
        layers: the model's numbers of the layers drawn.
    """
    return [
        Routing(phase, layer, ids[start : start + rows, index])
        for start in range(0, len(ids), rows)
        for index, layer in enumerate(layers)
    ]


def learned_heat(router: Router, layers: list[int], num_layers: int, num_experts: int) -> Heat:
    """The heat that texts on other subjects leave behind. Draws from the router, which then goes on to a new one."""
    heat = Heat(num_layers, num_experts)
    for _ in range(_LEARNED_SUBJECTS):
        router.begin_subject()
        ids = router.draw(LEARNED_TOKENS // _LEARNED_SUBJECTS)
        for index, layer in enumerate(layers):
            heat.count(layer, ids[:, index], "decode")
    router.begin_subject()
    heat.begin_run()
    return heat
