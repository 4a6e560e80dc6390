"""Sizes and rates as people write and read them."""

import re

from glm_gpu.errors import RequestError

_FACTORS = {
    "": 1, "b": 1,
    "k": 1024, "kib": 1024, "kb": 1000,
    "m": 1024**2, "mib": 1024**2, "mb": 1000**2,
    "g": 1024**3, "gib": 1024**3, "gb": 1000**3,
    "t": 1024**4, "tib": 1024**4, "tb": 1000**4,
}  # fmt: skip
_SIZE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([a-zA-Z]*)\s*")


def parse_bytes(text: str) -> int:
    """Bytes from "20GiB", "1.5g", "500MB", or a plain number; bare letters are binary.

    Raises:
        RequestError: the text is no size.
    """
    match = _SIZE.fullmatch(text)
    factor = _FACTORS.get(match.group(2).lower()) if match else None
    if match is None or factor is None:
        raise RequestError(f"size {text!r} is not understood; write for example 20GiB, 1500MB, or a number of bytes")
    return int(float(match.group(1)) * factor)


def format_bytes(num_bytes: float) -> str:
    """A size in binary units, three significant digits: "18.0 MiB"."""
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if abs(num_bytes) < 1024 or unit == "TiB":
            break
        num_bytes /= 1024
    if unit == "B":
        return f"{num_bytes:.0f} B"
    return f"{num_bytes:.{2 if num_bytes < 10 else 1 if num_bytes < 100 else 0}f} {unit}"
