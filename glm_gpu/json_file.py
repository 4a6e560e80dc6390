"""JSON side files of a model folder, read with a size limit and one kind of error."""

import json
import re
from pathlib import Path

from glm_gpu.errors import CheckpointError
from glm_gpu.units import format_bytes

# config.json and tokenizer_config.json stay below 1 MB; the index of GLM-5.2-FP8 has 12 MB
MAX_JSON_BYTES = 64 * 1024**2
# By `json_memory_bytes` an index file's entries come to 7 times their text, one long text of escaped letters, as in a
# saved conversation, to 13 times, one with an emoji to 16 times; empty lists to 70 times.
_MEMORY_RATIO = 17
_SMALL_MEMORY_BYTES = 16 * 1024**2
_WIDE, _WIDEST = re.compile(rb"[\xc4-\xff]"), re.compile(rb"[\xf0-\xff]")


def json_memory_bytes(data: bytes) -> int:
    """No less than what parsing this JSON text takes at its peak, told without parsing it.

    Counts what begins a value, also inside strings. CPython 3.11 to 3.14 take at most: 24 bytes for a value's place, 80
    for a list, 96 for an object, 88 for a number or a string's head, 320 for a key with its share of tables that grow;
    decoded text and strings, 1, 2 or 4 bytes a character, strings with escapes twice more while they are put together.
    """
    width = 1 if data.isascii() else 4 if _WIDEST.search(data) else 2 if _WIDE.search(data) else 1
    strings = 4 if b"\\u" in data else width
    text_bytes = len(data) * (width + strings * (3 if b"\\" in data else 1))
    num_lists, num_objects, num_commas = data.count(b"["), data.count(b"{"), data.count(b",")
    num_values = 1 + num_commas + num_lists + num_objects  # of them at most 1 + num_commas hold no others
    small_bytes = 80 * num_lists + 96 * num_objects + 24 * num_values + 88 * (1 + num_commas) + 320 * data.count(b":")
    return text_bytes + small_bytes + 16384


def parse_json_object(data: bytes, where: str, check_keys: bool = True, max_memory_bytes: int | None = None) -> dict:
    """The object that UTF-8 JSON text holds.

    Args:
        data: the text.
        where: what the text is, for messages.
        check_keys: refuse a key given twice, in any object; doubles the time for many small objects.
        max_memory_bytes: most that parsing may take; by default 17 times the text. 16 MiB are always allowed.

    Raises:
        CheckpointError: no UTF-8, no JSON, nested too deeply, a duplicate key, no object at the top, or so many small
            values that parsing would take too much memory.
    """
    allowed = max(_SMALL_MEMORY_BYTES, _MEMORY_RATIO * len(data) if max_memory_bytes is None else max_memory_bytes)
    needed = json_memory_bytes(data)
    if needed > allowed:
        raise CheckpointError(
            f"{where}: {len(data)} bytes of JSON that may take {format_bytes(needed)} to parse, expected at most "
            f"{format_bytes(allowed)}; no model's file looks like that, download it again"
        )
    try:
        value = json.loads(data.decode("utf-8"), object_pairs_hook=_unique if check_keys else None)
    except RecursionError:
        raise CheckpointError(f"{where}: JSON is nested too deeply; download the file again") from None
    except ValueError as error:  # includes JSONDecodeError and UnicodeDecodeError
        raise CheckpointError(f"{where}: not valid JSON ({error}); download the file again") from None
    if not isinstance(value, dict):
        raise CheckpointError(f"{where}: expected a JSON object, found {type(value).__name__}; download the file again")
    return value


def read_json_object(path: Path) -> dict:
    """The object in a JSON file.

    Raises:
        CheckpointError: the file is missing, unreadable, over MAX_JSON_BYTES, or holds no JSON object.
    """
    try:
        num_bytes = path.stat().st_size
        if num_bytes > MAX_JSON_BYTES:
            raise CheckpointError(
                f"{path}: {num_bytes} bytes, expected at most {MAX_JSON_BYTES}; this is no JSON side file"
            )
        data = path.read_bytes()
    except FileNotFoundError:
        raise CheckpointError(missing_file(path)) from None
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read ({error.strerror}); check its permissions") from None
    return parse_json_object(data, str(path))


def missing_file(path: Path) -> str:
    """The message for a file that is not there; a dangling link names its target."""
    if path.is_symlink():
        return f"{path}: link to {path.readlink()}, which does not exist; download the model again"
    if not path.parent.is_dir():
        return f"{path.parent}: no such folder; give the folder that holds config.json and the shards"
    return f"{path}: not found; download the missing file or give another model folder"


def _unique(pairs: list) -> dict:
    result = dict(pairs)
    if len(result) != len(pairs):
        seen = set()
        for key, _ in pairs:
            if key in seen:
                raise ValueError(f"key {key!r:.200} given twice")
            seen.add(key)
    return result
