"""Whether to read ahead: decided by measuring, again and again."""

from typing import Literal

PrefetchMode = Literal["on", "off", "auto"]

# Steps of one trial. At 10 tokens a second a pair of trials takes three seconds.
TRIAL_STEPS = 16
# After a decision it holds for so many steps; then both ways are tried again, since topic and cache have moved on.
HOLD_STEPS = 256
# Reading ahead must save this share of the waiting to be kept: it also wears the disk and the cache.
WORTHWHILE = 0.98


class PrefetchSwitch:
    """Turns prefetching on and off by the time that decoding waits for reads with it and without.

    Args:
        mode: "on" and "off" are obeyed; "auto" measures.
    """

    def __init__(self, mode: PrefetchMode) -> None:
        self.mode = mode
        self.is_on = mode != "off"
        self._step = 0
        self._waited = {True: 0.0, False: 0.0}

    def step(self, wait_s: float) -> None:
        """Count one decode step, of which `wait_s` seconds were spent waiting for reads."""
        if self.mode != "auto":
            return
        if self._step < 2 * TRIAL_STEPS:
            self._waited[self.is_on] += wait_s
        self._step += 1
        if self._step == TRIAL_STEPS:
            self.is_on = not self.is_on
        elif self._step == 2 * TRIAL_STEPS:
            self.is_on = self._waited[True] < WORTHWHILE * self._waited[False]
        elif self._step == 2 * TRIAL_STEPS + HOLD_STEPS:
            self._step, self._waited = 0, {True: 0.0, False: 0.0}
