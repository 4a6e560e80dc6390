"""What speculation gives on the demo model: that nothing changes, acceptance by depth, tokens a pass, net speed.

    python bench/speculation.py exact [--tokens 200]      every drafter, width and mixture against plain decoding
    python bench/speculation.py acceptance                by depth, on texts that were not trained on
    python bench/speculation.py speed [--repeats 3]       against plain decoding, at three memory budgets
    python bench/speculation.py json                      schemas: share of valid documents, tokens a pass

Prompts come from the held-out texts in glm_gpu/tasks/heldout. Each part ends with one JSON line.
"""

import argparse
import itertools
import json
import os
import statistics
import time
from collections.abc import Callable

from glm_gpu.engine import Engine
from glm_gpu.evaluate import heldout_texts
from glm_gpu.grammar import Grammar
from glm_gpu.kernels import cpu
from glm_gpu.machine import cpu_name
from glm_gpu.opening import EngineOptions
from glm_gpu.sampling import SamplingParams
from glm_gpu.session import Session
from glm_gpu.speculative import MAX_WIDTH, MtpDrafter, SpeculateMode, Speculator, WidthPolicy
from glm_gpu.tiers.heat import Heat
from glm_gpu.tiers.residency import slots_for_all
from glm_gpu.tiers.store import TieredStore

KINDS = {"scripture": "bible", "plays": "plays", "poems": "poems", "chat": "chats"}
PROMPT_TOKENS = 48
GREEDY = SamplingParams(temperature=0)
# The model's own distribution; a seed gives the same text with drafts and without.
SAMPLED = SamplingParams(temperature=1.0, seed=1)
# Of every layer's experts, so many have a slot. The smallest share still holds what one token uses of every layer.
BUDGETS = {"all resident": 1.0, "half": 0.5, "disk-bound": 0.07}
SCHEMAS = {
    "nested": {
        "type": "object",
        "properties": {
            "speaker": {
                "type": "object",
                "properties": {"name": {"type": "string", "maxLength": 24}, "is_king": {"type": "boolean"}},
                "required": ["name", "is_king"],
                "additionalProperties": False,
            },
            "book": {"enum": ["Genesis", "Exodus", "Psalms"]},
            "verse": {"type": "integer", "minimum": 1, "maximum": 176},
        },
        "required": ["speaker", "book", "verse"],
        "additionalProperties": False,
    },
    "array": {
        "type": "object",
        "properties": {
            "names": {"type": "array", "items": {"type": "string", "maxLength": 16}, "minItems": 2, "maxItems": 4},
            "weight": {"type": "number", "multipleOf": 0.01, "minimum": 0, "maximum": 1},
        },
        "required": ["names", "weight"],
        "additionalProperties": False,
    },
    "unicode": {"type": "array", "items": {"enum": ["שלום", "δόξα", "naïve 🕊️"]}, "minItems": 1, "maxItems": 3},
}


def prompts(engine: Engine, kind: str, num: int) -> list[list[int]]:
    """Stretches of a held-out text, evenly spread over it."""
    ids = engine.tokenizer.encode(heldout_texts()[KINDS[kind]])
    step = (len(ids) - PROMPT_TOKENS) // num
    return [ids[start : start + PROMPT_TOKENS] for start in range(0, num * step, step)]


def session(engine: Engine, mode: SpeculateMode, policy: WidthPolicy) -> Session:
    """A conversation that drafts as told, over the engine's weights."""
    mtp = None
    if mode in ("auto", "mtp"):
        mtp = MtpDrafter(engine.mtp_head, engine.context, True, engine.config.index_share_for_mtp_iteration)
    return Session(
        engine.model, engine.model.new_cache(engine.context, True), frozenset(), Speculator(mode, policy, mtp)
    )


def exact(engine: Engine, arguments: argparse.Namespace) -> dict:
    """Greedy answers of every drafter, width and mixture against those without drafts; the seeded ones too."""
    ways: list[tuple[str, Callable[[], WidthPolicy]]] = [
        (mode, lambda width=width: WidthPolicy(fixed_width=width))
        for mode in ("mtp", "ngram", "auto")
        for width in range(1, MAX_WIDTH + 1)
    ]
    ways.append(("auto", WidthPolicy))
    num_same = num_answers = 0
    for number in range(arguments.prompts):
        kind = list(KINDS)[number % len(KINDS)]
        prompt = prompts(engine, kind, arguments.prompts)[number]
        for params in (GREEDY, SamplingParams(temperature=0.8, top_p=0.95, seed=number)):
            plain = list(session(engine, "off", WidthPolicy()).generate(prompt, params, arguments.tokens))
            assert len(plain) == arguments.tokens
            for mode, policy in ways if params is GREEDY else ways[-1:]:
                found = list(session(engine, mode, policy()).generate(prompt, params, arguments.tokens))
                num_answers += 1
                num_same += found == plain
                if found != plain:
                    print(f"prompt {number} ({kind}), {mode}: differs")
    print(f"{num_same} of {num_answers} answers of {arguments.tokens} tokens are those without drafts")
    return {"answers": num_answers, "same": num_same, "tokens": arguments.tokens}


