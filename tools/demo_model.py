"""The demo model in torch: a small but complete glm_moe_dsa that can be trained.

Every mechanism of GLM-5.2 is present at toy size: latent attention, the sparse-attention indexer with layers that
share a selection, the sigmoid router with its correction bias, a shared expert, and one multi-token-prediction layer.

Needs: torch.
"""

import torch
import torch.nn.functional as F
from torch import nn

CONFIG = {
    "architectures": ["GlmMoeDsaForCausalLM"],
    "model_type": "glm_moe_dsa",
    "attention_bias": False,
    "first_k_dense_replace": 1,
    "hidden_act": "silu",
    "hidden_size": 256,
    "index_head_dim": 32,
    "index_n_heads": 4,
    "index_topk": 64,
    "indexer_types": ["full", "full", "shared", "shared", "full", "shared"],
    "intermediate_size": 512,
    "kv_lora_rank": 64,
    "max_position_embeddings": 4096,
    "moe_intermediate_size": 64,
    "n_group": 1,
    "n_routed_experts": 64,
    "n_shared_experts": 1,
    "norm_topk_prob": True,
    "num_attention_heads": 8,
    "num_experts_per_tok": 4,
    "num_hidden_layers": 6,
    "num_key_value_heads": 8,
    "num_nextn_predict_layers": 1,
    "q_lora_rank": 128,
    "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 16,
    "rms_norm_eps": 1e-5,
    "rope_parameters": {"rope_theta": 10000.0, "rope_type": "default"},
    "routed_scaling_factor": 2.5,
    "scoring_func": "sigmoid",
    "tie_word_embeddings": False,
    "topk_group": 1,
    "topk_method": "noaux_tc",
    "torch_dtype": "bfloat16",
    "v_head_dim": 32,
    "vocab_size": 2048,
}


class Config:
    def __init__(self, values: dict):
        self.__dict__.update(values)


class RMSNorm(nn.Module):
    def __init__(self, dim: int, eps: float = 1e-6):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(dim))
        self.eps = eps

    def forward(self, x):
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps) * self.weight


def rope(x, cos, sin):
    """Rotate interleaved pairs of x [..., T, rope_dim]; the output holds first members, then second."""
    a, b = x[..., 0::2], x[..., 1::2]
    return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1)


