"""Everything that is opened once: a checkpoint, its weights in memory, its tokenizer, and the sessions over them."""

import logging
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np

from glm_gpu import machine
from glm_gpu.batch import Batch
from glm_gpu.chat import ChatTemplate, eos_ids
from glm_gpu.checkpoint import Checkpoint
from glm_gpu.errors import CapacityError, CheckpointError, RequestError
from glm_gpu.grammar import Constraint, Grammar, GrammarVocabulary
from glm_gpu.json_file import read_json_object
from glm_gpu.kernels import cpu
from glm_gpu.model.mtp import MtpHead
from glm_gpu.model.numerics import Numerics
from glm_gpu.model.transformer import Transformer, cache_layout
from glm_gpu.model.weights import load_weights
from glm_gpu.recipe import Recipe, tensor_class
from glm_gpu.sampling import SamplingParams, logprobs
from glm_gpu.session import PREFILL_CHUNK, Session
from glm_gpu.speculative import MtpDrafter, SpeculateMode, Speculator, WidthPolicy
from glm_gpu.tensors import expected_tensors, validate_tensors
from glm_gpu.tiers.files import ExpertFiles
from glm_gpu.tiers.heat import Heat
from glm_gpu.tiers.prefetch import PrefetchMode
from glm_gpu.tiers.residency import slots_for_all
from glm_gpu.tiers.store import TieredStore
from glm_gpu.tokenizer import Tokenizer
from glm_gpu.units import format_bytes

log = logging.getLogger(__name__)

DEMO_MODEL = Path(__file__).parent / "demo"
# What a context takes when none is asked for; GLM-5.2 itself allows 1,048,576 positions, 90 GiB of cache.
DEFAULT_CONTEXT = 8192


@dataclass(frozen=True)
class EngineOptions:
    """How a model is opened; what is None comes from the checkpoint or the machine.

    Args:
        expert_bits: 16, 8, 4 or 2 for routed experts; of a stored container, only what it holds.
        dense_bits: the same for attention, dense MLPs and shared experts.
        group: columns that share a scale at four bits: 64, 128, or 0 for whole rows.
        weights: "f32" keeps every weight as f32, as the reference does.
        activations: "int16", "int8" or "f32": what activations are rounded to before packed weights.
        kv: format of the cache; "auto" is bf16, and f32 beside f32 weights.
        context: positions that a session can hold.
        threads: of the kernels.
        ram: bytes that weights, experts and one session's cache may take.
        fast_math: allow kernels whose last bits depend on how a prompt is cut.
        speculate: which drafts are verified: "auto" takes those that pay, "mtp", "ngram" and "grammar" one kind alone
            and always, "off" none.
    """

    expert_bits: int | None = None
    dense_bits: int | None = None
    group: int | None = None
    weights: Literal["auto", "f32"] = "auto"
    activations: Literal["int16", "int8", "f32"] = "int16"
    kv: Literal["auto", "bf16", "f32"] = "auto"
    context: int | None = None
    threads: int | None = None
    ram: int | None = None
    fast_math: bool = False
    speculate: SpeculateMode = "auto"
    prefetch: PrefetchMode = "auto"

    @property
    def recipe(self) -> Recipe:
        """The formats asked for.

        Raises:
            RequestError: a width or group that no format has, or widths together with f32 weights.
        """
        widths = (self.expert_bits, self.dense_bits, self.group)
        if self.weights == "f32":
            if widths != (None, None, None):
                raise RequestError(
                    "--weights f32 keeps all weights as they are; drop --expert-bits, --dense-bits, --group"
                )
            return Recipe.float32()
        expert_bits, dense_bits, group = (
            default if value is None else value for value, default in zip(widths, (4, 4, 64), strict=True)
        )
        return Recipe.from_bits(expert_bits, dense_bits, group)

    @property
    def is_kv_bf16(self) -> bool:
        return self.kv == "bf16" or (self.kv == "auto" and self.weights != "f32")


@dataclass(frozen=True)
class MemoryUse:
    """Bytes that an open model takes: weights every token needs, routed experts, one session's full cache."""

    dense_bytes: int
    expert_bytes: int
    cache_bytes: int

    @property
    def total_bytes(self) -> int:
        return self.dense_bytes + self.expert_bytes + self.cache_bytes


