"""`run --speculate`, `--json-schema` and `--grammar` as a user meets them."""

import json

import pytest

from glm_gpu.engine import Engine
from glm_gpu.options import Speculate

MODES = Speculate.__args__[0].__args__  # what the option takes


def run(invoke, *args) -> dict:
    code, out, err = invoke(
        "run", "In the beginning", "--max-tokens", 12, "--temperature", 0, "--context", 256, "--json", *args
    )
    assert code == 0, err
    return json.loads(out)


def test_every_mode_gives_the_same_text(invoke):
    answers = {mode: run(invoke, "--speculate", mode) for mode in MODES}
    assert len({tuple(answer["ids"]) for answer in answers.values()}) == 1
    assert answers["off"]["tokens_per_pass"] == 1
    assert answers["mtp"]["drafted_tokens"] > 0
    assert answers["mtp"]["speculation"]["drafts"]["mtp"]["tried"][0] > 0


def test_a_schema_shapes_the_answer(invoke, tmp_path):
    path = tmp_path / "schema.json"
    path.write_text(json.dumps({"enum": ["prophet", "king"]}))
    answer = run(invoke, "--json-schema", path)
    assert json.loads(answer["text"]) in ("prophet", "king")
    assert answer["finish_reason"] == "stop"


def test_a_grammar_file_shapes_the_answer(invoke, tmp_path):
    path = tmp_path / "answer.gbnf"
    path.write_text('root ::= " yea" | " nay"')
    assert run(invoke, "--grammar", path)["text"] in (" yea", " nay")


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--json-schema", "bad.json"], "bad.json is not valid JSON"),
        (["--grammar", "bad.gbnf"], "bad.gbnf cannot be used"),
        (["--grammar", "absent.gbnf"], "absent.gbnf cannot be read"),
        (["--grammar", "bad.gbnf", "--json-schema", "bad.json"], "give either --json-schema or --grammar, not both"),
    ],
)
def test_what_is_malformed_is_refused_in_one_line_before_the_model_is_opened(
    invoke, tmp_path, monkeypatch, args, message
):
    (tmp_path / "bad.json").write_text('{"type":')
    (tmp_path / "bad.gbnf").write_text("root ::= (")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(Engine, "open", lambda *_: pytest.fail("the model was opened"))
    code, out, err = invoke("run", "x", *args)
    assert (code, out) == (2, "")
    assert message in err and err.count("\n") == 1
