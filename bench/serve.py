"""Load on a server: throughput by clients, stalls while a long prompt is computed, and what is left behind.

    python bench/serve.py                       # starts `glm-gpu serve` on the demo, 32 clients for 60 s
    python bench/serve.py --clients 8 --seconds 10 --model DIR

Throughput: one client, then eight, that each ask for 64 tokens again and again; beside it what the scheduler gives one
and eight answers without a server. Stall: an answer grows while another request's prompt of 2,000 tokens is computed;
its longest gap between tokens then, against its median gap with nothing beside it. Load: clients ask for answers of
mixed lengths and one in five leaves in the middle; every answer that ends is compared with what the same request got
alone, and afterwards nothing may run, wait, or hold a page that the tree does not remember. Exit code 1 where a bound
of the project is missed; results in bench/results/serve.json.
"""

import argparse
import asyncio
import contextlib
import itertools
import json
import random
import re
import statistics
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from pathlib import Path
from urllib.parse import urlsplit

import record

from glm_gpu.engine import Engine
from glm_gpu.jobs import Request
from glm_gpu.model.transformer import cache_layout
from glm_gpu.pages import PagePool
from glm_gpu.sampling import SamplingParams
from glm_gpu.scheduler import Scheduler

TEXT = "And it came to pass in those days that the king went up unto the mountain and said let there be light"
MAX_STALL, MIN_GAIN = 5.0, 2.5
# Prompts of so many tokens are computed beside an answer, one after the other.
STALL_PROMPT, STALL_REPEATS = 2000, 3


class Refused(Exception):
    """The queue was full."""


class Client:
    """Asks a server over plain sockets: the libraries take more time for a token than the server, on the same cores."""

    def __init__(self, url: str) -> None:
        parts = urlsplit(url)
        self._host, self._port = parts.hostname, parts.port

    async def get(self, path: str) -> dict:
        """A JSON document."""
        async with self._sent("GET", path, b"") as reader:
            return json.loads(await reader.read())

    async def answer(self, body: dict, leave_after: int | None = None) -> tuple[str, list[float]]:
        """A completion's text and the time of each of its events; leaves after so many events if told to."""
        text, times = [], []
        async with self._sent("POST", "/v1/completions", json.dumps({**body, "stream": True}).encode()) as reader:
            # An event is one chunk of the response, so its line is never broken by a chunk's border.
            async for line in reader:
                if line.startswith(b"data: {"):
                    times.append(time.perf_counter())
                    event = json.loads(line[6:])
                    if "error" in event:
                        raise RuntimeError(event["error"]["message"])
                    text.append(event["choices"][0]["text"])
                    if leave_after is not None and len(times) >= leave_after:
                        break
        return "".join(text), times

    @contextlib.asynccontextmanager
    async def _sent(self, method: str, path: str, body: bytes) -> AsyncIterator[asyncio.StreamReader]:
        """The response's body; the connection is closed behind it."""
        reader, writer = await asyncio.open_connection(self._host, self._port)
        try:
            head = f"{method} {path} HTTP/1.1\r\nHost: {self._host}\r\nConnection: close\r\n"
            head += f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
            writer.write(head.encode() + body)
            status = int((await reader.readline()).split()[1])
            if status == 429:
                raise Refused
            assert status == 200, status
            while (await reader.readline()).strip():
                pass
            yield reader
        finally:
            writer.close()


def body(rng: random.Random, max_prompt: int) -> dict:
    """A request with a prompt of one of four lengths, and an answer of one of three."""
    words = [rng.choice(TEXT.split()) for _ in range(rng.choice([3, 10, 40, max_prompt]))]
    num_tokens = rng.choice([4, 16, 48])
    return {"prompt": " ".join(words), "max_tokens": num_tokens, "temperature": 0, "ignore_eos": True}


async def throughput(client: Client, num_clients: int, seconds: float) -> float:
    """Tokens a second over all clients."""
    end, num_tokens = time.perf_counter() + seconds, 0

    async def one(number: int) -> None:
        nonlocal num_tokens
        rng = random.Random(number)
        while time.perf_counter() < end:
            _, times = await client.answer({**body(rng, 10), "max_tokens": 64})
            num_tokens += sum(at < end for at in times)

    await asyncio.gather(*(one(n) for n in range(num_clients)))
    return num_tokens / seconds


async def stall(client: Client, num_tokens: int) -> dict:
    """Gaps of an answer, alone and while prompts are computed beside it."""
    ask = {"prompt": "And", "max_tokens": num_tokens, "temperature": 0, "ignore_eos": True}
    growing = asyncio.create_task(client.answer(ask))
    rng, spans = random.Random(time.time_ns()), []
    for _ in range(STALL_REPEATS):
        await asyncio.sleep(0.5)
        ids = [rng.randrange(3, 1900) for _ in range(STALL_PROMPT)]
        began = time.perf_counter()
        await client.answer({"prompt": ids, "max_tokens": 1, "temperature": 0})
        spans.append((began, time.perf_counter()))
    done_at = time.perf_counter()
    _, times = await growing
    assert times[-1] > done_at, "the answer ended before the prompts did; ask for more of its tokens"
    alone, beside = [], []
    for before, after in itertools.pairwise(times):
        is_beside = any(after > began and before < ended for began, ended in spans)
        (beside if is_beside else alone).append(after - before)
    return {
        "median_gap_ms": round(statistics.median(alone) * 1e3, 2),
        "alone_longest_ms": round(max(alone) * 1e3, 2),
        "beside_prefill_median_ms": round(statistics.median(beside) * 1e3, 2),
        "beside_prefill_p99_ms": round(statistics.quantiles(beside, n=100)[98] * 1e3, 2),
        "beside_prefill_longest_ms": round(max(beside) * 1e3, 2),
        "prefill_s": [round(ended - began, 2) for began, ended in spans],
        "stall": round(max(beside) / statistics.median(alone), 2),
    }


