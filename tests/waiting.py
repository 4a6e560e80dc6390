"""Waiting in tests: as long as it takes on a machine that stands still for a while, and not for ever."""

import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")
LONG_S = 600.0


def wait_until(condition: Callable[[], T]) -> T:
    """What a condition gives once that is true; the test fails where it never comes."""
    end = time.monotonic() + LONG_S
    while not (found := condition()):
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.005)
    return found
