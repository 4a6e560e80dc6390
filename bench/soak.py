"""Hours of mixed load with faults on the demo's server: memory, open files and threads must stay flat.

    python bench/soak.py --minutes 120                 as fast as the server answers
    python bench/soak.py --minutes 120 --pause 2       two seconds between requests

Requests: completions and chats, streamed and whole, with schemas, abandoned half-way, of several clients at once; the
malformed, oversized and slow; foreign hosts. Faults: shards of the model truncated under the server's hands and put
back, and the server stopped and continued. What grows is judged by a line fitted through the samples behind the first
quarter: flat is what grows over that time by less than twice the fit's standard error, or by less than 1 % of memory
and half a file or thread. Exit code 1 where something is not flat, or an answer was not one of those expected.
"""

import argparse
import contextlib
import http.client
import json
import os
import random
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from pathlib import Path

import numpy as np
import record

from glm_gpu.engine import DEMO_MODEL

TOLERANCE = {"memory_bytes": 0.01, "files": 0.5, "threads": 0.5}
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}


class Server:
    """`glm-gpu serve` on a copy of the demo of which only a part is kept in memory."""

    def __init__(self, folder: Path) -> None:
        self.model = folder / "model"
        shutil.copytree(DEMO_MODEL, self.model)
        command = [sys.executable, "-m", "glm_gpu", "serve", "--model", str(self.model), "--port", "0"]
        command += [
            "--context",
            "512",
            "--expert-slots",
            "60",
            "--read",
            "buffered",
            "--threads",
            "1",
            "--keep",
            "20MiB",
        ]
        environment = {**os.environ, "XDG_STATE_HOME": str(folder / "state")}
        self.process = subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True)
        self.errors: Counter[str] = Counter()
        for line in self.process.stderr:
            if found := re.search(r"at http://([\d.]+):(\d+)", line):
                self.host, self.port = found.group(1), int(found.group(2))
                break
        threading.Thread(target=self._drain, daemon=True).start()

    def _drain(self) -> None:
        for line in self.process.stderr:
            if "Traceback" in line or '"level": "error"' in line:
                message = json.loads(line).get("message", line) if line.startswith("{") else line
                self.errors[message.replace(str(self.model), "model")[:60]] += 1

    def sample(self) -> dict[str, float]:
        status = Path(f"/proc/{self.process.pid}/status").read_text()
        anonymous = int(re.search(r"RssAnon:\s+(\d+)", status).group(1)) * 1024
        threads = int(re.search(r"Threads:\s+(\d+)", status).group(1))
        files = len(os.listdir(f"/proc/{self.process.pid}/fd"))  # noqa: PTH208 (names only)
        return {"memory_bytes": anonymous, "files": files, "threads": threads}


