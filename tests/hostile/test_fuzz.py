"""Files of a stranger, mutated: never a crash, a hang, more memory than a small multiple of the file, or a traceback.

GLM_GPU_FUZZ=1000 tries a thousand times as many.
"""

import dataclasses
import hashlib
import json
import os
import random
import selectors
import shutil
import struct
import subprocess
import sys
import zlib
from pathlib import Path

import fuzz_targets
import numpy as np
import pytest
from toy_model import ToyModel

from glm_gpu.batch import Batch
from glm_gpu.conversations import save_conversation
from glm_gpu.convert.settings import ConvertSettings
from glm_gpu.engine import DEMO_MODEL
from glm_gpu.kernels.cubins import Cubin, _write
from glm_gpu.predict.cost import PlaceRates, Rates
from glm_gpu.predict.measure import save_rates
from glm_gpu.state import write_state
from glm_gpu.tiers.heat import Heat
from glm_gpu.tiers.trace import TraceHeader, TraceWriter

ORACLE = Path(__file__).parents[1] / "data" / "oracle" / "tiny_olmoe"
TIMES = int(os.environ.get("GLM_GPU_FUZZ", "1"))
EXAMPLES = 30
SECONDS = 20
# A folder's files are read whole, parsed, and copied; Python and the libraries grow by whole arenas.
RATIO, SLACK_BYTES = 16, 48 << 20

ODD = [None, True, False, 0, -1, 1, 2**31, 2**63, 10**400, 1e308, 0.5, "", "x", "\ud800", "\0", "../x", [], {}, [[]],
       [0] * 100, {"a": {}}, "9" * 5000, "<|user|>" * 50, [1, "a", None], {"": None}]  # fmt: skip
JUNK = [b"9" * 20, b"-", b"[", b'"', b"{}", b"\0", b"null", b",,", b"\xff\xfe", b"\\u", b"NaN", b"1e999", b"{" * 2000,
        b"[" * 2000, b"(" * 500, b"{1000}" * 3, b"*", b"\\d+" * 9, "ё".encode()]  # fmt: skip
SCHEMA = {
    "type": "object",
    "properties": {"a": {"type": "integer"}, "b": {"enum": ["x", "y"]}, "c": {"$ref": "#/$defs/d"}},
    "required": ["a"],
    "$defs": {"d": {"type": "array", "items": {"type": "string", "maxLength": 5}}},
}
GBNF = 'root ::= item ("," item)*\nitem ::= [a-z]+ | "(" root ")" | "x"{2,5}\n'
CALL = {"id": "a", "function": {"name": "f", "arguments": '{"x": [1]}'}}
MESSAGES = {
    "messages": [
        {"role": "user", "content": [{"type": "text", "text": "hi"}]},
        {"role": "assistant", "content": None, "tool_calls": [CALL]},
        {"role": "tool", "tool_call_id": "a", "content": "done"},
    ],
    "tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}],
}
REPLY = "so</think>\n<tool_call>f\n<arg_key>x</arg_key>\n<arg_value>[1, {}]</arg_value>\n</tool_call> <|user|> ёж"
# target: (file that is mutated, whether as JSON, too)
FILES = {
    "header": ("input", False), "index": ("model.safetensors.index.json", True), "config": ("config.json", True),
    "generation": ("generation_config.json", True), "tokenizer": ("tokenizer.json", True),
    "template": ("chat_template.jinja", False), "messages": ("input", True), "reply": ("input", False),
    "manifest": ("glm_gpu.json", True), "journal": ("glm_gpu.json.partial", True), "container": ("config.json", True),
    "conversation": ("input.conversation", False), "heat": ("input", False), "rates": ("rates", False),
    "cubin": ("input", False),
    "live": ("live/1.json", True), "trace": ("input", False), "schema": ("input", True), "grammar": ("input", False),
    "regex": ("input", False), "task": ("input", True),
}  # fmt: skip


