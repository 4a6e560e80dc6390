"""What the commands print: results on stdout, everything else on stderr, colour only on a terminal."""

import dataclasses
import io
import json
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from glm_gpu.machine import peak_rss_bytes
from glm_gpu.units import format_bytes

_CONTROLS = dict.fromkeys([*range(32), *range(127, 160)], "\N{REPLACEMENT CHARACTER}")
_STYLES = {"dim": "2", "ok": "32", "warn": "33", "fail": "31"}


def open_outputs() -> None:
    """Have all three standard streams, and show what the terminal's encoding lacks as question marks, or escaped.

    One that was closed when the program began fails when it is used, as one on a full disk does.
    """
    for name, mode, lacks in (("stdin", "r", os.O_WRONLY), ("stdout", "w", os.O_RDONLY), ("stderr", "w", os.O_RDONLY)):
        if getattr(sys, name) is None:
            # the lowest number that is free: the stream's own, which no other file can get then
            descriptor = os.open(os.devnull, lacks)
            setattr(sys, name, open(descriptor, mode, encoding="utf-8", closefd=False))  # noqa: SIM115
    if isinstance(getattr(sys.stdout, "buffer", None), io.RawIOBase):
        # PYTHONUNBUFFERED, with which Python drops what a full disk has no room for and says nothing
        sys.stdout = open(sys.stdout.fileno(), "w", encoding=sys.stdout.encoding, closefd=False)  # noqa: SIM115
    for output, errors in ((sys.stdout, "replace"), (sys.stderr, "backslashreplace")):
        if isinstance(output, io.TextIOWrapper):
            output.reconfigure(errors=errors)


def close_outputs() -> bool:
    """Whether all results were written. The interpreter, which flushes both outputs once more, finds them empty."""
    are_written = [_is_flushed(output) for output in (sys.stdout, sys.__stdout__) if output is not None]
    for output in (sys.stderr, sys.__stderr__):
        if output is not None:
            _is_flushed(output)
    return all(are_written)


def stream(text: str, style: str | None = None) -> None:
    """A piece of the answer, shown at once."""
    if text:
        _print(_styled(text, style, sys.stdout))


def result(text: str) -> None:
    """A line, or lines, of result."""
    _print(text + "\n")


def document(value: Any) -> None:
    """The one JSON document of a command."""
    result(json.dumps(value, ensure_ascii=(sys.stdout.encoding or "").lower() not in ("utf-8", "utf8")))


def screen(text: str) -> None:
    """A result in place of the one before, on a terminal; below it elsewhere."""
    stream(f"\x1b[H\x1b[2J{text}\n" if sys.stdout.isatty() else text + "\n\n")


def note(text: str) -> None:
    """A line beside the result: progress, speed, a hint."""
    _say(_styled(text, "dim", sys.stderr) + "\n")


def error(message: object) -> None:
    """A failure, in one line however many the message has."""
    # a file's name or its text may hold what a terminal would obey
    _say("glm-gpu: " + " ".join(str(message).split("\n")).translate(_CONTROLS) + "\n")


@contextmanager
def progress(text: str) -> Iterator[None]:
    """Shows what is being waited for, on a terminal only, and wipes it off again."""
    if not sys.stderr.isatty():
        yield
        return
    _say(_styled(text + " ...", "dim", sys.stderr))
    try:
        yield
    finally:
        _say("\r\x1b[K")


def closing_line(stats: Any) -> str:
    """How an answer went, in one line, from its GenerationStats."""
    parts = [f"{stats.prompt_tokens} prompt"]
    if stats.reused_tokens:
        parts[0] += f" ({stats.reused_tokens} cached)"
    parts[0] += f" + {stats.completion_tokens} new tokens"
    if stats.prefill_tok_s:
        parts.append(f"prefill {stats.prefill_tok_s:.1f} tok/s")
    if stats.decode_tok_s:
        parts.append(f"decode {stats.decode_tok_s:.1f} tok/s")
    if stats.drafted_tokens:
        parts.append(f"{stats.accepted_tokens} of {stats.drafted_tokens} drafts accepted")
    parts.append(f"peak {format_bytes(peak_rss_bytes())}")
    if stats.finish_reason == "length":
        parts.append("token limit")
    return " · ".join(parts)


