import pytest

from models.config import ModelConfig
from models.cost import (
    columns_of_window,
    flops_per_token,
    parameter_count,
    tokens_at_a_time,
)
from threefold.gpus.datasheet import load_gpu

GPT = {
    "norm": "layernorm",
    "positions": "learned",
    "activation": "gelu",
    "bias": True,
    "tie_embeddings": True,
}
LLAMA = {
    "norm": "rmsnorm",
    "positions": "rope",
    "activation": "swiglu",
    "bias": False,
    "tie_embeddings": False,
}
PUBLISHED = {
    # layers, hidden, heads, kv_heads, ffn, vocab, sequence, switches, parameters
    "GPT-2 (124M)": (12, 768, 12, 12, 3072, 50257, 1024, GPT, 124_439_808),
    "GPT-2 XL": (48, 1600, 25, 25, 6400, 50257, 1024, GPT, 1_557_611_200),
    "Llama 2 7B": (32, 4096, 32, 32, 11008, 32000, 4096, LLAMA, 6_738_415_616),
    "Llama 3 8B": (32, 4096, 32, 8, 14336, 128256, 8192, LLAMA, 8_030_261_248),
    "Llama 3 70B": (80, 8192, 64, 8, 28672, 128256, 8192, LLAMA, 70_553_706_496),
}


def config(layers, hidden, heads, kv_heads, ffn, vocab, sequence, switches) -> ModelConfig:
    return ModelConfig(
        layers=layers,
        hidden_size=hidden,
        heads=heads,
        kv_heads=kv_heads,
        ffn_hidden_size=ffn,
        vocab_size=vocab,
        sequence_length=sequence,
        **switches,
    )


@pytest.mark.parametrize("shape", PUBLISHED.values(), ids=PUBLISHED.keys())
def test_parameter_counts_are_the_published_ones(shape: tuple) -> None:
    assert parameter_count(config(*shape[:-1])) == shape[-1]


def test_flops_agree_with_narayanan_2021_equation_3() -> None:
    """GPT-3 175B: 96 B s l h^2 (1 + s/6h + V/16lh) with recomputation, a quarter of it forward."""
    layers, hidden, sequence, vocab = 96, 12288, 2048, 51200
    shape = config(layers, hidden, 96, 96, 4 * hidden, vocab, sequence, GPT)
    blocks = 96 * layers * hidden**2 * (1 + sequence / (6 * hidden))
    logits = 6 * hidden * vocab
    assert flops_per_token(shape) == pytest.approx(blocks * 3 / 4 + logits, rel=1e-12)
    assert blocks + logits == pytest.approx(
        96 * layers * hidden**2
        * (1 + sequence / (6 * hidden) + vocab / (16 * layers * hidden)), rel=1e-12,
    )  # fmt: skip


def test_a_gpu_computes_more_logits_at_a_time() -> None:
    """With a vocabulary of 128k, matmuls have 512 tokens on a CPU and 2,048 on a GPU."""
    tokens, columns = 16_384, 2**17
    assert tokens_at_a_time(tokens, columns, "cpu") == 512
    assert tokens_at_a_time(tokens, columns, "cuda") == tokens_at_a_time(tokens, columns, "xpu")
    assert tokens_at_a_time(tokens, columns, "cuda") == 2048
    assert tokens_at_a_time(100, columns, "cuda") == 100
    assert load_gpu("H100").device == "cuda" and load_gpu("cpu").device == "cpu"


@pytest.mark.parametrize("window", [1, 5, 63, 64, 65, None])
def test_a_window_counts_twice_the_keys_that_a_query_sees(window: int | None) -> None:
    """A query sees the keys before its own and half of its own, as full attention counts."""
    length = 64
    seen = sum(min(position + 1 / 2, window or length) for position in range(length))
    assert columns_of_window(length, window) == pytest.approx(2 * seen / length)
