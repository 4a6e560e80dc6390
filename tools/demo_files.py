"""The demo model's tokenizer, and its checkpoint in Hugging Face layout, written and read back.

Needs: torch, safetensors, tokenizers.
"""

import json
from pathlib import Path

import torch
from demo_model import CONFIG, MLP, Block, DemoModel
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

SPECIAL = [
    "<|endoftext|>",
    "[MASK]",
    "[gMASK]",
    "<sop>",
    "<eop>",
    "<|system|>",
    "<|user|>",
    "<|assistant|>",
    "<|observation|>",
    "<think>",
    "</think>",
    "<tool_call>",
    "</tool_call>",
    "<tool_response>",
    "</tool_response>",
    "<arg_key>",
    "</arg_key>",
    "<arg_value>",
    "</arg_value>",
]


def train_tokenizer(texts: list[str], vocab_size: int) -> Tokenizer:
    tok = Tokenizer(models.BPE())
    tok.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    tok.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size - len(SPECIAL), initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    tok.train_from_iterator(texts, trainer)
    tok.add_special_tokens(SPECIAL)
    return tok


def to_hf(model: DemoModel) -> dict[str, torch.Tensor]:
    c, out = model.c, {}
    f32 = lambda t: t.detach().clone().float().contiguous()  # noqa: E731
    bf16 = lambda t: t.detach().clone().to(torch.bfloat16).contiguous()  # noqa: E731
    out["model.embed_tokens.weight"] = bf16(model.embed.weight)
    out["model.norm.weight"] = bf16(model.norm.weight)
    out["lm_head.weight"] = bf16(model.head.weight)

    def block(prefix: str, b: Block) -> None:
        out[f"{prefix}.input_layernorm.weight"] = bf16(b.input_layernorm.weight)
        out[f"{prefix}.post_attention_layernorm.weight"] = bf16(b.post_attention_layernorm.weight)
        for name, p in b.attn.named_parameters():
            out[f"{prefix}.self_attn.{name}"] = bf16(p)
        if isinstance(b.mlp, MLP):
            for name, p in b.mlp.named_parameters():
                out[f"{prefix}.mlp.{name}"] = bf16(p)
            return
        out[f"{prefix}.mlp.gate.weight"] = f32(b.mlp.gate_weight)
        out[f"{prefix}.mlp.gate.e_score_correction_bias"] = f32(b.mlp.bias)
        for name, p in b.mlp.shared.named_parameters():
            out[f"{prefix}.mlp.shared_experts.{name}"] = bf16(p)
        for e in range(c.n_routed_experts):
            gate, up = b.mlp.gate_up[e].chunk(2, dim=0)
            for name, p in (("gate", gate), ("up", up), ("down", b.mlp.down[e])):
                out[f"{prefix}.mlp.experts.{e}.{name}_proj.weight"] = bf16(p)

    for i, b in enumerate(model.blocks):
        block(f"model.layers.{i}", b)
    mtp = f"model.layers.{c.num_hidden_layers}"
    block(mtp, model.mtp_block)
    out[f"{mtp}.enorm.weight"] = bf16(model.enorm.weight)
    out[f"{mtp}.hnorm.weight"] = bf16(model.hnorm.weight)
    out[f"{mtp}.eh_proj.weight"] = bf16(model.eh_proj.weight)
    out[f"{mtp}.shared_head.norm.weight"] = bf16(model.mtp_norm.weight)
    return out


def from_hf(model: DemoModel, folder: Path) -> None:
    """Load what `export` wrote, to go on training."""
    saved = {}
    for file in folder.glob("*.safetensors"):
        saved |= load_file(file)
    c = model.c

    def block(prefix: str, b: Block) -> None:
        put(b.input_layernorm.weight, f"{prefix}.input_layernorm.weight")
        put(b.post_attention_layernorm.weight, f"{prefix}.post_attention_layernorm.weight")
        for name, p in b.attn.named_parameters():
            put(p, f"{prefix}.self_attn.{name}")
        if isinstance(b.mlp, MLP):
            for name, p in b.mlp.named_parameters():
                put(p, f"{prefix}.mlp.{name}")
            return
        put(b.mlp.gate_weight, f"{prefix}.mlp.gate.weight")
        b.mlp.bias.copy_(saved[f"{prefix}.mlp.gate.e_score_correction_bias"])
        for name, p in b.mlp.shared.named_parameters():
            put(p, f"{prefix}.mlp.shared_experts.{name}")
        for e in range(c.n_routed_experts):
            expert = f"{prefix}.mlp.experts.{e}"
            gate_up = torch.cat([saved[f"{expert}.gate_proj.weight"], saved[f"{expert}.up_proj.weight"]])
            b.mlp.gate_up[e].copy_(gate_up)
            put(b.mlp.down[e], f"{expert}.down_proj.weight")

    def put(p: torch.Tensor, name: str) -> None:
        p.copy_(saved[name])

    with torch.no_grad():
        put(model.embed.weight, "model.embed_tokens.weight")
        put(model.norm.weight, "model.norm.weight")
        put(model.head.weight, "lm_head.weight")
        for i, b in enumerate(model.blocks):
            block(f"model.layers.{i}", b)
        mtp = f"model.layers.{c.num_hidden_layers}"
        block(mtp, model.mtp_block)
        put(model.enorm.weight, f"{mtp}.enorm.weight")
        put(model.hnorm.weight, f"{mtp}.hnorm.weight")
        put(model.eh_proj.weight, f"{mtp}.eh_proj.weight")
        put(model.mtp_norm.weight, f"{mtp}.shared_head.norm.weight")


def export(model: DemoModel, tok: Tokenizer, out: Path) -> None:
    out.mkdir(parents=True, exist_ok=True)
    ids = {s: tok.token_to_id(s) for s in SPECIAL}
    eos = [ids["<|endoftext|>"], ids["<|user|>"], ids["<|observation|>"]]
    config = CONFIG | {"eos_token_id": eos, "pad_token_id": ids["<|endoftext|>"], "bos_token_id": None}
    (out / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    ends = {"eos_token_id": eos, "pad_token_id": ids["<|endoftext|>"]}
    generation = ends | {"do_sample": True, "temperature": 0.8, "top_p": 0.95}
    (out / "generation_config.json").write_text(json.dumps(generation, indent=2) + "\n")
    tok.save(str(out / "tokenizer.json"))
    tensors = to_hf(model)
    names = sorted(tensors)
    shards = [names[i::2] for i in range(2)]
    weight_map, total = {}, 0
    for i, shard in enumerate(shards, 1):
        file = f"model-{i:05d}-of-{len(shards):05d}.safetensors"
        save_file({n: tensors[n] for n in shard}, out / file, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(shard, file)
        total += sum(tensors[n].numel() * tensors[n].element_size() for n in shard)
    index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
    (out / "model.safetensors.index.json").write_text(json.dumps(index, indent=1) + "\n")
