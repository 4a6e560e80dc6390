"""How often each expert is chosen: what placement goes by."""

import numpy as np

from glm_gpu.batch import Phase

PHASES: tuple[Phase, ...] = ("prefill", "decode")
# Half-lives in tokens: the slow signal tells what a model or a user's subject favours, the fast one what the text is
# about now. Tuned on the demo's recorded traces, see `policy`.
SLOW_HALF_LIFE = 1024.0
FAST_HALF_LIFE = 32.0
_SLOW, _FAST = 0, 1
# Weights grow as 2^(token / half life) until they are scaled back: 2^512 is far inside float64.
_MAX_GROWTH = 512.0
_TINY = np.finfo(np.float64).tiny


class Heat:
    """Signals for each (layer, expert): uses, decayed uses at two half-lives, and the last token that used it.

    Time is counted in tokens routed through a layer, so every layer has its own clock. Prefill and decode are counted
    apart in `uses`; the decayed signals take both, because a prompt is followed by text of its kind.

    Args:
        num_layers: L, layers counted from 0, the multi-token layer included.
        num_experts: E.
        half_lives: after so many tokens a use counts half: the slow signal's and the fast one's.

    Attributes:
        uses: [L, E] int64 by phase.
        tokens: [L] int64 by phase.
        clock: [L] int64, tokens that have passed through each layer's router.
        last_use: [L, E] int64, the clock's value when an expert was last used; -1 for never.
    """

    def __init__(
        self, num_layers: int, num_experts: int, half_lives: tuple[float, float] = (SLOW_HALF_LIFE, FAST_HALF_LIFE)
    ) -> None:
        self.half_lives = half_lives
        shape = (num_layers, num_experts)
        self.uses: dict[Phase, np.ndarray] = {phase: np.zeros(shape, np.int64) for phase in PHASES}
        self.tokens: dict[Phase, np.ndarray] = {phase: np.zeros(num_layers, np.int64) for phase in PHASES}
        self.clock = np.zeros(num_layers, np.int64)
        self.last_use = np.full(shape, -1, np.int64)
        # Uses, and tokens, weighted by 2^(token / half life). Kept relative to an epoch, so that a use touches one
        # value; in a rate, the quotient of the two, the epoch cancels out.
        self._weighted = np.zeros((2, *shape))
        self._weighted_tokens = np.zeros((2, num_layers))
        self._epoch = np.zeros((2, num_layers))

    @property
    def shape(self) -> tuple[int, int]:
        """(L, E)."""
        return self.last_use.shape

    def count(self, layer: int, ids: np.ndarray, phase: Phase) -> None:
        """Record one pass's choices in one layer.

        Args:
            ids: [T, K] int, each row the experts of one token, distinct, in the order of the tokens.
        """
        start, num_tokens = int(self.clock[layer]), len(ids)
        ids = ids.astype(np.intp)  # NumPy indexes twice as fast with its own integers
        for signal, half_life in enumerate(self.half_lives):
            if (start + num_tokens - self._epoch[signal, layer]) / half_life > _MAX_GROWTH:
                self._move_epoch(signal, layer, start)
            newest = (start + num_tokens - float(self._epoch[signal, layer])) / half_life
            assert newest < 2 * _MAX_GROWTH - 32, (num_tokens, half_life)
            if num_tokens == 1:  # decoding: one weight for all, and no expert twice
                weight = 2.0**newest
                np.add.at(self._weighted[signal, layer], ids[0], weight)
                self._weighted_tokens[signal, layer] += weight
                continue
            weights = 2.0 ** (newest - np.arange(num_tokens - 1, -1, -1) / half_life)
            self._weighted[signal, layer] += np.bincount(ids.ravel(), np.repeat(weights, ids.shape[1]), self.shape[1])
            self._weighted_tokens[signal, layer] += weights.sum()
        if num_tokens == 1:
            np.add.at(self.uses[phase][layer], ids[0], 1)
            self.last_use[layer][ids[0]] = start
        else:
            self.uses[phase][layer] += np.bincount(ids.ravel(), minlength=self.shape[1])
            np.maximum.at(self.last_use[layer], ids, np.arange(start, start + num_tokens)[:, None])
        self.tokens[phase][layer] += num_tokens
        self.clock[layer] += num_tokens

    def decayed(self, layer: int) -> np.ndarray:
        """[E] f64: each expert's uses, one that lies n tokens back counting 2^(-n / slow half-life)."""
        age = (self._epoch[_SLOW, layer] - self.clock[layer]) / self.half_lives[_SLOW]
        return self._weighted[_SLOW, layer] * 2.0**age

    def rates(self, layers: slice | np.ndarray = slice(None)) -> tuple[np.ndarray, np.ndarray]:
        """Uses a token of every expert, slow and fast, over the tokens seen so far; 0 in layers never used.

        Args:
            layers: which; all when not given.

        Returns:
            Two [len(layers), E] f64.
        """
        slow, fast = self._weighted[:, layers] / np.maximum(self._weighted_tokens[:, layers], _TINY)[..., None]
        return slow, fast

    def rates_at(self, layers: np.ndarray, experts: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The same for chosen experts: two [n] f64.

        Args:
            layers, experts: [n] int.
        """
        slow, fast = self._weighted[:, layers, experts] / np.maximum(self._weighted_tokens[:, layers], _TINY)
        return slow, fast

    def _move_epoch(self, signal: int, layer: int, epoch: int) -> None:
        factor = 2.0 ** ((self._epoch[signal, layer] - epoch) / self.half_lives[signal])
        self._weighted[signal, layer] *= factor
        self._weighted_tokens[signal, layer] *= factor
        self._epoch[signal, layer] = epoch
