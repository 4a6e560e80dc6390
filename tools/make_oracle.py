#!/usr/bin/env python3
"""Build the oracle fixtures: tiny random checkpoints in hub layout + reference outputs.

What it writes (below --out, default: tests/data/oracle)

    tiny_glm/        GLM-5.2-shaped model (glm_moe_dsa), BF16, 3 shards, 1 MTP layer
    tiny_glm_fp8/    the same weights as FP8 e4m3 + 128x128 block scales
    tiny_olmoe/      OLMoE-shaped model, BF16
    quant/           golden vectors for the int4 / int8 / fp8 formats

The numbers come from three places:
  * the main models: the `transformers` implementation (float32 compute, eager attention),
    loaded with `from_pretrained` from the very files that are written here;
  * the MTP head: this file (`MtpHead`), around transformers' decoder layer, because
    transformers has no MTP for glm_moe_dsa.  The glue follows what SGLang, vLLM and ATOM do
    (sources in MtpHead's docstring);
  * the quantised formats: plain NumPy in this file.

Usage
    python tools/make_oracle.py                 build everything
    python tools/make_oracle.py --only tiny_glm build one folder
    python tools/make_oracle.py --check         reload what is on disk and compare (no writing)
    python tools/make_oracle.py --search 200    try prompt seeds and print the best ones

Needs torch (CPU), transformers >= 5.24, safetensors, numpy.  Deterministic: every random
number comes from a seeded generator; one thread.
"""

# ruff: noqa: E741 (O and I are the formulas' names for out- and in-features)

from __future__ import annotations

import argparse
import copy
import json
import os
import sys
import tempfile
from collections import OrderedDict
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from safetensors import safe_open
from safetensors.torch import save_file

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
torch.set_num_threads(1)
torch.set_grad_enabled(False)

ORACLE = Path(__file__).resolve().parent.parent / "tests" / "data" / "oracle"
BLOCK = 128  # FP8 scale block edge
FP8_MAX = 448.0  # largest finite e4m3fn value


@dataclass
class Spec:
    """One fixture folder."""

    name: str
    config: dict
    weight_seed: int
    prompt_seed: int
    prompt_len: int = 64
    new_tokens: int = 32
    shards: int = 3  # 1 -> a single model.safetensors without an index
    short_len: int = 0  # extra short prompt (no pruning); 0 = none
    long_len: int = 0  # extra long prompt (strong pruning); 0 = none
    long_seed: int = 0
    chain: int = 4  # MTP draft steps
    fp8_of: str | None = None  # name of the spec whose weights are stored as FP8
    hidden: bool = True  # store per-layer hidden states
    gains: dict = field(default_factory=dict)
    drop: tuple = ()  # config keys left out of config.json (readers must derive them)

    def disk_config(self) -> dict:
        return {k: v for k, v in self.config.items() if k not in self.drop}


def glm_config(**over) -> dict:
    """A config.json with the same keys as the hub's GLM-5.2 one, at toy size."""
    c = {
        "architectures": ["GlmMoeDsaForCausalLM"],
        "attention_bias": False,
        "attention_dropout": 0.0,
        "dtype": "bfloat16",
        "eos_token_id": [317, 318, 319],
        "ep_size": 1,
        "first_k_dense_replace": 2,
        "head_dim": 28,  # like the hub file: equals qk_nope_head_dim, must be ignored
        "hidden_act": "silu",
        "hidden_size": 160,
        "index_head_dim": 32,
        "index_n_heads": 8,
        "index_share_for_mtp_iteration": True,
        "index_skip_topk_offset": 2,
        "index_topk": 16,
        "index_topk_freq": 3,
        "index_topk_pattern": None,
        "indexer_rope_interleave": True,
        "indexer_types": None,
        "initializer_range": 0.02,
        "intermediate_size": 272,
        "kv_lora_rank": 56,
        "max_position_embeddings": 4096,
        "mlp_layer_types": None,
        "model_type": "glm_moe_dsa",
        "moe_intermediate_size": 72,
        "moe_layer_freq": 1,
        "moe_router_dtype": "float32",
        "n_group": 1,
        "n_routed_experts": 16,
        "n_shared_experts": 1,
        "norm_topk_prob": True,
        "num_attention_heads": 6,
        "num_experts_per_tok": 4,
        "num_hidden_layers": 6,
        "num_key_value_heads": 6,
        "num_nextn_predict_layers": 1,
        "pad_token_id": 317,
        "pretraining_tp": 1,
        "q_lora_rank": 96,
        "qk_head_dim": 40,
        "qk_nope_head_dim": 28,
        "qk_rope_head_dim": 12,
        "rms_norm_eps": 1e-05,
        "rope_interleave": True,
        "rope_parameters": {"rope_theta": 8000000, "rope_type": "default"},
        "routed_scaling_factor": 2.5,
        "scoring_func": "sigmoid",
        "tie_word_embeddings": False,
        "topk_group": 1,
        "topk_method": "noaux_tc",
        "transformers_version": "5.12.0",
        "use_cache": True,
        "v_head_dim": 22,
        "vocab_size": 320,
    }
    c.update(over)
    n = c["num_hidden_layers"]
    c["qk_head_dim"] = c["qk_nope_head_dim"] + c["qk_rope_head_dim"]
    c["head_dim"] = c["qk_nope_head_dim"]
    c["num_key_value_heads"] = c["num_attention_heads"]
    if c["indexer_types"] is None and c["index_topk_pattern"]:
        c["indexer_types"] = [{"F": "full", "S": "shared"}[x] for x in c["index_topk_pattern"]]
    if c["indexer_types"] is None:
        f, o = c["index_topk_freq"], c["index_skip_topk_offset"]
        c["indexer_types"] = ["full" if max(i - o + 1, 0) % f == 0 else "shared" for i in range(n)]
    if c["mlp_layer_types"] is None:
        k = min(c["first_k_dense_replace"], n)
        c["mlp_layer_types"] = ["dense"] * k + ["sparse"] * (n - k)
    return dict(sorted(c.items()))


def olmoe_config(**over) -> dict:
    """Keys of the hub's OLMoE-1B-7B config (old style: top-level rope_theta, torch_dtype)."""
    c = {
        "architectures": ["OlmoeForCausalLM"],
        "attention_bias": False,
        "attention_dropout": 0.0,
        "clip_qkv": None,
        "eos_token_id": 299,
        "hidden_act": "silu",
        "hidden_size": 96,
        "initializer_range": 0.02,
        "intermediate_size": 40,
        "max_position_embeddings": 4096,
        "model_type": "olmoe",
        "norm_topk_prob": False,
        "num_attention_heads": 6,
        "num_experts": 12,
        "num_experts_per_tok": 3,
        "num_hidden_layers": 3,
        "num_key_value_heads": 6,
        "output_router_logits": False,
        "pad_token_id": 1,
        "rms_norm_eps": 1e-05,
        "rope_scaling": None,
        "rope_theta": 10000.0,
        "router_aux_loss_coef": 0.01,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "transformers_version": "4.43.0.dev0",
        "use_cache": True,
        "vocab_size": 300,
    }
    c.update(over)
    return c


