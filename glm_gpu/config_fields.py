"""ConfigFields: typed, range-checked look-ups in a parsed config.json; a refusal names field, found and expected."""

from reprlib import repr as brief

from glm_gpu.errors import CheckpointError, UnsupportedModelError

_REQUIRED = object()


class ConfigFields:
    """The fields of one JSON object. A field that is null counts as absent.

    Args:
        values: the parsed object.
        where: its name in messages.
    """

    def __init__(self, values: dict, where: str):
        self._values = values
        self._where = where

    def is_absent(self, name: str) -> bool:
        """Whether a field is missing or null."""
        return self._values.get(name) is None

    def nested(self, name: str) -> "ConfigFields":
        """The fields of an object inside this one."""
        value = self._values[name]
        self.check(isinstance(value, dict), name, value, "an object")
        return ConfigFields(value, f"{self._where}: {name}")

    def check(self, holds: bool, name: str, found, expected: str) -> None:
        """Refuse the file unless the condition holds.

        Raises:
            CheckpointError: it does not hold.
        """
        if not holds:
            raise CheckpointError(
                f"{self._where}: {name} is {_shown(found)}, expected {expected}; "
                "take config.json from the model's own repository"
            )

    def require(self, name: str, supported, default) -> None:
        """Refuse the model unless a field has the one value this program implements.

        Raises:
            UnsupportedModelError: it has another.
        """
        value = default if self.is_absent(name) else self._values[name]
        if value != supported or isinstance(value, bool) != isinstance(supported, bool):
            raise UnsupportedModelError(
                f"{self._where}: {name} is {_shown(value)}, and only {_shown(supported)} is supported"
            )

    def text(self, name: str) -> str:
        """A string field."""
        value = self._get(name, _REQUIRED)
        self.check(isinstance(value, str), name, value, "a string")
        return value

    def flag(self, name: str, default) -> bool:
        """A true/false field."""
        value = self._get(name, default)
        self.check(isinstance(value, bool), name, value, "true or false")
        return value

    def integer(self, name: str, low: int, high: int, default=_REQUIRED, multiple_of: int = 1) -> int:
        """A whole number from low to high."""
        value = self._get(name, default)
        expected = f"a whole number from {low} to {high}"
        self.check(_is_integer(value) and low <= value <= high, name, value, expected)
        self.check(value % multiple_of == 0, name, value, f"a multiple of {multiple_of}")
        return value

    def number(self, name: str, low: float, high: float, default=_REQUIRED) -> float:
        """A finite number above low, at most high."""
        value = self._get(name, default)
        is_number = _is_integer(value) or isinstance(value, float)
        self.check(is_number and low < value <= high, name, value, f"a number above {low:g}, at most {high:g}")
        return float(value)

    def integers(self, name: str, count: int, low: int, high: int) -> tuple[int, ...]:
        """A list of `count` whole numbers, each from low to high."""
        value = self._get(name, _REQUIRED)
        is_list = isinstance(value, list) and len(value) == count
        holds = is_list and all(_is_integer(item) and low <= item <= high for item in value)
        self.check(holds, name, value, f"a list of {count} whole numbers from {low} to {high}")
        return tuple(value)

    def choices(self, name: str, count: int, allowed: tuple[str, ...]) -> tuple[str, ...]:
        """A list (or, for single letters, a string) of `count` entries, each one of those allowed."""
        value = self._get(name, _REQUIRED)
        kind = str if len(allowed[0]) == 1 else list
        self.check(isinstance(value, kind), name, value, f"a {kind.__name__} of {' and '.join(allowed)}")
        self.check(len(value) == count, name, f"{len(value)} entries", f"{count}, one for each layer")
        for layer, item in enumerate(value):
            self.check(item in allowed, f"{name}[{layer}]", item, f"{' or '.join(allowed)}")
        return tuple(value)

    def token_ids(self, name: str, vocab_size: int) -> tuple[int, ...]:
        """An id or a list of ids as a tuple; empty when absent."""
        value = self._get(name, ())
        ids = tuple(value) if isinstance(value, (list, tuple)) else (value,)
        holds = all(_is_integer(item) and 0 <= item < vocab_size for item in ids)
        self.check(holds, name, value, f"an id, or a list of ids, below vocab_size {vocab_size}")
        return ids

    def rope_theta(self, default: float | None) -> float:
        """The base of the rotary angles: nested in `rope_parameters`, else at the top level, else the default.

        Raises:
            UnsupportedModelError: positions are scaled (yarn and the like) or only part of a head is rotated.
        """
        source = self
        for key in ("rope_scaling", "rope_parameters"):
            if self.is_absent(key):
                continue
            nested = self.nested(key)
            nested.require("rope_type", "default", default="default")
            nested.require("type", "default", default="default")
            nested.require("partial_rotary_factor", 1, default=1)
            if not nested.is_absent("rope_theta"):
                source = nested
        self.require("partial_rotary_factor", 1, default=1)
        return source.number("rope_theta", 1.0, 1e12, default=_REQUIRED if default is None else default)

    def _get(self, name: str, default):
        value = self._values.get(name)
        if value is not None:
            return value
        self.check(default is not _REQUIRED, name, value, "a value")
        return default


def _is_integer(value) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _shown(value) -> str:
    return "missing" if value is None else brief(value)
