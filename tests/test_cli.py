"""The command line as a user meets it: what goes to stdout and stderr, and how it leaves."""

import io
import json
import os
import signal
import subprocess
import sys
import threading
from concurrent.futures import Future
from pathlib import Path

import numpy as np
import pytest
from waiting import LONG_S

import glm_gpu
from glm_gpu import cli
from glm_gpu.engine import DEMO_MODEL, Engine
from glm_gpu.opening import EngineOptions
from glm_gpu.sampling import logprobs

PROMPT = "And it came to pass"
ROOT = Path(__file__).parent.parent
# the folder that holds the package under test: the checkout, or site-packages
IMPORTED_FROM = Path(glm_gpu.__file__).parent.parent


@pytest.fixture
def model_copy(tmp_path):
    """A folder of links to the demo model's files, which a test may change."""
    folder = tmp_path / "модель 模型 é"
    folder.mkdir()
    for file in DEMO_MODEL.iterdir():
        (folder / file.name).symlink_to(file)
    return folder


@pytest.fixture
def never_opens(monkeypatch):
    """Fails the test when a model is opened."""

    def opened(*_):
        raise AssertionError("the model was opened")

    monkeypatch.setattr(Engine, "open", opened)


def spawn(*args, **settings):
    command = [sys.executable, "-m", "glm_gpu", *args]
    pipes = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    return subprocess.Popen(command, cwd=IMPORTED_FROM, **pipes, **settings)


def test_run_prints_text_alone_on_stdout_and_speed_on_stderr(invoke):
    code, out, err = invoke("run", PROMPT, "--max-tokens", 8, "--temperature", 0)
    assert code == 0
    assert out.endswith("\n") and len(out.split()) > 3
    assert "5 prompt + 8 new tokens" in err and "tok/s" in err and "tok/s" not in out


def test_run_json_prints_one_document_that_agrees_with_itself(invoke):
    code, out, _ = invoke("run", PROMPT, "--max-tokens", 6, "--seed", 3, "--json")
    found = json.loads(out)
    assert code == 0
    assert found.keys() == {
        "ids", "text", "finish_reason", "prompt_tokens", "completion_tokens", "prefill_tok_s", "decode_tok_s",
        "peak_rss_bytes", "tiers", "drafted_tokens", "accepted_tokens", "tokens_per_pass", "speculation",
        "reused_tokens",
    }  # fmt: skip
    with Engine.open() as engine:
        assert engine.tokenizer.decode(found["ids"]) == found["text"]
    assert (len(found["ids"]), found["completion_tokens"], found["finish_reason"]) == (6, 6, "length")


def test_an_option_and_its_environment_twin_do_the_same(invoke, monkeypatch):
    wanted = invoke("run", PROMPT, "--max-tokens", 8, "--temperature", 0)[1]
    monkeypatch.setenv("GLM_GPU_MAX_TOKENS", "8")
    monkeypatch.setenv("GLM_GPU_TEMPERATURE", "0")
    assert invoke("run", PROMPT)[1] == wanted


def test_prompt_ids_and_standard_input_are_the_same_prompt(invoke, tmp_path, monkeypatch):
    options = ("--max-tokens", 8, "--temperature", 0)
    wanted = invoke("run", PROMPT, *options)[1]
    with Engine.open() as engine:
        (tmp_path / "ids.json").write_text(json.dumps(engine.tokenizer.encode(PROMPT)))
    assert invoke("run", "--prompt-ids", tmp_path / "ids.json", *options)[1] == wanted
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(PROMPT.encode() + b"\n")))
    assert invoke("run", "-", *options)[1] == wanted


def test_sampling_defaults_come_from_the_checkpoint(invoke, model_copy):
    (model_copy / "generation_config.json").unlink()
    (model_copy / "generation_config.json").write_text('{"do_sample": false}')
    greedy = invoke("run", PROMPT, "--max-tokens", 8, "--temperature", 0)[1]
    assert invoke("run", PROMPT, "--max-tokens", 8, "--model", model_copy)[1] == greedy


def test_a_model_folder_of_links_with_an_odd_name_is_read_and_left_as_it_was(invoke, model_copy):
    before = sorted(model_copy.iterdir())
    assert invoke("run", PROMPT, "--max-tokens", 2, "--model", model_copy)[0] == 0
    assert sorted(model_copy.iterdir()) == before


def test_without_tokenizer_ids_still_run_and_score(invoke, model_copy, tmp_path):
    (model_copy / "tokenizer.json").unlink()
    (tmp_path / "ids.json").write_text("[500, 259, 429]")
    source = ("--prompt-ids", tmp_path / "ids.json", "--model", model_copy)
    code, out, _ = invoke("run", *source, "--max-tokens", 3, "--temperature", 0, "--json")
    assert code == 0 and json.loads(out)["text"] is None and len(json.loads(out)["ids"]) == 3
    code, printed, _ = invoke("run", *source, "--max-tokens", 3, "--temperature", 0)
    assert code == 0 and printed.split() == [str(i) for i in json.loads(out)["ids"]]
    assert invoke("score", *source)[0] == 0