def write_seed(target, folder):
    """A sound folder for a target."""
    match target:
        case "header":
            shutil.copy(
                Path(__file__).parents[1] / "data/oracle/tiny_olmoe/model-00001-of-00002.safetensors", folder / "input"
            )
        case "index" | "config":
            for path in ORACLE.iterdir():
                if path.suffix in (".json", ".safetensors"):
                    shutil.copy(path, folder)
        case "generation" | "tokenizer" | "template" | "manifest" | "container":
            for path in DEMO_MODEL.iterdir():
                if path.suffix != ".safetensors":
                    shutil.copy(path, folder)
                else:
                    (folder / path.name).symlink_to(path)
        case "messages":
            shutil.copy(DEMO_MODEL / "chat_template.jinja", folder)
            (folder / "input").write_text(json.dumps(MESSAGES))
        case "reply":
            (folder / "input").write_text(REPLY * 5)
        case "journal":
            values = {"version": 1, "tool": "t", "source": "s", "revision": None, "plan": "p", "inputs": {"a": "b"}}
            values["settings"] = dataclasses.asdict(ConvertSettings())
            values["shards"] = {"m.safetensors": {"bytes": 4, "sha256": "0" * 64}}
            (folder / FILES[target][0]).write_text(json.dumps(values))
        case "conversation":
            model = ToyModel()
            cache = model.new_cache(16)
            model.forward(Batch.of([([1, 2, 3, 4, 5], cache)], "prefill"))
            save_conversation(folder / "input.conversation", "identity", [1, 2, 3, 4, 5, 6], cache, 5, {"a": "b"})
        case "heat":
            write_state(folder / "input", "heat", 1, {"fingerprint": "fingerprint"}, Heat(4, 8).arrays())
        case "rates":
            save_rates(folder, Rates(PlaceRates(10.0, 50.0), 1.0))
        case "cubin":
            _write(folder / "input", Cubin(b"image", "name", 1, 4))
        case "live":
            (folder / "live").mkdir()
            document = {"version": 1, "pid": 1, "started": "x", "at": 5.0, "fingerprint": "f", "map": [{"a": [1]}]}
            (folder / "live" / "1.json").write_text(json.dumps(document))
        case "trace":
            with TraceWriter(folder / "input", TraceHeader("f", 3, 8, 2, (0, 64, 64))) as writer:
                for layer in (1, 2, 1, 2):
                    writer.record(layer, np.arange(8).reshape(4, 2) % 8, 4)
                    writer.flush()
        case "schema":
            (folder / "input").write_text(json.dumps(SCHEMA))
        case "grammar":
            (folder / "input").write_text(GBNF)
        case "regex":
            (folder / "input").write_text(r"([a-z]{1,3}|\d+(\.\d+)?)*x[^y]?")
        case "task":
            (folder / "input").write_text(json.dumps({"context": "a", "choices": ["b", "c"], "answer": 1}))


def mutated(rng, content, is_json):
    """One or several damages to a file."""
    for _ in range(rng.choice([1, 1, 1, 2, 5])):
        if is_json and rng.random() < 0.7:
            try:
                content = json.dumps(mutated_value(rng, json.loads(content))).encode("utf-8", "surrogatepass")
                continue
            except (ValueError, RecursionError):
                pass
        content = bytearray(content)
        where = rng.randrange(len(content) + 1) if rng.random() < 0.5 else rng.randrange(min(len(content), 400) + 1)
        match rng.randrange(6):
            case 0:
                content[where : where + 1] = bytes([rng.randrange(256)])
            case 1:
                content[where : where + 4] = rng.randbytes(4)
            case 2:
                del content[where : where + rng.randrange(1, 50)]
            case 3:
                content[where:where] = rng.choice(JUNK)
            case 4:
                del content[where:]
            case 5:
                content[where:where] = content[max(0, where - rng.randrange(1, 200)) : where] * rng.choice([1, 2, 50])
        content = bytes(content)
    return content


