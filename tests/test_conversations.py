"""Conversations on disk: resumed in another process as if never interrupted, and refused when anything is off."""

import json
import os
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest
from toy_model import LAYOUT, ToyModel

import glm_gpu
from glm_gpu import conversations
from glm_gpu.batch import Batch
from glm_gpu.cache import CacheLayout, KVCache
from glm_gpu.conversations import ConversationStore, load_conversation, save_conversation
from glm_gpu.engine import Engine
from glm_gpu.errors import CheckpointError, RequestError
from glm_gpu.jobs import Request
from glm_gpu.pages import PagedCache, PagePool
from glm_gpu.repl import Repl
from glm_gpu.sampling import SamplingParams
from glm_gpu.scheduler import Scheduler

P = PagePool(LAYOUT, 1).page_tokens


def filled(ids, room=200):
    cache = KVCache(LAYOUT, room)
    ToyModel().forward(Batch.of([(ids, cache)], "prefill"))
    return cache


@pytest.fixture
def saved(tmp_path):
    """A file with 40 ids, the last one without a row."""
    path, ids = tmp_path / "one.conversation", list(range(40))
    save_conversation(path, "model a", ids, filled(ids[:39]), 39, {"messages": [{"role": "user", "content": "é"}]})
    return path


def test_everything_comes_back(saved):
    found, cache = load_conversation(saved, "model a", lambda n: KVCache(LAYOUT, n))
    assert (found.ids, found.num_cached) == (list(range(40)), 39)
    assert found.note == {"messages": [{"role": "user", "content": "é"}]}
    assert cache.length == 39
    expected = filled(list(range(39)))
    for layer, stream in ((0, "token"), (1, "position")):
        assert np.array_equal(cache.read(layer, stream, 39), expected.read(layer, stream, 39))
    assert saved.stat().st_mode & 0o077 == 0


def test_no_flipped_bit_and_no_cut_is_ever_accepted(saved):
    data = saved.read_bytes()
    rng = np.random.default_rng(0)
    for at in [0, 22, 30, 200, len(data) - 1, *rng.integers(0, len(data), 60).tolist()]:
        damaged = bytearray(data)
        damaged[at] ^= 1 << int(rng.integers(8))
        saved.write_bytes(damaged)
        cache = KVCache(LAYOUT, 64)
        with pytest.raises((CheckpointError, RequestError)):
            load_conversation(saved, "model a", lambda n, cache=cache: cache)
        assert cache.length == 0
    for length in (0, 10, 60, len(data) - 33, len(data) - 1):
        saved.write_bytes(data[:length])
        with pytest.raises(CheckpointError, match="damaged"):
            load_conversation(saved, "model a", lambda n: KVCache(LAYOUT, n))
    saved.write_bytes(data + b"x")
    with pytest.raises(CheckpointError):
        load_conversation(saved, "model a", lambda n: KVCache(LAYOUT, n))


def test_another_model_format_or_missing_file_is_refused(saved):
    with pytest.raises(RequestError, match="another model"):
        load_conversation(saved, "model b", lambda n: KVCache(LAYOUT, n))
    with pytest.raises(RequestError, match="another format"):
        load_conversation(saved, "model a", lambda n: KVCache(CacheLayout(LAYOUT.widths, is_bf16=True), n))
    with pytest.raises(RequestError, match="cannot be read"):
        load_conversation(saved.with_name("nowhere"), "model a", lambda n: KVCache(LAYOUT, n))


def test_a_failed_save_leaves_the_old_file_and_no_other(saved, monkeypatch):
    before = saved.read_bytes()
    monkeypatch.setattr(os, "fsync", lambda _: (_ for _ in ()).throw(OSError(28, "No space left on device")))
    with pytest.raises(OSError, match="No space"):
        save_conversation(saved, "model a", [1], filled([1]), 1)
    assert saved.read_bytes() == before and list(saved.parent.iterdir()) == [saved]


def test_the_longest_common_beginning_is_found(tmp_path):
    store = ConversationStore(tmp_path, "a", 1 << 20)
    store.save([1, 2, 3], filled([1, 2, 3]))
    store.save([1, 2, 9, 9], filled([1, 2, 9, 9]))
    assert store.find([1, 2, 3, 4, 5], 99).num_common == 3 and store.find([1, 2, 9, 9, 9], 99).num_common == 4
    assert store.find([1, 2, 9, 5], 99).num_common == 3 and store.find([1, 2, 9, 5], 3).num_common == 2
    assert store.find([2, 2], 99) is None and store.find([1, 2, 3], 2) is None
    assert not store.save([1, 2], filled([1, 2]))
    store.save([1, 2, 3, 4], filled([1, 2, 3, 4]))
    assert len(list(tmp_path.iterdir())) == 2
    again = ConversationStore(tmp_path, "a", 1 << 20)
    assert again.find([1, 2, 3, 4, 5], 99).num_common == 4
    assert ConversationStore(tmp_path, "b", 1 << 20).find([1, 2, 3, 4, 5], 99) is None