@pytest.mark.parametrize("command", [("run", PROMPT), ("chat",), ("score", ROOT / "LICENSE")])
def test_text_without_tokenizer_fails_before_loading_and_names_the_file(invoke, model_copy, never_opens, command):
    (model_copy / "tokenizer.json").unlink()
    code, out, err = invoke(*command, "--model", model_copy)
    assert (code, out, err.count("\n")) == (1, "", 1)
    assert err.startswith("glm-gpu: ") and f"{model_copy / 'tokenizer.json'}" in err


@pytest.mark.parametrize(
    ("args", "named"),
    [
        (["run"], "--prompt-ids"),
        (["run", PROMPT, "--prompt-ids", "ids.json"], "either"),
        (["run", ""], "empty"),
        (["run", "\udcff"], "UTF-8"),
        (["run", PROMPT, "--bogus"], "--bogus"),
        (["bogus"], "bogus"),
        (["run", PROMPT, "--max-tokens", "0"], "--max-tokens"),
        (["run", PROMPT, "--temperature", "-1"], "--temperature"),
        (["run", PROMPT, "--temperature", "nan"], "temperature"),
        (["run", PROMPT, "--top-p", "1.5"], "top_p"),
        (["run", PROMPT, "--top-k", "many"], "--top-k"),
        (["run", PROMPT, "--expert-bits", "3"], "--expert-bits"),
        (["run", PROMPT, "--weights", "f32", "--expert-bits", "4"], "--weights"),
        (["run", PROMPT, "--ram", "lots"], "lots"),
        (["run", PROMPT, "--context", "1"], "--context"),
        (["run", "--prompt-ids", "words.json"], "words.json"),
        (["run", "--prompt-ids", "outside.json"], "2048"),
        (["run", "--prompt-ids", "damaged.json"], "damaged.json"),
        (["score"], "--prompt-ids"),
        (["score", "latin.txt"], "latin.txt"),
    ],
)
def test_misuse_leaves_with_2_in_one_line_before_a_model_is_opened(
    invoke, never_opens, tmp_path, monkeypatch, args, named
):
    monkeypatch.chdir(tmp_path)
    Path("words.json").write_text('["And"]')
    Path("outside.json").write_text("[2048]")
    Path("damaged.json").write_text("[1,")
    Path("latin.txt").write_bytes(b"caf\xe9")
    code, out, err = invoke(*args)
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert err.startswith("glm-gpu: ") and named in err


@pytest.mark.parametrize(
    ("args", "named"),
    [
        (["run", PROMPT, "--model", "nowhere"], "nowhere"),
        (["score", "nowhere.txt"], "nowhere.txt"),
        (["run", PROMPT, "--ram", "1MiB"], "--ram"),
        (["score", str(ROOT / "LICENSE"), "--logits", "nowhere/out.npy"], "nowhere"),
        (["status", "--model", "nowhere"], ""),
        (["doctor", "--model", "nowhere"], ""),
    ],
)
def test_failure_leaves_with_1_and_says_what_in_one_line(invoke, tmp_path, monkeypatch, args, named):
    monkeypatch.chdir(tmp_path)
    code, out, err = invoke(*args)
    assert code == 1
    if named:
        assert (out, err.count("\n")) == ("", 1)
        assert err.startswith("glm-gpu: ") and named in err
    else:  # the failure is the result
        assert "nowhere" in out and err == ""


def test_an_unexpected_error_is_one_line_and_a_traceback_only_on_request(invoke, monkeypatch):
    def fails(*_):
        raise ValueError("planted\nin two lines")

    monkeypatch.setattr(Engine, "open", fails)
    code, out, err = invoke("run", PROMPT)
    assert (code, out, err.count("\n")) == (1, "", 1) and "planted" in err and "--debug" in err
    for args in (["run", PROMPT, "--debug"], ["run", "--debug", PROMPT]):
        with pytest.raises(ValueError, match="planted"):
            cli.main(args)


def test_a_prompt_as_long_as_the_context_is_refused(invoke):
    code, out, err = invoke("run", PROMPT, "--context", 5)
    assert (code, out) == (2, "")
    assert "5 tokens" in err and "--context" in err


def test_more_tokens_than_the_context_holds_are_cut_with_a_note(invoke):
    code, out, err = invoke("run", PROMPT, "--context", 8, "--max-tokens", 20, "--ignore-eos", "--json")
    assert code == 0 and json.loads(out)["completion_tokens"] == 3
    assert "room for 3 of 20" in err


