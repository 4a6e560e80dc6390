"""Manifest: what glm_gpu.json says about a container, so that no reader has to guess.

    {"version": 1, "tool": "glm-gpu 0.1.0",
     "source": "zai-org/GLM-5.2-FP8", "revision": "0123abcd", "rounding": "rtn",
     "classes": {"expert": {"format": "int4_g64", "bits": 4, "group": 64, "scale_dtype": "F32"}, ...},
     "shapes": {"model.layers.*.mlp.experts.*.gate_proj.weight": [2048, 6144], ...},
     "shards": {"model-00001-of-00090.safetensors": {"bytes": 4296015872, "sha256": "..."}, ...}}

`classes` are those of `recipe.tensor_class` that are stored packed. `shapes` are [O, I] of every packed weight, keyed
by its name with each number replaced by a star. `group` is null when a row shares one scale, `revision` when unknown.
"""

import json
import re
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from glm_gpu.config import ModelConfig
from glm_gpu.errors import CheckpointError
from glm_gpu.json_file import parse_json_object, read_json_object
from glm_gpu.quant import FORMATS, Format
from glm_gpu.recipe import tensor_class

MANIFEST_FILE = "glm_gpu.json"
VERSION = 1
SCALE_DTYPES = {"F32": np.dtype(np.float32), "F16": np.dtype(np.float16)}
_NUMBER = re.compile(r"(?<=\.)\d+(?=\.)")
_SHA256 = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True)
class StoredFormat:
    """How a packed weight is stored: its format and the type of its scales, "F32" or "F16"."""

    format: Format
    scale_dtype: str = "F32"


@dataclass(frozen=True)
class ShardRecord:
    """A finished shard: its size in bytes and the SHA-256 of all of them, in hex."""

    nbytes: int
    sha256: str


