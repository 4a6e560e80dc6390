"""JSON side files of a model folder, read with a size limit and one kind of error."""

import json
from pathlib import Path

from glm_gpu.errors import CheckpointError

# config.json and tokenizer_config.json stay below 1 MB; the index of GLM-5.2-FP8 has 12 MB
MAX_JSON_BYTES = 256 * 1024**2


def parse_json_object(data: bytes, where: str, check_keys: bool = True) -> dict:
    """The object that UTF-8 JSON text holds.

    Args:
        data: the text.
        where: what the text is, for messages.
        check_keys: refuse a key given twice, in any object; doubles the time for many small objects.

    Raises:
        CheckpointError: no UTF-8, no JSON, nested too deeply, a duplicate key, or no object at the top.
    """
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
