"""The bundled demo at four bits against its own BF16 weights."""

import json
import math
from pathlib import Path

import pytest

from glm_gpu.engine import Engine
from glm_gpu.evaluate import heldout_texts
from glm_gpu.opening import EngineOptions
from glm_gpu.score import score

DATA = Path(__file__).parent / "data/demo"
# Two windows of what the model was trained on, 256 tokens at a time.
CONTEXT, NUM_TOKENS = 257, 513


@pytest.mark.parametrize("name", ["bible", "chats", "plays", "poems"])
def test_four_bits_cost_at_most_1_5_percent_of_perplexity(name):
    reference = json.loads((DATA / "log_likelihood.json").read_text())
    with Engine.open(options=EngineOptions(context=CONTEXT)) as engine:
        ids = engine.tokenizer.encode(heldout_texts()[name])[:NUM_TOKENS]
        found = score(engine, ids)
    assert found.scored_tokens == reference["scored_tokens"]
    assert found.perplexity < 1.015 * math.exp(-reference[name] / reference["scored_tokens"])