async def load(client: Client, num_clients: int, seconds: float) -> dict:
    """Clients of all kinds; how many answers ended, differed, and were left."""
    rng = random.Random(1)
    bodies = [body(rng, 300) for _ in range(12)]
    alone = [(await client.answer(ask))[0] for ask in bodies]
    end = time.perf_counter() + seconds
    counts = {"ended": 0, "differed": 0, "left": 0, "refused": 0, "tokens": 0}

    async def one(number: int) -> None:
        rng = random.Random(number)
        while time.perf_counter() < end:
            which = rng.randrange(len(bodies))
            leave_after = rng.randrange(3) if rng.random() < 0.2 else None
            try:
                text, times = await client.answer(bodies[which], leave_after)
            except Refused:
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


class _Ignore:
    """A listener that wants nothing."""

    def prefilled(self, num_done: int, num_prompt: int) -> None:
        pass

    def token(self, token: object) -> bool:
        return False

    def ended(self, result: object) -> None:
        pass


def without_server(model: str | None, num_answers: int, num_tokens: int) -> float:
    """Tokens a second of the scheduler alone, in this process."""
    with Engine.open(Path(model) if model else None) as engine:
        pool = PagePool(cache_layout(engine.config, True), 32 * 512)
        scheduler = Scheduler(engine.model, pool, engine.context)
        request = Request([5, 6, 7], SamplingParams(temperature=0.0), num_tokens)
        for _ in range(num_answers):
            scheduler.submit(request, _Ignore())
        while scheduler.counts.completion_tokens < num_answers:
            scheduler.step()
        before, began = scheduler.counts.completion_tokens, time.perf_counter()
        while scheduler.step():
            pass
        return (scheduler.counts.completion_tokens - before) / (time.perf_counter() - began)


async def measure(url: str, pid: int, num_clients: int, seconds: float, parts: list[str]) -> dict:
    """What the chosen parts found."""
    client, found = Client(url), {}
    await throughput(client, 2, 2.0)
    if "throughput" in parts:
        one, eight = await throughput(client, 1, seconds / 6), await throughput(client, 8, seconds / 6)
        found["throughput"] = {
            "one_client_tok_s": round(one, 1),
            "eight_clients_tok_s": round(eight, 1),
            "gain": round(eight / one, 2),
        }
    if "stall" in parts:
        found["stall"] = await stall(client, num_tokens=1500)
    if "load" in parts:
        before = process_facts(pid)
        counts = await load(client, num_clients, seconds)
        await asyncio.sleep(1.0)
        status = await client.get("/status")
        found["load"] = {
            "clients": num_clients,
            "seconds": seconds,
            **counts,
            "before": before,
            "after": process_facts(pid),
            "requests": status["requests"],
            "cache": status["cache"],
        }
    return found


def missed(found: dict) -> list[str]:
    """The bounds of the project that were not kept."""
    bounds = {}
    if "throughput" in found:
        gain = found["throughput"]["gain"]
        bounds[f"eight clients are {gain} times as fast as one, expected {MIN_GAIN}"] = gain >= MIN_GAIN
    if "stall" in found:
        longest = found["stall"]["stall"]
        bounds[f"a stall of {longest} median gaps, expected at most {MAX_STALL}"] = longest <= MAX_STALL
    if "load" in found:
        counts = found["load"]
        cache, requests = counts["cache"], counts["requests"]
        before, after = counts["before"], counts["after"]
        bounds[f"{counts['differed']} answers differ from those given alone"] = counts["differed"] == 0
        bounds["requests are left over"] = requests["running"] + requests["queued"] == 0
        bounds["pages are left over"] = cache["taken_pages"] == cache["remembered_pages"]
        # The pool that renders prompts comes to four.
        bounds["threads are left over"] = not after or after["threads"] <= before["threads"] + 4
    return [bound for bound, is_kept in bounds.items() if not is_kept]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--clients", type=int, default=32)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--parts", nargs="+", default=["throughput", "stall", "load"])
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
        found = asyncio.run(measure(url.group(), server.pid, arguments.clients, arguments.seconds, arguments.parts))
    finally:
        server.terminate()
        server.wait(60)
    drain.wait()
    if "throughput" in found:
        for name, num_answers in (("one", 1), ("eight", 8)):
            rate = without_server(arguments.model, num_answers, 400)
            found["throughput"][f"{name}_without_server_tok_s"] = round(rate, 1)
    for part, values in found.items():
        print(part)
        for name, value in values.items():
            print(f"  {name:26} {value}")
    bounds = missed(found)
    for line in bounds:
        print(f"missed: {line}")
    saved = record.save("serve", {"model": arguments.model or "demo", **found, "missed": bounds})
    print(json.dumps({"saved": str(saved.relative_to(record.ROOT)), **found}))
    return bool(bounds)


if __name__ == "__main__":
    sys.exit(main())