SPECS = [
    # the prompt seeds are the best of several hundred (--search): no near-ties anywhere
    Spec("tiny_glm", glm_config(), weight_seed=20260, prompt_seed=81, short_len=12, long_len=512, long_seed=10),
    Spec("tiny_glm_fp8", glm_config(), weight_seed=20260, prompt_seed=152, fp8_of="tiny_glm", hidden=False),
    Spec("tiny_olmoe", olmoe_config(), weight_seed=777, prompt_seed=486, prompt_len=48, shards=2),
]


# Standard deviation of a [out, in] matrix is gain / sqrt(in).  Routing and index selection are
# spread out, every tensor matters, and the updates of a layer are small against the residual
# stream, as in a trained model: so the logits do not blow up rounding noise (a BF16 engine still
# agrees on ~95 % of the top-1 tokens, 8-bit weights on ~90 %).
GAIN = {
    "q_a_proj": 1.0,
    "q_b_proj": 0.9,
    "kv_a_proj_with_mqa": 1.0,
    "kv_b_proj": 1.0,
    "o_proj": 0.25,
    "wq_b": 1.2,
    "wk": 1.0,
    "weights_proj": 1.0,
    "gate_proj": 1.2,
    "up_proj": 1.2,
    "down_proj": 0.25,
    "gate": 1.2,
    "eh_proj": 1.2,
    "lm_head": 4.0,
    "q_proj": 0.9,
    "k_proj": 1.0,
    "v_proj": 1.0,
}


class WeightMaker:
    def __init__(self, seed: int, gains: dict):
        self.g = torch.Generator().manual_seed(seed)
        self.gain = {**GAIN, **gains}
        self.w: OrderedDict[str, torch.Tensor] = OrderedDict()

    def matrix(self, name: str, out: int, inn: int):
        gain = self.gain[name.split(".")[-2]]
        x = torch.randn(out, inn, generator=self.g) * (gain / inn**0.5)
        self.w[name] = x.to(torch.bfloat16)

    def norm(self, name: str, n: int, bias: bool = False):
        x = 1.0 + 0.25 * torch.randn(n, generator=self.g)
        self.w[name + ".weight"] = x.to(torch.bfloat16)
        if bias:
            self.w[name + ".bias"] = (0.3 * torch.randn(n, generator=self.g)).to(torch.bfloat16)

    def embedding(self, name: str, vocab: int, n: int):
        self.w[name] = torch.randn(vocab, n, generator=self.g).to(torch.bfloat16)

    def head(self, vocab: int, n: int, tied: bool):
        """Final norm and lm_head.  Tied models get random signs and a small scale in the final
        norm: otherwise they would only echo their input token."""
        self.norm("model.norm", n)
        if tied:
            sign = torch.randint(0, 2, (n,), generator=self.g) * 2 - 1
            self.w["model.norm.weight"] *= (sign * (self.gain["lm_head"] / n**0.5)).to(torch.bfloat16)
        else:
            self.matrix("lm_head.weight", vocab, n)


def glm_weights(c: dict, seed: int, gains: dict) -> OrderedDict[str, torch.Tensor]:
    """All tensors of a glm_moe_dsa checkpoint, hub names (experts one by one)."""
    m = WeightMaker(seed, gains)
    H, V, nh = c["hidden_size"], c["vocab_size"], c["num_attention_heads"]
    dq = c["qk_nope_head_dim"] + c["qk_rope_head_dim"]
    L, n_mtp = c["num_hidden_layers"], c.get("num_nextn_predict_layers", 0) or 0
    m.embedding("model.embed_tokens.weight", V, H)

    def mlp(p, inter):
        m.matrix(p + "gate_proj.weight", inter, H)
        m.matrix(p + "up_proj.weight", inter, H)
        m.matrix(p + "down_proj.weight", H, inter)

    for i in range(L + n_mtp):
        p = f"model.layers.{i}."
        if i >= L:  # MTP extras
            m.norm(p + "enorm", H)
            m.norm(p + "hnorm", H)
            m.matrix(p + "eh_proj.weight", H, 2 * H)
        m.norm(p + "input_layernorm", H)
        a = p + "self_attn."
        m.matrix(a + "q_a_proj.weight", c["q_lora_rank"], H)
        m.norm(a + "q_a_layernorm", c["q_lora_rank"])
        m.matrix(a + "q_b_proj.weight", nh * dq, c["q_lora_rank"])
        m.matrix(a + "kv_a_proj_with_mqa.weight", c["kv_lora_rank"] + c["qk_rope_head_dim"], H)
        m.norm(a + "kv_a_layernorm", c["kv_lora_rank"])
        m.matrix(a + "kv_b_proj.weight", nh * (c["qk_nope_head_dim"] + c["v_head_dim"]), c["kv_lora_rank"])
        m.matrix(a + "o_proj.weight", H, nh * c["v_head_dim"])
        if i >= L or c["indexer_types"][i] == "full":
            x = a + "indexer."
            m.matrix(x + "wq_b.weight", c["index_n_heads"] * c["index_head_dim"], c["q_lora_rank"])
            m.matrix(x + "wk.weight", c["index_head_dim"], H)
            m.norm(x + "k_norm", c["index_head_dim"], bias=True)
            m.matrix(x + "weights_proj.weight", c["index_n_heads"], H)
        m.norm(p + "post_attention_layernorm", H)
        if i < L and c["mlp_layer_types"][i] == "dense":
            mlp(p + "mlp.", c["intermediate_size"])
        else:
            E, I = c["n_routed_experts"], c["moe_intermediate_size"]
            m.matrix(p + "mlp.gate.weight", E, H)
            m.w[p + "mlp.gate.e_score_correction_bias"] = 0.15 * torch.randn(E, generator=m.g)  # F32
            for e in range(E):
                mlp(p + f"mlp.experts.{e}.", I)
            mlp(p + "mlp.shared_experts.", I * c["n_shared_experts"])
        if i >= L:
            m.norm(p + "shared_head.norm", H)
    m.head(V, H, c["tie_word_embeddings"])
    for i in range(L, L + n_mtp):
        align_mtp(m, f"model.layers.{i}.", H)
    return m.w


def align_mtp(m: WeightMaker, p: str, H: int):
    """Let the draft head agree with the main model now and then (about one token in six), so that
    the accept path of speculative decoding is exercised: the main model mostly reacts to the last
    token, so eh_proj passes its embedding through (plus noise on both halves) and
    shared_head.norm resembles model.norm."""

    def r(*n):
        return torch.randn(*n, generator=m.g)

    eh = torch.cat([torch.eye(H) + r(H, H) * (0.15 / H**0.5), r(H, H) * (0.3 / H**0.5)], 1)
    m.w[p + "eh_proj.weight"] = eh.to(torch.bfloat16)
    m.w[p + "enorm.weight"] = (1 + 0.1 * r(H)).to(torch.bfloat16)
    m.w[p + "shared_head.norm.weight"] = (m.w["model.norm.weight"].float() * (1 + 0.1 * r(H))).to(torch.bfloat16)


