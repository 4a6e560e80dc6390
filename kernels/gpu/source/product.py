"""A tile of activations times a tile of a weight in its stored form; the inside of every kernel with packed weights.

Tokens are the rows of a tensor-core tile, even when there is one: padded to 16 it takes fewer instructions than any
product on plain cores, because unpacking is paid once for all rows. The inline assembly is elementwise over a pack of
two words in one or two 32-bit registers, so it does not matter which elements the compiler puts together.
"""

import triton
import triton.language as tl


@triton.jit
def unpack(words, BITS: tl.constexpr, dtype: tl.constexpr):
    """The four weights of each word, exact integers (or plain numbers) in the activations' type."""
    if BITS == 4:
        if dtype == tl.float16:
            # nibble | 0x6400 is 1024 + n; from bits 4..7 it is 1024 + 16 n, brought back by n / 16 without a shift
            n0, n1, n2, n3 = tl.inline_asm_elementwise(
                """{
                .reg .b32 t, u, base, down, less;
                mov.b32 base, 0x64086408;
                mov.b32 down, 0x2c002c00;
                mov.b32 less, 0xd480d480;
                lop3.b32 t, $4, 0x000f000f, 0x64006400, 0xea;
                sub.rn.f16x2 $0, t, base;
                lop3.b32 t, $4, 0x00f000f0, 0x64006400, 0xea;
                fma.rn.f16x2 $1, t, down, less;
                shr.u32 u, $4, 8;
                lop3.b32 t, u, 0x000f000f, 0x64006400, 0xea;
                sub.rn.f16x2 $2, t, base;
                lop3.b32 t, u, 0x00f000f0, 0x64006400, 0xea;
                fma.rn.f16x2 $3, t, down, less;
                }""",
                "=r,=r,=r,=r,r",
                [words],
                dtype=(tl.float16, tl.float16, tl.float16, tl.float16),
                is_pure=True,
                pack=2,
            )
        else:
            # bf16 has 7 bits behind the point: only the lowest nibble fits, n | 0x4300 is 128 + n
            n0, n1, n2, n3 = tl.inline_asm_elementwise(
                """{
                .reg .b32 t, u, one, less;
                mov.b32 less, 0xc308c308;
                mov.b32 one, 0x3f803f80;
                lop3.b32 t, $4, 0x000f000f, 0x43004300, 0xea;
                fma.rn.bf16x2 $0, t, one, less;
                shr.u32 u, $4, 4;
                lop3.b32 t, u, 0x000f000f, 0x43004300, 0xea;
                fma.rn.bf16x2 $1, t, one, less;
                shr.u32 u, $4, 8;
                lop3.b32 t, u, 0x000f000f, 0x43004300, 0xea;
                fma.rn.bf16x2 $2, t, one, less;
                shr.u32 u, $4, 12;
                lop3.b32 t, u, 0x000f000f, 0x43004300, 0xea;
                fma.rn.bf16x2 $3, t, one, less;
                }""",
                "=r,=r,=r,=r,r",
                [words],
                dtype=(tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16),
                is_pure=True,
                pack=2,
            )
    elif BITS == 8:
        if dtype == tl.float16:
            # byte ^ 0x80 is n + 128; with 0x64 above it, 1024 + 128 + n
            n0, n1, n2, n3 = tl.inline_asm_elementwise(
                """{
                .reg .b32 a, b, t, base, high;
                mov.b32 base, 0x64806480;
                mov.b32 high, 0x64646464;
                xor.b32 a, $4, 0x80808080;
                xor.b32 b, $5, 0x80808080;
                prmt.b32 t, a, b, 0x0400;
                lop3.b32 t, t, 0x00ff00ff, 0x64006400, 0xea;
                sub.rn.f16x2 $0, t, base;
                prmt.b32 t, a, b, 0x0501;
                lop3.b32 t, t, 0x00ff00ff, 0x64006400, 0xea;
                sub.rn.f16x2 $1, t, base;
                prmt.b32 t, a, b, 0x0602;
                lop3.b32 t, t, 0x00ff00ff, 0x64006400, 0xea;
                sub.rn.f16x2 $2, t, base;
                prmt.b32 t, a, b, 0x0703;
                lop3.b32 t, t, 0x00ff00ff, 0x64006400, 0xea;
                sub.rn.f16x2 $3, t, base;
                }""",
                "=r,=r,=r,=r,r,r",
                [words],
                dtype=(tl.float16, tl.float16, tl.float16, tl.float16),
                is_pure=True,
                pack=2,
            )
        else:
            # in two nibbles: 16 * (128 + high) - 2304 + (128 + low) is 16 high + low - 128, every step exact
            n0, n1, n2, n3 = tl.inline_asm_elementwise(
                """{
                .reg .b32 a, b, t, h, l, sixteen, one, less;
                mov.b32 sixteen, 0x41804180;
                mov.b32 one, 0x3f803f80;
                mov.b32 less, 0xc510c510;
                xor.b32 a, $4, 0x80808080;
                xor.b32 b, $5, 0x80808080;
                prmt.b32 t, a, b, 0x0400;
                lop3.b32 l, t, 0x000f000f, 0x43004300, 0xea;
                shr.u32 t, t, 4;
                lop3.b32 h, t, 0x000f000f, 0x43004300, 0xea;
                fma.rn.bf16x2 h, h, sixteen, less;
                fma.rn.bf16x2 $0, l, one, h;
                prmt.b32 t, a, b, 0x0501;
                lop3.b32 l, t, 0x000f000f, 0x43004300, 0xea;
                shr.u32 t, t, 4;
                lop3.b32 h, t, 0x000f000f, 0x43004300, 0xea;
                fma.rn.bf16x2 h, h, sixteen, less;
                fma.rn.bf16x2 $1, l, one, h;
                prmt.b32 t, a, b, 0x0602;
                lop3.b32 l, t, 0x000f000f, 0x43004300, 0xea;
                shr.u32 t, t, 4;
                lop3.b32 h, t, 0x000f000f, 0x43004300, 0xea;
                fma.rn.bf16x2 h, h, sixteen, less;
                fma.rn.bf16x2 $2, l, one, h;
                prmt.b32 t, a, b, 0x0703;
                lop3.b32 l, t, 0x000f000f, 0x43004300, 0xea;
                shr.u32 t, t, 4;
                lop3.b32 h, t, 0x000f000f, 0x43004300, 0xea;
                fma.rn.bf16x2 h, h, sixteen, less;
                fma.rn.bf16x2 $3, l, one, h;
                }""",
                "=r,=r,=r,=r,r,r",
                [words],
                dtype=(tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16),
                is_pure=True,
                pack=2,
            )
    elif BITS == 2:
        # n in the lowest bits of 1024 or 128, which or-ing does
        if dtype == tl.float16:
            n0 = ((words & 3).to(tl.uint16) | 0x6400).to(tl.float16, bitcast=True) - 1026.0
            n1 = (((words >> 2) & 3).to(tl.uint16) | 0x6400).to(tl.float16, bitcast=True) - 1026.0
            n2 = (((words >> 4) & 3).to(tl.uint16) | 0x6400).to(tl.float16, bitcast=True) - 1026.0
            n3 = ((words >> 6).to(tl.uint16) | 0x6400).to(tl.float16, bitcast=True) - 1026.0
        else:
            n0 = ((words & 3).to(tl.uint16) | 0x4300).to(tl.bfloat16, bitcast=True) - 130.0
            n1 = (((words >> 2) & 3).to(tl.uint16) | 0x4300).to(tl.bfloat16, bitcast=True) - 130.0
            n2 = (((words >> 4) & 3).to(tl.uint16) | 0x4300).to(tl.bfloat16, bitcast=True) - 130.0
            n3 = ((words >> 6).to(tl.uint16) | 0x4300).to(tl.bfloat16, bitcast=True) - 130.0
    else:
        n0 = (words & 0xFFFF).to(tl.uint16).to(tl.bfloat16, bitcast=True).to(dtype)
        n1 = ((words >> 16) & 0xFFFF).to(tl.uint16).to(tl.bfloat16, bitcast=True).to(dtype)
        n2 = ((words >> 32) & 0xFFFF).to(tl.uint16).to(tl.bfloat16, bitcast=True).to(dtype)
        n3 = (words >> 48).to(tl.uint16).to(tl.bfloat16, bitcast=True).to(dtype)
    return n0, n1, n2, n3


