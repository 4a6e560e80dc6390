"""lm-evaluation-harness against `glm-gpu serve`, as its users run it: /v1/completions, and no tokenizer of its own."""

import importlib.util
import json
import os
import subprocess
import sys

import numpy as np
import pytest
from waiting import LONG_S

from glm_gpu.bench.serve import served
from glm_gpu.engine import DEMO_MODEL, Engine
from glm_gpu.evaluate import evaluate, log_likelihood, read_items

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("lm_eval") is None, reason="lm_eval is not installed (pip install '.[lm-eval]')"
)
NUM_ITEMS = 12
TASK = """
task: continuations
dataset_path: json
dataset_kwargs: {data_files: {test: ITEMS}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{context}}"
doc_to_choice: choices
doc_to_target: answer
metric_list: [{metric: acc}, {metric: acc_norm}]
"""


def test_a_task_gives_the_scores_that_this_program_finds_itself(tmp_path):
    items = read_items()[::6][:NUM_ITEMS]
    lines = [json.dumps({"context": i.context, "choices": list(i.choices), "answer": i.answer}) for i in items]
    (tmp_path / "items.jsonl").write_text("\n".join(lines), encoding="utf-8")
    (tmp_path / "task.yaml").write_text(TASK.replace("ITEMS", json.dumps(str(tmp_path / "items.jsonl"))))
    with served(DEMO_MODEL) as ((host, port), _):
        url = f"http://{host}:{port}/v1/completions"
        command = [
            sys.executable, "-m", "lm_eval", "--model", "local-completions",
            "--model_args", f"model={DEMO_MODEL.name},base_url={url},num_concurrent=4",
            "--tasks", "continuations", "--include_path", tmp_path, "--output_path", tmp_path / "out", "--log_samples",
        ]  # fmt: skip
        environment = {**os.environ, "HF_HOME": str(tmp_path / "hub"), "HF_HUB_OFFLINE": "1"}
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=LONG_S)
    assert done.returncode == 0, done.stderr
    (results,) = tmp_path.glob("out/**/results_*.json")
    found = json.loads(results.read_text())["results"]["continuations"]
    with Engine.open(DEMO_MODEL) as engine:
        expected = evaluate(engine, {}, items)
        assert found["acc,none"] == pytest.approx(expected.is_right.mean())
        (samples,) = tmp_path.glob("out/**/samples_*.jsonl")
        for line in samples.read_text().splitlines():
            sample = json.loads(line)
            item = items[sample["doc_id"]]
            own = [log_likelihood(engine, item.context, f" {choice}") for choice in item.choices]
            heard = [answer for (answer,) in sample["resps"]]
            # The server sends what float32 logits give in full; lm_eval adds them up.
            assert np.allclose([float(value) for value, _ in heard], [value for value, _ in own], rtol=1e-6)
            assert [str(is_greedy) == "True" for _, is_greedy in heard] == [is_greedy for _, is_greedy in own]
