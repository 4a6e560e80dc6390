"""What a forward pass takes in memory beside weights and cache, from shapes alone."""

from glm_gpu.config import ModelConfig

_F32, _INT16 = 4, 2
# `lanes.dot_rows` multiplies tiles of 16 x 4096 values: products, sums and their copies.
_NUMPY_TILES = 1 << 20


def pass_bytes(
    config: ModelConfig,
    num_rows: int,
    context: int,
    *,
    is_numpy: bool = False,
    explicit_prefill: bool = False,
    all_logits: bool = True,
) -> int:
    """The most a pass holds at once: an upper bound, met within a few percent at widths where it matters.

    The largest of three moments counts: a layer's attention, its experts, and the logits; beside each the residual
    stream lives, twice while a layer adds to it, and its normed copy.

    Args:
        num_rows: T, rows of the pass.
        context: S, positions in the cache once the pass is done.
        is_numpy: without the C kernels, scores of all heads and widened weights are whole arrays.
        explicit_prefill: keys and values of every position are expanded.
        all_logits: logits of every row are wanted, as in scoring.
    """
    if config.is_latent:
        attention = _latent_attention(config, num_rows, context, is_numpy, explicit_prefill)
    else:
        attention = _head_attention(config, num_rows, context, is_numpy)
    logits = num_rows * config.vocab_size * _F32 if all_logits else config.vocab_size * _F32
    stream = 3 * num_rows * config.hidden_size * _F32
    scratch = _largest_weight(config) * 17 + _NUMPY_TILES if is_numpy else 0  # int8 twice, f64, and a column block
    return stream + max(attention, _experts(config, num_rows), logits) + scratch


def _latent_attention(config: ModelConfig, num_rows: int, context: int, is_numpy: bool, explicit_prefill: bool) -> int:
    heads, rank, rope = config.num_attention_heads, config.kv_lora_rank, config.qk_rope_head_dim
    query = heads * config.qk_head_dim + heads * rope + config.q_lora_rank + 2 * config.latent_width
    # the absorbed query and its copy beside the rope part; then the mixed latents beside the latter
    absorbed = heads * (config.latent_width + rank) + heads * config.v_head_dim
    values = query + absorbed
    selected = min(context, config.index_topk)
    indexer = 2 * config.index_n_heads * config.index_head_dim + 2 * context if context > config.index_topk else 0
    quantized = heads * rank * _INT16
    num_bytes = num_rows * ((values + max(indexer, selected)) * _F32 + quantized)
    if is_numpy:
        scores = max(8 * heads * selected, 4 * config.index_n_heads * context)
        num_bytes += num_rows * scores * _F32
    if explicit_prefill:
        width = config.qk_nope_head_dim + config.v_head_dim + config.qk_head_dim
        num_bytes += context * heads * width * _F32
    return num_bytes


def _head_attention(config: ModelConfig, num_rows: int, context: int, is_numpy: bool) -> int:
    width = config.num_attention_heads * config.head_dim
    num_bytes = num_rows * 12 * width * _F32
    return num_bytes + (num_rows * config.num_attention_heads * context * 8 * _F32 if is_numpy else 0)


def _experts(config: ModelConfig, num_rows: int) -> int:
    """All (row, expert) pairs of a layer at once: inputs, integers, hidden halves, results, weighted sums."""
    hidden, width = config.hidden_size, config.moe_intermediate_size
    pair = 4 * hidden * _F32 + hidden * _INT16 + 2 * width * _F32 + width * _INT16
    shared = 2 * width * _F32 + hidden * _F32
    return num_rows * (config.num_experts_per_tok * pair + shared)


def _largest_weight(config: ModelConfig) -> int:
    return max(config.vocab_size, config.num_attention_heads * config.qk_head_dim) * config.hidden_size
