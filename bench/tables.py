"""The tables of README.md and of bench/results/README.md, from the JSON in bench/results and nothing else.

A table stands between its two marks; around them the text is free. `render.py` writes them, a test compares.
"""

import re
from collections.abc import Callable, Sequence

import record

from glm_gpu.report_bench import number
from glm_gpu.units import format_bytes

MARK = re.compile(r"(<!-- table ([\w, ]+): written by bench/render\.py -->\n)(.*?)(<!-- end of table -->)", re.DOTALL)


def updated(text: str) -> str:
    """A text with what stands between its marks as the results give it; without results it stays as it is."""
    return MARK.sub(lambda found: found[1] + (_tables(found[2].split(", ")) or found[3]) + found[4], text)


def _tables(names: Sequence[str]) -> str | None:
    """The rows of several results under one head, and how they were measured."""
    documents = [record.load(name) for name in names]
    if None in documents:
        return None
    kind = TABLES.get(names[0], parts)
    return f"\n{kind(documents)}\n\n{_origin(documents)}\n\n"


def _origin(documents: Sequence[dict]) -> str:
    """The commands, and the machine as they found it."""
    commands = ", ".join(f"`{command}`" for command in dict.fromkeys(found["command"] for found in documents))
    machines: dict[str, dict[str, None]] = {}
    for found in (document["machine"] for document in documents):
        machine = f"{found['cpu']}, {found['cores']} cores, {format_bytes(found['memory_bytes'])}, {found['kernels']}"
        machines.setdefault(machine, {})[f"{found['date']}, revision {found['commit']}"] = None
    where = " and ".join(f"{machine}; {' and '.join(when)}" for machine, when in machines.items())
    noises = [document["noise"] for document in documents if document.get("noise") is not None]
    noise = f"; repeats differ by {' and '.join(f'{noise:.1%}' for noise in noises)}" if noises else ""
    return f"{commands}: {where}{noise}."


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def parts(documents: Sequence[dict]) -> str:
    """Rows of `glm-gpu bench`: median with extremes, and the share of the limit measured beside."""
    rows = []
    for row in (row for document in documents for row in document["rows"]):
        figure = f"{number(row['median'])} {row['unit']}"
        spread = f" ({number(row['low'])} to {number(row['high'])})" if row["samples"] > 1 else ""
        against = f"{row['share']:.0%} of {number(row['limit'])}: {row['limit_name']}" if "share" in row else ""
        rows.append([row["name"], figure + spread, "; ".join(filter(None, [against, *_facts(row)]))])
    return table(["", "median (lowest to highest)", "against the limit measured beside it"], rows)


def _facts(row: dict) -> list[str]:
    """What a row's JSON says beyond its figure."""
    found = []
    if row.get("python_share") is not None:
        found.append(f"{row['python_share']:.1%} of a step in Python")
    if row.get("share_of_experts", 1.0) < 1:
        found.append(f"{row['hit_rate']:.0%} hits, at best {row['best_hit_rate']:.0%}")
    if "peak_anonymous_bytes" in row:
        held, allowed = format_bytes(row["peak_anonymous_bytes"]), format_bytes(row["ram_bytes"])
        found.append(f"{held} held of {allowed} allowed")
    if "gain" in row:
        found.append(f"{row['gain']:.1f} times one client")
    if "median_gap_ms" in row:
        found.append(f"median gap {number(row['median_gap_ms'])} ms")
    if row.get("stolen"):
        longest = number(row["longest_stolen_ms"])
        found.append(f"apart from {row['stolen']} in which the hypervisor had the processors, at most {longest} ms")
    if "ended" in row:
        found.append(f"{row['ended']} answers, {row['differed']} of them other than alone; {row['left']} left")
    return found


def convert(documents: Sequence[dict]) -> str:
    """Conversion with each rounding."""
    lines = {
        "decode and quantize, source bytes a second of one core": "{quantize_gb_s:.2f} GB/s",
        "disk alone: read, write": "{disk_read_gb_s:.2f}, {disk_write_gb_s:.2f} GB/s",
        "whole, source bytes a second": "{source_gb_s:.2f} GB/s",
        "peak resident memory": "{peak_gb:.2f} GB",
    }
    found = [document | {"peak_gb": document["peak_rss_bytes"] / 1e9} for document in documents]
    names = {"rtn": "to nearest", "search": "searched"}
    rows = [[name, *(text.format(**each) for each in found)] for name, text in lines.items()]
    return table(["", *(names[each["rounding"]] for each in found)], rows)


def policies(documents: Sequence[dict]) -> str:
    """Hit rates of decoding, heat learned on the other kinds of text."""
    columns = {
        "glm-gpu": "policy in use",
        "LRU": "LRU",
        "LFU": "LFU",
        "static heat": "static heat",
        "optimum": "optimum",
    }
    rows = [
        [
            _KINDS.get(row["trace"], row["trace"]),
            f"{row['capacity']:.0%}",
            *(f"{100 * row[name]:.1f} %" for name in columns),
        ]
        for row in documents[0]["rows"]
        if row["heat"] == "other kinds"
    ]
    return table(["text", "slots", *columns.values()], rows)


def quality(documents: Sequence[dict]) -> str:
    """Perplexity of the demo with and without quantization."""
    found = documents[0]["perplexity"]
    rows = []
    for name, value in found["bundled"].items():
        before = found["bf16"][name]
        rows.append([_KINDS.get(name, name), f"{before:.2f}", f"{value:.2f}", f"{value / before - 1:+.1%}"])
    return table(["text", "bf16 weights", "four bits, as bundled", "change"], rows)