def acceptance(engine: Engine, arguments: argparse.Namespace) -> dict:
    """Share of right guesses at each depth, once those before were right, and tokens a pass by width."""
    found: dict = {}
    for name, params in (("greedy", GREEDY), ("sampled", SAMPLED)):
        for kind in KINDS:
            policy = WidthPolicy(fixed_width=4)
            num_tokens = num_passes = 0
            for prompt in prompts(engine, kind, arguments.prompts):
                mtp = session(engine, "mtp", policy)
                list(mtp.generate(prompt, params, arguments.tokens))
                num_tokens += mtp.last.num_passes + mtp.last.accepted_tokens
                num_passes += mtp.last.num_passes
                list(session(engine, "ngram", policy).generate(prompt, params, arguments.tokens))
            shares = {
                source: [round(depth.right / depth.tried, 3) for depth in depths[:4] if depth.tried > 20]
                for source, depths in sorted(policy.acceptance.counts.items())
            }
            print(f"{name:<8} {kind:<10} {num_tokens / num_passes:.2f} tokens a pass by mtp at width 4; {shares}")
            found[f"{name}, {kind}"] = {"tokens_per_pass": num_tokens / num_passes, "right_by_depth": shares}
    return found


def speed(engine: Engine, arguments: argparse.Namespace) -> dict:
    """How many times the speed of plain decoding, measured in turns answer by answer: medians and quartiles."""
    found: dict = {}
    for budget, share in BUDGETS.items():
        give_slots(engine, share)
        policies = {"auto": WidthPolicy(), "mtp": WidthPolicy(min_width=1), "ngram": WidthPolicy(min_width=1)}
        for kind, params in itertools.product(("scripture", "plays", "chat"), (GREEDY, SAMPLED)):
            plain_s: list[float] = []
            gains: dict[str, list[float]] = {mode: [] for mode in policies}
            passes = dict.fromkeys(policies, 0)
            for prompt in prompts(engine, kind, arguments.prompts) * arguments.repeats:
                plain_s.append(seconds_of(session(engine, "off", WidthPolicy()), prompt, params, arguments.tokens))
                for mode, policy in policies.items():
                    # as the engine does: "auto" leaves the multi-token layer out where experts are read from disk
                    turn = session(engine, "ngram" if mode == "auto" and share < 1 else mode, policy)
                    gains[mode].append(plain_s[-1] / seconds_of(turn, prompt, params, arguments.tokens))
                    passes[mode] += turn.last.num_passes
            num_tokens = len(plain_s) * (arguments.tokens - 1)
            tok_s = (arguments.tokens - 1) / statistics.median(plain_s)
            line = {mode: [round(q, 2) for q in statistics.quantiles(values)] for mode, values in gains.items()}
            per_pass = {mode: round(num_tokens / num, 2) for mode, num in passes.items()}
            how = "greedy" if params is GREEDY else "sampled"
            name = f"{budget}, {kind}, {how}"
            print(f"{name:<32} plain {tok_s:5.1f} tok/s, times that: {line}, tokens a pass: {per_pass}")
            found[name] = {"plain_tok_s": tok_s, "times_plain": line, "tokens_per_pass": per_pass}
        print("   ", "; ".join(policies["auto"].summary))
    return found


def seconds_of(turn: Session, prompt: list[int], params: SamplingParams, num_tokens: int) -> float:
    list(turn.generate(prompt, params, num_tokens))
    return turn.last.decode_s


def give_slots(engine: Engine, share: float) -> None:
    """Let the engine's experts have slots for a share of them."""
    files = engine.store.files
    slots = {size: max(1, int(share * num)) for size, num in slots_for_all(files).items()}
    heat = Heat(engine.config.num_hidden_layers + 1, engine.config.n_routed_experts)
    engine.store = engine.model.store = TieredStore(files, slots, heat)


def json_documents(engine: Engine, arguments: argparse.Namespace) -> dict:
    """Documents by schema, greedy and sampled: how many parse, tokens a pass with forced tokens as drafts."""
    found: dict = {}
    for name, schema in SCHEMAS.items():
        grammar = Grammar.from_json_schema(schema)
        num_valid = num = num_passes = num_tokens = 0
        began = time.perf_counter()
        for seed, prompt in enumerate(prompts(engine, "chat", arguments.prompts)):
            for params in (GREEDY, SamplingParams(temperature=1.0, seed=seed)):
                turn, num = session(engine, "grammar", WidthPolicy()), num + 1
                ids = list(turn.generate(prompt, params, 256, constraint=engine.constraint(grammar)))
                num_valid += is_json(engine.tokenizer.decode(ids))
                num_passes += turn.last.num_passes
                num_tokens += turn.last.num_passes + turn.last.accepted_tokens
        seconds = time.perf_counter() - began
        print(f"{name:<8} {num_valid} of {num} are JSON, {num_tokens / num_passes:.2f} tokens a pass, {seconds:.1f} s")
        found[name] = {"documents": num, "valid": num_valid, "tokens_per_pass": num_tokens / num_passes}
    return found


def is_json(text: str) -> bool:
    try:
        json.loads(text)
    except ValueError:
        return False
    return True


PARTS = {"exact": exact, "acceptance": acceptance, "speed": speed, "json": json_documents}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("part", choices=PARTS)
    parser.add_argument("--prompts", type=int, default=20)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=3)
    arguments = parser.parse_args()
    print(f"{cpu_name()}, kernels {cpu.implementation()}, load {os.getloadavg()[0]:.2f}, {arguments}")
    with Engine.open(None, EngineOptions(context=512)) as engine:
        found = PARTS[arguments.part](engine, arguments)
    print(json.dumps({"part": arguments.part, "implementation": cpu.implementation(), **found}))


if __name__ == "__main__":
    main()
