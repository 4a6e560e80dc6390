"""`glm-gpu bench serve`: a server of its own under load: throughput, stalls, and answers that stay what they are alone.

Clients send token ids and read streams. One client is held against the engine without a server in between.
"""

import contextlib
import itertools
import random
import re
import statistics
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from glm_gpu.bench.client import Address, Refused, ask, status
from glm_gpu.bench.measurement import Limit, Part, model_part
from glm_gpu.bench.process import own_command, own_environment
from glm_gpu.engine import Engine
from glm_gpu.errors import DeviceError
from glm_gpu.machine import stolen_s, storage_bytes_read
from glm_gpu.opening import EngineOptions
from glm_gpu.sampling import SamplingParams

GREEDY = {"temperature": 0, "ignore_eos": True}
WINDOWS = 3
# Ids below are control tokens in most vocabularies.
FIRST_ID = 3


@dataclass
class Load:
    """What clients of all kinds met: answers that ended, differed from those given alone, were left, were refused."""

    ended: int = 0
    differed: int = 0
    left: int = 0
    refused: int = 0
    tokens: int = 0
    lock: threading.Lock = field(default_factory=threading.Lock, repr=False)

    def count(self, **changes: int) -> None:
        """Add to the counts, from any thread."""
        with self.lock:
            for name, change in changes.items():
                setattr(self, name, getattr(self, name) + change)


def measure_serve(
    path: Path, threads: int | None, num_clients: int, window_s: float, load_s: float, prompt_tokens: int
) -> Part:
    """The server on a model.

    Args:
        num_clients: of the part with mixed lengths; one in five leaves in the middle.
        window_s: seconds of each of the windows in which throughput is counted.
        load_s: seconds of the mixed load.
        prompt_tokens: of the prompt whose computing other answers must live with.

    Raises:
        DeviceError: the server does not start.
    """
    options, part = EngineOptions(threads=threads, context=512, speculate="off"), model_part("serve", path)
    with Engine.open(path, options) as engine:
        vocab_size = engine.config.vocab_size
        alone = engine_tok_s(engine)
    with served(path, threads) as (address, pid):
        list(itertools.islice(ask(address, body(random.Random(0), vocab_size, 8, 8)), 4))
        limit = Limit(alone, "the engine without a server")
        # in turns, for a machine's speed may change while it is measured
        pairs = [tuple(throughput(address, vocab_size, n, window_s) for n in (1, 8)) for _ in range(WINDOWS)]
        part.add("1 client", (one for one, _ in pairs), "tok/s", limit)
        gain = statistics.median(eight / one for one, eight in pairs)
        part.add("8 clients", (eight for _, eight in pairs), "tok/s", gain=gain)
        stalls = [stall(address, vocab_size, prompt_tokens, seed) for seed in range(WINDOWS)]
        part.add(f"first token behind {prompt_tokens}, beside an answer", (1e3 * s.first_token_s for s in stalls), "ms")
        alone_s = [gap.seconds for s in stalls for gap in s.alone]
        beside_s = [gap.seconds for s in stalls for gap in s.beside]
        stolen_s = [gap.seconds for s in stalls for gap in s.beside if gap.is_stolen]
        part.add(
            "longest gap in that answer", (1e3 * s.longest_s for s in stalls), "ms",
            median_gap_ms=1e3 * statistics.median(alone_s), longest_gap_alone_ms=1e3 * max(alone_s),
            beside=len(beside_s), beside_median_ms=1e3 * _quantile(beside_s, 0.5),
            beside_p99_ms=1e3 * _quantile(beside_s, 0.99),
            stolen=len(stolen_s), longest_stolen_ms=1e3 * max(stolen_s, default=0.0),
        )  # fmt: skip
        before = process_facts(pid)
        load = mixed_load(address, vocab_size, num_clients, load_s, min(300, prompt_tokens))
        time.sleep(1.0)
        found = status(address)
        part.add(
            f"{num_clients} clients, mixed, some leave", [load.tokens / load_s], "tok/s",
            ended=load.ended, differed=load.differed, left=load.left, refused=load.refused,
            requests=found["requests"], cache=found["cache"], before=before, after=process_facts(pid),
            server_peak_rss_bytes=found["peak_rss_bytes"], server_storage_bytes_read=storage_bytes_read(pid),
        )  # fmt: skip
    if load.differed:
        part.notes.append(f"{load.differed} answers differ from those given alone: that is a fault, please report it")
    return part


