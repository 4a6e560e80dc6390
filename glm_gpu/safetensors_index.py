"""Which tensors a model folder holds and where: shard headers and the index file, checked before anything is read.

A safetensors file: 8 bytes little-endian header length n; n bytes of JSON, padded with spaces, mapping each name to
{"dtype", "shape", "data_offsets": [begin, end)} with offsets from the end of the header; then the data.
"""

import hashlib
import logging
import math
import os
import re
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from reprlib import repr as brief
from typing import NamedTuple

from glm_gpu.errors import CheckpointError
from glm_gpu.json_file import missing_file, parse_json_object, read_json_object

INDEX_FILE = "model.safetensors.index.json"
# what the reference implementation allows; GLM-5.2's largest header has 0.2 MB
MAX_HEADER_BYTES = 100_000_000
MAX_DIMENSIONS = 8
MAX_SHARDS = 100_000
MAX_SIZE = 2**63 - 1
DTYPE_BITS = {
    "BOOL": 8, "U8": 8, "I8": 8, "F8_E4M3": 8, "F8_E5M2": 8, "F8_E8M0": 8, "F4": 4, "F6_E2M3": 6, "F6_E3M2": 6,
    "U16": 16, "I16": 16, "F16": 16, "BF16": 16, "U32": 32, "I32": 32, "F32": 32,
    "U64": 64, "I64": 64, "F64": 64, "C64": 64,
}  # fmt: skip
_PLAIN_NAME = re.compile(r"(?!\.{1,2}$)[^/\\\0\ud800-\udfff]+", re.DOTALL)
_NUMBERED = re.compile(r"(.*)-\d+-of-(\d+)\.safetensors")
_COMPARE_BYTES = 1 << 20

log = logging.getLogger(__name__)


