"""What convert, inspect and verify print."""

import dataclasses
from pathlib import Path
from typing import Any

from glm_gpu.machine import peak_rss_bytes
from glm_gpu.units import format_bytes

MISSING_FILES = {
    "tokenizer.json": "; run, chat and score will take token ids only",
    "tokenizer_config.json": "; the defaults of GLM are used",
    "chat_template.jinja": "; chat uses the one of tokenizer_config.json, or else GLM's layout",
    "generation_config.json": "; sampling options and end tokens come from config.json and the command line",
}


def progress_line(progress: Any, seconds: float) -> str:
    """How far a conversion is: shards, bytes, speed, and how long the rest will take at this speed."""
    done_bytes = progress.times.write_bytes
    left_bytes = progress.total_bytes - progress.finished_bytes
    line = (
        f"{progress.activity} · {progress.num_finished} of {progress.num_shards} shards · "
        f"{format_bytes(progress.finished_bytes)} of {format_bytes(progress.total_bytes)}"
    )
    if done_bytes:
        line += f" · {done_bytes / seconds / 1e9:.2f} GB/s · {_duration(left_bytes * seconds / done_bytes)} left"
    return line


def convert_document(found: Any, out: Path, seconds: float) -> dict:
    """What `convert --json` prints."""
    return {
        "path": str(out),
        "shards": {name: dataclasses.asdict(record) for name, record in found.shards.items()},
        "num_written": found.num_written,
        "dropped": list(found.dropped),
        "has_mtp": found.has_mtp,
        "missing_files": list(found.missing_files),
        "seconds": round(seconds, 3),
        "stages": stage_rates(found.times, seconds),
        "peak_rss_bytes": peak_rss_bytes(),
    }


def convert_text(found: Any, out: Path, seconds: float) -> str:
    """What `convert` prints."""
    total_bytes = sum(record.nbytes for record in found.shards.values())
    rows = [("container", f"{out}: {len(found.shards)} shards, {format_bytes(total_bytes)}")]
    if found.num_written == 0:
        rows.append(("written", "nothing, it was complete"))
    else:
        rates = stage_rates(found.times, seconds)
        rows.append(("written", f"{found.num_written} shards in {_duration(seconds)}"))
        rows.append(
            (
                "speed",
                f"{rates['source_gb_s']:.2f} GB/s of source in, {rates['output_gb_s']:.2f} GB/s out; read "
                f"{rates['read_gb_s']:.2f} GB/s a thread, quantize {rates['quantize_gb_s']:.2f} GB/s a core, hash and "
                f"write {rates['write_gb_s']:.2f} GB/s",
            )
        )
        rows.append(("memory", f"peak {format_bytes(peak_rss_bytes())}"))
    if not found.has_mtp:
        rows.append(("draft layer", "the source has none"))
    if found.dropped:
        rows.append(("left out", f"{len(found.dropped)} tensors the model does not use, first {found.dropped[0]}"))
    return table(rows)


def stage_rates(times: Any, seconds: float) -> dict:
    """GB/s of each stage and the whole; source bytes for a second of one thread reading, of one core quantizing."""

    def rate(num_bytes: int, stage_s: float) -> float:
        return round(num_bytes / stage_s / 1e9, 4) if stage_s else 0.0

    return {
        "source_gb_s": rate(times.read_bytes, seconds),
        "output_gb_s": rate(times.write_bytes, seconds),
        "read_gb_s": rate(times.read_bytes, times.read_s),
        "quantize_gb_s": rate(times.read_bytes, times.quantize_s),
        "write_gb_s": rate(times.write_bytes, times.write_s),
        "wait_s": round(times.wait_s, 3),
    }


def inspect_document(checkpoint: Any, rows: list, expert: Any) -> dict:
    """What `inspect --json` prints."""
    manifest = checkpoint.manifest
    return {
        "path": str(checkpoint.path),
        "model_type": checkpoint.config.model_type,
        "fingerprint": checkpoint.fingerprint,
        "source": manifest and manifest.source,
        "revision": manifest and manifest.revision,
        "tool": manifest and manifest.tool,
        "rounding": manifest and manifest.rounding,
        "num_shards": len(checkpoint.shards),
        "bill": [
            {**dataclasses.asdict(row), "num_bytes": row.num_bytes, "bits_per_weight": row.bits_per_weight}
            for row in rows
        ],
        "num_weights": sum(row.num_weights for row in rows),
        "num_bytes": sum(row.num_bytes for row in rows),
        "expert": expert and dataclasses.asdict(expert),
    }


