"""Helpers of the model tests: small models opened in float weights, and passes whose inside is seen."""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
from waiting import LONG_S

from glm_gpu.batch import Batch
from glm_gpu.checkpoint import Checkpoint
from glm_gpu.model.numerics import Numerics
from glm_gpu.model.transformer import Output, Transformer
from glm_gpu.model.weights import load_weights
from glm_gpu.recipe import Recipe
from glm_gpu.tensors import validate_tensors
from glm_gpu.tiers.files import ExpertFiles
from glm_gpu.tiers.heat import Heat
from glm_gpu.tiers.residency import slots_for_all
from glm_gpu.tiers.store import TieredStore

# Two float32 programs that add in different orders: the measured gap is 1e-5, and either eps of the latent norms
# stays within 6e-5. Every mistake listed in the oracle's README moves some logit by more than 3.
LOGIT_TOLERANCE = 5e-4


def open_model(path: Path, recipe: Recipe | None = None, numerics: Numerics | None = None) -> Transformer:
    """A model with its multi-token layer, in float32 unless a recipe is given; all of it is in memory."""
    recipe = recipe or Recipe.float32()
    checkpoint = Checkpoint.open(path)
    config = checkpoint.config
    has_mtp = validate_tensors(config, checkpoint)
    layers = [*config.sparse_layers, *([config.mtp_layer] if has_mtp else [])]
    weights = load_weights(checkpoint, config, recipe, has_mtp)
    files = ExpertFiles(checkpoint, recipe, layers)
    store = TieredStore(files, slots_for_all(files), Heat(config.num_hidden_layers + 1, config.n_routed_experts))
    residency = store._residency
    with residency.changed:
        assert residency.changed.wait_for(lambda: residency.holds_every_expert and not residency.jobs, LONG_S)
    store.close()
    return Transformer(config, weights, store, numerics)


@dataclass
class Trace:
    """What a probe saw: arrays by (quantity, layer), one for each time it was called."""

    arrays: dict[tuple[str, int], list[np.ndarray]]

    def __call__(self, quantity: str, layer: int, array: np.ndarray) -> None:
        self.arrays.setdefault((quantity, layer), []).append(array.copy())

    def one(self, quantity: str, layer: int) -> np.ndarray:
        (array,) = self.arrays[quantity, layer]
        return array


def prefill(model: Transformer, ids, is_bf16: bool = False, room: int = 64) -> tuple[Output, object, Trace]:
    """One pass over a prompt: its output with all logits, its cache, and what the probe saw."""
    trace, cache = Trace({}), model.new_cache(len(ids) + room, is_bf16)
    return model.forward(Batch.of([(list(ids), cache)], "prefill", all_logits=True), trace), cache, trace


def decode(model: Transformer, cache, first: np.ndarray, num_tokens: int) -> tuple[list[int], np.ndarray]:
    """Greedy tokens and the logits that chose each: [num_tokens, V]."""
    ids, rows, logits = [], [], first
    for _ in range(num_tokens):
        rows.append(logits)
        ids.append(int(np.argmax(logits)))
        logits = model.forward(Batch.of([([ids[-1]], cache)], "decode")).logits[0]
    return ids, np.array(rows)