class TensorInfo(NamedTuple):
    """Where one tensor lies. A named tuple because 120,000 are made at once: a fifth of a frozen dataclass's cost.

    Attributes:
        name: as in the file.
        dtype: as in the file: "BF16", "F8_E4M3", "U8", ...
        shape: as in the file.
        shard: path of its file.
        begin, end: byte range in that file, absolute.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    shard: Path
    begin: int
    end: int

    @property
    def nbytes(self) -> int:
        """Bytes in the file."""
        return self.end - self.begin


@dataclass(frozen=True)
class ShardIndex:
    """Every tensor of a model folder.

    Attributes:
        tensors: by name.
        shards: the files in use, in order of their names.
        unused: safetensors files in the folder that the index file does not name.
        digest: SHA-256 over file names and headers: names, types, shapes and offsets, no data.
    """

    tensors: dict[str, TensorInfo]
    shards: tuple[Path, ...]
    unused: tuple[Path, ...]
    digest: bytes


def index_shards(model_dir: Path) -> ShardIndex:
    """The tensors of all shards of a folder; reads headers only.

    Raises:
        CheckpointError: a shard is missing or broken, or index file and shards contradict each other.
    """
    shards, weight_map, unused = _find_shards(model_dir)
    tensors: dict[str, TensorInfo] = {}
    shard_names: dict[str, str] = {}
    digest = hashlib.sha256()
    for shard in shards:
        header, found = read_header(shard)
        digest.update(shard.name.encode("utf-8", "surrogateescape") + hashlib.sha256(header).digest())
        repeated = found.keys() & tensors.keys()
        for name in repeated:
            if not _same_bytes(tensors[name], found[name]):
                raise CheckpointError(
                    f"{model_dir}: tensor {name!r} is in {tensors[name].shard.name} and, with other bytes, in "
                    f"{shard.name}; remove the file that does not belong to this model"
                )
            if weight_map.get(name) != shard.name:
                del found[name]
        tensors.update(found)
        shard_names.update(dict.fromkeys(found, shard.name))
    _check_weight_map(model_dir, weight_map, shard_names)
    return ShardIndex(tensors, shards, unused, digest.digest())


def read_header(shard: Path) -> tuple[bytes, dict[str, TensorInfo]]:
    """A shard's header and the tensors it describes, every range checked against its shape and the file's size.

    Raises:
        CheckpointError: the file is missing, truncated, or its header does not add up; names file and tensor.
    """
    try:
        if not shard.is_file() and shard.exists():  # opening a pipe would wait for ever
            raise CheckpointError(f"{shard}: not a regular file; replace it by the shard itself")
        with shard.open("rb", buffering=0) as file:
            return parse_header(file, shard, os.fstat(file.fileno()).st_size)
    except FileNotFoundError:
        raise CheckpointError(missing_file(shard)) from None
    except OSError as error:
        raise CheckpointError(f"{shard}: cannot be read ({error.strerror}); check permissions and disk") from None


def parse_header(file, shard: Path, file_bytes: int) -> tuple[bytes, dict[str, TensorInfo]]:
    """As `read_header`, from an open binary file, or from the beginning of one that is still elsewhere.

    Args:
        file: has `read`; at its beginning.
        shard: where it is or will be.
        file_bytes: size of all of it.
    """
    header = _read_header_bytes(file, shard, file_bytes)
    where, max_memory_bytes = f"{shard}: header", 2 * file_bytes
    entries = parse_json_object(header, where, check_keys=False, max_memory_bytes=max_memory_bytes)
    if header.count(b'"data_offsets"') != len(entries.keys() - {"__metadata__"}):  # a name may be there twice
        del entries
        entries = parse_json_object(header, where, max_memory_bytes=max_memory_bytes)
    return header, _check_entries(shard, entries, 8 + len(header), file_bytes)


def _read_header_bytes(file, shard: Path, file_bytes: int) -> bytes:
    prefix = file.read(8)
    if len(prefix) < 8:
        raise CheckpointError(f"{shard}: {file_bytes} bytes, expected at least 8 and a header; {_fetch_again(shard)}")
    header_bytes = int.from_bytes(prefix, "little")
    if header_bytes > MAX_HEADER_BYTES:
        raise CheckpointError(
            f"{shard}: header length {header_bytes}, expected at most {MAX_HEADER_BYTES}; {_fetch_again(shard)}"
        )
    if 8 + header_bytes > file_bytes:
        raise CheckpointError(
            f"{shard}: {file_bytes} bytes, expected at least {8 + header_bytes} for its header; {_fetch_again(shard)}"
        )
    header = file.read(header_bytes)
    if len(header) < header_bytes:
        raise CheckpointError(f"{shard}: shrank while it was read; {_fetch_again(shard)}")
    return header


def _check_entries(shard: Path, entries: dict, data_start: int, file_bytes: int) -> dict[str, TensorInfo]:
    tensors = {}
    last_end, last, is_in_order = 0, "", True
    entries.pop("__metadata__", None)
    for name, entry in entries.items():
        try:
            dtype, shape, (begin, end) = entry["dtype"], entry["shape"], entry["data_offsets"]
            bits = DTYPE_BITS[dtype]
        except (TypeError, KeyError, ValueError):
            _refuse(shard, name, f"header entry is {brief(entry)}", "dtype, shape and data_offsets [begin, end]")
        if type(begin) is not int or type(end) is not int or not 0 <= begin <= end <= MAX_SIZE:
            _refuse(shard, name, f"data_offsets are [{brief(begin)}, {brief(end)}]", f"0 <= begin <= end <= {MAX_SIZE}")
        if not _is_shape(shape):
            _refuse(
                shard, name, f"shape is {brief(shape)}", f"at most {MAX_DIMENSIONS} whole numbers from 0 to {MAX_SIZE}"
            )
        if math.prod(shape) * bits != (end - begin) * 8:
            expected = f"{math.prod(shape) * bits // 8} for {dtype} {brief(shape)}"
            _refuse(shard, name, f"data_offsets span {end - begin} bytes", expected)
        tensors[name] = TensorInfo(name, dtype, tuple(shape), shard, data_start + begin, data_start + end)
        if begin < end:
            is_in_order = is_in_order and begin >= last_end
            if end > last_end:
                last_end, last = end, name
    if not is_in_order:  # writers sort by offset, so that sorting here is the exception
        _refuse_overlaps(shard, sorted(tensors.values(), key=lambda info: (info.begin, info.end)))
    if data_start + last_end != file_bytes:
        raise CheckpointError(
            f"{shard}: {file_bytes} bytes, expected {data_start + last_end} (end of tensor {last!r:.200}); "
            f"{_fetch_again(shard)}"
        )
    return tensors


def _is_shape(value) -> bool:
    if type(value) is not list or len(value) > MAX_DIMENSIONS:
        return False
    for size in value:  # noqa: SIM110 (all() over a generator takes three times as long)
        if type(size) is not int or not 0 <= size <= MAX_SIZE:
            return False
    return True


def _refuse_overlaps(shard: Path, by_offset: list[TensorInfo]) -> None:
    for previous, info in pairwise(info for info in by_offset if info.nbytes):
        if info.begin < previous.end:
            _refuse(
                shard, info.name, f"begins at {info.begin}, inside {previous.name!r:.200}", f"at least {previous.end}"
            )


def _refuse(shard: Path, name: str, found: str, expected: str):
    raise CheckpointError(f"{shard}: tensor {name!r:.200}: {found}, expected {expected}; {_fetch_again(shard)}")


def _fetch_again(shard: Path) -> str:
    return f"delete it and fetch this one file again: hf download REPOSITORY {shard.name}"


def _find_shards(model_dir: Path) -> tuple[tuple[Path, ...], dict[str, str], tuple[Path, ...]]:
    """(files to use, index file's name -> file name, files not to use)."""
    if not model_dir.is_dir():
        raise CheckpointError(f"{model_dir}: no such folder; give the folder that holds config.json and the shards")
    on_disk = {path.name: path for path in sorted(model_dir.glob("*.safetensors"))}
    index_file = model_dir / INDEX_FILE
    if not (index_file.exists() or index_file.is_symlink()):
        if not on_disk:
            raise CheckpointError(f"{model_dir}: no *.safetensors file; give the folder that holds the shards")
        _check_numbering(model_dir, on_disk)
        return tuple(on_disk.values()), {}, ()
    weight_map = read_json_object(index_file).get("weight_map")
    if not isinstance(weight_map, dict) or set(map(type, weight_map.values())) != {str}:
        raise CheckpointError(f"{index_file}: weight_map is no object of file names; download the file again")
    named = sorted(set(weight_map.values()))
    for name in named:
        if not _PLAIN_NAME.fullmatch(name) or len(os.fsencode(name)) > 255:
            raise CheckpointError(f"{index_file}: shard {name!r:.200} is no plain file name; download the file again")
    _refuse_missing(model_dir, [name for name in named if not (model_dir / name).exists()], INDEX_FILE)
    unused = tuple(path for name, path in on_disk.items() if name not in set(named))
    if unused:
        names = ", ".join(path.name for path in unused)
        log.warning("%s: not used, since %s does not name them: %s", model_dir, INDEX_FILE, names)
    return tuple(model_dir / name for name in named), weight_map, unused


def _check_numbering(model_dir: Path, on_disk: dict[str, Path]) -> None:
    """Without an index file, a name "X-00002-of-00005" still says how many shards there must be."""
    missing = []
    for stem, total in sorted({match.groups() for match in map(_NUMBERED.fullmatch, on_disk) if match}):
        if int(total) > MAX_SHARDS:
            raise CheckpointError(
                f"{model_dir}: a name counts {total} shards, expected at most {MAX_SHARDS}; rename it"
            )
        names = (f"{stem}-{number:0{len(total)}d}-of-{total}.safetensors" for number in range(1, int(total) + 1))
        missing += [name for name in names if name not in on_disk]
    _refuse_missing(model_dir, sorted(set(missing)), "the numbering of the others")


def _refuse_missing(model_dir: Path, missing: list[str], named_by: str) -> None:
    if not missing:
        return
    details = []
    incomplete = [path.name for path in model_dir.glob("*.incomplete")]
    for name in missing[:20]:
        path = model_dir / name
        if path.is_symlink():
            name += f" (link to {path.readlink()}, which does not exist)"
        elif any(file.startswith(name) for file in incomplete):
            name += " (an .incomplete download lies beside it)"
        details.append(name)
    if len(missing) > len(details):
        details.append(f"and {len(missing) - len(details)} more")
    raise CheckpointError(
        f"{model_dir}: {len(missing)} shards named by {named_by} are not there: {', '.join(details)}; "
        f"fetch them: hf download REPOSITORY {missing[0]}"
    )


def _check_weight_map(model_dir: Path, weight_map: dict[str, str], shard_names: dict[str, str]) -> None:
    wrong = [name for name, file in weight_map.items() if shard_names.get(name) != file]
    if wrong:
        raise CheckpointError(
            f"{model_dir / INDEX_FILE}: {len(wrong)} tensors are not in the shard it names, first {wrong[0]!r:.200} in "
            f"{weight_map[wrong[0]]}; index and shards are of different downloads, fetch both again"
        )


def _same_bytes(one: TensorInfo, other: TensorInfo) -> bool:
    if (one.dtype, one.shape) != (other.dtype, other.shape):
        return False
    with one.shard.open("rb") as one_file, other.shard.open("rb") as other_file:
        one_file.seek(one.begin)
        other_file.seek(other.begin)
        for begin in range(0, one.nbytes, _COMPARE_BYTES):
            size = min(_COMPARE_BYTES, one.nbytes - begin)
            if one_file.read(size) != other_file.read(size):
                return False
    return True
