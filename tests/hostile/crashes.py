"""What a disk may hold after a power cut: the writes, renames and syncs of a program recorded, and replayed in part.

The model is that of a journaling file system without mercy. What was not synced when the power went may be there or
not: of a file's bytes all, none, the first half, or zeros in their place; of the renames, creations and removals in a
folder since it was last synced any prefix, or all but one of them.
"""

import contextlib
import io
import itertools
import os
import random
from dataclasses import dataclass, field
from pathlib import Path

from wrapped_file import WrappedFile


@dataclass
class Recorder:
    """The operations on files of one folder, in order, while it is entered; a context manager.

    Attributes:
        before: the folder's files when it was entered, which are on the disk.
        operations: (what, ...) each; files are numbers, names may change.
    """

    folder: Path
    before: dict[str, bytes] = field(default_factory=dict)
    operations: list[tuple] = field(default_factory=list)

    def __enter__(self):
        self.before = {path.name: path.read_bytes() for path in self.folder.iterdir()} if self.folder.exists() else {}
        self._ids = {name: number for number, name in enumerate(self.before)}
        self._next = itertools.count(len(self._ids))
        self._files, self._folders = {}, set()
        self._stack = contextlib.ExitStack()
        for module, name, replacement in (
            (io, "open", self._open), (os, "open", self._os_open), (os, "fsync", self._fsync),
            (os, "close", self._close), (os, "replace", self._rename), (os, "rename", self._rename),
            (os, "unlink", self._unlink),
        ):  # fmt: skip
            real = getattr(module, name)
            setattr(module, name, lambda *args, real=real, call=replacement, **kwargs: call(real, *args, **kwargs))
            self._stack.callback(setattr, module, name, real)
        return self

    def __exit__(self, *exception):
        self._stack.close()

    def returned(self):
        """Note that the writer has returned: from here on its promise holds."""
        self.operations.append(("returned",))

    def _is_here(self, path):
        return isinstance(path, str | Path) and Path(path).parent == self.folder

    def _created(self, path):
        name = Path(path).name
        if name not in self._ids:
            self._ids[name] = next(self._next)
            self.operations.append(("create", name, self._ids[name]))
        return self._ids[name]

    def _open(self, real, file, mode="r", *args, **kwargs):
        opened = real(file, mode, *args, **kwargs)
        if isinstance(file, int):
            number = self._files.get(file)
        else:
            number = self._created(file) if self._is_here(file) and "r" not in mode else None
        if number is None or "r" in mode:
            return opened
        self._files[opened.fileno()] = number
        if "w" in mode:
            self.operations.append(("truncate", number, 0))
        return _Recorded(opened, number, self.operations)

    def _os_open(self, real, path, flags, *args, **kwargs):
        descriptor = real(path, flags, *args, **kwargs)
        if self._is_here(path) and flags & (os.O_WRONLY | os.O_RDWR):
            self._files[descriptor] = self._created(path)
        elif isinstance(path, str | Path) and Path(path) == self.folder:
            self._folders.add(descriptor)
        return descriptor

    def _close(self, real, descriptor):
        self._folders.discard(descriptor)
        self._files.pop(descriptor, None)
        real(descriptor)

    def _fsync(self, real, descriptor):
        if descriptor in self._folders:
            self.operations.append(("sync folder",))
        elif descriptor in self._files:
            self.operations.append(("sync", self._files[descriptor]))

    def _rename(self, real, source, target, **kwargs):
        real(source, target, **kwargs)
        if self._is_here(source):
            self._ids[Path(target).name] = self._ids.pop(Path(source).name)
            self.operations.append(("rename", Path(source).name, Path(target).name))

    def _unlink(self, real, path, **kwargs):
        real(path, **kwargs)
        if self._is_here(path) and self._ids.pop(Path(path).name, None) is not None:
            self.operations.append(("unlink", Path(path).name))


class _Recorded(WrappedFile):
    """A file whose writes are noted."""

    def __init__(self, file, number, operations):
        super().__init__(file)
        self._number, self._operations = number, operations

    def write(self, data):
        data = bytes(memoryview(data).cast("B")) if len(memoryview(data)) else b""
        self._operations.append(("write", self._number, self._file.tell(), data))
        return self._file.write(data)

    def truncate(self, size):
        self._operations.append(("truncate", self._number, size))
        return self._file.truncate(size)


def states(before, operations):
    """(files by name, whether the writer had returned) of everything the disk may hold, each once."""
    found = {}
    for cut in range(len(operations) + 1):
        has_returned = ("returned",) in operations[:cut]
        for files in _states_at(before, operations[:cut]):
            key = tuple(sorted(files.items()))
            found[key] = found.get(key, False) or has_returned
    return [(dict(files), has_returned) for files, has_returned in found.items()]


def some_states(before, operations, count, seed=0):
    """So many of them, drawn at random."""
    rng = random.Random(seed)
    for _ in range(count):
        cut = rng.randrange(len(operations) + 1)
        yield rng.choice(list(_states_at(before, operations[:cut]))), ("returned",) in operations[:cut]


def _states_at(before, operations):
    synced = dict(enumerate(before.values()))
    newest = dict(synced)
    names = {name: number for number, name in enumerate(before)}
    pending = []  # what was done to names since the folder was synced
    for operation in operations:
        match operation:
            case ("write", number, at, data):
                content = newest[number].ljust(at, b"\0")
                newest[number] = content[:at] + data + content[at + len(data) :]
            case ("truncate", number, size):
                newest[number] = newest.get(number, b"")[:size]
            case ("sync", number):
                synced[number] = newest[number]
            case ("create", _, number):
                newest.setdefault(number, b"")
                pending.append(operation)
            case ("rename", *_) | ("unlink", _):
                pending.append(operation)
            case ("sync folder",):
                names, pending = _applied(names, pending), []
    choices = [pending[:end] for end in range(len(pending) + 1)]
    choices += [pending[:at] + pending[at + 1 :] for at in range(len(pending))]
    for choice in choices:
        shown = _applied(names, choice)
        for damage in (_whole, _lost, _half, _zeros):
            yield {name: damage(synced.get(number), newest[number]) for name, number in shown.items()}


def _applied(names, operations):
    names = dict(names)
    for operation in operations:
        match operation:
            case ("create", name, number):
                names[name] = number
            case ("rename", source, target) if source in names:
                names[target] = names.pop(source)
            case ("unlink", name):
                names.pop(name, None)
    return names


def _whole(synced, newest):
    return newest


def _lost(synced, newest):
    return newest if synced == newest else synced or b""


def _half(synced, newest):
    return newest if synced == newest else newest[: len(newest) // 2]


def _zeros(synced, newest):
    return newest if synced == newest else bytes(len(newest))


def lay_out(folder, files):
    """Make a folder hold just these files."""
    folder.mkdir(exist_ok=True)
    for path in folder.iterdir():
        path.unlink()
    for name, content in files.items():
        (folder / name).write_bytes(content)
