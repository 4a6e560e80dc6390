"""Load on a server: throughput by clients, stalls while a long prompt is computed, and what is left behind.

    python bench/serve.py                       # starts `glm-gpu serve` on the demo, 32 clients for 60 s
    python bench/serve.py --clients 8 --seconds 10 --model DIR

Three parts. Throughput: one client, then eight, that each ask for 64 tokens again and again. Stall: one answer grows
while another request's prompt of 2,000 tokens is computed; its longest gap between tokens against its median. Load:
clients ask for answers of mixed lengths and one in five leaves in the middle; every answer that ends is compared with
what the same request got alone, and afterwards nothing may run, wait, or hold a page that the tree does not remember.
Exit code 1 where a bound of the project is missed.
"""

import argparse
import asyncio
import itertools
import json
import os
import random
import re
import statistics
import subprocess
import sys
import time
from pathlib import Path

import httpx

from glm_gpu.machine import cpu_name, num_physical_cores

WORDS = [
    "And",
    "it",
    "came",
    "to",
    "pass",
    "in",
    "those",
    "days",
    "that",
    "the",
    "king",
    "went",
    "up",
    "unto",
    "the",
    "mountain",
    "and",
    "said",
    "let",
    "there",
    "be",
    "light",
]
MAX_STALL, MIN_GAIN = 5.0, 2.5


async def answer(client: httpx.AsyncClient, body: dict, leave_after: int | None = None) -> tuple[str, list[float]]:
    """A completion's text and the time of each of its events; leaves after so many events if told to."""
    text, times = [], []
    async with client.stream("POST", "/v1/completions", json={**body, "stream": True}) as response:
        response.raise_for_status()
        async for line in response.aiter_lines():
            if line.startswith("data: {"):
                times.append(time.perf_counter())
                event = json.loads(line[6:])
                if "error" in event:
                    raise RuntimeError(event["error"]["message"])
                text.append(event["choices"][0]["text"])
                if leave_after is not None and len(times) >= leave_after:
                    break
    return "".join(text), times


def body(rng: random.Random, max_prompt: int) -> dict:
    words = [rng.choice(WORDS) for _ in range(rng.choice([3, 10, 40, max_prompt]))]
    num_tokens = rng.choice([4, 16, 48])
    return {"prompt": " ".join(words), "max_tokens": num_tokens, "temperature": 0, "ignore_eos": True}


async def throughput(client: httpx.AsyncClient, num_clients: int, seconds: float) -> float:
    """Tokens a second over all clients."""
    end, num_tokens = time.perf_counter() + seconds, 0

    async def one(number: int) -> None:
        nonlocal num_tokens
        rng = random.Random(number)
        while time.perf_counter() < end:
            ask = {**body(rng, 10), "max_tokens": 64}
            _, times = await answer(client, ask)
            num_tokens += sum(at < end for at in times)

    await asyncio.gather(*(one(n) for n in range(num_clients)))
    return num_tokens / seconds


async def stall(client: httpx.AsyncClient) -> tuple[float, float]:
    """Median and longest gap, in seconds, of an answer beside which a prompt of 2,000 tokens is computed."""
    ask = {"prompt": "And", "max_tokens": 400, "temperature": 0, "ignore_eos": True}
    growing = asyncio.create_task(answer(client, ask))
    await asyncio.sleep(0.5)
    rng = random.Random(time.time_ns())
    ids = [rng.randrange(3, 1900) for _ in range(2000)]
    began = time.perf_counter()
    await answer(client, {"prompt": ids, "max_tokens": 1, "temperature": 0})
    ended = time.perf_counter()
    _, times = await growing
    gaps = [b - a for a, b in itertools.pairwise(times)]
    beside = [b - a for a, b in itertools.pairwise(times) if b > began and a < ended]
    return statistics.median(gaps), max(beside, default=0.0)


