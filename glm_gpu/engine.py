"""Everything that is opened once: a checkpoint, its weights in memory, its tokenizer, and the sessions over them."""

import logging
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from glm_gpu import machine
from glm_gpu.batch import Batch
from glm_gpu.chat import ChatTemplate, eos_ids
from glm_gpu.checkpoint import Checkpoint
from glm_gpu.device_opening import open_on_devices
from glm_gpu.errors import RequestError
from glm_gpu.grammar import Constraint, Grammar, GrammarVocabulary
from glm_gpu.json_file import read_json_object
from glm_gpu.kernels import cpu
from glm_gpu.model.device_mtp import DeviceMtpHead
from glm_gpu.model.device_transformer import DeviceTransformer
from glm_gpu.model.mtp import MtpHead
from glm_gpu.model.numerics import Numerics
from glm_gpu.model.transformer import Transformer
from glm_gpu.model.weights import load_weights
from glm_gpu.opening import EngineOptions, Opening, plan_opening
from glm_gpu.sampling import SamplingParams
from glm_gpu.session import PREFILL_CHUNK, Session
from glm_gpu.speculative import MtpDrafter, SpeculateMode, Speculator, WidthPolicy
from glm_gpu.tiers.files import ExpertFiles
from glm_gpu.tiers.heat import Heat
from glm_gpu.tiers.heat_file import HeatFile
from glm_gpu.tiers.store import TieredStore
from glm_gpu.tiers.trace import TraceWriter, trace_header
from glm_gpu.tokenizer import Tokenizer

log = logging.getLogger(__name__)

DEMO_MODEL = Path(__file__).parent / "demo"


class Engine:
    """A model that is open and ready; make one with `Engine.open`. A context manager.

    Attributes:
        checkpoint, config: what was opened.
        model: the forward pass.
        store: the door to its experts.
        devices, device_reason: what computes, none for the CPU, and why there are no more.
        tokenizer, chat_template: None where the checkpoint has no tokenizer.json; token ids still work.
        eos_ids: tokens that end a raw completion, and `turn_ids` those that end a turn of a conversation.
        sampling_defaults: what the checkpoint's generation_config.json recommends.
        plan: where everything lives.
        context: positions that a session can hold.
        is_kv_bf16: whether cached rows are bfloat16.
        mtp_head: the multi-token layer, or None where it is not loaded.
        speculate: which drafts are verified.
        speculation: what decides how many tokens are drafted, over all sessions.
        row_identity: everything that the bits of cached rows depend on, as text.
        open_s: seconds that opening took.
    """

    def __init__(self, checkpoint: Checkpoint, options: EngineOptions) -> None:
        began = time.perf_counter()
        config, recipe = checkpoint.config, options.recipe
        self._heat_file = HeatFile(options.state, checkpoint.fingerprint, options.is_heat_read_only)
        heat = self._heat_file.load(config.num_hidden_layers + 1, config.n_routed_experts)
        opening = plan_opening(checkpoint, options, heat)
        self.devices, self.device_reason = opening.devices, opening.device_reason
        if not self.devices and options.devices.kind == "auto" and machine.gpu_absence() is None:
            log.warning("the CPU computes: %s", self.device_reason)
        self.checkpoint, self.config = checkpoint, config
        self.plan, self.context = opening.plan, opening.plan.context
        self.tokenizer, self.chat_template, generation = _text_side(checkpoint.path)
        self.eos_ids = eos_ids(config, generation, self.tokenizer, chat=False)
        self.turn_ids = eos_ids(config, generation, self.tokenizer, chat=True)
        self.sampling_defaults = SamplingParams.from_generation_config(generation)
        self.is_kv_bf16 = options.is_kv_bf16 or bool(self.devices)
        self.row_identity = f"{checkpoint.fingerprint} {options.row_format}"

        if options.threads is not None:
            cpu.set_threads(options.threads)
        self.model: Transformer | DeviceTransformer
        self.mtp_head: MtpHead | DeviceMtpHead | None
        if self.devices:
            try:
                self.model, self.mtp_head = open_on_devices(checkpoint, opening, options, heat, self.devices)
            except BaseException:
                for device in self.devices:
                    device.close()
                raise
            self.row_identity += " gpu"
        else:
            weights = load_weights(checkpoint, config, recipe, opening.loads_mtp, self.plan.is_streamed)
            numerics = Numerics(options.activations, explicit_prefill=options.fast_math)
            self.model = Transformer(config, weights, _open_store(checkpoint, opening, options, heat), numerics)
            self.mtp_head = MtpHead(self.model) if opening.loads_mtp else None
        self.store = self.model.store
        self.speculate: SpeculateMode = options.speculate
        self.speculation = WidthPolicy(min_width=0 if options.speculate == "auto" else 1)
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
        """Keep the heat, stop reading, and close all files. Sessions must not be used afterwards."""
        self.store.close()
        for device in self.devices:
            device.close()
        self._heat_file.save(self.store.heat)
        self.checkpoint.close()

    def session(self, is_chat: bool = False) -> Session:
        """A new sequence with a cache of its own; in a chat, a marker of another turn ends the answer too."""
        cache = self.model.new_cache(self.context, self.is_kv_bf16)
        return Session(self.model, cache, self.turn_ids if is_chat else self.eos_ids, self.speculator(self.context))

    def speculator(self, max_length: int) -> Speculator:
        """Drafts for a new sequence of at most so many tokens."""
        mtp = None
        if self.mtp_head is not None:
            shares_selection = self.config.index_share_for_mtp_iteration
            mtp = MtpDrafter(self.mtp_head, max_length, self.is_kv_bf16, shares_selection)
        return Speculator(self.speculate, self.speculation, mtp)

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
        cache = self.model.new_cache(len(ids), self.is_kv_bf16)
        for start in range(0, len(ids), PREFILL_CHUNK):
            batch = Batch.of([(ids[start : start + PREFILL_CHUNK], cache)], "prefill", all_logits=True)
            yield self.model.forward(batch).logits


def _open_store(checkpoint: Checkpoint, opening: Opening, options: EngineOptions, heat: Heat) -> TieredStore:
    """The store that the plan describes."""
    plan, config = opening.plan, checkpoint.config
    layers = [*config.sparse_layers, *([config.mtp_layer] if opening.loads_mtp else [])]
    files = ExpertFiles(checkpoint, options.recipe, layers, plan.read_mode)
    return TieredStore(
        files,
        plan.num_slots,
        heat,
        plan.num_pinned,
        lock_bytes=plan.lock_bytes,
        num_read_threads=options.read_threads,
        prefetch=options.prefetch,
        excess_bytes=lambda: machine.anon_rss_bytes() - plan.budget.ram_bytes,
        trace=options.trace and TraceWriter(options.trace, trace_header(files, opening.sizes)),
    )


def _text_side(path: Path) -> tuple[Tokenizer | None, ChatTemplate | None, dict]:
    config_path = path / "generation_config.json"
    generation = read_json_object(config_path) if config_path.exists() else {}
    if not (path / "tokenizer.json").exists():
        return None, None, generation
    tokenizer = Tokenizer.open(path)
    return tokenizer, ChatTemplate.open(path, tokenizer), generation