class Engine:
    """A model that is open and ready; make one with `Engine.open`. A context manager.

    Attributes:
        checkpoint, config: what was opened.
        model: the forward pass.
        store: the door to its experts.
        tokenizer, chat_template: None where the checkpoint has no tokenizer.json; token ids still work.
        eos_ids: tokens that end a raw completion, and `turn_ids` those that end a turn of a conversation.
        sampling_defaults: what the checkpoint's generation_config.json recommends.
        context: positions that a session can hold.
        memory: what it takes.
        speculation: what decides how many tokens are drafted, over all sessions.
        open_s: seconds that opening took.
    """

    def __init__(self, checkpoint: Checkpoint, options: EngineOptions) -> None:
        began = time.perf_counter()
        opening = check_opening(checkpoint, options)
        config, recipe = checkpoint.config, options.recipe
        self.checkpoint, self.config = checkpoint, config
        self.context, self.memory = opening.context, opening.memory
        self.tokenizer, self.chat_template, generation = _text_side(checkpoint.path)
        self.eos_ids = eos_ids(config, generation, self.tokenizer, chat=False)
        self.turn_ids = eos_ids(config, generation, self.tokenizer, chat=True)
        self.sampling_defaults = SamplingParams.from_generation_config(generation)
        self._is_kv_bf16 = options.is_kv_bf16

        if options.threads is not None:
            cpu.set_threads(options.threads)
        layers = list(config.sparse_layers) + ([config.mtp_layer] if opening.loads_mtp else [])
        weights = load_weights(checkpoint, config, recipe, opening.loads_mtp)
        files = ExpertFiles(checkpoint, recipe, layers)
        heat = Heat(config.num_hidden_layers + 1, config.n_routed_experts)
        self.store = TieredStore(files, slots_for_all(files), heat, prefetch=options.prefetch)
        numerics = Numerics(options.activations, explicit_prefill=options.fast_math)
        self.model = Transformer(config, weights, self.store, numerics)
        self._speculate: SpeculateMode = options.speculate
        self.speculation = WidthPolicy(min_width=0 if options.speculate == "auto" else 1)
        self._mtp_head = MtpHead(self.model) if opening.loads_mtp else None
        if config.mtp_layer is not None and not opening.has_mtp and options.speculate == "auto":
            log.warning("%s: no MTP head in this checkpoint; running without its drafts", checkpoint.path)
        self._vocabulary: GrammarVocabulary | None = None
        self.open_s = time.perf_counter() - began

    @classmethod
    def open(cls, path: Path | None = None, options: EngineOptions | None = None) -> "Engine":
        """Open a model folder, or the bundled demo. Everything is checked before anything is loaded.

        Raises:
            CheckpointError, UnsupportedModelError: the folder does not hold a model that can run.
            CapacityError: it does not fit the memory that `ram` or the machine allows.
            RequestError: options contradict each other or the checkpoint.
        """
        checkpoint = Checkpoint.open(path or DEMO_MODEL)
        try:
            return cls(checkpoint, options or EngineOptions())
        except BaseException:
            checkpoint.close()
            raise

    def __enter__(self) -> "Engine":
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def close(self) -> None:
        """Stop reading and close all files. Sessions must not be used afterwards."""
        self.store.close()
        self.checkpoint.close()

    def session(self, is_chat: bool = False) -> Session:
        """A new sequence with a cache of its own; in a chat, a marker of another turn ends the answer too."""
        cache = self.model.new_cache(self.context, self._is_kv_bf16)
        return Session(self.model, cache, self.turn_ids if is_chat else self.eos_ids, self.speculator())

    def speculator(self) -> Speculator:
        """Drafts for a new sequence."""
        mtp = None
        if self._mtp_head is not None:
            shares_selection = self.config.index_share_for_mtp_iteration
            mtp = MtpDrafter(self._mtp_head, self.context, self._is_kv_bf16, shares_selection)
        return Speculator(self._speculate, self.speculation, mtp)

    def constraint(self, grammar: Grammar) -> Constraint:
        """A grammar made ready for one answer of this model.

        Raises:
            RequestError: the model has no tokenizer, or the grammar cannot be used with it.
        """
        if self.tokenizer is None:
            raise RequestError(f"{self.checkpoint.path} has no tokenizer.json; a grammar needs one")
        if self._vocabulary is None:
            path, end_ids = self.checkpoint.path / "tokenizer.json", self.eos_ids | self.turn_ids
            self._vocabulary = GrammarVocabulary(path, self.config.vocab_size, end_ids)
        return self._vocabulary.start(grammar)

    def logits(self, ids: Sequence[int]) -> Iterator[np.ndarray]:
        """Teacher-forced logits in order, a chunk of rows at a time: [<= 512, V] f32. The tokens are one context.

        Raises:
            RequestError: no tokens, ids outside the vocabulary, or more tokens than the context holds.
        """
        if not 0 < len(ids) <= self.context:
            raise RequestError(f"{len(ids)} tokens to score, expected 1 to {self.context}; cut them or raise --context")
        if not all(0 <= i < self.config.vocab_size for i in ids):
            raise RequestError(f"token ids must lie in the vocabulary, 0 to {self.config.vocab_size - 1}")
        return self._logits(ids)

    def _logits(self, ids: Sequence[int]) -> Iterator[np.ndarray]:
        cache = self.model.new_cache(len(ids), self._is_kv_bf16)
        for start in range(0, len(ids), PREFILL_CHUNK):
            batch = Batch.of([(ids[start : start + PREFILL_CHUNK], cache)], "prefill", all_logits=True)
            yield self.model.forward(batch).logits

    def score(self, ids: Sequence[int]) -> np.ndarray:
        """Natural log-probability of each token but the first, given those before it: [T - 1] f64.

        Raises:
            RequestError: as `logits` does.
        """
        scores, position = np.empty(len(ids) - 1), 0
        for logits in self.logits(ids):
            for row in logits[: len(ids) - 1 - position]:
                scores[position] = logprobs(row)[ids[position + 1]]
                position += 1
        return scores