def mutated_value(rng, value):
    """A JSON value with one part changed."""
    if isinstance(value, dict) and value and rng.random() < 0.85:
        key = rng.choice(list(value))
        match rng.randrange(8):
            case 0:
                return {k: v for k, v in value.items() if k != key}
            case 1:
                return {**value, rng.choice(["x", "", "type", "__class__", key + "x"]): rng.choice(ODD)}
            case _:
                return {**value, key: mutated_value(rng, value[key])}
    if isinstance(value, list) and value and rng.random() < 0.85:
        at = rng.randrange(len(value))
        match rng.randrange(6):
            case 0:
                return value[:at] + value[at + 1 :]
            case 1:
                return value[:at] + [value[at]] * rng.choice([2, 100]) + value[at:]
            case _:
                return [*value[:at], mutated_value(rng, value[at]), *value[at + 1 :]]
    return [value] if rng.random() < 0.2 else rng.choice(ODD)


def signed(target, content):
    """The content with its checksum made right, so that what lies behind is reached too."""
    if target in ("heat", "rates", "cubin"):
        first, _, rest = content.partition(b"\n")
        return b" ".join([*first.split(b" ")[:3], hashlib.sha256(rest).hexdigest().encode()]) + b"\n" + rest
    if target == "conversation":
        return content[:-32] + hashlib.sha256(content[:-32]).digest()
    if target == "trace" and b"}\n" in content:
        head, _, rest = content.partition(b"}\n")
        data = zlib.compress(bytes(rest[:60]))
        return head + b"}\n" + struct.pack("<II", len(data), zlib.crc32(data)) + data
    return content


def processor_seconds(pid):
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


class Reader:
    """A process that reads inputs under limits; started again when it dies."""

    def __init__(self, folder):
        self.folder, self.process = folder, None

    def read(self, target):
        """(what became of the folder's input, the most memory it took)."""
        if self.process is None:
            command = [sys.executable, fuzz_targets.__file__, str(self.folder)]
            environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
            self.process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment
            )
        self.process.stdin.write(json.dumps({"target": target}).encode() + b"\n")
        self.process.stdin.flush()
        is_answered = self._is_answered()
        line = self.process.stdout.readline() if is_answered else b""
        if line:
            return tuple(json.loads(line))
        self.process.kill()
        errors = self.close()
        return f"unexpected: {'died' if is_answered else 'hung'}: {errors[-2000:]}", 0

    def _is_answered(self):
        """Whether an answer comes before the process has worked for SECONDS, or slept for long."""
        before = processor_seconds(self.process.pid)
        with selectors.DefaultSelector() as selector:
            selector.register(self.process.stdout, selectors.EVENT_READ)
            for _ in range(600):
                if selector.select(1):
                    return True
                if processor_seconds(self.process.pid) - before > SECONDS:
                    return False
        return False

    def close(self):
        if self.process is not None:
            self.process.stdin.close()
            errors = self.process.stderr.read().decode("utf-8", "replace")
            self.process.wait()
            self.process.stdout.close()
            self.process.stderr.close()
            self.process = None
            return errors
        return ""


def tried(reader, target, folder, content):
    path = folder / FILES[target][0]
    path.write_bytes(content)
    said, peak = reader.read(target)
    size = sum(file.stat().st_size for file in folder.rglob("*") if file.is_file() and not file.is_symlink())
    kept = f"; the input: {content[:1500]!r}"
    assert said == "ok" or said.startswith("refused: "), said + kept
    assert peak <= SLACK_BYTES + RATIO * size, f"{peak} bytes of memory for files of {size}{kept}"
    return said


@pytest.fixture
def reading(tmp_path):
    """reading(target) -> (a sound folder, its file's content, a function that tries other content)."""
    reader = Reader(tmp_path / "folder")

    def prepare(target):
        folder = tmp_path / "folder"
        folder.mkdir()
        write_seed(target, folder)
        content = (folder / FILES[target][0]).read_bytes()
        assert tried(reader, target, folder, content) == "ok", target
        return content, lambda changed: tried(reader, target, folder, changed)

    yield prepare
    reader.close()


@pytest.mark.parametrize("target", FILES)
def test_mutated_files_are_read_or_refused_in_one_line(reading, target):
    content, try_content = reading(target)
    rng = random.Random(f"{target} {TIMES}")
    outcomes = set()
    for number in range(EXAMPLES * TIMES):
        changed = mutated(rng, content, FILES[target][1])
        outcomes.add(try_content(signed(target, changed) if number % 2 else changed)[:2])
    # Heat, rates and status are told of in the log; a template may be any text, and so may a reply.
    assert "re" in outcomes or target in ("heat", "rates", "cubin", "live", "reply", "template")