def test_score_agrees_with_the_logits_it_writes(invoke, tmp_path):
    file = tmp_path / "text.txt"
    file.write_text("And God said, Let there be light: and there was light.")
    code, out, _ = invoke("score", file, "--logits", tmp_path / "out.npy", "--json")
    found = json.loads(out)
    logits = np.load(tmp_path / "out.npy")
    with Engine.open() as engine:
        ids = engine.tokenizer.encode(file.read_text())
    assert code == 0 and logits.dtype == np.float32 and logits.shape == (len(ids), 2048)
    wide = logits.astype(np.float64)
    expected = wide[np.arange(len(ids) - 1), ids[1:]] - np.log(np.exp(wide[:-1]).sum(axis=1))
    assert found["log_likelihood"] == pytest.approx(expected.sum(), abs=1e-9)
    assert found["perplexity"] == pytest.approx(np.exp(-expected.mean()), abs=1e-9)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["out.npy", "text.txt"]


def test_a_text_longer_than_the_context_is_scored_in_windows_each_token_once(invoke, tmp_path):
    ids = list(range(300, 310))
    (tmp_path / "ids.json").write_text(json.dumps(ids))
    source = ("--prompt-ids", tmp_path / "ids.json", "--context", 4)
    code, out, _ = invoke("score", *source, "--json", "--logits", tmp_path / "out.npy")
    with Engine.open(options=EngineOptions(context=4)) as engine:
        rows = [np.concatenate(list(engine.logits(ids[start : start + 4]))) for start in (0, 3, 6)]
    found = json.loads(out)
    assert code == 0 and (found["tokens"], found["scored_tokens"], found["windows"]) == (10, 9, 3)
    windows = zip((0, 3, 6), rows, strict=True)
    expected = [logprobs(row)[ids[n + 1]] for start, part in windows for n, row in enumerate(part[:3], start)]
    assert found["log_likelihood"] == pytest.approx(sum(expected), abs=1e-12)
    assert np.array_equal(np.load(tmp_path / "out.npy"), np.concatenate([rows[0], rows[1][1:], rows[2][1:]]))


def test_score_of_a_single_token_is_refused(invoke, tmp_path):
    (tmp_path / "ids.json").write_text("[5]")
    code, _, err = invoke("score", "--prompt-ids", tmp_path / "ids.json", "--logits", tmp_path / "out.npy")
    assert code == 2 and "at least 2" in err
    assert [p.name for p in tmp_path.iterdir()] == ["ids.json"]


def test_status_and_doctor_answer_a_machine_too(invoke):
    code, out, _ = invoke("status", "--json")
    assert code == 0 and json.loads(out)["ready"] is True
    code, out, _ = invoke("doctor", "--json")
    assert code == 0 and {"name", "state", "found", "advice"} == json.loads(out)[0].keys()


def test_chat_reads_lines_from_a_pipe(invoke, monkeypatch):
    monkeypatch.setattr(sys, "stdin", io.StringIO("Recite a poem.\n/stats\n"))
    code, out, err = invoke("chat", "--max-tokens", 4, "--temperature", 0)
    assert code == 0 and out.strip()
    assert "2 messages" in err


def test_ctrl_c_stops_a_run_with_130_and_keeps_what_was_printed():
    process = spawn("run", PROMPT, "--ignore-eos", "--max-tokens", "4000", "--seed", "1")
    first = os.read(process.stdout.fileno(), 4)
    process.send_signal(signal.SIGINT)
    rest, err = process.communicate(timeout=LONG_S)
    assert process.returncode == 130
    assert (first + rest).strip() and b"Traceback" not in err


def test_ctrl_c_while_a_wait_takes_its_lock_back_is_an_interrupt_too(invoke, monkeypatch):
    def open_engine(*_):
        done = Future()
        monkeypatch.setattr(done._condition, "_acquire_restore", lambda _: signal.raise_signal(signal.SIGINT))
        threading.Timer(0.1, done.set_result, [None]).start()
        done.result()

    monkeypatch.setattr(Engine, "open", open_engine)
    code, out, err = invoke("run", PROMPT)
    assert code == 130 and not out and "internal error" not in err


def test_a_closed_pipe_is_no_error_message():
    process = spawn("run", PROMPT, "--ignore-eos", "--max-tokens", "4000", "--seed", "1")
    os.read(process.stdout.fileno(), 4)
    process.stdout.close()
    err = process.stderr.read()
    process.wait(timeout=LONG_S)
    process.stderr.close()
    assert b"Traceback" not in err and b"glm-gpu:" not in err and b"Broken" not in err


@pytest.mark.parametrize("command", ["run", "chat", "score", "status", "doctor"])
def test_help_of_each_command_ends_with_an_example(invoke, command):
    code, out, _ = invoke(command, "--help")
    assert code == 0
    assert out.strip().splitlines()[-1].strip().startswith(f"Example: glm-gpu {command}")


def test_no_command_shows_the_help(invoke):
    assert invoke()[:2] == invoke("--help")[:2]