def olmoe_weights(c: dict, seed: int, gains: dict) -> OrderedDict[str, torch.Tensor]:
    m = WeightMaker(seed, gains)
    H, V = c["hidden_size"], c["vocab_size"]
    kv = H // c["num_attention_heads"] * c["num_key_value_heads"]
    m.embedding("model.embed_tokens.weight", V, H)
    for i in range(c["num_hidden_layers"]):
        p = f"model.layers.{i}."
        m.norm(p + "input_layernorm", H)
        m.matrix(p + "self_attn.q_proj.weight", H, H)
        m.matrix(p + "self_attn.k_proj.weight", kv, H)
        m.matrix(p + "self_attn.v_proj.weight", kv, H)
        m.matrix(p + "self_attn.o_proj.weight", H, H)
        m.norm(p + "self_attn.q_norm", H)
        m.norm(p + "self_attn.k_norm", kv)
        m.norm(p + "post_attention_layernorm", H)
        m.matrix(p + "mlp.gate.weight", c["num_experts"], H)
        for e in range(c["num_experts"]):
            q = p + f"mlp.experts.{e}."
            m.matrix(q + "gate_proj.weight", c["intermediate_size"], H)
            m.matrix(q + "up_proj.weight", c["intermediate_size"], H)
            m.matrix(q + "down_proj.weight", H, c["intermediate_size"])
    m.head(V, H, c["tie_word_embeddings"])
    return m.w


def make_weights(s: Spec):
    f = glm_weights if s.config["model_type"] == "glm_moe_dsa" else olmoe_weights
    return f(s.config, s.weight_seed, s.gains)


def stays_bf16(name: str) -> bool:
    """Tensors that GLM-5.2-FP8 keeps in BF16 (F32 for the router bias)."""
    if name in ("model.embed_tokens.weight", "lm_head.weight"):
        return True
    last = name.rsplit(".", 1)[0]
    return not name.endswith(".weight") or last.endswith(("norm", "mlp.gate", "indexer.weights_proj", "eh_proj"))


def fp8_quantise(w: torch.Tensor):
    """[O, I] -> (e4m3fn [O, I], float32 scale_inv [ceil(O/128), ceil(I/128)]).

    scale_inv = absmax(block) / 448, so that value = fp8 * scale_inv.  Edge blocks are
    simply smaller: the block grid always starts at multiples of 128.
    """
    w = w.float()
    O, I = w.shape
    s = torch.ones(-(-O // BLOCK), -(-I // BLOCK))
    q = torch.empty(O, I, dtype=torch.float8_e4m3fn)
    for r in range(s.shape[0]):
        for k in range(s.shape[1]):
            sl = (slice(r * BLOCK, min((r + 1) * BLOCK, O)), slice(k * BLOCK, min((k + 1) * BLOCK, I)))
            amax = w[sl].abs().max()
            if amax > 0:
                s[r, k] = amax / FP8_MAX
            q[sl] = (w[sl] / s[r, k]).clamp(-FP8_MAX, FP8_MAX).to(torch.float8_e4m3fn)
    return q, s


def fp8_dequantise(q: torch.Tensor, s: torch.Tensor) -> torch.Tensor:
    O, I = q.shape
    full = s.repeat_interleave(BLOCK, 0).repeat_interleave(BLOCK, 1)[:O, :I]
    return q.float() * full


def not_converted(c: dict) -> list:
    """modules_to_not_convert as the hub's FP8 config lists it - including its wrong name
    `self_attn.indexers_proj` for what is really `self_attn.indexer.weights_proj`."""
    L = c["num_hidden_layers"]
    out = []
    for i in range(L + (c.get("num_nextn_predict_layers") or 0)):
        p = f"model.layers.{i}."
        out += [
            p + "input_layernorm",
            p + "post_attention_layernorm",
            p + "self_attn.q_a_layernorm",
            p + "self_attn.kv_a_layernorm",
        ]
        if i >= L or c["mlp_layer_types"][i] == "sparse":
            out += [p + "mlp.gate", p + "mlp.gate.e_score_correction_bias"]
        if i >= L or c["indexer_types"][i] == "full":
            out += [p + "self_attn.indexers_proj", p + "self_attn.indexer.k_norm", p + "self_attn.indexer.k_norm.bias"]
        if i >= L:
            out += [p + x for x in ("hnorm", "enorm", "eh_proj", "shared_head.norm")]
    return [*out, "model.norm", "lm_head", "model.embed_tokens"]


def quantization_config(c: dict) -> dict:
    return {
        "activation_scheme": "dynamic",
        "fmt": "e4m3",
        "modules_to_not_convert": not_converted(c),
        "quant_method": "fp8",
        "weight_block_size": [BLOCK, BLOCK],
    }


def to_fp8(weights):
    """-> (stored tensors, dequantised float32 tensors)."""
    stored, deq = OrderedDict(), OrderedDict()
    for n, w in weights.items():
        if stays_bf16(n):
            stored[n], deq[n] = w, w.float()
        else:
            stored[n], stored[n + "_scale_inv"] = fp8_quantise(w)
            deq[n] = fp8_dequantise(stored[n], stored[n + "_scale_inv"])
    return stored, deq


def write_checkpoint(folder: Path, weights, config: dict, shards: int):
    folder.mkdir(parents=True, exist_ok=True)
    for f in folder.glob("*.safetensors*"):
        f.unlink()
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    gen = {k: config[k] for k in ("eos_token_id", "pad_token_id", "transformers_version") if k in config}
    gen = {"_from_model_config": True, **gen, "temperature": 1.0, "top_p": 0.95}
    (folder / "generation_config.json").write_text(json.dumps(gen, indent=2) + "\n")
    weights = OrderedDict((k, v.contiguous()) for k, v in weights.items())

    def save(tensors, fn):
        save_file(tensors, str(folder / fn), metadata={"format": "pt"})
        (folder / fn).chmod(0o644)

    if shards == 1:
        save(weights, "model.safetensors")
        return
    total = sum(v.numel() * v.element_size() for v in weights.values())
    groups, size = [OrderedDict()], 0
    for k, v in weights.items():
        # an FP8 tensor and its scale may land in different shards: readers must cope
        if size >= total / shards * len(groups) and len(groups) < shards:
            groups.append(OrderedDict())
        groups[-1][k] = v
        size += v.numel() * v.element_size()
    wmap = {}
    for i, g in enumerate(groups):
        fn = f"model-{i + 1:05d}-of-{shards:05d}.safetensors"
        save(g, fn)
        wmap.update(dict.fromkeys(g, fn))
    index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(wmap.items()))}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n")


