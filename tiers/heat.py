"""How often each expert is chosen: what placement goes by."""

import numpy as np

from glm_gpu.batch import Phase


class Heat:
    """Three signals for each (layer, expert): uses, exponentially decayed uses, and the last token that used it.

    Time is counted in tokens routed through a layer, so every layer has its own clock. Prefill and decode are counted
    apart: a long prompt touches nearly every expert once and says little about decoding.

    Args:
        num_layers: L, layers counted from 0, the multi-token layer included.
        num_experts: E.
        half_life_tokens: after this many tokens a use counts half.
    """

    def __init__(self, num_layers: int, num_experts: int, half_life_tokens: float = 512.0) -> None:
        self.half_life_tokens = half_life_tokens
        shape = (num_layers, num_experts)
        self.uses: dict[Phase, np.ndarray] = {"prefill": np.zeros(shape, np.int64), "decode": np.zeros(shape, np.int64)}
        self.tokens: dict[Phase, np.ndarray] = {
            "prefill": np.zeros(num_layers, np.int64),
            "decode": np.zeros(num_layers, np.int64),
        }
        self.last_use = np.full(shape, -1, np.int64)
        # Uses weighted by 2^(token / half life), kept relative to `_epoch` so that one expert's update touches one value.
        self._weighted = np.zeros(shape, np.float64)
        self._epoch = np.zeros(num_layers, np.float64)

    def clock(self, layer: int) -> int:
        """Tokens that have passed through the layer's router."""
        return int(self.tokens["prefill"][layer] + self.tokens["decode"][layer])

    def count(self, layer: int, ids: np.ndarray, phase: Phase) -> None:
        """Record one pass's choices in one layer.

        Args:
            ids: [T, K] int, each row the experts of one token, in the order of the tokens.
        """
        start, num_tokens = self.clock(layer), len(ids)
        times = start + np.arange(num_tokens)
        if times[-1] - self._epoch[layer] > 512 * self.half_life_tokens:  # 2^512: far inside float64
            self._weighted[layer] *= 2.0 ** ((self._epoch[layer] - start) / self.half_life_tokens)
            self._epoch[layer] = start
        weights = 2.0 ** ((times - self._epoch[layer]) / self.half_life_tokens)
        np.add.at(self.uses[phase][layer], ids, 1)
        np.add.at(self._weighted[layer], ids, weights[:, None])
        np.maximum.at(self.last_use[layer], ids, times[:, None])
        self.tokens[phase][layer] += num_tokens

    def decayed(self, layer: int) -> np.ndarray:
        """[E] f64: each expert's uses, one that lies n tokens back counting 2^(-n / half life)."""
        newest = self.clock(layer) - 1
        return self._weighted[layer] * 2.0 ** ((self._epoch[layer] - newest) / self.half_life_tokens)