def run_document(stats: Any, ids: list[int], text: str | None, engine: Any) -> dict:
    """What `run --json` prints."""
    return {
        "ids": ids,
        "text": text,
        "finish_reason": stats.finish_reason,
        "prompt_tokens": stats.prompt_tokens,
        "reused_tokens": stats.reused_tokens,
        "completion_tokens": stats.completion_tokens,
        "prefill_tok_s": round(stats.prefill_tok_s, 3),
        "decode_tok_s": round(stats.decode_tok_s, 3),
        "drafted_tokens": stats.drafted_tokens,
        "accepted_tokens": stats.accepted_tokens,
        "tokens_per_pass": round(stats.tokens_per_pass, 3),
        "speculation": engine.speculation.as_dict(),
        "peak_rss_bytes": peak_rss_bytes(),
        "tiers": [dataclasses.asdict(tier) for tier in engine.store.report()],
    }


def profile_text(document: dict) -> str:
    """Where an answer's time went, from `pass_profile.profile_document`."""
    lines = []
    for name, phase in document.items():
        tokens, wall_s = phase["tokens"], phase["wall_s"]
        lines.append(f"{name}: {tokens} tokens in {phase['passes']} passes, {wall_s:.3f} s")
        width = max(len(line) for line in phase["seconds"])
        for line, line_s in phase["seconds"].items():
            per_token = f"{1e3 * line_s / tokens:9.3f} ms a token"
            lines.append(f"  {line:<{width}}  {line_s / wall_s:6.1%}  {per_token}")
    return "\n".join(lines)


def chat_stats(session: Any, engine: Any, num_messages: int) -> str:
    """What /stats shows: the last answer, the context, speculation, the tiers."""
    lines = [closing_line(session.last)] if session.last else []
    lines.append(f"{num_messages} messages, {len(session.cached_ids)} of {engine.context} tokens of context in use")
    lines += engine.speculation.summary
    lines += [
        f"tier {tier.name}: {tier.num_experts} experts, {format_bytes(tier.used_bytes)}, "
        + ", ".join(f"{hits} {phase} hits" for phase, hits in tier.hits.items())
        for tier in engine.store.report()
    ]
    return "\n".join(lines)


def score_document(score: Any) -> dict:
    """What `score --json` prints."""
    return {
        "tokens": score.tokens,
        "scored_tokens": score.scored_tokens,
        "windows": score.windows,
        "log_likelihood": score.log_likelihood,
        "perplexity": score.perplexity,
        "tok_s": round(score.tok_s, 3),
        "peak_rss_bytes": peak_rss_bytes(),
    }


def score_text(score: Any) -> str:
    """What `score` prints."""
    windows = f" in {score.windows} windows" if score.windows > 1 else ""
    return table(
        [
            ("tokens", f"{score.tokens}{windows}, {score.tok_s:.1f} tok/s"),
            ("log-likelihood", f"{score.log_likelihood:.4f} nats over {score.scored_tokens} tokens"),
            ("perplexity", f"{score.perplexity:.4f} a token"),
        ]
    )


def status_document(status: Any) -> dict:
    """What `status --json` prints."""
    model, plan = status.model, status.plan
    return {
        "path": str(status.path),
        "ready": status.problem is None,
        "problem": status.problem,
        "model": model and {**dataclasses.asdict(model), "config": dataclasses.asdict(model.config)},
        "context": plan and plan.context,
        "memory": plan
        and {
            "dense_bytes": plan.dense_bytes,
            "slot_bytes": plan.slot_bytes,
            "cache_bytes": plan.cache_bytes,
            "total_bytes": plan.ram_bytes,
        },
        "tiers": plan and [dataclasses.asdict(tier) for tier in plan.tiers],
        "machine": dataclasses.asdict(status.machine),
    }


