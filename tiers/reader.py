"""Threads that read experts, the most urgent first."""

import heapq
import itertools
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import IntEnum


class Urgency(IntEnum):
    """DEMAND: a pass waits for it. PREFETCH: a pass may want it soon. PROMOTE: heat says it should be here."""

    DEMAND = 0
    PREFETCH = 1
    PROMOTE = 2


@dataclass(eq=False)
class ReadJob:
    """One expert on its way into a slot."""

    layer: int
    expert: int
    slot: int
    urgency: Urgency
    is_started: bool = field(default=False, init=False)
    is_promotion: bool = field(init=False)

    def __post_init__(self) -> None:
        self.is_promotion = self.urgency == Urgency.PROMOTE


class ReadPool:
    """Runs read jobs on threads of its own until closed.

    Args:
        num_threads: reads in flight at once.
        read: fills a job's slot; may raise.
        finish: called on the reading thread with the job and what `read` raised, or None.
    """

    def __init__(
        self,
        num_threads: int,
        read: Callable[[ReadJob], None],
        finish: Callable[[ReadJob, Exception | None], None],
    ) -> None:
        self._read, self._finish = read, finish
        self._queue: list[tuple[Urgency, int, ReadJob]] = []
        self._order = itertools.count()
        self._wake = threading.Condition()
        self._is_closed = False
        self._threads = [
            threading.Thread(target=self._work, name=f"glm-gpu-read-{n}", daemon=True) for n in range(num_threads)
        ]
        for thread in self._threads:
            thread.start()

    def submit(self, job: ReadJob) -> None:
        """Queue a job behind those of the same urgency. A queued job may be submitted again once it is more urgent."""
        with self._wake:
            heapq.heappush(self._queue, (job.urgency, next(self._order), job))
            self._wake.notify()

    def close(self) -> None:
        """Drop what is queued, wait for what is being read. Harmless when repeated."""
        with self._wake:
            self._is_closed = True
            self._queue.clear()
            self._wake.notify_all()
        for thread in self._threads:
            thread.join()

    def _work(self) -> None:
        while True:
            with self._wake:
                while not self._queue and not self._is_closed:
                    self._wake.wait()
                if self._is_closed:
                    return
                job = heapq.heappop(self._queue)[2]
                if job.is_started:
                    continue
                job.is_started = True
            failure = None
            try:
                self._read(job)
            except Exception as error:  # handed to whoever waits for this expert
                failure = error
            self._finish(job, failure)
