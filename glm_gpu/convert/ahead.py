"""Results in order, computed or fetched ahead of their use."""

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Executor, Future, wait
from typing import TypeVar

Item, Result = TypeVar("Item"), TypeVar("Result")


def in_order(
    executor: Executor, function: Callable[[Item], Result], items: Iterable[Item], ahead: int
) -> Iterator[Result]:
    """function(item) for each item in order, at most `ahead` of them under way or waiting.

    When it is closed early, or a result raises, what has not begun never will, and what has is waited for.
    """
    pending: deque[Future] = deque()
    try:
        for item in items:
            pending.append(executor.submit(function, item))
            if len(pending) >= ahead:
                yield pending.popleft().result()
        while pending:
            yield pending.popleft().result()
    finally:
        for future in pending:
            future.cancel()
        wait(pending)