class Load:
    """Requests, and what came of them."""

    def __init__(self, server: Server, rng: random.Random) -> None:
        self.server, self.rng = server, rng
        self.outcomes: Counter[str] = Counter()
        self.unexpected: list[str] = []
        self.faults: Counter[str] = Counter()
        self._may_fail = 0  # while a fault is in, a request may be answered by an error

    def one(self) -> None:
        kind = self.rng.choice([self.whole, self.streamed, self.abandoned, self.constrained, self.crowd, self.malformed,
                                self.oversized, self.slow, self.foreign, self.truncated, self.paused])  # fmt: skip
        try:
            kind()
        except OSError as error:
            self.unexpected.append(f"{kind.__name__}: {error!r}")
        self.outcomes[kind.__name__] += 1

    def whole(self) -> None:
        self._expect("whole", self._post("/v1/completions", self._prompt()), {200})

    def streamed(self) -> None:
        body = {"messages": [{"role": "user", "content": self._text()}], "max_tokens": 6, "stream": True}
        status, text = self._post("/v1/chat/completions", body)
        self._expect("streamed", (status, text), {200})
        if "[DONE]" not in text and '"error"' not in text:
            self.unexpected.append("a stream without an end")

    def abandoned(self) -> None:
        body = {**self._prompt(), "max_tokens": 200, "stream": True, "ignore_eos": True}
        with contextlib.closing(self._connect()) as connection:
            connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
            connection.getresponse().read(50)

    def constrained(self) -> None:
        response_format = {"type": "json_schema", "json_schema": {"schema": SCHEMA}}
        body = {**self._prompt(), "max_tokens": 20, "response_format": response_format}
        self._expect("constrained", self._post("/v1/completions", body), {200, 400})

    def crowd(self) -> None:
        threads = [threading.Thread(target=self.whole) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    def malformed(self) -> None:
        body = self.rng.choice(["{", "[]", '{"prompt": 5}', '{"prompt": "x", "temperature": "hot"}', "\xff", "[" * 900])
        self._expect("malformed", self._post("/v1/completions", body), {400})

    def oversized(self) -> None:
        self._expect("oversized", self._post("/v1/completions", '{"prompt": [' + "[]," * 2_900_000 + "0]}"), {400, 413})
        self._expect("too long", self._post("/v1/completions", {"prompt": "so " * 5000}), {400})

    def slow(self) -> None:
        with socket.create_connection((self.server.host, self.server.port), timeout=5) as connection:
            connection.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x")
            time.sleep(0.05)

    def foreign(self) -> None:
        self._expect("foreign", self._post("/v1/completions", self._prompt(), {"Host": "evil.example"}), {403})

    def truncated(self) -> None:
        """Cut a shard while requests run, then put it back."""
        shard = self.rng.choice(sorted(self.server.model.glob("*.safetensors")))
        content = shard.read_bytes()
        self._may_fail += 1
        self.faults["truncated shard"] += 1
        try:
            os.truncate(shard, len(content) // 3)
            for _ in range(2):
                self._post("/v1/completions", self._prompt())
        finally:
            with shard.open("r+b") as file:  # the same file: the server has it open
                file.write(content)
            self._may_fail -= 1

    def paused(self) -> None:
        self.faults["server stopped"] += 1
        self.server.process.send_signal(signal.SIGSTOP)
        time.sleep(0.1)
        self.server.process.send_signal(signal.SIGCONT)
        self.whole()

    def _text(self) -> str:
        return " ".join(self.rng.choice(["and", "it", "came", "to", "pass", "in", "those", "days"]) for _ in range(8))

    def _prompt(self) -> dict:
        return {
            "prompt": self._text(),
            "max_tokens": self.rng.choice([1, 4, 12]),
            "temperature": self.rng.choice([0, 1]),
        }

    def _connect(self) -> http.client.HTTPConnection:
        return http.client.HTTPConnection(self.server.host, self.server.port, timeout=120)

    def _post(self, path: str, body: object, headers: dict | None = None) -> tuple[int, str]:
        data = body.encode("latin-1") if isinstance(body, str) else json.dumps(body).encode()
        with contextlib.closing(self._connect()) as connection:
            connection.request("POST", path, data, {"Content-Type": "application/json", **(headers or {})})
            answer = connection.getresponse()
            return answer.status, answer.read().decode("utf-8", "replace")

    def _expect(self, what: str, answer: tuple[int, str], statuses: set[int]) -> None:
        if answer[0] not in statuses and not (self._may_fail and answer[0] == 500):
            self.unexpected.append(f"{what}: {answer[0]} {answer[1][:200]}")


def growth(samples: list[dict], key: str) -> dict:
    """What a fitted line grows by behind the first quarter, with twice its standard error."""
    chosen = samples[len(samples) // 4 :]
    x = np.array([sample["s"] for sample in chosen])
    y = np.array([sample[key] for sample in chosen], float)
    length = x[-1] - x[0]
    slope, intercept = np.polyfit(x, y, 1)
    residual = y - slope * x - intercept
    error = np.sqrt((residual**2).sum() / max(1, len(x) - 2) / ((x - x.mean()) ** 2).sum()) if length else 0.0
    grown, margin = slope * length, 2 * error * length
    allowed = TOLERANCE[key] * (y.mean() if key == "memory_bytes" else 1)
    found = {"grown": grown, "margin": margin, "mean": y.mean(), "least": y.min(), "most": y.max()}
    return {**found, "is_flat": bool(grown < max(margin, allowed))}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--minutes", type=float, default=120)
    parser.add_argument("--pause", type=float, default=0.0, help="seconds between requests")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--save", action="store_true", help="keep the result in bench/results")
    given = parser.parse_args()
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # ends early, with what was found so far
    with tempfile.TemporaryDirectory() as folder:
        server = Server(Path(folder))
        load, samples, began = Load(server, random.Random(given.seed)), [], time.monotonic()
        try:
            while (now := time.monotonic() - began) < given.minutes * 60 and server.process.poll() is None:
                load.one()
                samples.append({"s": time.monotonic() - began, **server.sample()})
                if len(samples) % 50 == 0:
                    latest = {key: round(value, 1) for key, value in samples[-1].items()}
                    print(json.dumps({**latest, "unexpected": len(load.unexpected)}), file=sys.stderr, flush=True)
                time.sleep(given.pause)
        except KeyboardInterrupt:
            now = time.monotonic() - began
        server.process.send_signal(signal.SIGCONT)
        server.process.terminate()
        code = server.process.wait(60)
    fits = {key: growth(samples, key) for key in TOLERANCE}
    found = {"minutes": now / 60, "requests": sum(load.outcomes.values()), "kinds": dict(load.outcomes), "fits": fits,
             "faults": dict(load.faults), "unexpected": load.unexpected[:20], "server_errors": dict(server.errors),
             "exit_code": code}  # fmt: skip
    print(json.dumps(found, indent=1))
    if given.save:
        record.save("soak", found)
    return int(bool(load.unexpected) or code != 0 or not all(fit["is_flat"] for fit in fits.values()))


if __name__ == "__main__":
    sys.exit(main())