@dataclass(frozen=True)
class Manifest:
    """A container's description; equal manifests write equal files.

    Attributes:
        tool: program and version that wrote the container.
        source: name of the model it was made from.
        revision: the source's revision, if known.
        classes: stored format by class of weights; classes stored as plain numbers are left out.
        shapes: (O, I) by pattern of name.
        shards: by file name.
        rounding: how the packed integers were chosen: "rtn" (to nearest) or "search"; absent in a file means "rtn".
    """

    tool: str
    source: str
    revision: str | None
    classes: dict[str, StoredFormat]
    shapes: dict[str, tuple[int, int]]
    shards: dict[str, ShardRecord]
    rounding: str = "rtn"

    @classmethod
    def open(cls, model_dir: Path) -> "Manifest | None":
        """The manifest of a folder; None when it has none. Raises as `from_json` does."""
        path = model_dir / MANIFEST_FILE
        if not (path.exists() or path.is_symlink()):
            return None
        return cls._from_object(read_json_object(path), str(path))

    @classmethod
    def from_json(cls, text: bytes, where: str = MANIFEST_FILE) -> "Manifest":
        """The manifest that a JSON text holds.

        Raises:
            CheckpointError: it is of another version, or a field is missing, mistyped, or contradicts another.
        """
        return cls._from_object(parse_json_object(text, where), where)

    @classmethod
    def _from_object(cls, values: dict, where: str) -> "Manifest":
        version = values.get("version")
        if version != VERSION or isinstance(version, bool):
            raise CheckpointError(
                f"{where}: version {version!r:.40}, expected {VERSION}; use the glm-gpu that wrote it"
            )
        try:
            return cls(
                tool=_text(values["tool"]),
                source=_text(values["source"]),
                revision=None if values["revision"] is None else _text(values["revision"]),
                classes={name: _stored_format(entry) for name, entry in values["classes"].items()},
                shapes={pattern: _shape(shape) for pattern, shape in values["shapes"].items()},
                shards={name: _shard_record(entry) for name, entry in values["shards"].items()},
                rounding=_text(values.get("rounding", "rtn")),
            )
        except KeyError as error:
            raise CheckpointError(f"{where}: {error.args[0]} is missing; convert the model again") from None
        except (TypeError, ValueError, AttributeError) as error:
            raise CheckpointError(f"{where}: {error}; convert the model again") from None

    def to_json(self) -> str:
        """The text of glm_gpu.json; `from_json` gives the same manifest back."""
        values = {
            "version": VERSION,
            "tool": self.tool,
            "source": self.source,
            "revision": self.revision,
            "rounding": self.rounding,
            "classes": {
                name: {
                    "format": stored.format.name,
                    "bits": stored.format.bits,
                    "group": stored.format.group,
                    "scale_dtype": stored.scale_dtype,
                }
                for name, stored in sorted(self.classes.items())
            },
            "shapes": {pattern: list(shape) for pattern, shape in sorted(self.shapes.items())},
            "shards": {
                name: {"bytes": record.nbytes, "sha256": record.sha256} for name, record in sorted(self.shards.items())
            },
        }
        return json.dumps(values, indent=1) + "\n"

    def stored(self, name: str, config: ModelConfig) -> tuple[StoredFormat, tuple[int, int]]:
        """Format and shape of a packed weight.

        Raises:
            CheckpointError: the manifest has no entry for its class or its pattern.
        """
        name_class = tensor_class(name, config)
        pattern = name_pattern(name)
        if name_class not in self.classes or pattern not in self.shapes:
            raise CheckpointError(
                f"{MANIFEST_FILE}: no entry for the packed tensor {name!r} (class {name_class!r}, shape {pattern!r}); "
                "convert the model again"
            )
        return self.classes[name_class], self.shapes[pattern]

    def validate(self, shard_nbytes: dict[str, int]) -> None:
        """Check that the folder has just the shards the manifest lists, in their sizes; reads no data.

        Args:
            shard_nbytes: size by file name of every shard in use.

        Raises:
            CheckpointError: one is missing, additional, or of another size.
        """
        for name in sorted(self.shards.keys() | shard_nbytes.keys()):
            found = f"{shard_nbytes[name]} bytes" if name in shard_nbytes else "missing"
            if name not in self.shards:
                raise CheckpointError(f"{name}: {found}, {MANIFEST_FILE} does not list it; move it to another folder")
            expected = f"{self.shards[name].nbytes} bytes"
            if found != expected:
                raise CheckpointError(
                    f"{name}: {found}, {MANIFEST_FILE} expects {expected}; fetch this shard or convert the model again"
                )


def name_pattern(name: str) -> str:
    """A tensor's name with each number replaced by a star: "model.layers.*.mlp.experts.*.up_proj.weight"."""
    return _NUMBER.sub("*", name)


def _text(value) -> str:
    if not isinstance(value, str):
        raise TypeError(f"{value!r:.40} is no string")
    return value


def _stored_format(entry: dict) -> StoredFormat:
    format = FORMATS.get(entry["format"])
    if format is None or not format.is_packed:
        raise ValueError(f"format {entry['format']!r:.40} is no packed format")
    if entry["bits"] != format.bits or entry["group"] != format.group:
        raise ValueError(
            f"format {format.name} does not go with {entry['bits']!r:.40} bits, group {entry['group']!r:.40}"
        )
    if entry["scale_dtype"] not in SCALE_DTYPES:
        raise ValueError(f"scale_dtype {entry['scale_dtype']!r:.40} is not one of {', '.join(SCALE_DTYPES)}")
    return StoredFormat(format, entry["scale_dtype"])


def _shape(value: list) -> tuple[int, int]:
    if not isinstance(value, list) or len(value) != 2 or any(type(n) is not int or not 0 < n < 1 << 32 for n in value):
        raise ValueError(f"shape {value!r:.60} is not [O, I]")
    return tuple(value)


def _shard_record(entry: dict) -> ShardRecord:
    nbytes, sha256 = entry["bytes"], entry["sha256"]
    if type(nbytes) is not int or nbytes < 0 or not isinstance(sha256, str) or not _SHA256.fullmatch(sha256):
        raise ValueError(f"shard entry {entry!r:.120} is not bytes and sha256")
    return ShardRecord(nbytes, sha256)