def state_of(kind, header):
    return signed("heat", f"glm-gpu {kind} 1 x\n".encode() + json.dumps(header).encode() + b"\n")


# What once ended in a traceback, a hang, too much memory, or a message without end.
FOUND = {
    "schema": [b'{"type": "object", "properties": "\\ud800"}', b'"\\ud800"', b"[" * 3000],
    "regex": [b"([a-z]{1,3}|" * 300, b"((a{1000}){1000}){1000}"],
    "grammar": [b"root ::= " + b'"a" | ' * 500, b"root ::= root root | root\n"],
    "live": [json.dumps({"version": 1, "pid": 1, "started": "x", "at": at}).encode() for at in (10**400, "x", None)]
    + [b'{"version": 1, "pid": -1, "at": 5}', b"[" * 3000],
    "generation": [json.dumps({field: ["9" * 20_000]}).encode() for field in ("top_p", "eos_token_id")],
    "messages": [json.dumps({"messages": [{"role": "9" * 20_000, "content": "x"}]}).encode()],
    "tokenizer": [b'{"model": "' + b"9" * 20_000 + b'"}'],
    "heat": [state_of("heat", header) for header in (
        {}, {"header": {}}, {"header": 1, "arrays": []}, {"header": {}, "arrays": [1]},
        {"header": {}, "arrays": [["a", "|O8", [1]]]}, {"header": {}, "arrays": [["a", "<f8", [-1]]]},
        {"header": {}, "arrays": [["a", "<f8", [2**62]]]}, {"header": {}, "arrays": [["a", "<f8", ["x"]]]})],
    "cubin": [state_of("cubin", {"header": {}, "arrays": []})],
    "rates": [state_of("rates", {"header": header, "arrays": []}) for header in (
        {}, {"memory_gb_s": "x", "disk_gb_s": 1}, {"memory_gb_s": 0, "disk_gb_s": 1}, {"memory_gb_s": None})],
    "trace": [b"glm-gpu trace 1\n" + json.dumps({"fingerprint": 1, "num_layers": 1, "num_experts": 8,
              "experts_per_tok": 2, "slab_nbytes": ["x"]}).encode() + b"\n", b"glm-gpu trace 1\n" + b"[" * 3000],
    "conversation": [b'glm-gpu conversation 1\n{"identity": "identity", "num_ids": 1e999, "num_cached": 0, '
                     b'"widths": [], "is_bf16": false, "note": {}}\n', b"glm-gpu conversation 1\n" + b"[" * 3000],
    "template": [b"{{ '%1000000000d' % 1 }}", b"{{ raise_exception('x' * 30000000) }}"],
}  # fmt: skip


@pytest.mark.parametrize("target", FOUND)
def test_what_was_found_stays_mended(reading, target):
    _, try_content = reading(target)
    for content in FOUND[target]:
        try_content(content)


def test_a_record_longer_than_its_frame_is_refused(reading):
    content, try_content = reading("trace")
    head, _, _ = content.partition(b"}\n")
    for record in (b"\1", struct.pack("<BHI", 1, 1, 2**32 - 1), struct.pack("<BHI", 1, 1, 3) + b"\0"):
        data = zlib.compress(record)
        said = try_content(head + b"}\n" + struct.pack("<II", len(data), zlib.crc32(data)) + data)
        assert said.startswith("refused: ") and "longer than its frame" in said


def test_a_trace_that_unpacks_to_far_more_than_its_size_is_refused(reading):
    content, try_content = reading("trace")
    head, _, _ = content.partition(b"}\n")
    data = zlib.compress(struct.pack("<BHI", 1, 1, 4_000_000) + bytes(8_000_000))
    frame = struct.pack("<II", len(data), zlib.crc32(data)) + data
    assert "times its size" in try_content(head + b"}\n" + frame * 40)
