"""Faults at the seams between the program and its machine: the nth read, write, allocation, or look at the clock.

    faults = Faults(seam="read", at=3, what="eio")
    faults.install()               the third read from here on fails with EIO
    faults.counts                  how often each seam was passed, for choosing `at`

Seams: "read" (positioned reads), "open", "write", "sync", "rename", "allocate" (NumPy arrays), "clock". `wrap` makes a
seam of any other function, such as the registration of pinned memory or the launch of a kernel:

    module.register = faults.wrap("register", module.register)

At a seam these may happen: "eio", "einval", "enospc", "emfile", "gone" (ESTALE), "memory" (MemoryError), "short" (a
read that gives half), "slow" (0.2 s), "jump" (clocks a day ahead), "term", "kill" (a signal to this process).
"""

import errno
import io
import os
import signal
import time
from collections import Counter

from wrapped_file import WrappedFile

ERRNOS = {
    "eio": errno.EIO,
    "einval": errno.EINVAL,
    "enospc": errno.ENOSPC,
    "gone": errno.ESTALE,
    "emfile": errno.EMFILE,
}
DAY_S = 86_400


class Faults:
    """One fault, at the nth passing of a seam; without one, a count of passings."""

    def __init__(self, seam: str = "", at: int = 0, what: str = "") -> None:
        self.seam, self.at, self.what = seam, at, what
        self.counts: Counter[str] = Counter()
        self.clock_ahead_s = 0

    def install(self) -> None:
        """Put the seams into this process, for good."""
        import numpy as np

        os.preadv = self.wrap("read", os.preadv, shorten=_shortened)
        os.pread = self.wrap("read", os.pread)
        os.fsync = self.wrap("sync", os.fsync)
        os.replace = self.wrap("rename", os.replace)
        os.rename = self.wrap("rename", os.rename)
        np.empty = self.wrap("allocate", np.empty)
        np.zeros = self.wrap("allocate", np.zeros)
        io.open = self.wrap("open", self._opening(io.open))
        for name in ("time", "monotonic", "perf_counter"):
            setattr(time, name, self._clock(getattr(time, name)))

    def wrap(self, seam, function, shorten=None):
        """The function with this seam in front of it.

        Args:
            shorten: (function, arguments) -> what it gives when it does only a part of its work.
        """

        def passed(*args, **kwargs):
            if self.strikes(seam):
                if self.what == "short" and shorten is not None:
                    return shorten(function, args)
                self.happen()
            return function(*args, **kwargs)

        return passed

    def strikes(self, seam):
        self.counts[seam] += 1
        return seam == self.seam and self.counts[seam] == self.at

    def happen(self):
        match self.what:
            case "memory":
                raise MemoryError
            case "slow":
                time.sleep(0.2)
            case "jump":
                self.clock_ahead_s = DAY_S
            case "term":
                os.kill(os.getpid(), signal.SIGTERM)
            case "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            case what if what in ERRNOS:
                raise OSError(ERRNOS[what], os.strerror(ERRNOS[what]))

    def _opening(self, real):
        def opened(file, mode="r", *args, **kwargs):
            found = real(file, mode, *args, **kwargs)
            return _Written(found, self) if "b" in mode and set(mode) & set("wax") else found

        return opened

    def _clock(self, real):
        def now():
            if self.strikes("clock"):
                self.happen()
            return real() + self.clock_ahead_s

        return now


class _Written(WrappedFile):
    """A file opened for writing, each write a seam."""

    def __init__(self, file, faults):
        super().__init__(file)
        self._faults = faults

    def write(self, data):
        if self._faults.strikes("write"):
            if self._faults.what in ("kill", "term", "enospc"):  # a part of it is written
                self._file.write(memoryview(data).cast("B")[: memoryview(data).nbytes // 2])
                self._file.flush()
            self._faults.happen()
        return self._file.write(data)


def _shortened(real, args):
    descriptor, buffers, *rest = args
    view = memoryview(buffers[0]).cast("B")
    return real(descriptor, [view[: max(1, len(view) // 2)]], *rest)
