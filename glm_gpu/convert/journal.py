"""Journal: which output shards are finished, and of which conversion; so that an interrupted one can go on.

DIR/glm_gpu.json.partial, replaced as a whole each time a shard is finished, and removed when the container is complete:

    {"version": 1, "tool": "glm-gpu 0.1.0", "source": "...", "revision": null,
     "settings": {"expert_bits": 4, ...}, "plan": "sha256 of all planned headers",
     "inputs": {"config.json": "...", "model-00001-of-00141.safetensors": "..."},
     "shards": {"model-00001-of-00090.safetensors": {"bytes": 4296015872, "sha256": "..."}, ...}}

A shard is recorded when its bytes are on the disk and before it gets its name, so every shard under its own name has a
record; one without was not written by this conversion. A record without its shard is a shard to be written again.
"""

import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path

from glm_gpu.convert.settings import ConvertSettings
from glm_gpu.errors import CheckpointError, RequestError
from glm_gpu.json_file import read_json_object
from glm_gpu.manifest import MANIFEST_FILE, ShardRecord
from glm_gpu.state import sync_folder

JOURNAL_FILE = MANIFEST_FILE + ".partial"
VERSION = 1
_OPTIONS = {
    "expert_bits": "--expert-bits", "dense_bits": "--dense-bits", "group": "--group", "scales": "--scales",
    "rounding": "--rounding", "container": "--format", "shard_bytes": "--shard-size",
}  # fmt: skip


@dataclass
class Journal:
    """The record of one conversion.

    Attributes:
        tool, source, revision: as the manifest will have them.
        settings: of the container.
        plan: digest of the plan.
        inputs: what tells that a source file is still the same, by its name.
        shards: finished so far.
    """

    tool: str
    source: str
    revision: str | None
    settings: ConvertSettings
    plan: str
    inputs: Mapping[str, str]
    shards: dict[str, ShardRecord] = field(default_factory=dict)

    @classmethod
    def read(cls, folder: Path) -> "Journal | None":
        """The journal in a folder; None when there is none.

        Raises:
            CheckpointError: it cannot be understood.
        """
        path = folder / JOURNAL_FILE
        if not path.exists():
            return None
        values = read_json_object(path)
        try:
            if values["version"] != VERSION:
                raise ValueError(f"version {values['version']!r:.40}, expected {VERSION}")
            return cls(
                values["tool"], values["source"], values["revision"], ConvertSettings(**values["settings"]),
                values["plan"], dict(values["inputs"]),
                {name: ShardRecord(entry["bytes"], entry["sha256"]) for name, entry in values["shards"].items()},
            )  # fmt: skip
        except (KeyError, TypeError, ValueError, AttributeError, RequestError) as error:
            raise CheckpointError(
                f"{path}: not a journal of this program ({error}); remove the folder and convert again"
            ) from None

    def write(self, folder: Path) -> None:
        """Replace the journal in a folder; it is on the disk when this returns."""
        values = {
            "version": VERSION, "tool": self.tool, "source": self.source, "revision": self.revision,
            "settings": asdict(self.settings), "plan": self.plan, "inputs": dict(self.inputs),
            "shards": {name: {"bytes": r.nbytes, "sha256": r.sha256} for name, r in self.shards.items()},
        }  # fmt: skip
        replace_file(folder / JOURNAL_FILE, json.dumps(values, indent=1).encode() + b"\n")

    def refuse_other(self, other: "Journal", folder: Path) -> None:
        """Check that a conversion may go on with what this journal has begun.

        Args:
            other: the conversion asked for now.

        Raises:
            RequestError: it would make another container; names the option.
            CheckpointError: the source is another, or one of its files has changed; names it.
        """
        mine, asked = asdict(self.settings), asdict(other.settings)
        for key, option in _OPTIONS.items():
            if mine[key] != asked[key]:
                raise RequestError(
                    f"{folder}: begun with {option} {mine[key]}, asked for {asked[key]}; "
                    "give the same options, or another folder"
                )
        if (self.source, self.revision) != (other.source, other.revision):
            raise CheckpointError(
                f"{folder}: begun from {self.source} at revision {self.revision}, asked for {other.source} at revision "
                f"{other.revision}; give the same source, or another folder"
            )
        for name in sorted(self.inputs.keys() | other.inputs.keys()):
            if self.inputs.get(name) != other.inputs.get(name):
                raise CheckpointError(
                    f"{name}: the source file has changed since {folder} was begun (then {self.inputs.get(name)}, now "
                    f"{other.inputs.get(name)}); restore it, or convert into another folder"
                )
        if (self.tool, self.plan) != (other.tool, other.plan):
            raise CheckpointError(
                f"{folder}: begun by {self.tool}, this is {other.tool}, which lays the container out differently; "
                f"go on with {self.tool}, or convert into another folder"
            )


def replace_file(path: Path, data: bytes) -> None:
    """Write a small file so that after a crash it is the old or the new one; on the disk when this returns."""
    temporary = path.with_name(path.name + ".new")
    with temporary.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)
    sync_folder(path.parent)