@dataclass(frozen=True)
class Opening:
    """What opening a model comes to: positions a session holds, whether the multi-token layer is there, and used."""

    context: int
    has_mtp: bool
    loads_mtp: bool
    memory: MemoryUse


def check_opening(checkpoint: Checkpoint, options: EngineOptions) -> Opening:
    """Check that a model can be opened with these options; reads no weights. Raises as `Engine.open` does."""
    config, recipe = checkpoint.config, options.recipe
    context = _context(options.context, config.max_position_embeddings)
    has_mtp = validate_tensors(config, checkpoint)
    if options.speculate == "mtp" and not has_mtp:
        raise CheckpointError(
            f"{checkpoint.path}: no MTP head in this checkpoint, which --speculate mtp needs; use another --speculate, "
            "or convert the model again from a source that has the layer"
        )
    _check_stored(checkpoint, recipe, options)
    cache_bytes = cache_layout(config, options.is_kv_bf16).bytes_per_token * context
    memory = memory_use(checkpoint, recipe, cache_bytes, options.speculate == "mtp")
    _check_budget(memory, options.ram)
    loads_mtp = options.speculate == "mtp"
    if options.speculate == "auto" and has_mtp:
        memory_with_mtp = memory_use(checkpoint, recipe, cache_bytes, True)
        loads_mtp = memory_with_mtp.total_bytes <= _limit(options.ram)
        memory = memory_with_mtp if loads_mtp else memory
    return Opening(context, has_mtp, loads_mtp, memory)


def memory_use(checkpoint: Checkpoint, recipe: Recipe, cache_bytes: int, with_mtp: bool) -> MemoryUse:
    """What a model will take once it is open; reads no weights."""
    config = checkpoint.config
    dense_bytes = expert_bytes = 0
    for name, shape in expected_tensors(config).items():
        if name.startswith(f"model.layers.{config.mtp_layer}.") and not with_mtp:
            continue
        format, stored = recipe.format_for(name, config), checkpoint.stored(name)
        scale_size = 4
        if stored is not None and format.is_packed:
            format, scale_size = stored.format, stored.scale_dtype.itemsize
        matrix = shape if len(shape) == 2 else (1, shape[0])
        num_bytes = format.data_nbytes(*matrix) + format.scale_count(*matrix) * scale_size
        if tensor_class(name, config) in ("expert", "mtp_expert"):
            expert_bytes += num_bytes
        else:
            dense_bytes += num_bytes
    return MemoryUse(dense_bytes, expert_bytes, cache_bytes)


def _context(asked: int | None, longest: int) -> int:
    if asked is None:
        return min(longest, DEFAULT_CONTEXT)
    if not 2 <= asked <= longest:
        raise RequestError(f"--context is {asked}, expected 2 to {longest}, the longest this model was made for")
    return asked


def _limit(ram: int | None) -> int:
    return machine.memory().available if ram is None else ram


def _check_budget(memory: MemoryUse, ram: int | None) -> None:
    limit = _limit(ram)
    if memory.total_bytes > limit:
        raise CapacityError(
            f"the model needs {format_bytes(memory.total_bytes)} (dense weights {format_bytes(memory.dense_bytes)}, "
            f"experts {format_bytes(memory.expert_bytes)}, cache {format_bytes(memory.cache_bytes)}) and "
            f"{format_bytes(limit)} is {'available' if ram is None else 'allowed by --ram'}; "
            "use fewer --expert-bits, a shorter --context, or more memory"
        )


def _check_stored(checkpoint: Checkpoint, recipe: Recipe, options: EngineOptions) -> None:
    """Refuse widths that were asked for by name and differ from what a container stores."""
    asked = {"expert": options.expert_bits, "dense": options.dense_bits}
    for name in expected_tensors(checkpoint.config):
        kind = tensor_class(name, checkpoint.config)
        stored = checkpoint.stored(name)
        if stored is None or kind not in asked:
            continue
        wanted = recipe.format_for(name, checkpoint.config)
        is_asked = asked[kind] is not None or (options.group is not None and stored.format.bits == 4)
        if is_asked and wanted.is_packed and wanted != stored.format:
            raise RequestError(
                f"{checkpoint.path} stores its {kind} weights as {stored.format.name}, asked for as {wanted.name}; "
                f"drop --expert-bits, --dense-bits and --group, or convert the model again"
            )
        asked.pop(kind)
        if not asked:
            return


def _text_side(path: Path) -> tuple[Tokenizer | None, ChatTemplate | None, dict]:
    config_path = path / "generation_config.json"
    generation = read_json_object(config_path) if config_path.exists() else {}
    if not (path / "tokenizer.json").exists():
        return None, None, generation
    tokenizer = Tokenizer.open(path)
    return tokenizer, ChatTemplate.open(path, tokenizer), generation