def engine_tok_s(engine: Engine, num_tokens: int = 48) -> float:
    """Tokens a second of one answer, without a server."""
    session = engine.session()
    for _ in range(2):  # the first brings the experts into memory
        session.reset()
        list(session.generate([FIRST_ID] * 8, SamplingParams(temperature=0.0), num_tokens, ignore_eos=True))
    return session.last.decode_tok_s


@contextlib.contextmanager
def served(path: Path, threads: int | None = None) -> Iterator[tuple[Address, int]]:
    """A server of this program on a free port, and its process; it keeps nothing of what it learns.

    It drafts nothing: tokens that come several at a time leave no gap to hold a stall against.
    """
    words = ["serve", "--port", "0", "--model", str(path), "--speculate", "off", "--device", "cpu"]
    words += [] if threads is None else ["--threads", str(threads)]
    with tempfile.TemporaryDirectory() as folder:
        environment = own_environment(XDG_STATE_HOME=folder)
        server = subprocess.Popen(own_command(*words), stderr=subprocess.PIPE, env=environment, text=True)
        try:
            lines = iter(server.stderr.readline, "")
            url, said = None, []
            for line in lines:
                said.append(line)
                if url := re.search(r"is served at http://([\d.]+):(\d+)", line):
                    break
            if url is None:
                raise DeviceError(f"the server did not start: {''.join(said[-1:]).strip()}; try glm-gpu serve itself")
            drain = threading.Thread(target=lambda: [None for _ in lines], daemon=True)
            drain.start()
            yield (url[1], int(url[2])), server.pid
        finally:
            server.terminate()
            server.wait(60)
            server.stderr.close()


def body(rng: random.Random, vocab_size: int, num_ids: int, max_tokens: int) -> dict:
    """A request for so many tokens behind so many random ones."""
    ids = [rng.randrange(FIRST_ID, vocab_size) for _ in range(num_ids)]
    return {**GREEDY, "prompt": ids, "max_tokens": max_tokens}


def throughput(address: Address, vocab_size: int, num_clients: int, window_s: float) -> float:
    """Tokens a second over all clients; where none came in the window, one by the time of the first."""
    began = time.perf_counter() + 0.5  # when everybody has begun
    end, times, lock = began + window_s, [], threading.Lock()

    def client(number: int) -> None:
        rng = random.Random(number)
        while time.perf_counter() < end or not times or times[-1] < began:
            for at, _ in ask(address, body(rng, vocab_size, 8, 64)):
                with lock:
                    times.append(at)
                if at > end:
                    return

    in_threads(num_clients, client)
    num_tokens = sum(began <= at < end for at in times)
    return num_tokens / window_s if num_tokens else 1 / (min(at for at in times if at >= end) - began)


@dataclass(frozen=True)
class Gap:
    """Between two tokens of an answer; `is_stolen` where the hypervisor kept a processor to itself meanwhile."""

    seconds: float
    is_stolen: bool


@dataclass(frozen=True)
class Stall:
    """Gaps in an answer, before and while a prompt is computed beside it; how long that took."""

    alone: list[Gap]
    beside: list[Gap]
    first_token_s: float

    @property
    def longest_s(self) -> float:
        """The longest gap beside the prompt that the server had the whole machine for."""
        return max((gap.seconds for gap in self.beside if not gap.is_stolen), default=0.0)


