"""What a server counts, in Prometheus' text format."""

from collections.abc import Iterable

from glm_gpu.histogram import Histogram
from glm_gpu.machine import peak_rss_bytes
from glm_gpu.scheduler import Scheduler
from glm_gpu.speculative import WidthPolicy
from glm_gpu.tiers.store import TieredStore

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
Samples = Iterable[tuple[dict[str, str], float]]


def render(scheduler: Scheduler, store: TieredStore, speculation: WidthPolicy, num_connections: int) -> str:
    """All metrics as they stand.

    Source: Prometheus' exposition format, version 0.0.4.
    """
    counts, pool = scheduler.counts, scheduler.pool
    prefill = counts.prompt_tokens - counts.reused_tokens
    parts = [
        _metric("prompt_tokens_total", "counter", "Prompt tokens of ended requests, by whether they were cached.",
                [({"cached": "no"}, prefill), ({"cached": "yes"}, counts.reused_tokens)]),
        _one("completion_tokens_total", "counter", "Tokens generated.", counts.completion_tokens),
        _metric("requests_total", "counter", "Requests ended, by how.",
                [({"finish": reason}, count) for reason, count in counts.ended.items()]),
        _one("requests_refused_total", "counter", "Requests that found the queue full.", counts.refused),
        _one("preemptions_total", "counter", "Answers that gave up their pages for a time.", counts.preempted),
        _one("passes_total", "counter", "Passes through the model.", counts.passes),
        _one("passes_repeated_total", "counter", "Passes repeated after a failure.", counts.retried),
        _metric("pass_rows_total", "counter", "Rows computed in all passes, by what they are of.",
                [({"of": "prompts"}, counts.prompt_rows), ({"of": "answers"}, counts.answer_rows)]),
        _metric("requests", "gauge", "Requests now, by state.",
                [({"state": "queued"}, scheduler.num_queued), ({"state": "running"}, scheduler.num_running)]),
        _one("connections", "gauge", "HTTP requests being answered.", num_connections),
        _metric("cache_pages", "gauge", "Pages of the KV cache, by use.",
                [({"use": "free"}, pool.num_free), ({"use": "taken"}, pool.num_pages - pool.num_free)]),
        _one("cache_page_tokens", "gauge", "Positions of a page.", pool.page_tokens),
        _one("resident_peak_bytes", "gauge", "Most memory this process has had.", peak_rss_bytes()),
        *_drafts(scheduler, speculation),
        *_tiers(store),
        _histogram("first_token_seconds", "From a request to its first token.", counts.first_token_s),
        _histogram("token_gap_seconds", "Between two tokens of an answer.", counts.token_gap_s),
        _histogram("queue_seconds", "From a request to the start of its prompt.", counts.queue_s),
    ]  # fmt: skip
    return "".join(parts)


def _drafts(scheduler: Scheduler, speculation: WidthPolicy) -> list[str]:
    counts, drafts = scheduler.counts, sorted(speculation.acceptance.counts.items())
    by_depth = [
        ({"source": source.replace(" ", "_"), "depth": str(depth), "came": came}, count)
        for source, depths in drafts
        for depth, found in enumerate(depths, start=1)
        for came, count in (("true", found.right), ("false", found.tried - found.right))
        if found.tried
    ]
    return [
        _one("answer_steps_total", "counter", "Times that a pass gave an answer tokens.", counts.answer_steps),
        _metric("drafted_tokens_total", "counter", "Drafts verified, by whether the model chose them.",
                [({"accepted": "yes"}, counts.accepted_tokens),
                 ({"accepted": "no"}, counts.drafted_tokens - counts.accepted_tokens)]),
        _metric("guesses_total", "counter", "Guesses compared with what came, verified or not, by source and depth.",
                by_depth),
        _one("draft_width", "gauge", "Tokens drafted for the last pass, all answers together.", speculation.last.width),
        _one("draft_gain", "gauge", "Speed expected of that pass against one without drafts.", speculation.last.gain),
    ]  # fmt: skip


def _tiers(store: TieredStore) -> list[str]:
    tiers, counters = store.report(), store.counters
    uses = [
        ({"phase": phase, "found": found}, getattr(uses, found))
        for phase, uses in counters.phases.items()
        for found in ("locked", "ram", "prefetched", "late", "missed")
    ]
    return [
        _metric("experts", "gauge", "Experts, by tier.", [({"tier": t.name}, t.num_experts) for t in tiers]),
        _metric(
            "expert_bytes", "gauge", "Bytes of experts, by tier.", [({"tier": t.name}, t.used_bytes) for t in tiers]
        ),
        _metric("expert_uses_total", "counter", "Experts asked for, by phase and where they were.", uses),
        _one("expert_wait_seconds_total", "counter", "Time that passes stood still for reads.", counters.wait_s),
        _one("expert_read_errors_total", "counter", "Reads of experts that failed.", counters.read_errors),
    ]


def _one(name: str, kind: str, help: str, value: float) -> str:
    return _metric(name, kind, help, [({}, value)])


def _metric(name: str, kind: str, help: str, samples: Samples) -> str:
    lines = [f"# HELP glm_gpu_{name} {help}", f"# TYPE glm_gpu_{name} {kind}"]
    lines += [_line(f"glm_gpu_{name}", labels, value) for labels, value in samples]
    return "\n".join(lines) + "\n"


def _histogram(name: str, help: str, histogram: Histogram) -> str:
    counts = list(histogram.counts)
    lines, seen = [f"# HELP glm_gpu_{name} {help}", f"# TYPE glm_gpu_{name} histogram"], 0
    for bound, count in zip((*histogram.bounds, float("inf")), counts, strict=True):
        seen += count
        label = "+Inf" if bound == float("inf") else f"{bound:g}"
        lines.append(_line(f"glm_gpu_{name}_bucket", {"le": label}, seen))
    lines += [_line(f"glm_gpu_{name}_sum", {}, histogram.sum), _line(f"glm_gpu_{name}_count", {}, seen)]
    return "\n".join(lines) + "\n"


def _line(name: str, labels: dict[str, str], value: float) -> str:
    pairs = ",".join(f'{key}="{text}"' for key, text in labels.items())
    return f"{name}{{{pairs}}} {value:.17g}" if pairs else f"{name} {value:.17g}"