def test_the_folder_stays_below_its_size_and_the_longest_unused_go(tmp_path):
    size = 100 * (LAYOUT.bytes_per_token + 4) + 500
    store = ConversationStore(tmp_path, "a", 3 * size)
    for n in range(5):
        ids = [n] * 100
        store.save(ids, filled(ids))
        for path in tmp_path.iterdir():
            os.utime(path, (path.stat().st_atime, path.stat().st_mtime - 100))
        if n >= 1:
            store.load(store.find([1] * 101, 999), KVCache(LAYOUT, 100))
    assert {n for n in range(5) if store.find([n] * 101, 999)} == {1, 3, 4}
    assert sum(path.stat().st_size for path in tmp_path.iterdir()) <= 3 * size
    assert not store.save([7] * 1000, filled([7] * 1000, 1000))


@pytest.fixture
def scheduler_on():
    """scheduler_on(folder, identity) -> a stepped scheduler that knows the conversations there."""
    pools = []

    def call(folder, identity="a", num_pages=32):
        pools.append(PagePool(LAYOUT, num_pages * P))
        return Scheduler(
            ToyModel(), pools[-1], num_pages * P, conversations=ConversationStore(folder, identity, 1 << 22)
        )

    yield call
    for pool in pools:
        pool.close()


class Ids:
    def __init__(self):
        self.ids, self.result = [], None

    def prefilled(self, num_done, num_prompt):
        pass

    def token(self, token):
        self.ids.append(token.id)
        return False

    def ended(self, result):
        self.result = result


def answer(scheduler, ids, num_tokens=6):
    heard = Ids()
    scheduler.submit(Request(ids, SamplingParams(temperature=0), num_tokens), heard)
    while scheduler.step():
        pass
    return heard


def answer_to_the_end(scheduler, ids):
    """An answer, while others may be under way that do not end."""
    heard = Ids()
    scheduler.submit(Request(ids, SamplingParams(temperature=0), 6), heard)
    while heard.result is None:
        scheduler.step()
    return heard


def test_a_new_server_goes_on_where_the_old_one_was(scheduler_on, tmp_path):
    prompt = [n % 60 for n in range(150)]
    first = scheduler_on(tmp_path)
    said = answer(first, prompt).ids
    assert first.beginnings.keep(1 << 22) == 1
    longer = [*prompt, *said, 7, 8]
    second = scheduler_on(tmp_path)
    heard = answer(second, longer)
    assert heard.ids == ToyModel().answer(longer, 6)
    assert heard.result.reused_tokens == len(prompt) + 5  # the last token said was never computed
    assert sum(map(sum, second._model.batches)) == 3 + 5


def test_rows_are_used_as_far_as_the_tokens_are_the_same(scheduler_on, tmp_path):
    prompt = [n % 60 for n in range(150)]
    first = scheduler_on(tmp_path)
    answer(first, prompt)
    first.beginnings.keep(1 << 22)
    other = [*prompt[:100], 5, 5, 5]
    heard = answer(scheduler_on(tmp_path), other)
    assert heard.ids == ToyModel().answer(other, 6) and heard.result.reused_tokens == 100


@pytest.fixture
def slow_disk(monkeypatch):
    """slow_disk() -> an event that all reading of rows waits for from here on."""
    may_read = threading.Event()
    read = conversations._read_whole

    def wait_and_read(path, file, target, digest, *is_wanted):
        while is_wanted and is_wanted[0]() and not may_read.wait(0.005):
            pass
        read(path, file, target, digest, *is_wanted)

    def begin():
        monkeypatch.setattr(conversations, "_read_whole", wait_and_read)
        return may_read

    yield begin
    may_read.set()


def test_others_go_on_while_a_conversation_comes_from_disk(scheduler_on, tmp_path, slow_disk):
    talk, short = [n % 60 for n in range(150)], [9, 8, 7]
    first = scheduler_on(tmp_path)
    answer(first, talk)
    first.beginnings.keep(1 << 22)
    second, may_read = scheduler_on(tmp_path), slow_disk()
    resumed = [Ids(), Ids()]  # two that want the same one: it is read once
    for heard in resumed:
        second.submit(Request([*talk, 5], SamplingParams(temperature=0), 6), heard)
    second.step()
    assert answer_to_the_end(second, short).ids == ToyModel().answer(short, 6)
    assert not resumed[0].ids and second.num_running == 2
    may_read.set()
    while second.step():
        pass
    for heard in resumed:
        assert heard.ids == ToyModel().answer([*talk, 5], 6) and heard.result.reused_tokens == 150
    assert sum(map(sum, second._model.batches)) == 1 + 1 + 2 * 5 + 3 + 5


