"""What a call holds in memory at its peak, for tests that hold it against a bound."""

import gc
import tracemalloc
from collections.abc import Callable

NUM_TRIES = 3


def peak_bytes(call: Callable[[], object], bound: float) -> int:
    """The most that a call held at once; measured again, up to three times, while it is above the bound.

    tracemalloc counts what the whole process allocates: the finalizers of a collection that falls into the call, other
    threads, caches filled on first use. They can only add, so the smallest of several peaks is nearest to the call's.

    Args:
        call: takes the same memory each time.
        bound: what the test allows, in bytes.
    """
    peaks: list[int] = []
    while not peaks or (min(peaks) > bound and len(peaks) < NUM_TRIES):
        peaks.append(_peak_bytes(call))
    return min(peaks)


def _peak_bytes(call: Callable[[], object]) -> int:
    collects = gc.isenabled()
    gc.disable()
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        call()
        return tracemalloc.get_traced_memory()[1] - before
    finally:
        tracemalloc.stop()
        if collects:
            gc.enable()
