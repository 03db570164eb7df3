"""Matmuls add weight gradients to fp32 sums: they train as matmuls and additions do."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from models.kernels import matmul
from models.parallel.layers import ProductGradient
from tests.conftest import GPT_SWITCHES, changed, small_recipe
from tests.ranks import join_world, run_ranks
from threefold.config.loading import parse_recipe
from threefold.pipeline.stage import replaced
from threefold.prove.layouts import SCHEDULES
from threefold.prove.training import held_weights, many_cases, start, train_step

OUT, IN = 6, 4
STEPS = 2
EXPERTS = {
    "model__experts": {"count": 4, "per_token": 2, "ffn_hidden_size": 24, "shared": 1},
    "layout__expert": 2,
}
LATENTS = {
    "model__kv_heads": 4,
    "model__head_size": 16,
    "model__latent": {
        "query_rank": 24,
        "key_value_rank": 16,
        "rotary_size": 8,
        "value_size": 16,
    },
}
BF16 = "ds_configs/zero{}_bf16.json"
CASES: dict[str, tuple[int, dict[str, Any]]] = {  # name -> ranks, changes of the recipe
    "one rank": (1, {"layout__recompute": "full"}),
    "compiled": (1, {"training__compile": True}),
    "fp16": (2, {"deepspeed": "ds_configs/zero1_fp16.json"}),
    "tensor, tied, biases": (2, GPT_SWITCHES | {"layout__tensor": 2}),
    "sequence parallel": (
        4, {"layout__tensor": 2, "layout__sequence_parallel": True, "deepspeed": BF16.format(2)},
    ),
    "sequence parallel, selective": (
        2,
        {
            "layout__tensor": 2, "layout__sequence_parallel": True,
            "layout__recompute": "selective",
        },
    ),
    "experts": (2, EXPERTS),
    "latents, sequence parallel": (
        2, LATENTS | {"layout__tensor": 2, "layout__sequence_parallel": True},
    ),
    "latents, ulysses": (
        2, LATENTS | {"layout__context": 2, "layout__context_attention": "ulysses"},
    ),
    "latents, ring": (2, LATENTS | {"layout__context": 2, "layout__context_attention": "ring"}),
    "zero-2, groups": (
        4,
        {
            "layout": {"pipeline": 2, "schedule": "interleaved", "virtual_stages": 2,
                       "reduce_every": 2},
            "model__layers": 4, "batch__micro_sequences": 1, "deepspeed": BF16.format(2),
        },
    ),
    **{
        name: (2, {"layout": {"pipeline": 2, **layout}, "model__layers": 6})
        for name, layout in SCHEDULES.items()
    },
}  # fmt: skip
QUICK = ("one rank", "sequence parallel", "zb-h1")
LONG = ("zero-2, groups", "tensor, tied, biases", "1f1b", "experts")
Trained = tuple[list[tuple[float, float]], dict[str, Tensor], int]


def marks(name: str) -> list[pytest.MarkDecorator]:
    """Return the marks of the test of a case."""
    if name in QUICK:
        return []
    return [pytest.mark.long if name in LONG else pytest.mark.exhaustive]


def emulated(total: Tensor, first: Tensor, second: Tensor, *, replace: bool) -> None:
    """Compute what the matmul of a GPU computes, but round the product to 16 bits as a CPU does."""
    product = first @ second
    total.copy_(product) if replace else total.add_(product)


def train_worker(corpus: str, changes: dict[str, Any]) -> tuple[Trained, Trained]:
    """Return losses, norms, weights and the number of added products, without and with them."""
    world, trained = join_world(), []
    with many_cases() as begin:
        for is_on_gpu in (matmul.is_on_gpu, lambda x: True):
            begin()
            defaults = {"deepspeed": BF16.format(1), "batch__global_sequences": 4}
            table = changed(small_recipe(Path(corpus)), **defaults | changes)
            calls = 0

            def noted(*tensors: Tensor, replace: bool) -> None:
                nonlocal calls
                calls += 1
                emulated(*tensors, replace=replace)

            with (
                replaced(matmul, "is_on_gpu", is_on_gpu),
                replaced(matmul, "multiply_into", noted),
            ):
                engine, data = start(parse_recipe(table, "test"), world)
                results = [train_step(engine, data, step) for step in range(1, STEPS + 1)]
            steps = [(result.loss, result.grad_norm) for result in results]
            weights = {name: weight.clone() for name, weight in held_weights(engine).items()}
            trained.append((steps, weights, calls))
    before, after = trained
    return before, after


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=marks(name)) for name in CASES],
)
def test_sums_in_matmuls_train_with_the_same_bits(name: str, corpus: Path) -> None:
    """The emulated product is rounded as before, so that nothing but its place may change."""
    ranks, changes = CASES[name]
    for before, after in run_ranks(ranks, train_worker, str(corpus), changes):
        assert before[2] == 0 and after[2] > 0
        assert after[0] == before[0]
        for weight, value in before[1].items():
            assert torch.equal(after[1][weight], value), weight


def test_the_first_product_replaces_and_the_others_add() -> None:
    total = torch.full((OUT, IN), torch.nan)
    gradients = [ProductGradient(torch.randn(3, 2, OUT), torch.randn(3, 2, IN)) for _ in range(3)]
    for number, gradient in enumerate(gradients):
        gradient.add_to(total, replace=number == 0)
    torch.testing.assert_close(total, sum(gradient() for gradient in gradients))


class Recorded(TorchDispatchMode):
    """Records the names of the operations that run."""

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()

    def __torch_dispatch__(
        self, function: Any, types: Any, arguments: tuple = (), keywords: Any = None
    ) -> Any:
        self.names.add(function._schema.name)
        return function(*arguments, **(keywords or {}))


def test_an_expert_without_tokens_runs_the_operations_of_the_others() -> None:
    """The first use of an operation waits for the device, also for messages in flight."""
    used = {}
    for tokens in (3, 0):
        total = torch.full((OUT, IN), torch.nan)
        gradient = ProductGradient(torch.randn(tokens, OUT), torch.randn(tokens, IN))
        with Recorded() as recorded:
            gradient.add_to(total, replace=True)
        used[tokens] = recorded.names
    assert used[0] == used[3]
    assert total.count_nonzero() == 0
    with Recorded() as recorded:
        gradient.add_to(total, replace=False)
    assert not any("add" in name for name in recorded.names)


def test_an_input_is_gathered_when_its_gradient_is_added() -> None:
    grad, x, gathered = torch.randn(4, 1, OUT), torch.randn(2, 1, IN), []

    def gather(part: Tensor) -> Tensor:
        gathered.append(part)
        return torch.cat([part, part])

    gradient, total = ProductGradient(grad, x, gather), torch.zeros(OUT, IN)
    assert not gathered
    gradient.add_to(total, replace=False)
    torch.testing.assert_close(total, gradient())
    assert len(gathered) == 2
