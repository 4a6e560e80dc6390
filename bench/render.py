"""Draw the plots and write the tables of README.md and bench/results/README.md from the JSON in bench/results.

    python bench/render.py [--no-readme]

Needs matplotlib: pip install '.[bench]'.
"""

import argparse
import itertools

import record
from plots import plot
from tables import updated

PAGES = (record.ROOT / "README.md", record.ROOT / "bench/results/README.md")


def ladder(found: dict) -> None:
    """Decode by the share of experts in memory."""
    rows = [row for row in found["rows"] if "ram_bytes" not in row]
    shares = [row["share_of_experts"] for row in rows]
    with plot("tiers", "Decode by memory", "share of the experts in memory", "tok/s") as axes:
        spread = [[row["median"] - row["low"] for row in rows], [row["high"] - row["median"] for row in rows]]
        axes.errorbar(shares, [row["median"] for row in rows], spread, marker="o", capsize=3, label="measured")
        limits = [row.get("limit") for row in rows]
        if None not in limits:
            axes.plot(shares, limits, "--", marker=".", label="limit measured beside it")
        axes.set_ylim(bottom=0)
    with plot("tiers_hits", "Hit rate by memory", "share of the experts in memory", "hits, %") as axes:
        axes.plot(shares, [100 * row["best_hit_rate"] for row in rows], "--", marker=".", label="optimum")
        axes.plot(shares, [100 * row["hit_rate"] for row in rows], marker="o", label="measured")
        axes.set_ylim(0, 105)


def hits(found: dict) -> None:
    """Policies on recorded routing."""
    rows = [row for row in found["rows"] if row["heat"] == "other kinds"]
    by_kind = {kind: list(group) for kind, group in itertools.groupby(rows, lambda row: row["trace"])}
    with plot("policies", "Decode hit rate on the demo's routing", "slots, % of the experts", "hits, %") as axes:
        for color, (kind, group) in zip(("C0", "C1", "C2", "C3"), by_kind.items(), strict=False):
            shares = [100 * row["capacity"] for row in group]
            for name, style in (("optimum", ":"), ("glm-gpu", "-"), ("LRU", "--")):
                axes.plot(shares, [100 * row[name] for row in group], style, color=color, label=f"{kind}, {name}")


def kernels(found: dict) -> None:
    """Every kernel's share of its limit."""
    rows = [row for row in found["rows"] if "share" in row][::-1]
    colors = {"memory read": "C0", "int16 products": "C1", "f32 products and sums": "C2"}
    with plot("kernels", "Kernels at GLM-5.2's sizes", "% of the limit", "", (9, 5.5)) as axes:
        for name, color in colors.items():
            own = [n for n, row in enumerate(rows) if row["limit_name"] == name]
            axes.barh(own, [100 * rows[n]["share"] for n in own], color=color, label=name)
        axes.set_yticks(range(len(rows)), [row["name"] for row in rows])
        axes.axvline(100, color="0.4", linewidth=0.8)


def prefill(found: dict) -> None:
    """Prompts by their length."""
    lengths = [row["name"].split()[2] for row in found["rows"]]
    with plot("prefill", "Prefill", "tokens of the prompt", "tok/s") as axes:
        axes.bar(lengths, [row["median"] for row in found["rows"]], label="measured")
        axes.plot(lengths, [row["limit"] for row in found["rows"]], "k--", label=found["rows"][0]["limit_name"])


def serve(found: dict) -> None:
    """Throughput of the server."""
    rows = [row for row in found["rows"] if row["unit"] == "tok/s"]
    with plot("serve", f"Server on {found['subject']}", "", "tok/s") as axes:
        axes.bar([row["name"].split(",")[0] for row in rows], [row["median"] for row in rows])
        if "limit" in rows[0]:
            axes.axhline(rows[0]["limit"], color="0.4", linestyle="--", label=rows[0]["limit_name"])


def convert(nearest: dict, searched: dict) -> None:
    """The stages of a conversion beside what the disk does alone."""
    names = {
        "disk_read_gb_s": "disk alone, read", "read_gb_s": "read, a thread", "quantize_gb_s": "quantize, a core",
        "disk_write_gb_s": "disk alone, write", "write_gb_s": "write", "source_gb_s": "whole, of source",
    }  # fmt: skip
    with plot("convert", "Conversion", "GB/s", "") as axes:
        for offset, found in ((0.2, nearest), (-0.2, searched)):
            places = [len(names) - n + offset for n in range(len(names))]
            axes.barh(places, [found[name] for name in names], height=0.4, label=found["rounding"])
        axes.set_yticks([len(names) - n for n in range(len(names))], list(names.values()))


PLOTS = {("tiers",): ladder, ("policies",): hits, ("kernels",): kernels, ("prefill",): prefill, ("serve",): serve,
         ("convert_rtn", "convert_search"): convert}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--no-readme", action="store_true", help="plots only")
    arguments = parser.parse_args()
    for names, draw in PLOTS.items():
        documents = [record.load(name) for name in names]
        if None not in documents:
            draw(*documents)
    if not arguments.no_readme:
        for page in PAGES:
            page.write_text(updated(page.read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    main()
