/* All kernels for one instruction set; see dispatch.h. */
#include "dispatch.h"

#include "absorb.h"
#include "attention.h"
#include "ffn.h"
#include "indexer.h"
#include "integer_limit.h"
#include "limits.h"
#include "matmul.h"
#include "norm.h"
#include "quantize.h"
#include "rope.h"
#include "router.h"

#define TABLE_OF(name) TABLE_OF_(name)
#define TABLE_OF_(name) kernels_##name
#define STRING_OF(name) STRING_OF_(name)
#define STRING_OF_(name) #name

const struct kernels TABLE_OF(ISA_NAME) = {
    .name = STRING_OF(ISA_NAME),
    .matmul = matmul,
    .expert_ffn = expert_ffn,
    .absorb_query = absorb_query,
    .expand_value = expand_value,
    .attend = attend,
    .index_scores = index_scores,
    .select_top = select_top,
    .route = route,
    .norm = norm,
    .rope = rope,
    .read_all = read_all,
    .multiply_add = multiply_add,
    .integer_multiply_add = integer_multiply_add,
    .group_absmax = group_absmax,
    .group_errors = group_errors,
    .pack_rows = pack_rows,
    .decode_fp8 = decode_fp8,
    .silu_mul = silu_mul,
};
