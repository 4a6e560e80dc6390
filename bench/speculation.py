"""What speculation gives on the demo model: that nothing changes, acceptance by depth, tokens a pass, net speed.

    python bench/speculation.py exact [--tokens 200]      every drafter, width and mixture against plain decoding
    python bench/speculation.py acceptance                by depth, on texts that were not trained on
    python bench/speculation.py speed --budget half       --speculate auto against off: resident, half or disk
    python bench/speculation.py json                      schemas: share of valid documents, tokens a pass

Prompts come from held-out texts. Results go to bench/results.
"""

import argparse
import contextlib
import itertools
import json
import random
import statistics
import time
from collections.abc import Callable, Iterator

import record

from glm_gpu.engine import Engine
from glm_gpu.evaluate import heldout_texts
from glm_gpu.grammar import Grammar
from glm_gpu.opening import EngineOptions
from glm_gpu.sampling import SamplingParams
from glm_gpu.session import Session
from glm_gpu.speculative import MAX_WIDTH, MtpDrafter, SpeculateMode, Speculator, WidthPolicy
from glm_gpu.tiers.files import ReadMode

KINDS = {"scripture": "bible", "plays": "plays", "poems": "poems", "chat": "chats"}
PROMPT_TOKENS = 48
GREEDY = SamplingParams(temperature=0)
# The model's own distribution; a seed gives the same text with drafts and without.
SAMPLED = SamplingParams(temperature=1.0, seed=1)
# How many of the experts have a slot. The smallest share still holds what one token uses of every layer, and reads past
# the page cache, which else would hold the whole demo.
BUDGETS: dict[str, tuple[str, float, ReadMode | None]] = {
    "resident": ("all resident", 1.0, None),
    "half": ("half", 0.5, None),
    "disk": ("disk-bound", 0.07, "direct"),
}
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
    rows = []
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
            rows.append(
                {"name": f"{kind}, {name}", "tokens_per_pass": num_tokens / num_passes, "right_by_depth": shares}
            )
    return {"rows": rows}


def speed(arguments: argparse.Namespace) -> dict:
    """How many times the speed of plain decoding, in answers one after the other: medians and their intervals.

    Three engines with the same budget, each with its own experts in memory, as users of one machine would have them;
    each goes first, second and last in turn. Two are plain, which shows how far the same thing differs. The automatic
    one keeps what it learned from answer to answer.
    """
    shown, share, read = BUDGETS[arguments.budget]
    rows = []
    with contextlib.ExitStack() as stack:
        engines = {
            name: stack.enter_context(budgeted("auto" if name == "auto" else "off", share, read))
            for name in ("off", "again", "auto")
        }
        for kind, params in itertools.product(("scripture", "plays", "chat"), (GREEDY, SAMPLED)):
            decode: dict[str, list[float]] = {name: [] for name in engines}
            whole: dict[str, list[float]] = {name: [] for name in engines}
            num_passes = 0
            for prompt, order in zip(
                prompts(engines["off"], kind, arguments.prompts) * arguments.repeats,
                itertools.cycle(itertools.permutations(engines)),
                strict=False,
            ):
                for name in order:
                    turn = engines[name].session()
                    list(turn.generate(prompt, params, arguments.tokens, ignore_eos=True))
                    decode[name].append(turn.last.decode_s)
                    whole[name].append(turn.last.prefill_s + turn.last.decode_s)
                    num_passes += turn.last.num_passes if name == "auto" else 0
            row = {
                "name": f"{shown}, {kind}, {'greedy' if params is GREEDY else 'sampled'}",
                "plain_tok_s": (arguments.tokens - 1) / statistics.median(decode["off"]),
                "again": times_plain(decode, "again"),
                "decode": times_plain(decode, "auto"),
                "whole": times_plain(whole, "auto"),
                "tokens_per_pass": len(decode["off"]) * (arguments.tokens - 1) / num_passes,
                "answers": len(decode["off"]),
            }
            rows.append(row)
            print(
                f"{row['name']:<32} plain {row['plain_tok_s']:5.1f} tok/s, again {shown_ratio(row['again'])} times; "
                f"auto {shown_ratio(row['decode'])} times, with prefill {shown_ratio(row['whole'])}; "
                f"{row['tokens_per_pass']:.2f} tokens a pass",
                flush=True,
            )
        print("   ", "; ".join(engines["auto"].speculation.summary))
        return {"rows": rows, "decision": engines["auto"].speculation.as_dict()}


def times_plain(seconds: dict[str, list[float]], name: str) -> dict[str, float]:
    """The median of the pairs' ratios with a 95 % interval by bootstrap, and the ratio of the sums."""
    ratios = [off / other for off, other in zip(seconds["off"], seconds[name], strict=True)]
    rng = random.Random(0)
    medians = sorted(statistics.median(rng.choices(ratios, k=len(ratios))) for _ in range(1000))
    return {
        "median": statistics.median(ratios),
        "low": medians[25],
        "high": medians[975],
        "sums": sum(seconds["off"]) / sum(seconds[name]),
    }


def shown_ratio(found: dict[str, float]) -> str:
    return f"{found['median']:.3f} ({found['low']:.3f} to {found['high']:.3f})"


@contextlib.contextmanager
def budgeted(speculate: SpeculateMode, share: float, read: ReadMode | None) -> Iterator[Engine]:
    """The demo with a share of its experts in memory, warmed by an answer.

    Without prefetching, which tries now and then whether it pays: two plain engines differ by 10 % for that.
    """
    slots = None
    if share < 1:
        with Engine.open(None, EngineOptions(context=64, speculate="off")) as engine:
            slots = int(share * len(engine.config.sparse_layers) * engine.config.n_routed_experts)
    options = EngineOptions(context=512, speculate=speculate, expert_slots=slots, read=read or "auto", prefetch="off")
    with Engine.open(None, options) as engine:
        for kind in ("scripture", "plays"):
            list(engine.session().generate(prompts(engine, kind, 1)[0], GREEDY, 64))
        yield engine


def json_documents(engine: Engine, arguments: argparse.Namespace) -> dict:
    """Documents by schema, greedy and sampled: how many parse, tokens a pass with forced tokens as drafts."""
    rows = []
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
        rows.append({"name": name, "documents": num, "valid": num_valid, "tokens_per_pass": num_tokens / num_passes})
    return {"rows": rows}


def is_json(text: str) -> bool:
    try:
        json.loads(text)
    except ValueError:
        return False
    return True


PARTS = {"exact": exact, "acceptance": acceptance, "json": json_documents}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("part", choices=[*PARTS, "speed"])
    parser.add_argument("--budget", choices=BUDGETS, default="resident", help="of `speed`")
    parser.add_argument("--prompts", type=int, default=20)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=1)
    arguments = parser.parse_args()
    if arguments.part == "speed":
        record.save(f"speculation_{arguments.budget}", speed(arguments))
        return
    with Engine.open(None, EngineOptions(context=512)) as engine:
        record.save(f"speculation_{arguments.part}", PARTS[arguments.part](engine, arguments))


if __name__ == "__main__":
    main()