@triton.jit
def weight_rows(words, w_row, K: tl.constexpr, BITS: tl.constexpr):
    """Where rows of a weight of K columns begin: among words of four weights, or among f32 numbers."""
    if BITS == 32:
        return words + w_row * K
    else:
        return words + w_row * (K // 4)


@triton.jit
def dot_f32(x, w, acc, dtype: tl.constexpr):
    """16-bit x times f32 w as the sum of three 16-bit numbers, which for bf16 is every bit of it, small ones first."""
    high = w.to(dtype)
    rest = w - high.to(tl.float32)
    middle = rest.to(dtype)
    low = (rest - middle.to(tl.float32)).to(dtype)
    acc = tl.dot(x, low, acc)
    acc = tl.dot(x, middle, acc)
    return tl.dot(x, high, acc)


@triton.jit
def product_f32(x_rows, w_rows, K: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr):
    """`product` with a weight of f32 numbers, whose columns are taken in their own order."""
    dtype: tl.constexpr = x_rows.dtype.element_ty
    acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for step in tl.range(0, tl.cdiv(K, BLOCK_K)):
        column = step * BLOCK_K + tl.arange(0, BLOCK_K)
        x_tile = x_rows[:, None] + split_columns(column, K)[None, :]
        w_tile = w_rows[None, :] + column[:, None]
        if K % BLOCK_K == 0:
            acc = dot_f32(tl.load(x_tile), tl.load(w_tile), acc, dtype)
        else:
            x = tl.load(x_tile, mask=(column < K)[None, :], other=0.0)
            w = tl.load(w_tile, mask=(column < K)[:, None], other=0.0)
            acc = dot_f32(x, w, acc, dtype)
    return acc


@triton.jit
def product(
    x_rows,
    w_rows,
    s_rows,
    K: tl.constexpr,
    BITS: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    UNROLL: tl.constexpr,
):
    """Activations [BLOCK_M, K] times weights [BLOCK_N, K], transposed: [BLOCK_M, BLOCK_N] f32.

    Args:
        x_rows: [BLOCK_M] pointers, where each row's quarter-split activations begin.
        w_rows: [BLOCK_N] pointers, where each weight row's words, or f32 numbers, begin.
        s_rows: [BLOCK_N] pointers, where each weight row's scales begin; not read for plain numbers.
        BLOCK_K: weights of a row in a step; equal to GROUP if there are groups.
    """
    if BITS == 32:
        acc = product_f32(x_rows, w_rows, K, BLOCK_M, BLOCK_N, BLOCK_K)
    else:
        dtype: tl.constexpr = x_rows.dtype.element_ty
        QUARTER: tl.constexpr = K // 4
        STEP: tl.constexpr = BLOCK_K // 4
        word = tl.arange(0, STEP)
        x_tile = x_rows[:, None] + word[None, :]
        w_tile = w_rows[None, :] + word[:, None]
        acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        for step in tl.range(0, tl.cdiv(K, BLOCK_K), loop_unroll_factor=UNROLL):
            begin = step * STEP
            if K % BLOCK_K == 0:
                words = tl.load(w_tile + begin)
                x0 = tl.load(x_tile + begin)
                x1 = tl.load(x_tile + begin + QUARTER)
                x2 = tl.load(x_tile + begin + 2 * QUARTER)
                x3 = tl.load(x_tile + begin + 3 * QUARTER)
            else:
                is_word = begin + word < QUARTER
                words = tl.load(w_tile + begin, mask=is_word[:, None], other=0)
                x0 = tl.load(x_tile + begin, mask=is_word[None, :], other=0.0)
                x1 = tl.load(x_tile + begin + QUARTER, mask=is_word[None, :], other=0.0)
                x2 = tl.load(x_tile + begin + 2 * QUARTER, mask=is_word[None, :], other=0.0)
                x3 = tl.load(x_tile + begin + 3 * QUARTER, mask=is_word[None, :], other=0.0)
            n0, n1, n2, n3 = unpack(words, BITS, dtype)
            if GROUP == 0:
                acc = tl.dot(x0, n0, acc)
                acc = tl.dot(x1, n1, acc)
                acc = tl.dot(x2, n2, acc)
                acc = tl.dot(x3, n3, acc)
            else:
                part = tl.dot(x0, n0)
                part = tl.dot(x1, n1, part)
                part = tl.dot(x2, n2, part)
                part = tl.dot(x3, n3, part)
                acc = part * tl.load(s_rows + step).to(tl.float32)[None, :] + acc
    if GROUP == 0 and BITS < 16:
        acc = acc * tl.load(s_rows).to(tl.float32)[None, :]
    return acc


@triton.jit
def split_columns(columns, WIDTH: tl.constexpr):
    """Where columns of a quarter-split row of WIDTH lie."""
    return (columns % 4) * (WIDTH // 4) + columns // 4