def test_a_request_that_ends_while_its_conversation_is_read_leaves_nothing(scheduler_on, tmp_path, slow_disk):
    talk = [n % 60 for n in range(150)]
    first = scheduler_on(tmp_path)
    answer(first, talk)
    first.beginnings.keep(1 << 22)
    second = scheduler_on(tmp_path)
    slow_disk()
    heard = Ids()
    job = second.submit(Request([*talk, 5], SamplingParams(temperature=0), 6), heard)
    second.step()
    assert second.pool.num_free < second.pool.num_pages
    job.cancel()
    assert not second.step() and heard.result.finish_reason == "cancelled"
    assert second.pool.num_free == second.pool.num_pages
    assert not [thread for thread in threading.enumerate() if thread.name == "conversation"]


@pytest.mark.parametrize("fault", ["flipped byte", "another model", "shorter context"])
def test_what_is_off_is_not_used_and_the_answer_is_right_even_so(scheduler_on, tmp_path, fault, caplog):
    prompt = [n % 60 for n in range(150)]
    first = scheduler_on(tmp_path)
    said = answer(first, prompt).ids
    first.beginnings.keep(1 << 22)
    if fault == "flipped byte":
        (path,) = tmp_path.iterdir()
        data = bytearray(path.read_bytes())
        data[len(data) // 2] ^= 1
        path.write_bytes(data)
    second = scheduler_on(tmp_path, "b" if fault == "another model" else "a", 4 if fault == "shorter context" else 32)
    longer = [*prompt, *said, 8] if fault != "shorter context" else prompt[:100]
    heard = answer(second, longer)
    assert heard.ids == ToyModel().answer(longer, 6) and heard.result.reused_tokens == 0
    assert ("not used" in caplog.text) == (fault == "flipped byte")
    second.tree.clear()
    assert second.pool.num_free == second.pool.num_pages


def test_pages_can_be_saved_and_filled(tmp_path):
    pool, ids = PagePool(LAYOUT, 8 * P), [3] * (P + 5)
    cache = PagedCache(pool, 4 * P)
    cache.grow(len(ids))
    ToyModel().forward(Batch.of([(ids, cache)], "prefill"))
    save_conversation(tmp_path / "x", "a", ids, cache, len(ids))
    other = PagedCache(pool, 4 * P)

    def room(num_tokens):
        other.grow(num_tokens)
        return other

    load_conversation(tmp_path / "x", "a", room)
    assert np.array_equal(other.read(1, "position", P + 5), cache.read(1, "position", P + 5)) and other.length == P + 5
    pool.close()


def test_a_chat_goes_on_in_another_session(tmp_path, capsys):
    def talk(engine, lines, file=None):
        left = iter(lines)
        repl = Repl(engine, SamplingParams(temperature=0), lambda _: next(left, "/exit"), max_tokens=4)
        if file is not None and file.exists():
            repl.resume(file)
        repl.run()
        if file is not None:
            repl.save(file)
        return capsys.readouterr()

    with Engine.open() as engine:
        whole = talk(engine, ["Who art thou?", "Go on."]).out
        begun = talk(engine, ["Who art thou?"], tmp_path / "talk").out
        resumed = talk(engine, ["Go on."], tmp_path / "talk")
        assert begun + resumed.out == whole
        assert "2 messages" in resumed.err and " cached)" in resumed.err
        talk(engine, ["/reset"], tmp_path / "talk")
        assert "0 messages, 0 tokens" in talk(engine, [], tmp_path / "talk").err
        save_conversation(tmp_path / "text", engine.row_identity, [], engine.session().cache, 0)
        with pytest.raises(RequestError, match="no chat"):
            talk(engine, [], tmp_path / "text")


def run_cli(*args, check=True):
    command = [sys.executable, "-m", "glm_gpu", "run", *args, "--temperature", "0"]
    root = Path(glm_gpu.__file__).parent.parent
    return subprocess.run(command, cwd=root, capture_output=True, text=True, check=check)


def test_run_goes_on_in_another_process_with_the_same_tokens(tmp_path):
    file, prompt = tmp_path / "talk", "And it came to pass in those days"
    whole = run_cli(prompt, "--max-tokens", "8").stdout.removesuffix("\n")
    begun = run_cli(prompt, "--max-tokens", "4", "--save", file).stdout.removesuffix("\n")
    resumed = json.loads(run_cli("--resume", file, "--max-tokens", "4", "--json").stdout)
    assert begun + resumed["text"] == whole
    assert resumed["reused_tokens"] == resumed["prompt_tokens"] - 1
    shorter = run_cli("--resume", file, "--context", "8", check=False)
    assert shorter.returncode == 2 and "context" in shorter.stderr
    other = run_cli("--resume", file, "--kv", "f32", check=False)
    assert other.returncode == 2 and "other formats" in other.stderr
