"""convert, inspect and verify as a user meets them."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from small_sources import AWKWARD_CONFIG, make_awkward_source
from waiting import LONG_S

ROOT = Path(__file__).parent.parent
# The program, and Ctrl-C when three shards have their names.
INTERRUPTED = """
import os, signal
from pathlib import Path
from glm_gpu import cli
rename, shards = Path.rename, []
def rename_and_interrupt(path, target):
    shards.append(rename(path, target))
    if len(shards) == 3:
        os.kill(os.getpid(), signal.SIGINT)
Path.rename = rename_and_interrupt
cli.main()
"""


@pytest.fixture
def source(tmp_path):
    return make_awkward_source(tmp_path / "source", "fp8")


def test_convert_inspect_verify_agree(source, tmp_path, invoke):
    out = tmp_path / "модель é"
    code, printed, err = invoke("convert", source, "--out", out, "--shard-size", "128KiB", "--json")
    assert code == 0
    document = json.loads(printed)
    assert document["num_written"] == len(document["shards"]) > 5
    assert document["missing_files"] == [
        "generation_config.json", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja"
    ]  # fmt: skip
    assert "tokenizer.json: the source has none" in err
    code, printed, _ = invoke("verify", out, "--json")
    assert code == 0 and json.loads(printed)["is_whole"]
    code, printed, _ = invoke("inspect", out, "--json")
    bill = json.loads(printed)
    assert code == 0 and bill["num_shards"] == len(document["shards"])
    assert bill["source"] == "source" and bill["expert"]["shapes"]["gate"] == [33, 257]
    assert "int4_g64" in invoke("inspect", out)[1] and "hashes of the manifest" in invoke("verify", out)[1]
    assert "nothing, it was complete" in invoke("convert", source, "--out", out, "--shard-size", "128KiB")[1]


def test_damaged_shard_makes_verify_fail_and_name_it(source, tmp_path, invoke):
    out = tmp_path / "out"
    invoke("convert", source, "--out", out, "--shard-size", "128KiB")
    shard = sorted(out.glob("*.safetensors"))[1]
    content = bytearray(shard.read_bytes())
    content[-1] ^= 4
    shard.write_bytes(content)
    code, printed, err = invoke("verify", out)
    assert code == 1 and shard.name in err and "1 of" in printed


@pytest.mark.parametrize(
    ("args", "code", "message"),
    [
        (("nowhere",), 2, "no such folder"),
        (("{source}", "--expert-bits", "3"), 2, "expert-bits"),
        (("{source}", "--format", "colibri", "--scales", "f16"), 2, "f32 scales only"),
        (("{source}", "--shard-size", "big"), 2, "size 'big'"),
        (("{source}", "--revision", "main"), 2, "for hub repositories"),
    ],
    ids=str,
)
def test_misuse_is_one_line_and_exit_code_2(args, code, message, source, tmp_path, invoke):
    given = [arg.format(source=source) for arg in args]
    found, printed, err = invoke("convert", *given, "--out", tmp_path / "out")
    assert (found, printed) == (code, "")
    assert message in err and len(err.strip().splitlines()) == 1


def test_unknown_family_fails_before_a_shard_is_looked_at(source, tmp_path, invoke):
    (source / "config.json").write_text(json.dumps(AWKWARD_CONFIG | {"model_type": "llama"}))
    for shard in source.glob("*.safetensors"):
        shard.write_bytes(b"no shard")
    code, _, err = invoke("convert", source, "--out", tmp_path / "out")
    assert code == 1 and "llama" in err
    assert not (tmp_path / "out").exists()


def test_other_width_is_refused_and_the_option_named(source, tmp_path, invoke):
    invoke("convert", source, "--out", tmp_path / "out")
    code, _, err = invoke("convert", source, "--out", tmp_path / "out", "--expert-bits", 8)
    assert code == 2 and "expert weights are int4_g64" in err and "int8" in err


def test_interrupt_leaves_with_130_and_the_same_command_goes_on(tmp_path, invoke):
    source, out = ROOT / "tests/data/oracle/tiny_glm_fp8", tmp_path / "out"
    words = ["convert", str(source), "--out", str(out), "--shard-size", "64KiB"]
    child = subprocess.run([sys.executable, "-c", INTERRUPTED, *words], cwd=ROOT, capture_output=True, timeout=LONG_S)
    assert child.returncode == 130, child.stderr
    assert b"Traceback" not in child.stderr
    assert 1 <= len(list(out.glob("*.safetensors"))) < 57
    assert not list(out.glob("*.safetensors.partial"))
    assert invoke("convert", source, "--out", out, "--shard-size", "64KiB")[0] == 0
    assert invoke("verify", out)[0] == 0
