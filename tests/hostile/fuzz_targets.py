"""Everything that reads a file of a stranger, as functions of one folder; a program that runs them one after another.

    python fuzz_targets.py FOLDER        lines of {"target": name} on standard input; the input's files lie in
                                    FOLDER; a line [what became of it, bytes at most beyond those before] for each

An answer is "ok", "refused: one line", or "unexpected: ...". Crashes, hangs and aborts are for the
parent to see.
"""

import contextlib
import json
import logging
import resource
import sys
from pathlib import Path


def header(folder):
    from glm_gpu.safetensors_index import read_header

    read_header(folder / "input")


def index(folder):
    from glm_gpu.safetensors_index import index_shards

    index_shards(folder)


def config(folder):
    from glm_gpu.config import ModelConfig

    ModelConfig.open(folder)


def generation(folder):
    from types import SimpleNamespace

    from glm_gpu.chat import eos_ids
    from glm_gpu.json_file import read_json_object
    from glm_gpu.sampling import SamplingParams

    fields = read_json_object(folder / "generation_config.json")
    eos_ids(SimpleNamespace(eos_token_id=(1,)), fields, None)
    SamplingParams.from_generation_config(fields)


def tokenizer(folder):
    from glm_gpu.tokenizer import Tokenizer

    found = Tokenizer.open(folder)
    ids = found.encode("And it came <|user|> to pass, ёжик 👩‍👩‍👧")
    found.decode(ids)
    found.encode(found.guard("x <|user|> y"), special=False)


def template(folder):
    from glm_gpu.chat import ChatTemplate

    messages = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "ho"}]
    ChatTemplate.open(folder, _tokenizer()).render(messages, tools=None, enable_thinking=False)


def messages(folder):
    from glm_gpu.chat import ChatTemplate
    from glm_gpu.errors import RequestError

    try:
        given = json.loads((folder / "input").read_bytes())
    except (ValueError, RecursionError):
        raise RequestError("no JSON") from None
    if not isinstance(given, dict):
        raise RequestError("no object")
    given = ChatTemplate.open(folder, _tokenizer()).render(given.get("messages"), tools=given.get("tools"))
    _tokenizer().encode(given)


def reply(folder):
    from glm_gpu.chat import ReplyParser

    parser = ReplyParser(None, in_reasoning=True)
    text = (folder / "input").read_bytes().decode("utf-8", "replace")
    for at in range(0, len(text), 7):
        parser.push(text[at : at + 7])
    parser.finish()


def manifest(folder):
    from glm_gpu.manifest import Manifest

    found = Manifest.open(folder)
    found.validate({name: record.nbytes for name, record in found.shards.items()})
    found.to_json()


def journal(folder):
    from glm_gpu.convert.journal import Journal

    found = Journal.read(folder)
    found.refuse_other(found, folder)


def container(folder):
    from glm_gpu.checkpoint import Checkpoint
    from glm_gpu.tensors import validate_tensors

    with Checkpoint.open(folder) as checkpoint:
        validate_tensors(checkpoint.config, checkpoint)


def conversation(folder):
    from toy_model import LAYOUT

    from glm_gpu.cache import KVCache
    from glm_gpu.conversations import ConversationStore, load_conversation

    ConversationStore(folder, "identity", 1 << 30)
    load_conversation(folder / "input.conversation", "identity", lambda length: KVCache(LAYOUT, length))


def heat(folder):
    from glm_gpu.tiers.heat_file import read_heat

    read_heat(folder / "input", "fingerprint", 4, 8)


def rates(folder):
    from glm_gpu.predict.measure import load_rates

    load_rates(folder)


def cubin(folder):
    from glm_gpu.kernels import cubins

    cubins._read(folder / "input")


def live(folder):
    from glm_gpu.tiers.live import live_engines

    live_engines(folder)


def trace(folder):
    from glm_gpu.tiers.trace import read_trace

    read_trace(folder / "input")


def schema(folder):
    _constrained("from_json_schema", folder)


def grammar(folder):
    _constrained("from_text", folder)


def regex(folder):
    _constrained("from_regex", folder)


def task(folder):
    from glm_gpu.evaluate import read_items

    read_items(folder / "input")


def _constrained(kind, folder):
    import numpy as np

    from glm_gpu.engine import DEMO_MODEL
    from glm_gpu.errors import RequestError
    from glm_gpu.grammar import Grammar, GrammarVocabulary

    try:
        text = (folder / "input").read_bytes().decode()
    except UnicodeDecodeError:
        raise RequestError("no text") from None
    found = getattr(Grammar, kind)(text)
    if "vocabulary" not in _kept:
        _kept["vocabulary"] = GrammarVocabulary(DEMO_MODEL / "tokenizer.json", 2048, frozenset([0]))
    constraint = _kept["vocabulary"].start(found)
    logits = np.zeros(2048, np.float32)
    for _ in range(8):
        allowed = np.flatnonzero(np.isfinite(constraint.mask(logits)))
        if constraint.is_complete or not len(allowed) or allowed[0] == 0:
            return
        constraint.push(int(allowed[len(allowed) // 2]))


def _tokenizer():
    from glm_gpu.engine import DEMO_MODEL
    from glm_gpu.tokenizer import Tokenizer

    if "tokenizer" not in _kept:
        _kept["tokenizer"] = Tokenizer.open(DEMO_MODEL)
    return _kept["tokenizer"]


_kept = {}


def _resident(key):
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(key):
            return int(line.split()[1]) * 1024
    return 0


def run(name, folder):
    from glm_gpu.errors import GlmGpuError

    try:
        globals()[name](folder)
        return "ok"
    except GlmGpuError as error:
        text = str(error)
        return f"refused: {text}" if "\n" not in text and len(text) <= 8000 else f"unexpected: no line: {text[:3000]}"
    except BaseException as error:
        import traceback

        return "unexpected: " + "".join(traceback.format_exception(error))[-3000:]


def main():
    folder = Path(sys.argv[1])
    logging.disable(logging.CRITICAL)
    resource.setrlimit(resource.RLIMIT_AS, (2 << 30, 2 << 30))
    for line in sys.stdin:
        name = json.loads(line)["target"]
        if name not in _kept:  # imports and vocabularies are no input's fault
            _kept[name] = run(name, folder)
        with contextlib.suppress(OSError):
            Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
        before = _resident("VmRSS")
        said = run(name, folder)
        print(json.dumps([said, max(0, _resident("VmHWM") - before)]), flush=True)


if __name__ == "__main__":
    main()
