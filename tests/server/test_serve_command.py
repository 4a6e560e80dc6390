"""`glm-gpu serve` as a process: where it listens, whom it refuses, how it stops, what it keeps."""

import os
import re
import signal
import subprocess
import sys
import threading
from pathlib import Path

import httpx
import pytest
from waiting import LONG_S, wait_until

import glm_gpu
from glm_gpu.engine import DEMO_MODEL

ROOT = Path(glm_gpu.__file__).parent.parent


class Process:
    """A server with its standard error."""

    def __init__(self, tmp_path, *args):
        environment = {**os.environ, "XDG_STATE_HOME": str(tmp_path / "state")}
        command = [sys.executable, "-m", "glm_gpu", "serve", "--port", "0", *args]
        self.process = subprocess.Popen(command, cwd=ROOT, env=environment, stderr=subprocess.PIPE, text=True)
        self.lines = []
        for line in self.process.stderr:
            self.lines.append(line)
            if found := re.search(r"at (http://\S+)", line):
                self.url = found.group(1)
                break
        threading.Thread(target=lambda: self.lines.extend(self.process.stderr), daemon=True).start()

    def stop(self, how=signal.SIGTERM):
        self.process.send_signal(how)
        return self.process.wait(LONG_S)


@pytest.fixture
def start(tmp_path):
    started = []

    def call(*args):
        started.append(Process(tmp_path, *args))
        return started[-1]

    yield call
    for one in started:
        if one.process.poll() is None:
            one.process.kill()
        one.process.wait()
        one.process.stderr.close()


def refused(*args, **environment):
    command = [sys.executable, "-m", "glm_gpu", "serve", *args]
    done = subprocess.run(command, cwd=ROOT, env={**os.environ, **environment}, capture_output=True, text=True)
    return done.returncode, done.stderr


def complete(url, prompt, **fields):
    body = {"prompt": prompt, "temperature": 0, "max_tokens": 3, **fields}
    return httpx.post(f"{url}/v1/completions", json=body, timeout=LONG_S).json()


def test_a_conversation_goes_on_in_the_next_server_and_an_answer_ends_before_the_stop(start):
    first = start("--keep", "1GiB", "--context", "256")
    text = "And it came to pass in those days, that there went out a decree"
    said = complete(first.url, text)
    slow = {}
    client = threading.Thread(
        target=lambda: slow.update(complete(first.url, "Of man", max_tokens=200, ignore_eos=True))
    )
    client.start()
    wait_until(
        lambda: not client.is_alive() or httpx.get(f"{first.url}/status", timeout=LONG_S).json()["requests"]["running"]
    )
    assert first.stop() == 0
    client.join()
    assert slow["usage"]["completion_tokens"] == 200

    second = start("--keep", "1GiB", "--context", "256")
    longer = text + said["choices"][0]["text"] + " from"
    resumed = complete(second.url, longer)
    third = start("--context", "256")
    fresh = complete(third.url, longer)
    assert resumed["choices"] == fresh["choices"]
    assert fresh["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    assert resumed["usage"]["prompt_tokens_details"]["cached_tokens"] >= said["usage"]["prompt_tokens"]
    assert second.stop(signal.SIGINT) == 130 and third.stop() == 0


def test_beyond_loopback_a_key_is_needed():
    code, error = refused("--host", "0.0.0.0")
    assert code == 2 and "api-key" in error and error.count("\n") == 1
    code, error = refused("--host", "0.0.0.0", GLM_GPU_API_KEY="short")
    assert code == 2 and "8 characters" in error


def test_a_taken_port_is_named(start):
    port = start("--context", "128").url.rpartition(":")[2]
    code, error = refused("--port", port)
    assert code == 2 and f"127.0.0.1:{port}" in error and error.count("\n") == 1


def test_a_model_without_tokenizer_is_refused_at_once(tmp_path):
    for file in DEMO_MODEL.iterdir():
        if file.name != "tokenizer.json":
            (tmp_path / file.name).symlink_to(file)
    code, error = refused("--model", str(tmp_path))
    assert code == 1 and "tokenizer.json" in error and error.count("\n") == 1