def read_tensors(folder: Path):
    out = {}
    for f in sorted(folder.glob("*.safetensors")):
        with safe_open(str(f), framework="pt") as h:
            for k in h.keys():  # noqa: SIM118 (a safe_open is no dict)
                out[k] = h.get_tensor(k)
    return out


def read_dequantised(folder: Path):
    """All tensors as float32, FP8 ones dequantised."""
    t, out = read_tensors(folder), OrderedDict()
    for k, v in t.items():
        if k.endswith("_scale_inv"):
            continue
        out[k] = fp8_dequantise(v, t[k + "_scale_inv"]) if v.dtype == torch.float8_e4m3fn else v.float()
    return out


def load_model(folder: Path, attn: str = "eager"):
    """The transformers model in float32.

    An FP8 folder is dequantised here first: transformers' own CPU dequantisation derives the
    block size from the scale grid, which is wrong when a dimension is no multiple of 128.
    """
    from transformers import AutoModelForCausalLM

    def load(d):
        # experts_implementation is set on the config: the default uses a grouped GEMM
        from transformers import AutoConfig

        c = AutoConfig.from_pretrained(d)
        return AutoModelForCausalLM.from_pretrained(
            d, config=c, dtype=torch.float32, attn_implementation=attn, experts_implementation="eager"
        ).eval()

    c = json.loads((folder / "config.json").read_text())
    if "quantization_config" not in c:
        return load(str(folder))
    c.pop("quantization_config")
    with tempfile.TemporaryDirectory() as d:
        write_checkpoint(Path(d), read_dequantised(folder), c, 1)
        return load(d)


class Tape:
    """Forward hooks that record residual streams, routing and index selections."""

    def __init__(self, layers, arch: str):
        self.layers, self.arch, self.handles = layers, arch, []
        self.clear()

    def clear(self):
        self.hidden, self.router, self.topk, self.index_in = {}, {}, {}, {}

    def __enter__(self):
        for i, layer in enumerate(self.layers):
            self._hook(
                layer, lambda m, a, k, o, i=i: self.hidden.__setitem__(i, (o[0] if isinstance(o, tuple) else o).clone())
            )
            gate = getattr(layer.mlp, "gate", None)
            if gate is not None:
                self._hook(gate, lambda m, a, k, o, i=i: self.router.__setitem__(i, (m, o)))
            ix = getattr(layer.self_attn, "indexer", None)
            if ix is not None:
                self._hook(
                    ix, lambda m, a, k, o, i=i: (self.topk.__setitem__(i, o), self.index_in.__setitem__(i, (m, a)))[0]
                )
        return self

    def _hook(self, module, fn):
        self.handles.append(module.register_forward_hook(fn, with_kwargs=True))

    def __exit__(self, *_):
        for h in self.handles:
            h.remove()
        self.handles.clear()


def canonical_topk(topk: torch.Tensor, first_pos: int = 0) -> np.ndarray:
    """[S, k] raw indices -> int32, only causally valid ones, ascending, padded with -1."""
    t = topk.cpu().numpy()
    out = np.full(t.shape, -1, np.int32)
    for s in range(t.shape[0]):
        v = np.sort(t[s][t[s] <= first_pos + s])
        out[s, : len(v)] = v
    return out


def canonical_router(module, out):
    """-> (expert ids ascending [S, k] int32, their final weights [S, k] float32)."""
    _, w, ids = out
    o = ids.argsort(-1)
    return ids.gather(-1, o).numpy().astype(np.int32), w.gather(-1, o).float().numpy()