async def load(client: httpx.AsyncClient, num_clients: int, seconds: float) -> dict:
    """Clients of all kinds; how many answers ended, differed, and were left."""
    rng = random.Random(1)
    bodies = [body(rng, 300) for _ in range(12)]
    alone = [(await answer(client, ask))[0] for ask in bodies]
    end = time.perf_counter() + seconds
    counts = {"ended": 0, "differed": 0, "left": 0, "refused": 0, "tokens": 0}

    async def one(number: int) -> None:
        rng = random.Random(number)
        while time.perf_counter() < end:
            which = rng.randrange(len(bodies))
            leave_after = rng.randrange(3) if rng.random() < 0.2 else None
            try:
                text, times = await answer(client, bodies[which], leave_after)
            except httpx.HTTPStatusError as error:
                assert error.response.status_code == 429
                counts["refused"] += 1
                await asyncio.sleep(0.5)
                continue
            counts["tokens"] += len(times)
            if leave_after is not None:
                counts["left"] += 1
            else:
                counts["ended"] += 1
                counts["differed"] += text != alone[which]

    await asyncio.gather(*(one(n) for n in range(num_clients)))
    return counts


def process_facts(pid: int) -> dict:
    """Threads and resident bytes of a process; empty where there is no /proc."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text(encoding="ascii").splitlines()
    except OSError:
        return {}
    fields = dict(line.split(":", 1) for line in lines)
    return {"threads": int(fields["Threads"]), "rss_bytes": int(fields["VmRSS"].split()[0]) * 1024}


async def measure(url: str, pid: int, num_clients: int, seconds: float) -> tuple[dict, list[str]]:
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(base_url=url, timeout=300, limits=limits) as client:
        await throughput(client, 2, 2.0)
        one, eight = await throughput(client, 1, seconds / 6), await throughput(client, 8, seconds / 6)
        median, longest = sorted([await stall(client) for _ in range(3)], key=lambda gaps: gaps[1] / gaps[0])[1]
        before = process_facts(pid)
        counts = await load(client, num_clients, seconds)
        await asyncio.sleep(1.0)
        after, status = process_facts(pid), (await client.get("/status")).json()
    found = {
        "one_client_tok_s": round(one, 1),
        "eight_clients_tok_s": round(eight, 1),
        "gain": round(eight / one, 2),
        "median_gap_ms": round(median * 1e3, 2),
        "longest_gap_ms": round(longest * 1e3, 2),
        "stall": round(longest / median, 2),
        **counts,
        "before": before,
        "after": after,
        "requests": status["requests"],
        "cache": status["cache"],
    }
    cache, requests = status["cache"], status["requests"]
    bounds = {
        f"eight clients are {found['gain']} times as fast as one, expected {MIN_GAIN}": eight >= MIN_GAIN * one,
        f"a stall of {found['stall']} median gaps, expected at most {MAX_STALL}": longest <= MAX_STALL * median,
        f"{counts['differed']} answers differ from those given alone": counts["differed"] == 0,
        "requests are left over": requests["running"] + requests["queued"] == 0,
        "pages are left over": cache["taken_pages"] == cache["remembered_pages"],
        # The pool that renders prompts comes to four.
        "threads are left over": not after or after["threads"] <= before["threads"] + 4,
    }
    missed = [bound for bound, is_kept in bounds.items() if not is_kept]
    return found, missed


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--clients", type=int, default=32)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--model")
    arguments = parser.parse_args()
    command = [sys.executable, "-m", "glm_gpu", "serve", "--port", "0"]
    command += ["--model", arguments.model] if arguments.model else []
    server = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    try:
        first = server.stderr.readline()
        url = re.search(r"http://\S+", first)
        if url is None:
            print(first, end="", file=sys.stderr)
            return 1
        drain = subprocess.Popen(["cat"], stdin=server.stderr, stdout=subprocess.DEVNULL)
        found, missed = asyncio.run(measure(url.group(), server.pid, arguments.clients, arguments.seconds))
    finally:
        server.terminate()
        server.wait(60)
    drain.wait()
    print(f"{cpu_name()}, {num_physical_cores()} cores, load {os.getloadavg()[0]:.1f}")
    print(f"{arguments.clients} clients, {arguments.seconds:g} s, model {arguments.model or 'demo'}")
    for name, value in found.items():
        print(f"{name:24} {value}")
    for line in missed:
        print(f"missed: {line}")
    print(json.dumps(found))
    return bool(missed)


if __name__ == "__main__":
    sys.exit(main())
