"""The kernels at GLM-5.2's sizes: what is called, and how many bytes or operations a call takes."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal

import numpy as np

from glm_gpu.arrays import line_aligned
from glm_gpu.kernels.absorb import absorb_query, expand_value
from glm_gpu.kernels.activation import silu_mul
from glm_gpu.kernels.attention import attend_explicit, attend_latent
from glm_gpu.kernels.experts import expert_ffn
from glm_gpu.kernels.indexer import index_scores, select_top
from glm_gpu.kernels.matmul import matmul
from glm_gpu.kernels.norm import rms_norm
from glm_gpu.kernels.rope import rope_interleaved, rope_tables
from glm_gpu.kernels.router import route
from glm_gpu.quant import Format, QuantizedMatrix, f32_to_bf16
from glm_gpu.slab import SlabLayout

HIDDEN, WIDTH, EXPERTS, CHOSEN = 6144, 2048, 256, 8
HEADS, LATENT, NOPE, ROPE, VALUE = 64, 512, 192, 64, 256
INDEX_HEADS, INDEX_WIDTH, INDEX_TOPK, CONTEXT = 32, 128, 2048, 32768
SCALE = 0.01
Bound = Literal["memory", "int16", "f32"]


@dataclass(frozen=True)
class Case:
    """One kernel at one size.

    Attributes:
        call: takes the number of the call, so that it can use other weights each time.
        num_calls: after which all weights had their turn.
        amount: bytes that a call reads from memory, or multiply-adds of integers, or f32 operations.
        bound: which of these; None for what stays in a cache and is measured in time alone.
    """

    name: str
    call: Callable[[int], object]
    num_calls: int
    amount: float = 0
    bound: Bound | None = None


def cases(memory_bytes: int) -> Iterator[Case]:
    """All of them, one after the other: the weights of one are gone before the next are made.

    Args:
        memory_bytes: distinct weights of each case, more than the last cache holds, so that they come from memory.
    """
    yield _decode("int4_g64", (WIDTH, HIDDEN), 1, memory_bytes)
    yield _decode("int4_g64", (HIDDEN, WIDTH), 1, memory_bytes)
    yield _decode("int8", (WIDTH, HIDDEN), 1, memory_bytes)
    yield _decode("int4_g64", (WIDTH, HIDDEN), 4, memory_bytes)
    for tokens in (1, 2, 4):
        yield _experts(tokens, memory_bytes)
    yield from _absorbed(memory_bytes)
    for tokens in (16, 64, 256):
        yield _prefill("int4_g64", (WIDTH, HIDDEN), tokens)
    yield _router(memory_bytes)
    yield from _attention()
    yield from _indexer()
    yield from _small()


def many_tokens() -> Case:
    """A projection of 64 tokens, which arithmetic bounds."""
    return _prefill("int4_g64", (WIDTH, HIDDEN), 64)


def _normal(*shape: int) -> np.ndarray:
    return np.random.default_rng(0).standard_normal(shape, np.float32)


def _random_bytes(size: int) -> np.ndarray:
    """Memory of its own, aligned as the engine's, filled with the same random megabyte again and again."""
    megabyte, memory = np.random.default_rng(0).integers(0, 256, 1 << 20, dtype=np.uint8), line_aligned(size)
    for begin in range(0, size, len(megabyte)):
        memory[begin : begin + len(megabyte)] = megabyte[: size - begin]
    return memory


def _random_matrix(name: str, shape: tuple[int, int]) -> QuantizedMatrix:
    format = Format.parse(name)
    data = _random_bytes(format.data_nbytes(*shape)).reshape(shape[0], -1)
    scales = line_aligned(4 * shape[0] * format.num_groups(shape[1])).view(np.float32).reshape(shape[0], -1)
    scales[...] = SCALE
    return QuantizedMatrix(format, shape, data, scales)