def status_text(status: Any) -> str:
    """What `status` prints."""
    rows = [("model", str(status.path))]
    if model := status.model:
        config = model.config
        rows += [
            (
                "architecture",
                f"{config.model_type}, {config.num_layers} layers, {config.n_routed_experts} experts a layer, "
                f"{config.num_experts_per_tok} for each token",
            ),
            ("files", f"{model.num_shards} shards, {format_bytes(model.disk_bytes)}, fingerprint {model.fingerprint}"),
            ("stored as", ", ".join(f"{kind} {found}" for kind, found in model.formats.items())),
        ]
    if plan := status.plan:
        rows.append(
            (
                "takes",
                f"{format_bytes(plan.ram_bytes)}: weights {format_bytes(plan.dense_bytes)}, experts "
                f"{format_bytes(plan.slot_bytes)}, cache of {plan.context} tokens {format_bytes(plan.cache_bytes)}",
            )
        )
        rows += [
            (f"tier {tier.name}", f"{tier.num_experts} experts, {format_bytes(tier.nbytes)}") for tier in plan.tiers
        ]
    here = status.machine
    rows += [
        ("ram", f"{format_bytes(here.ram_available_bytes)} available of {format_bytes(here.ram_bytes)}"),
        ("disk", "-" if here.disk_free_bytes is None else f"{format_bytes(here.disk_free_bytes)} free"),
        ("cpu", f"{here.cpu}, {here.num_cores} cores, kernels: {here.instruction_set}"),
        ("gpu", here.gpu),
        ("engine", f"not ready: {status.problem}" if status.problem else "ready"),
    ]
    return table(rows)


def checks_text(checks: list) -> str:
    """What `doctor` prints: a line for each check, with the next step below those that need one."""
    width = max(len(check.name) for check in checks)
    lines = []
    for check in checks:
        state = _styled(f"{check.state:<4}", check.state, sys.stdout)
        lines.append(f"{state}  {check.name:<{width}}  {check.found}")
        if check.advice:
            lines.append(" " * (width + 8) + check.advice)
    return "\n".join(lines)


def table(rows: list[tuple[str, str]]) -> str:
    """Lines of a name and what belongs to it, aligned."""
    width = max(len(name) for name, _ in rows)
    return "\n".join(f"{name:<{width}}  {text}" for name, text in rows)


def _print(text: str) -> None:
    """Write to standard output at once.

    Raises:
        OSError: it cannot be written; nothing that is printed afterwards is shown.
    """
    try:
        sys.stdout.write(text)
        sys.stdout.flush()
    except OSError as error:
        _discard(sys.stdout)
        raise OSError(error.errno, error.strerror, "standard output") from None


def _say(text: str) -> None:
    """Write to standard error at once; no command fails because its messages cannot be shown."""
    try:
        sys.stderr.write(text)
        sys.stderr.flush()
    except OSError:
        _discard(sys.stderr)


def _is_flushed(output: Any) -> bool:
    try:
        output.flush()
    except OSError:
        _discard(output)
        return False
    return True


def _discard(output: Any) -> None:
    """Let everything written to a stream vanish, what it still holds included.

    Else the interpreter would fail on that when it leaves, with a message of its own and exit code 120.
    """
    try:
        descriptor = output.fileno()
    except (OSError, AttributeError):  # no stream of the system
        return
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, descriptor)
    os.close(nowhere)


def _styled(text: str, style: str | None, file: Any) -> str:
    if style is None or not file.isatty() or os.environ.get("NO_COLOR"):
        return text
    return f"\x1b[{_STYLES[style]}m{text}\x1b[0m"