def rope_interleaved(x, theta, positions):
    """Rotate adjacent pairs in place (x[..., 2j], x[..., 2j+1]); x is [S, ..., d]."""
    d = x.shape[-1]
    inv = theta ** (-torch.arange(0, d, 2).double() / d)
    a = positions.double()[:, None] * inv
    shape = [x.shape[0]] + [1] * (x.dim() - 2) + [d // 2]
    c, s = a.cos().reshape(shape), a.sin().reshape(shape)
    x = x.double()
    out = torch.empty_like(x)
    out[..., 0::2] = x[..., 0::2] * c - x[..., 1::2] * s
    out[..., 1::2] = x[..., 1::2] * c + x[..., 0::2] * s
    return out


def index_scores(module, args, cfg) -> torch.Tensor:
    """Our own float64 index scores [S, S] from the indexer's inputs (for margins only)."""
    x, qr = args[0][0].double(), args[1][0].double()
    S, H, D, R = x.shape[0], module.n_heads, module.head_dim, module.qk_rope_head_dim
    theta, pos = cfg.rope_parameters["rope_theta"], torch.arange(S)
    q = (qr @ module.wq_b.weight.double().T).view(S, H, D)
    k = x @ module.wk.weight.double().T
    k = (k - k.mean(-1, keepdim=True)) / (k.var(-1, unbiased=False, keepdim=True) + 1e-6).sqrt()
    k = k * module.k_norm.weight.double() + module.k_norm.bias.double()
    q = torch.cat([rope_interleaved(q[..., :R], theta, pos), q[..., R:]], -1)
    k = torch.cat([rope_interleaved(k[..., :R], theta, pos), k[..., R:]], -1)
    w = x @ module.weights_proj.weight.double().T * H**-0.5
    dots = torch.einsum("shd,td->sht", q, k).mul_(D**-0.5).relu_()
    sc = torch.einsum("sh,sht->st", w, dots)
    return sc.masked_fill(torch.ones(S, S).triu(1).bool(), float("-inf"))


def index_margin(scores: torch.Tensor, k: int) -> np.ndarray:
    """Per row: gap between the k-th and (k+1)-th score, relative to the spread of that row's
    scores; inf where nothing is pruned."""
    out = np.full(scores.shape[0], np.inf, np.float32)
    for s in range(k, scores.shape[0]):
        v = scores[s, : s + 1]
        t = v.sort(descending=True).values
        out[s] = ((t[k - 1] - t[k]) / v.std()).item()
    return out


def router_margin(module, out, arch: str, k: int) -> np.ndarray:
    """Per row: gap between the last chosen and the first refused expert (in the score that is
    ranked), or between the last kept and first dropped group if that is smaller."""
    logits = out[0].double()
    if arch == "olmoe":
        sc = logits.softmax(-1)
    else:
        sc = logits.sigmoid() + module.e_score_correction_bias.double()
        g, tg = module.num_group, module.topk_group
        if g > 1:
            grp = sc.view(sc.shape[0], g, -1)
            gs = grp.topk(2, -1).values.sum(-1)
            gsort = gs.sort(-1, descending=True)
            gap_g = gsort.values[:, tg - 1] - gsort.values[:, tg] if tg < g else torch.full((len(gs),), torch.inf)
            keep = torch.zeros_like(gs).scatter_(1, gsort.indices[:, :tg], 1).bool()
            sc = grp.masked_fill(~keep[..., None], float("-inf")).flatten(1)
            t = sc.sort(-1, descending=True).values
            return torch.minimum(gap_g, t[:, k - 1] - t[:, k]).numpy().astype(np.float32)
    t = sc.sort(-1, descending=True).values
    return (t[:, k - 1] - t[:, k]).numpy().astype(np.float32)


def top1_margin(logits: torch.Tensor) -> float:
    t = logits.float().topk(2, -1).values
    return (t[..., 0] - t[..., 1]).min().item()


def forward(model, ids):
    return model(input_ids=torch.as_tensor(ids, dtype=torch.long)[None], use_cache=False)


def greedy(model, ids, n: int):
    """n greedy tokens with the KV cache -> (ids [n], logits [n, V])."""
    out = model(input_ids=torch.as_tensor(ids, dtype=torch.long)[None], use_cache=True)
    cache, toks, logs = out.cache, [], []
    for _ in range(n):
        lg = out.logits[0, -1].float()
        toks.append(int(lg.argmax()))
        logs.append(lg.numpy())
        out = model(input_ids=torch.tensor([[toks[-1]]]), cache=cache, use_cache=True)
    return np.array(toks, np.int32), np.stack(logs)


def make_prompt(c: dict, seed: int, n: int) -> np.ndarray:
    """Random ids, never an eos or pad id."""
    eos = c["eos_token_id"]
    bad = set(eos if isinstance(eos, list) else [eos]) | {c["pad_token_id"]}
    ok = np.array([t for t in range(c["vocab_size"]) if t not in bad])
    return ok[np.random.default_rng(seed).integers(0, len(ok), n)].astype(np.int32)


class MtpHead:
    """One next-token-prediction layer, checkpoint index num_hidden_layers.

    Row i combines the target's final hidden h_i (after model.norm) with the embedding of
    token t_{i+1}; its logits predict t_{i+2}:

        u_i    = eh_proj [ enorm(embed(t_{i+1})) ; hnorm(h_i) ]
        v_i    = decoder_layer(u)_i             (own MLA + own indexer + own MoE, causal)
        g_i    = shared_head.norm(v_i)
        logits = lm_head(g_i)
    In a draft chain the recycled hidden is g (after shared_head.norm).
    """

    def __init__(self, folder: Path, model):
        from transformers.models.glm_moe_dsa.modeling_glm_moe_dsa import GlmMoeDsaDecoderLayer, GlmMoeDsaRMSNorm

        self.model, cfg = model, model.config
        n = cfg.num_hidden_layers
        t = {k: v for k, v in read_dequantised(folder).items() if k.startswith(f"model.layers.{n}.")}
        t = {k[len(f"model.layers.{n}.") :]: v for k, v in t.items()}
        self.cfg = copy.deepcopy(cfg)
        self.cfg.num_hidden_layers = 1
        self.cfg.mlp_layer_types, self.cfg.indexer_types = ["sparse"], ["full"]
        self.cfg.layer_types = ["indexed_attention"]
        self.cfg._attn_implementation = "eager"
        self.block = GlmMoeDsaDecoderLayer(self.cfg, 0).float().eval()

        def norm(name):
            m = GlmMoeDsaRMSNorm(cfg.hidden_size, cfg.rms_norm_eps)
            m.weight.copy_(t.pop(name + ".weight"))
            return m

        self.enorm, self.hnorm, self.out_norm = norm("enorm"), norm("hnorm"), norm("shared_head.norm")
        self.eh_proj = t.pop("eh_proj.weight")
        E = cfg.n_routed_experts

        def ex(e, w):
            return t.pop(f"mlp.experts.{e}.{w}_proj.weight")

        gu, dn = [], []
        for e in range(E):
            gu.append(torch.cat([ex(e, "gate"), ex(e, "up")], 0))
            dn.append(ex(e, "down"))
        t["mlp.experts.gate_up_proj"], t["mlp.experts.down_proj"] = torch.stack(gu), torch.stack(dn)
        missing, extra = self.block.load_state_dict(t, strict=False)
        assert not extra and not missing, (missing, extra)

    def run(self, tokens, hidden, share_from: int | None = None, pos0: int = 0):
        """tokens [S] = t_1..t_S, hidden [S, H] -> (g [S, H], logits [S, V], tape).

        share_from=r: rows after r reuse row r's index selection unchanged
        (index_share_for_mtp_iteration), instead of running the indexer.
        """
        S = len(tokens)
        emb = self.model.model.embed_tokens(torch.as_tensor(tokens, dtype=torch.long))
        u = torch.cat([self.enorm(emb), self.hnorm(hidden)], -1) @ self.eh_proj.T
        pos = torch.arange(pos0, pos0 + S)[None]
        rope = self.model.model.rotary_emb(u[None], position_ids=pos)
        mask = torch.full((S, S), torch.finfo(torch.float32).min).triu(1)[None, None]
        extra = None
        if share_from is not None:

            def reuse(m, a, k, o):
                o = o.clone()
                o[:, share_from + 1 :] = o[:, share_from : share_from + 1]
                return o

            extra = self.block.self_attn.indexer.register_forward_hook(reuse, with_kwargs=True)
        with Tape([self.block], "glm") as tape:
            v, _ = self.block(u[None], attention_mask=mask, position_ids=pos, position_embeddings=rope)
        if extra is not None:
            extra.remove()
        g = self.out_norm(v[0])
        return g, self.model.lm_head(g), tape

    def chain(self, ids, h, first: int, steps: int, share: bool):
        """Draft `steps` tokens after prompt `ids` (+ the target's next token `first`)."""
        toks, hid = [*list(ids[1:]), int(first)], h
        out, logs = [], []
        n = len(ids)
        for j in range(steps):
            g, lg, _ = self.run(toks, hid, share_from=n - 1 if share and j else None)
            out.append(int(lg[-1].argmax()))
            logs.append(lg[-1].numpy())
            toks.append(out[-1])
            hid = torch.cat([hid, g[-1:]], 0)
        return np.array(out, np.int32), np.stack(logs).astype(np.float32)


def measure(model, c: dict, ids, cont) -> dict:
    """Margins over prompt + continuation in one uncached pass."""
    arch = c["model_type"]
    seq = np.concatenate([ids, cont[:-1]])
    with Tape(model.model.layers, arch) as tape:
        lg = forward(model, seq).logits[0]
    k = c["num_experts_per_tok"]
    m = {
        "top1_gap_prompt": top1_margin(lg[: len(ids)]),
        "top1_gap_greedy": top1_margin(lg[len(ids) - 1 :]),
        "logit_std": float(lg.std()),
        "router_gap": float(min([router_margin(mod, o, arch, k).min() for mod, o in tape.router.values()] or [np.inf])),
        "distinct_greedy": len(set(cont.tolist())),
    }
    if arch == "glm_moe_dsa":
        gaps = []
        for i, (mod, a) in tape.index_in.items():
            sc = index_scores(mod, a, model.config)
            gaps.append(float(index_margin(sc, c["index_topk"]).min()))
            ours = canonical_topk(sc.topk(min(c["index_topk"], len(seq)), -1).indices)
            if not (ours == canonical_topk(tape.topk[i][0])).all():
                m["index_mismatch"] = m.get("index_mismatch", 0) + 1
        m["index_gap"] = min(gaps)
    return m


def glm_reference(folder: Path, s: Spec, model=None):
    """-> dict of named npz contents, dict of facts for the log."""
    c = s.config
    model = model or load_model(folder)
    L = c["num_hidden_layers"]
    files, facts = {}, {}
    ids = make_prompt(c, s.prompt_seed, s.prompt_len)
    with Tape(model.model.layers, "glm") as tape:
        out = model.model(input_ids=torch.as_tensor(ids, dtype=torch.long)[None], use_cache=False)
        final = out.last_hidden_state[0]
        logits = model.lm_head(final)
    full = [i for i in range(L) if i in tape.topk]
    moe = [i for i in range(L) if i in tape.router]
    owner = np.array([max(f for f in full if f <= i) for i in range(L)], np.int32)
    cont, cont_logits = greedy(model, ids, s.new_tokens)
    r = {
        "input_ids": ids,
        "logits": logits.numpy(),
        "final_hidden": final.numpy(),
        "greedy_ids": cont,
        "greedy_logits": cont_logits,
        "full_layers": np.array(full, np.int32),
        "index_owner": owner,
        "index_topk_sel": np.stack([canonical_topk(tape.topk[i][0]) for i in full]),
        "index_margin": np.stack(
            [index_margin(index_scores(*tape.index_in[i], model.config), c["index_topk"]) for i in full]
        ),
        "moe_layers": np.array(moe, np.int32),
    }
    if moe:
        r["router_ids"], r["router_weights"] = map(
            np.stack, zip(*[canonical_router(*tape.router[i]) for i in moe], strict=True)
        )
        r["router_margin"] = np.stack([router_margin(*tape.router[i], "glm", c["num_experts_per_tok"]) for i in moe])
    if s.hidden:
        emb = model.model.embed_tokens(torch.as_tensor(ids, dtype=torch.long))
        r["hidden_states"] = torch.stack([emb] + [tape.hidden[i][0] for i in range(L)]).numpy()
    facts["main"] = measure(model, c, ids, cont)
    # the cache must not change anything
    seq = np.concatenate([ids, cont[:-1]])
    again = forward(model, seq).logits[0, len(ids) - 1 :].numpy()
    facts["cache_vs_full"] = float(np.abs(again - cont_logits).max())

    if c.get("num_nextn_predict_layers"):
        head = MtpHead(folder, model)
        nxt = np.concatenate([ids[1:], cont[:1]])
        g, lg, t = head.run(nxt, final)
        mod, o = t.router[0]
        r["mtp_input_ids"] = nxt.astype(np.int32)
        r["mtp_logits"], r["mtp_hidden"] = lg.numpy(), g.numpy()
        r["mtp_index_topk_sel"] = canonical_topk(t.topk[0][0])
        r["mtp_router_ids"], r["mtp_router_weights"] = canonical_router(mod, o)
        r["mtp_router_margin"] = router_margin(mod, o, "glm", c["num_experts_per_tok"])
        r["mtp_index_margin"] = index_margin(index_scores(*t.index_in[0], model.config), c["index_topk"])
        for nm, sh in (("recompute", False), ("share", True)):
            a, b = head.chain(ids, final, cont[0], s.chain, sh)
            r[f"mtp_chain_ids_{nm}"], r[f"mtp_chain_logits_{nm}"] = a, b
        # what one-token drafting proposes along the greedy continuation
        seq_h = model.model(input_ids=torch.as_tensor(seq, dtype=torch.long)[None], use_cache=False).last_hidden_state[
            0
        ]
        lg2 = head.run(np.concatenate([seq[1:], cont[-1:]]), seq_h)[1][len(ids) - 1 :]
        r["mtp_greedy_draft_ids"] = lg2.argmax(-1).numpy().astype(np.int32)
        shifted = head.run(nxt, final, pos0=1)[1]
        facts["mtp"] = {
            "top1_gap": top1_margin(lg),
            "router_gap": float(r["mtp_router_margin"].min()),
            "index_gap": float(r["mtp_index_margin"].min()),
            "positions_from_1_change": float((shifted - lg).abs().max()),
            "share_vs_recompute": float(np.abs(r["mtp_chain_logits_share"] - r["mtp_chain_logits_recompute"]).max()),
            "accepted": int((r["mtp_greedy_draft_ids"][:-1] == cont[1:]).sum()),
            "draft_top1_gap": top1_margin(lg2),
            "chain_top1_gap": min(
                top1_margin(torch.tensor(r["mtp_chain_logits_share"])),
                top1_margin(torch.tensor(r["mtp_chain_logits_recompute"])),
            ),
        }
    if s.short_len:
        sid = ids[: s.short_len]
        r["short_input_ids"] = sid
        r["short_logits"] = forward(model, sid).logits[0].numpy()
        r["short_greedy_ids"], r["short_greedy_logits"] = greedy(model, sid, s.new_tokens)
        facts["short"] = measure(model, c, sid, r["short_greedy_ids"])
    files["reference.npz"] = r
    if s.long_len:
        lid = make_prompt(c, s.long_seed, s.long_len)
        with Tape(model.model.layers, "glm") as tape:
            llog = forward(model, lid).logits[0].numpy()
        lc, lcl = greedy(model, lid, s.new_tokens)
        files["reference_long.npz"] = {
            "input_ids": lid,
            "logits": llog,
            "greedy_ids": lc,
            "greedy_logits": lcl,
            "full_layers": np.array(full, np.int32),
            "index_owner": owner,
            "index_topk_sel": np.stack([canonical_topk(tape.topk[i][0]) for i in full]),
            "index_margin": np.stack(
                [index_margin(index_scores(*tape.index_in[i], model.config), c["index_topk"]) for i in full]
            ),
            "router_margin": np.stack([router_margin(*tape.router[i], "glm", c["num_experts_per_tok"]) for i in moe]),
        }
        facts["long"] = measure(model, c, lid, lc)
    return files, facts


def olmoe_reference(folder: Path, s: Spec, model=None):
    c = s.config
    model = model or load_model(folder)
    ids = make_prompt(c, s.prompt_seed, s.prompt_len)
    L = c["num_hidden_layers"]
    with Tape(model.model.layers, "olmoe") as tape:
        out = model.model(input_ids=torch.as_tensor(ids, dtype=torch.long)[None], use_cache=False)
    final = out.last_hidden_state[0]
    logits = model.lm_head(final)
    cont, cl = greedy(model, ids, s.new_tokens)
    emb = model.model.embed_tokens(torch.as_tensor(ids, dtype=torch.long))
    rid, rw = map(np.stack, zip(*[canonical_router(*tape.router[i]) for i in range(L)], strict=True))
    r = {
        "input_ids": ids,
        "logits": logits.numpy(),
        "final_hidden": final.numpy(),
        "hidden_states": torch.stack([emb] + [tape.hidden[i][0] for i in range(L)]).numpy(),
        "greedy_ids": cont,
        "greedy_logits": cl,
        "router_ids": rid,
        "router_weights": rw,
        "router_margin": np.stack(
            [router_margin(*tape.router[i], "olmoe", c["num_experts_per_tok"]) for i in range(L)]
        ),
    }
    facts = {"main": measure(model, c, ids, cont)}
    seq = np.concatenate([ids, cont[:-1]])
    facts["cache_vs_full"] = float(np.abs(forward(model, seq).logits[0, len(ids) - 1 :].numpy() - cl).max())
    return {"reference.npz": r}, facts


def reference(folder: Path, s: Spec, model=None):
    f = glm_reference if s.config["model_type"] == "glm_moe_dsa" else olmoe_reference
    return f(folder, s, model)


def save_npz(path: Path, arrays: dict):
    """np.savez_compressed with fixed timestamps, so that a rebuild is byte-identical."""
    import io
    import zipfile

    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as z:
        for k in sorted(arrays):
            buf = io.BytesIO()
            np.lib.format.write_array(buf, np.ascontiguousarray(arrays[k]), allow_pickle=False)
            z.writestr(
                zipfile.ZipInfo(k + ".npy", (1980, 1, 1, 0, 0, 0)), buf.getvalue(), compress_type=zipfile.ZIP_DEFLATED
            )


def build(s: Spec, out: Path, log: dict):
    folder = out / s.name
    weights, config = make_weights(s), s.disk_config()
    extra = {}
    if s.fp8_of:
        weights, deq = to_fp8(weights)
        config = {**config, "quantization_config": quantization_config(s.config)}
        for n in (
            "model.layers.0.self_attn.kv_a_proj_with_mqa.weight",
            "model.layers.0.self_attn.q_b_proj.weight",
            "model.layers.0.mlp.gate_proj.weight",
            "model.layers.0.mlp.down_proj.weight",
        ):
            if n in deq:
                extra[n] = deq[n].numpy()
    write_checkpoint(folder, weights, config, s.shards)
    files, facts = reference(folder, s)
    if extra:
        files["dequantised.npz"] = extra
    for fn, arrays in files.items():
        save_npz(folder / fn, arrays)
    log[s.name] = facts
    print(s.name, json.dumps(facts, indent=1), flush=True)


def check(s: Spec, out: Path) -> float:
    """Reload a folder with transformers (eager and sdpa) and compare with its npz files."""
    folder, worst = out / s.name, 0.0
    disk = json.loads((folder / "config.json").read_text())
    disk.pop("quantization_config", None)
    assert disk == json.loads(json.dumps(s.disk_config())), "config.json differs from the spec"
    for attn in ("eager", "sdpa"):
        files, _ = reference(folder, s, load_model(folder, attn))
        for fn, arrays in files.items():
            z = np.load(folder / fn)
            assert set(z.files) == set(arrays), (fn, set(z.files) ^ set(arrays))
            for k, v in arrays.items():
                if v.dtype.kind == "f":
                    fin = np.isfinite(v)
                    assert (np.isfinite(z[k]) == fin).all(), (fn, k)
                    d = float(np.abs(z[k][fin].astype(np.float64) - v[fin]).max(initial=0.0))
                    worst = max(worst, d)
                    assert d < 2e-4, (s.name, attn, fn, k, d)
                else:
                    assert (z[k] == v).all(), (s.name, attn, fn, k)
    print(f"check {s.name}: ok, largest float difference {worst:.2e}", flush=True)
    return worst


def search(s: Spec, out: Path, n: int, start: int = 0, long: bool = False):
    """Rank prompt seeds by their weakest margin (all in units where float32 noise is ~1e-6)."""
    folder = out / s.name
    model = load_model(folder)
    c, rows = s.config, []
    head = MtpHead(folder, model) if c.get("num_nextn_predict_layers") and not long else None
    bad = set(c["eos_token_id"] if isinstance(c["eos_token_id"], list) else [c["eos_token_id"]])
    for seed in range(start, start + n):
        ids = make_prompt(c, seed, s.long_len if long else s.prompt_len)
        cont, _ = greedy(model, ids, s.new_tokens)
        if bad & set(cont.tolist()):
            continue
        m = measure(model, c, ids, cont)
        if m.get("index_mismatch"):
            continue
        score = min(m["top1_gap_prompt"], m["top1_gap_greedy"], m["router_gap"] * 10, m.get("index_gap", 1.0) * 10)
        if rows and score < 0.3 * max(r[0] for r in rows):
            continue
        if head is not None:
            h = model.model(input_ids=torch.as_tensor(ids, dtype=torch.long)[None], use_cache=False).last_hidden_state[
                0
            ]
            _, lg, t = head.run(np.concatenate([ids[1:], cont[:1]]), h)
            sq = np.concatenate([ids, cont[:-1]])
            h2 = model.model(input_ids=torch.as_tensor(sq, dtype=torch.long)[None], use_cache=False).last_hidden_state[
                0
            ]
            lg2 = head.run(np.concatenate([sq[1:], cont[-1:]]), h2)[1][len(ids) - 1 :]
            acc = int((lg2.argmax(-1)[:-1].numpy() == cont[1:]).sum())
            mod, o = t.router[0]
            mt = (
                top1_margin(lg),
                float(router_margin(mod, o, "glm", c["num_experts_per_tok"]).min()),
                float(index_margin(index_scores(*t.index_in[0], model.config), c["index_topk"]).min()),
            )
            m["mtp"] = (acc, *mt)
            score = min(score, mt[0], top1_margin(lg2), mt[1] * 10, mt[2] * 10)
            if acc < 4:
                score *= 0.1
        if s.short_len and not long:
            sc, _ = greedy(model, ids[: s.short_len], s.new_tokens)
            ms = measure(model, c, ids[: s.short_len], sc)
            score = min(score, ms["top1_gap_greedy"], ms["router_gap"] * 10, ms["index_gap"] * 10)
            if bad & set(sc.tolist()) or ms.get("index_mismatch"):
                continue
        if m["distinct_greedy"] < s.new_tokens * 0.6:
            score *= 0.1
        if not rows or score > max(r[0] for r in rows):
            print("better:", score, seed, flush=True)
        rows.append((score, seed, m))
    rows.sort(key=lambda r: -r[0])
    for r in rows[:5]:
        print(s.name, "long" if long else "", r, flush=True)
    return rows


def f32(x):
    return np.asarray(x, np.float32)


def quant_rows(w, bits: int):
    """Symmetric per-row absmax.  float32 arithmetic, round half to even.
    scale = max(absmax / qmax, 1e-8); q = clip(rint(w / scale), -qmax-1, qmax)."""
    qmax = (1 << (bits - 1)) - 1
    s = np.maximum(np.abs(w).max(1, keepdims=True) / f32(qmax), f32(1e-8)).astype(np.float32)
    q = np.clip(np.rint(w / s), -qmax - 1, qmax).astype(np.int8)
    return q, s[:, 0]


def quant_groups(w, bits: int, group: int):
    """The same, one scale per `group` consecutive columns; the last group may be shorter."""
    O, I = w.shape
    G = -(-I // group)
    q, s = np.zeros((O, I), np.int8), np.zeros((O, G), np.float32)
    for g in range(G):
        sl = slice(g * group, min((g + 1) * group, I))
        q[:, sl], s[:, g] = quant_rows(w[:, sl], bits)
    return q, s


def pack_int4(q):
    """[O, I] int8 in [-8, 7] -> [O, ceil(I/2)] uint8.  Stored nibble = value + 8; column 2j is
    the low nibble, column 2j+1 the high one.  Odd I: the unused last high nibble is 8 (zero)."""
    O, I = q.shape
    n = np.full((O, I + (I & 1)), 8, np.uint8)
    n[:, :I] = (q.astype(np.int16) + 8).astype(np.uint8)
    return (n[:, 0::2] | (n[:, 1::2] << 4)).astype(np.uint8)


def quant_activation(x):
    """Per-row int8 of an activation: s = max(absmax/127, 1e-12), q = rint(x * (1/s)).
    Note the multiplication by the float32 reciprocal (not a division)."""
    s = np.maximum(np.abs(x).max(1, keepdims=True) / f32(127), f32(1e-12)).astype(np.float32)
    inv = (f32(1) / s).astype(np.float32)
    return np.rint(x * inv).astype(np.int8), s[:, 0]


def special_matrix(rng, O, I):
    w = rng.standard_normal((O, I)).astype(np.float32) * f32(0.05)
    w[0] = 0  # an all-zero row
    if O > 1:
        w[1, rng.integers(I)] = f32(1e4)  # one huge value
    if O > 2:
        w[2] = f32(1e-9)  # below the scale floor
    if O > 3:  # exact halves (scale is exactly 1 for int4)
        half = f32([7, 0.5, 1.5, 2.5, 3.5, -0.5, -1.5, -2.5, -3.5, 6.5, -6.5, 4.5])
        w[3] = np.resize(half, I)
    if O > 4:
        w[4] = -np.abs(w[4]) - f32(0.01)  # only negative values
    return w


def quant_golden(seed: int, shapes) -> dict:
    rng, z = np.random.default_rng(seed), {}
    z["shapes"] = np.array(shapes, np.int32)
    for n, (O, I, S) in enumerate(shapes):
        w = special_matrix(rng, O, I)
        x = rng.standard_normal((S, I)).astype(np.float32)
        if S > 1:
            x[1] = 0
        p, x64 = f"c{n}_", x.astype(np.float64)
        z[p + "w"], z[p + "x"] = w, x
        z[p + "y"] = x64 @ w.astype(np.float64).T
        q4, s4 = quant_rows(w, 4)
        z[p + "int4_packed"], z[p + "int4_scale"] = pack_int4(q4), s4
        z[p + "int4_y"] = x64 @ (q4 * s4[:, None].astype(np.float64)).T
        qg, sg = quant_groups(w, 4, 64)
        full = np.repeat(sg, 64, 1)[:, :I].astype(np.float64)
        z[p + "int4g64_packed"], z[p + "int4g64_scale"] = pack_int4(qg), sg
        z[p + "int4g64_y"] = x64 @ (qg * full).T
        q8, s8 = quant_rows(w, 8)
        z[p + "int8_q"], z[p + "int8_scale"] = q8, s8
        z[p + "int8_y"] = x64 @ (q8 * s8[:, None].astype(np.float64)).T
        xq, xs = quant_activation(x)
        z[p + "xq"], z[p + "xs"] = xq, xs
        for nm, q, s in (("int4", q4, s4), ("int8", q8, s8)):
            acc = xq.astype(np.int32) @ q.astype(np.int32).T
            z[p + nm + "_idot"] = acc  # exact integer dots [S, O]
            z[p + nm + "_idot_y"] = acc * (xs[:, None].astype(np.float64) * s[None].astype(np.float64))
    # FP8: the decode table and one block-scaled matrix with partial edge blocks
    codes = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn)
    z["fp8_e4m3_table"] = codes.float().numpy()
    O, I = 200, 300
    w = torch.tensor(rng.standard_normal((O, I)).astype(np.float32)) * 0.02
    w[:128, 128:256] = 0  # one all-zero block: scale 1
    q, s = fp8_quantise(w)
    z["fp8_bytes"], z["fp8_scale_inv"] = q.view(torch.uint8).numpy(), s.numpy()
    z["fp8_dequant"] = fp8_dequantise(q, s).numpy()
    # BF16 -> F32 bit patterns
    b = rng.integers(0, 65536, 64).astype(np.uint16)
    b = b[(b & 0x7F80) != 0x7F80]
    z["bf16_bits"], z["bf16_as_f32"] = b, (b.astype(np.uint32) << 16).view(np.float32)
    return z


QUANT_SHAPES = [(5, 7, 3), (16, 64, 2), (9, 1, 2), (33, 129, 4), (64, 256, 3), (12, 65, 1), (40, 190, 5)]


def build_quant(out: Path, seed: int = 4242, shapes=QUANT_SHAPES):
    (out / "quant").mkdir(parents=True, exist_ok=True)
    save_npz(out / "quant" / "quant_golden.npz", quant_golden(seed, shapes))
    print("quant: written", flush=True)


def run(specs, out: Path, args, quant_args=None):
    want = [s for s in specs if not args.only or s.name == args.only]
    if args.search:
        for s in want:
            search(s, out, args.search, args.start, args.long)
        return
    if args.check:
        for s in want:
            check(s, out)
        return
    log = {}
    for s in want:
        build(s, out, log)
    if not args.only or args.only == "quant":
        build_quant(out, **(quant_args or {}))
    if not args.only:
        text = json.dumps(log, indent=1).replace("Infinity", "null")  # null: nothing pruned
        (out / "margins.json").write_text(text + "\n")


def parser():
    p = argparse.ArgumentParser(description="Build or check the oracle fixtures.")
    p.add_argument("--out", type=Path, default=None)
    p.add_argument("--only")
    p.add_argument("--check", action="store_true")
    p.add_argument("--search", type=int, default=0, help="try this many prompt seeds")
    p.add_argument("--start", type=int, default=0)
    p.add_argument("--long", action="store_true", help="with --search: the long prompt")
    return p


if __name__ == "__main__":
    a = parser().parse_args()
    run(SPECS, a.out or ORACLE, a)
    sys.exit(0)