def _random_matrices(name: str, shape: tuple[int, int], memory_bytes: int) -> list[QuantizedMatrix]:
    first = _random_matrix(name, shape)
    return [first, *(_random_matrix(name, shape) for _ in range(max(1, memory_bytes // first.nbytes - 1)))]


def _decode(name: str, shape: tuple[int, int], tokens: int, memory_bytes: int) -> Case:
    matrices, x = _random_matrices(name, shape, memory_bytes), _normal(tokens, shape[1])
    title = f"matmul {name} {shape[0]} x {shape[1]}, {_tokens(tokens)}"
    num = len(matrices)
    return Case(title, lambda i: matmul(x, matrices[i % num]), num, matrices[0].nbytes, "memory")


def _prefill(name: str, shape: tuple[int, int], tokens: int) -> Case:
    w, x = _random_matrix(name, shape), _normal(tokens, shape[1])
    title = f"matmul {name} {shape[0]} x {shape[1]}, {_tokens(tokens)}"
    return Case(title, lambda _: matmul(x, w), 9, tokens * shape[0] * shape[1], "int16")


def _experts(tokens: int, memory_bytes: int) -> Case:
    layout = SlabLayout(Format.parse("int4_g64"), HIDDEN, WIDTH)
    num_sets = max(2, memory_bytes // (CHOSEN * layout.nbytes))
    slabs = [_random_bytes(layout.nbytes) for _ in range(num_sets * CHOSEN)]
    for slab in slabs:
        for view in layout.views(slab):
            view.scales[...] = SCALE
    x = _normal(tokens, layout.hidden)
    choice = np.tile(np.arange(CHOSEN, dtype=np.int32), (tokens, 1))
    weights = np.full(choice.shape, 1 / CHOSEN, np.float32)

    def call(i: int) -> np.ndarray:
        first = i % num_sets * CHOSEN
        return expert_ffn(x, slabs[first : first + CHOSEN], layout, choice, weights)

    title = f"{CHOSEN} experts int4_g64, {_tokens(tokens)}"
    return Case(title, call, 3 * num_sets, CHOSEN * layout.nbytes, "memory")


def _absorbed(memory_bytes: int) -> Iterator[Case]:
    shape = (HEADS * (NOPE + VALUE), LATENT)
    matrices = _random_matrices("int4_g64", shape, memory_bytes)
    num, q, o = len(matrices), _normal(1, HEADS, NOPE), _normal(1, HEADS, LATENT)
    calls = {
        "absorb_query": (NOPE, lambda i: absorb_query(q, matrices[i % num], VALUE)),
        "expand_value": (VALUE, lambda i: expand_value(o, matrices[i % num], NOPE)),
    }
    for name, (rows, call) in calls.items():
        amount = matrices[0].nbytes * rows // (NOPE + VALUE)
        yield Case(f"{name} int4_g64, 1 token", call, num, amount, "memory")


def _router(memory_bytes: int) -> Case:
    x, bias, first = _normal(1, HIDDEN), _normal(EXPERTS), _normal(EXPERTS, HIDDEN)
    gates = [first, *(first.copy() for _ in range(max(1, memory_bytes // first.nbytes - 1)))]
    num = len(gates)

    def call(i: int) -> object:
        return route(x, gates[i % num], bias, CHOSEN, 1, 1, True, 2.5)

    return Case(f"route over {EXPERTS} experts, 1 token", call, num, first.nbytes, "memory")


def _attention() -> Iterator[Case]:
    q = _normal(1, HEADS, LATENT + ROPE)
    chosen = np.sort(np.random.default_rng(0).permutation(CONTEXT)[:INDEX_TOPK]).astype(np.int32)[None]
    counts = np.int32([INDEX_TOPK])
    operations = HEADS * INDEX_TOPK * (2 * LATENT + ROPE) * 2
    cache = f32_to_bf16(_normal(CONTEXT, LATENT + ROPE))
    yield Case(
        f"attend_latent bf16, {INDEX_TOPK} chosen of {CONTEXT}, 1 token",
        lambda _: attend_latent(q, cache, LATENT, chosen, counts, 1 / 16),
        30, operations, "f32",
    )  # fmt: skip
    several = _normal(8, HEADS, LATENT + ROPE)
    yield Case(
        f"attend_latent bf16, first {INDEX_TOPK}, 8 tokens",
        lambda _: attend_latent(several, cache, LATENT, None, np.repeat(counts, 8), 1 / 16),
        6, 8 * operations, "f32",
    )  # fmt: skip
    heads, keys = _normal(1, 16, 128), _normal(INDEX_TOPK, 16, 128)
    values = keys.copy()
    yield Case(
        f"attend_explicit f32, 16 heads of 128, first {INDEX_TOPK}, 1 token",
        lambda _: attend_explicit(heads, keys, values, None, counts, 0.09),
        30, keys.nbytes + values.nbytes, "memory",
    )  # fmt: skip


def _indexer() -> Iterator[Case]:
    queries, head_weights = _normal(1, INDEX_HEADS, INDEX_WIDTH), _normal(1, INDEX_HEADS)
    keys, counts = f32_to_bf16(_normal(CONTEXT, INDEX_WIDTH)), np.int32([CONTEXT])
    scores = index_scores(queries, head_weights, keys, counts, 0.09)
    yield Case(
        f"index_scores bf16, {CONTEXT} positions, 1 token",
        lambda _: index_scores(queries, head_weights, keys, counts, 0.09),
        15, INDEX_HEADS * INDEX_WIDTH * CONTEXT * 2, "f32",
    )  # fmt: skip
    yield Case(f"select_top {INDEX_TOPK} of {CONTEXT}", lambda _: select_top(scores, counts, INDEX_TOPK), 30)


def _small() -> Iterator[Case]:
    x, weight, gate = _normal(1, HIDDEN), _normal(HIDDEN), _normal(1, 2 * HIDDEN)
    tables, rotated = rope_tables([CONTEXT], 8e6, ROPE), _normal(1, HEADS, ROPE)
    yield Case("rms_norm, 1 token", lambda _: rms_norm(x, weight, 1e-5), 100)
    yield Case("silu_mul, 1 token", lambda _: silu_mul(gate, gate), 100)
    yield Case("rope_interleaved, 1 token", lambda _: rope_interleaved(rotated, *tables), 100)


def _tokens(num: int) -> str:
    return "1 token" if num == 1 else f"{num} tokens"