class Indexer(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.c = c
        self.wq_b = nn.Linear(c.q_lora_rank, c.index_n_heads * c.index_head_dim, bias=False)
        self.wk = nn.Linear(c.hidden_size, c.index_head_dim, bias=False)
        self.k_norm = nn.LayerNorm(c.index_head_dim, eps=1e-6)
        self.weights_proj = nn.Linear(c.hidden_size, c.index_n_heads, bias=False)

    def forward(self, x, q_resid, cos, sin):
        """Score every key for every query: x [B, T, H], q_resid [B, T, q_lora] -> [B, T, T]."""
        c, (B, T, _) = self.c, x.shape
        q = self.wq_b(q_resid).view(B, T, c.index_n_heads, c.index_head_dim).transpose(1, 2)
        k = self.k_norm(self.wk(x))
        r = c.qk_rope_head_dim
        q = torch.cat([rope(q[..., :r], cos, sin), q[..., r:]], dim=-1)
        k = torch.cat([rope(k[..., :r], cos, sin), k[..., r:]], dim=-1)
        scores = F.relu(q @ k.transpose(1, 2).unsqueeze(1) * c.index_head_dim**-0.5)  # [B, heads, T, T]
        weights = self.weights_proj(x) * c.index_n_heads**-0.5  # [B, T, heads]
        return torch.einsum("bth,bhts->bts", weights, scores)


class Attention(nn.Module):
    def __init__(self, c, owns_indexer: bool):
        super().__init__()
        self.c = c
        qk = c.qk_nope_head_dim + c.qk_rope_head_dim
        self.q_a_proj = nn.Linear(c.hidden_size, c.q_lora_rank, bias=False)
        self.q_a_layernorm = RMSNorm(c.q_lora_rank)
        self.q_b_proj = nn.Linear(c.q_lora_rank, c.num_attention_heads * qk, bias=False)
        self.kv_a_proj_with_mqa = nn.Linear(c.hidden_size, c.kv_lora_rank + c.qk_rope_head_dim, bias=False)
        self.kv_a_layernorm = RMSNorm(c.kv_lora_rank)
        self.kv_b_proj = nn.Linear(
            c.kv_lora_rank, c.num_attention_heads * (c.qk_nope_head_dim + c.v_head_dim), bias=False
        )
        self.o_proj = nn.Linear(c.num_attention_heads * c.v_head_dim, c.hidden_size, bias=False)
        self.indexer = Indexer(c) if owns_indexer else None

    def forward(self, x, cos, sin, causal, selection, sparse):
        """Returns (output [B, T, H], index scores or None, mean attention [B, T, T], selection)."""
        c, (B, T, _) = self.c, x.shape
        heads, nope, r = c.num_attention_heads, c.qk_nope_head_dim, c.qk_rope_head_dim
        q_resid = self.q_a_layernorm(self.q_a_proj(x))
        q = self.q_b_proj(q_resid).view(B, T, heads, nope + r).transpose(1, 2)
        latent, k_rope = self.kv_a_proj_with_mqa(x).split([c.kv_lora_rank, r], dim=-1)
        kv = self.kv_b_proj(self.kv_a_layernorm(latent)).view(B, T, heads, nope + c.v_head_dim).transpose(1, 2)
        k_nope, v = kv.split([nope, c.v_head_dim], dim=-1)
        q_rope, k_rope = rope(q[..., nope:], cos, sin), rope(k_rope, cos, sin).unsqueeze(1)
        logits = (q[..., :nope] @ k_nope.transpose(2, 3) + q_rope @ k_rope.transpose(2, 3)) * (nope + r) ** -0.5
        scores = None
        if self.indexer is not None:
            scores = self.indexer(x.detach(), q_resid.detach(), cos, sin).masked_fill(~causal, -1e9)
            if sparse:
                picked = scores.detach().topk(min(c.index_topk, T), dim=-1).indices
                selection = torch.zeros(B, T, T, dtype=torch.bool).scatter_(-1, picked, True) & causal
        allowed = selection if sparse else causal
        probs = logits.masked_fill(~(allowed.unsqueeze(1) if allowed.dim() == 3 else allowed), -1e9).softmax(-1)
        out = (probs @ v).transpose(1, 2).reshape(B, T, heads * c.v_head_dim)
        return self.o_proj(out), scores, probs.detach().mean(1), selection


class MLP(nn.Module):
    def __init__(self, hidden: int, inner: int):
        super().__init__()
        self.gate_proj = nn.Linear(hidden, inner, bias=False)
        self.up_proj = nn.Linear(hidden, inner, bias=False)
        self.down_proj = nn.Linear(inner, hidden, bias=False)

    def forward(self, x):
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class MoE(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.c = c
        self.gate_weight = nn.Parameter(torch.empty(c.n_routed_experts, c.hidden_size))
        self.register_buffer("bias", torch.zeros(c.n_routed_experts))
        self.gate_up = nn.Parameter(torch.empty(c.n_routed_experts, 2 * c.moe_intermediate_size, c.hidden_size))
        self.down = nn.Parameter(torch.empty(c.n_routed_experts, c.hidden_size, c.moe_intermediate_size))
        self.shared = MLP(c.hidden_size, c.moe_intermediate_size * c.n_shared_experts)
        self.load = torch.zeros(c.n_routed_experts)

    def forward(self, x):
        c, shape = self.c, x.shape
        x = x.reshape(-1, shape[-1])
        scores = (x @ self.gate_weight.t()).sigmoid()
        picked = (scores.detach() + self.bias).topk(c.num_experts_per_tok, dim=-1).indices
        weights = scores.gather(1, picked)
        weights = weights / (weights.sum(-1, keepdim=True) + 1e-20) * c.routed_scaling_factor
        flat = picked.flatten()
        order = flat.argsort()
        counts = torch.bincount(flat, minlength=c.n_routed_experts)
        if self.training:
            self.load += counts
        rows = order // c.num_experts_per_tok
        chunks = x[rows].split(counts.tolist())
        outs = []
        for e, chunk in enumerate(chunks):
            if chunk.shape[0]:
                gate, up = (chunk @ self.gate_up[e].t()).chunk(2, dim=-1)
                outs.append((F.silu(gate) * up) @ self.down[e].t())
        y = torch.cat(outs) * weights.flatten()[order].unsqueeze(1)
        return (torch.zeros_like(x).index_add_(0, rows, y) + self.shared(x)).view(shape)

    def rebalance(self, step: float) -> None:
        """Nudge the selection bias toward even load, as auxiliary-loss-free balancing does."""
        self.bias += step * torch.sign(self.load.mean() - self.load)
        self.load.zero_()


class Block(nn.Module):
    def __init__(self, c, index: int):
        super().__init__()
        kinds = c.indexer_types
        self.input_layernorm = RMSNorm(c.hidden_size, c.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(c.hidden_size, c.rms_norm_eps)
        self.attn = Attention(c, owns_indexer=index >= len(kinds) or kinds[index] == "full")
        dense = index < c.first_k_dense_replace
        self.mlp = MLP(c.hidden_size, c.intermediate_size) if dense else MoE(c)

    def forward(self, x, cos, sin, causal, selection, sparse):
        attn, scores, probs, selection = self.attn(self.input_layernorm(x), cos, sin, causal, selection, sparse)
        x = x + attn
        return x + self.mlp(self.post_attention_layernorm(x)), scores, probs, selection


class DemoModel(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.c = c
        self.embed = nn.Embedding(c.vocab_size, c.hidden_size)
        self.blocks = nn.ModuleList(Block(c, i) for i in range(c.num_hidden_layers))
        self.norm = RMSNorm(c.hidden_size, c.rms_norm_eps)
        self.head = nn.Linear(c.hidden_size, c.vocab_size, bias=False)
        self.enorm, self.hnorm, self.mtp_norm = (RMSNorm(c.hidden_size, c.rms_norm_eps) for _ in range(3))
        self.eh_proj = nn.Linear(2 * c.hidden_size, c.hidden_size, bias=False)
        self.mtp_block = Block(c, c.num_hidden_layers)
        for name, p in self.named_parameters():
            if p.dim() >= 2:
                nn.init.normal_(p, std=0.02 if "embed" in name or "head" in name else p.shape[-1] ** -0.5)
                if name.endswith(("o_proj.weight", "down_proj.weight", "down")):
                    with torch.no_grad():
                        p.mul_((2 * c.num_hidden_layers) ** -0.5)

    def angles(self, T: int):
        r = self.c.qk_rope_head_dim
        inv = self.c.rope_parameters["rope_theta"] ** (-torch.arange(0, r, 2).float() / r)
        a = torch.outer(torch.arange(T).float(), inv)
        return a.cos(), a.sin()

    def forward(self, ids, sparse=False):
        """ids [B, T] -> (final hidden, MTP hidden [B, T-1, H], indexer loss). MTP position t sees token t+1."""
        T = ids.shape[1]
        cos, sin = self.angles(T)
        causal = torch.ones(T, T, dtype=torch.bool).tril()
        x, selection, index_loss, scores, group = self.embed(ids), None, 0.0, None, []
        for block in self.blocks:
            x, own, probs, selection = block(x, cos, sin, causal, selection, sparse)
            if own is not None:
                index_loss = index_loss + self.index_loss(scores, group)
                scores, group = own, []
            group.append(probs)
        index_loss = index_loss + self.index_loss(scores, group)
        hidden = self.norm(x)
        e = self.enorm(self.embed(ids[:, 1:]))
        h = self.eh_proj(torch.cat([e, self.hnorm(hidden[:, :-1])], dim=-1))
        cos, sin, causal = cos[1:], sin[1:], causal[1:, 1:]
        m, own, probs, _ = self.mtp_block(h, cos, sin, causal, None, sparse)
        index_loss = index_loss + self.index_loss(own, [probs])
        return hidden, self.mtp_norm(m), index_loss

    @staticmethod
    def index_loss(scores, group):
        if scores is None or not group:
            return 0.0
        target = torch.stack(group).mean(0)
        return F.kl_div(scores.log_softmax(-1), target, reduction="none").sum(-1).mean()