def inspect_text(checkpoint: Any, rows: list, expert: Any) -> str:
    """What `inspect` prints: the bill, and an expert."""
    manifest = checkpoint.manifest
    head = [("model", f"{checkpoint.path} ({checkpoint.config.model_type}), {len(checkpoint.shards)} shards")]
    if manifest:
        revision = f" at {manifest.revision}" if manifest.revision else ""
        head.append(("made", f"by {manifest.tool} from {manifest.source}{revision}, rounding {manifest.rounding}"))
    parts = [table(head), _bill(rows)]
    if expert:
        run = "one run on a 4 KiB border" if expert.is_one_run else "not in one run"
        lines = [f"expert {expert.prefix}: {run}"]
        for role, (num_rows, num_columns) in expert.shapes.items():
            values = ", ".join(f"{value:.6g}" for value in expert.first_values[role])
            lines.append(f"  {role:<4} [{num_rows}, {num_columns}] {expert.stored[role]}: {values}, ...")
        parts.append("\n".join(lines))
    return "\n\n".join(parts)


def verify_document(found: Any, folder: Path) -> dict:
    """What `verify --json` prints."""
    return {
        "path": str(folder),
        "is_whole": not found.problems,
        "problems": list(found.problems),
        "shards": [{**dataclasses.asdict(shard), "problem": shard.problem} for shard in found.shards],
        "num_tensors": found.num_tensors,
        "has_manifest": found.has_manifest,
        "has_mtp": found.has_mtp,
        "num_bytes": found.nbytes,
    }


def verify_text(found: Any, folder: Path) -> str:
    """What `verify` prints."""
    if found.problems:
        hashes = f"{len(found.problems)} of {len(found.shards)} shards are damaged"
    elif found.has_manifest:
        hashes = f"all {len(found.shards)} shards have the hashes of the manifest"
    else:
        hashes = "no manifest, so nothing to compare hashes with"
    return table(
        [
            ("folder", f"{folder}: {len(found.shards)} shards, {format_bytes(found.nbytes)}"),
            ("tensors", f"{found.num_tensors}, every one the model needs is there in its shape"),
            ("draft layer", "there" if found.has_mtp else "none"),
            ("content", hashes),
        ]
    )


def _bill(rows: list) -> str:
    lines = [("class", "stored as", "tensors", "weights", "bytes", "bits a weight")]
    for row in rows:
        bits = f"{row.bits_per_weight:.3f}" if row.num_weights else ""
        lines.append(
            (row.name_class, row.stored, f"{row.num_tensors:,}", f"{row.num_weights:,}", f"{row.num_bytes:,}", bits)
        )
    num_weights, num_bytes = sum(row.num_weights for row in rows), sum(row.num_bytes for row in rows)
    num_tensors = sum(row.num_tensors for row in rows)
    bits = f"{8 * num_bytes / num_weights:.3f}" if num_weights else ""
    lines.append(("total", "", f"{num_tensors:,}", f"{num_weights:,}", f"{num_bytes:,}", bits))
    widths = [max(len(line[column]) for line in lines) for column in range(len(lines[0]))]
    return "\n".join(
        "  ".join(f"{cell:<{width}}" if column < 2 else f"{cell:>{width}}" for column, (cell, width) in
                  enumerate(zip(line, widths, strict=True))).rstrip()
        for line in lines
    )  # fmt: skip


def table(rows: list[tuple[str, str]]) -> str:
    """Names and texts in two columns."""
    width = max(len(name) for name, _ in rows)
    return "\n".join(f"{name:<{width}}  {text}" for name, text in rows)


def _duration(seconds: float) -> str:
    if seconds < 120:
        return f"{seconds:.1f} s"
    hours, minutes = divmod(round(seconds / 60), 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min"