def stall(address: Address, vocab_size: int, prompt_tokens: int, seed: int) -> Stall:
    """What a long prompt costs an answer that grows beside it."""
    times: list[tuple[float, float]] = []
    is_done, rng = threading.Event(), random.Random(f"stall {seed}")

    def grow() -> None:
        # At one row of the prompt a pass, the answer still outlasts it.
        for at, _ in ask(address, body(rng, vocab_size, 4, prompt_tokens + 200)):
            times.append((at, stolen_s()))
            if is_done.is_set():
                return

    growing = threading.Thread(target=grow)
    growing.start()
    while len(times) < 100 and growing.is_alive():  # enough for a median without the prompt
        time.sleep(0.01)
    num_before, began = len(times), time.perf_counter()
    ended = next(at for at, _ in ask(address, body(random.Random(seed), vocab_size, prompt_tokens, 1)))
    is_done.set()
    growing.join()
    beside = [(a, b) for a, b in itertools.pairwise(times) if b[0] > began and a[0] < ended]
    return Stall(_gaps(itertools.pairwise(times[:num_before])), _gaps(beside), ended - began)


def _gaps(pairs: Iterable[tuple[tuple[float, float], tuple[float, float]]]) -> list[Gap]:
    return [Gap(after - before, stolen > stolen_before) for (before, stolen_before), (after, stolen) in pairs]


def _quantile(values: list[float], share: float) -> float:
    ranked = sorted(values)
    return ranked[min(int(share * len(ranked)), len(ranked) - 1)] if ranked else 0.0


def mixed_load(address: Address, vocab_size: int, num_clients: int, seconds: float, longest: int) -> Load:
    """Clients of all kinds, one in five of whom leaves; whoever stays compares with the answer given alone.

    The first request of each is seen to its end, however long that takes.

    Args:
        longest: tokens of the longest of four lengths of prompts.
    """
    rng, found = random.Random(1), Load()
    bodies = [
        body(rng, vocab_size, rng.choice([3, 10, min(40, longest), longest]), rng.choice([4, 16, 48]))
        for _ in range(12)
    ]
    alone = ["".join(text for _, text in ask(address, each)) for each in bodies]
    end = time.perf_counter() + seconds

    def client(number: int) -> None:
        rng, is_first = random.Random(number), True
        while is_first or time.perf_counter() < end:
            which = rng.randrange(len(bodies))
            leaves_after = 1 + rng.randrange(3) if rng.random() < 0.2 else None
            pieces = []
            try:
                for _, text in itertools.islice(ask(address, bodies[which]), leaves_after):
                    is_late = time.perf_counter() > end
                    if is_late and not is_first:
                        return  # which leaves too
                    found.count(tokens=int(not is_late))
                    pieces.append(text)
            except Refused:
                found.count(refused=1)
                time.sleep(0.5)
                is_first = False
                continue
            if leaves_after is None:
                found.count(ended=1, differed="".join(pieces) != alone[which])
            else:
                found.count(left=1)
            is_first = False

    in_threads(num_clients, client)
    return found


def in_threads(num: int, work: Callable[[int], None]) -> None:
    """Run work(0) to work(num - 1) at once.

    Raises:
        Exception: the first that one of them raised.
    """
    failures: list[Exception] = []

    def guarded(number: int) -> None:
        try:
            work(number)
        except Exception as error:
            failures.append(error)

    threads = [threading.Thread(target=guarded, args=(number,)) for number in range(num)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failures:
        raise failures[0]


def process_facts(pid: int) -> dict:
    """Threads and resident bytes of a process; empty where there is no /proc."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text(encoding="ascii").splitlines()
    except OSError:
        return {}
    fields = dict(line.split(":", 1) for line in lines)
    return {"threads": int(fields["Threads"]), "rss_bytes": int(fields["VmRSS"].split()[0]) * 1024}