def rounding(documents: Sequence[dict]) -> str:
    """Searched scales against rounding to nearest."""
    rows = []
    for nearest, searched in zip(documents[0]["rows"][::2], documents[0]["rows"][1::2], strict=True):
        value, low, high = searched["perplexity_change"]
        cells = (f"{row['perplexity']:.2f}, {row['logit_rmse']:.3f}" for row in (nearest, searched))
        rows.append([nearest["widths"], *cells, f"{value:+.2%} [{low:+.2%}, {high:+.2%}]"])
    return table(
        ["expert bits/dense bits/group", "nearest: perplexity, logit RMSE", "searched", "change of perplexity"], rows
    )


def startup(documents: Sequence[dict]) -> str:
    """How long a user waits for a process."""
    found = documents[0]
    rows = []
    for name, median_s in found["seconds"].items():
        budget = found["budgets"][name]
        rows.append([f"`{name}`", f"{median_s:.2f} s", f"{budget} s" if budget else ""])
    return table(["", "median", "budget"], rows)


def predict(documents: Sequence[dict]) -> str:
    """Predicted against measured: a slice's decode by memory, and a prompt."""
    rows = []
    for row in documents[0]["rows"]:
        predicted, off = row["predicted"], row["predicted_over_measured"] - 1
        where = f"{row['budget']}: {row['expert_slots']} of {row['experts']}"
        measured = [f"{number(row['measured_tok_s'])} tok/s", f"{row['measured_hit_rate']:.0%}"]
        foretold = [
            f"{number(predicted['tok_s'])} ({off:+.0%})",
            f"{predicted['hit_rate']:.0%}",
            predicted["bottleneck"],
        ]
        rows.append([where, *measured, *foretold])
    if prompt := documents[0].get("prompt"):
        foretold = f"{number(prompt['predicted_s'])} s ({prompt['predicted_over_measured'] - 1:+.0%})"
        where = f"resident, a prompt of {prompt['prompt_tokens']} tokens"
        rows.append(
            [where, f"{number(prompt['measured_s'])} s", "100%", foretold, "100%", prompt.get("bottleneck", "")]
        )
    return table(["experts in memory", "measured", "hits", "predicted", "hits", "bound by"], rows)


def published(documents: Sequence[dict]) -> str:
    """Published measurements of other engines that the cost model reproduces with their parameters."""
    rows = [
        [f"{row['engine']}, {row['model']}", row["name"], f"{row['published_tok_s']:.2f} tok/s",
         f"{row['predicted_tok_s']:.2f} ({row['off']:+.0%})"]
        for row in documents[0]["rows"]
        if row["kind"] == "counted"
    ]  # fmt: skip
    return table(["engine, model", "machine", "published", "predicted"], rows)


def machines(documents: Sequence[dict]) -> str:
    """GLM-5.2 on the described machines, the slowest first."""
    rows = []
    for found in sorted(documents[0]["machines"], key=lambda found: found["prediction"]["tok_s"]):
        prediction = found["prediction"]
        decode = [f"{number(prediction['tok_s'])} tok/s", prediction["decode"]["bottleneck"]]
        rows.append([f"`{found['machine']['name']}`", *decode, f"{number(prediction['first_token_s'])} s"])
    return table(["machine", "decode", "bound by", "first token after"], rows)


_KINDS = {"bible": "scripture"}


def speculation(documents: Sequence[dict]) -> str:
    """`--speculate auto` against `off`, by memory and text."""
    rows = []
    for row in (row for document in documents for row in document["rows"]):
        cells = [
            f"{found['median']:.2f} ({found['low']:.2f} to {found['high']:.2f})"
            for found in (row["again"], row["decode"], row["whole"])
        ]
        rows.append([row["name"], f"{row['plain_tok_s']:.0f} tok/s", *cells, f"{row['tokens_per_pass']:.2f}"])
    return table(["", "off", "off again, times that", "auto, times that", "with prefill", "tokens a pass"], rows)


def acceptance(documents: Sequence[dict]) -> str:
    """Guesses that came true, by depth."""
    rows = []
    for row in documents[0]["rows"]:
        shares = row["right_by_depth"]
        cells = [
            ", ".join(f"{share:.0%}" for share in shares.get(source, [])) for source in ("mtp", "ngram 2", "ngram 32")
        ]
        rows.append([row["name"], *cells, f"{row['tokens_per_pass']:.2f}"])
    head = [
        "",
        "multi-token layer, by depth",
        "repetition of 2 tokens",
        "of more than 8",
        "tokens a pass, 4 by the layer",
    ]
    return table(head, rows)


def documents_by_schema(documents: Sequence[dict]) -> str:
    """What a schema's forced tokens save."""
    rows = [
        [row["name"], f"{row['valid']} of {row['documents']}", f"{row['tokens_per_pass']:.2f}"]
        for row in documents[0]["rows"]
    ]
    return table(["schema", "valid", "tokens a pass"], rows)


TABLES: dict[str, Callable[[Sequence[dict]], str]] = {
    "convert_rtn": convert, "policies": policies, "quality": quality, "rounding": rounding, "startup": startup,
    "predict": predict, "speculation_resident": speculation,
    "speculation_acceptance": acceptance, "speculation_json": documents_by_schema, "published": published,
    "machines": machines,
}  # fmt: skip
