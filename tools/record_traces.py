"""Record the demo's routing on held-out texts: the traces under tests/data/traces.

Of each kind of text two runs: `KIND.answers.trace`, eight prompts of 96 tokens with answers of 160, sampled at
temperature 0.8; `KIND.text.trace`, 2,048 tokens of the text itself in passes of 512, as scoring reads them.

    python tools/record_traces.py --model demo/model --texts demo/heldout --out tests/data/traces
"""

import argparse
from pathlib import Path

import numpy as np

from glm_gpu.engine import Engine
from glm_gpu.opening import EngineOptions
from glm_gpu.sampling import SamplingParams
from glm_gpu.tiers.trace import TraceHeader, TraceWriter

KINDS = {"scripture": "bible.txt", "plays": "plays.txt", "chats": "chats.txt"}
NUM_PROMPTS, PROMPT_TOKENS, ANSWER_TOKENS = 8, 96, 160
TEXT_TOKENS = 2048


class RecordedStore:
    """A store whose choices go to a trace; everything else is the store's own."""

    def __init__(self, store, trace: TraceWriter) -> None:
        self._store, self._trace = store, trace

    def __getattr__(self, name: str):
        return getattr(self._store, name)

    def count(self, layer: int, choices: np.ndarray, num_decode: int) -> None:
        self._trace.record(layer, choices, num_decode)
        self._store.count(layer, choices, num_decode)


def main() -> None:
    parser = argparse.ArgumentParser(description="Record the demo's routing on held-out texts.")
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--texts", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    with Engine.open(arguments.model, EngineOptions(context=TEXT_TOKENS, speculate="off")) as engine:
        for kind, file in KINDS.items():
            ids = engine.tokenizer.encode((arguments.texts / file).read_text())
            record(engine, arguments.out / f"{kind}.answers.trace", lambda ids=ids: answer(engine, ids))
            record(engine, arguments.out / f"{kind}.text.trace", lambda ids=ids: read(engine, ids))


def record(engine: Engine, path: Path, run) -> None:
    config, store = engine.config, engine.store
    layers = range(config.num_hidden_layers + 1)
    sparse = set(config.sparse_layers)
    header = TraceHeader(
        engine.checkpoint.fingerprint,
        len(layers),
        config.n_routed_experts,
        config.num_experts_per_tok,
        tuple(store.layout(layer).nbytes if layer in sparse else 0 for layer in layers),
    )
    with TraceWriter(path, header) as trace:
        engine.model.store = RecordedStore(store, trace)
        try:
            run()
        finally:
            engine.model.store = store
    print(f"{path}: {path.stat().st_size} bytes")


def answer(engine: Engine, ids: list[int]) -> None:
    for number in range(NUM_PROMPTS):
        start = number * (len(ids) - PROMPT_TOKENS) // NUM_PROMPTS
        params = SamplingParams(temperature=0.8, seed=number)
        prompt = ids[start : start + PROMPT_TOKENS]
        for _ in engine.session().generate(prompt, params, ANSWER_TOKENS, ignore_eos=True):
            pass


def read(engine: Engine, ids: list[int]) -> None:
    for _ in engine.logits(ids[:TEXT_TOKENS]):
        pass


if __name__ == "__main__":
    main()
