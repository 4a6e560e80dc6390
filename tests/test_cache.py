import numpy as np
import pytest

from glm_gpu.cache import CacheLayout, KVCache
from glm_gpu.config import ModelConfig
from glm_gpu.model.transformer import cache_layout
from glm_gpu.quant import bf16_to_f32, f32_to_bf16


def test_glm_caches_576_values_a_token_and_layer_and_128_more_in_full_layers(oracle_dir):
    config = ModelConfig.open(oracle_dir / "tiny_glm")
    layout = cache_layout(config, is_bf16=True)
    assert [streams["latent"] for streams in layout.widths] == [56 + 12] * 6
    assert [streams.get("index_key") for streams in layout.widths] == [32, 32, None, None, 32, None]
    assert layout.bytes_per_token == 2 * (6 * 68 + 3 * 32)


@pytest.mark.parametrize("is_bf16", [False, True])
def test_rows_come_back_as_written_and_survive_truncation(is_bf16):
    cache = KVCache(CacheLayout(({"latent": 5}, {"latent": 5, "index_key": 3}), is_bf16), 8)
    values = np.random.default_rng(1).standard_normal((6, 3)).astype(np.float32)
    cache.write(1, "index_key", 0, values)
    cache.length = 6
    cache.truncate(4)
    read = cache.read(1, "index_key", cache.length)
    expected = bf16_to_f32(f32_to_bf16(values)) if is_bf16 else values
    assert np.array_equal(bf16_to_f32(read) if is_bf16 else read, expected[:4])
    assert cache.nbytes == 8 * 13 * (2 if is_bf16 else 4)
