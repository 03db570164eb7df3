"""training.deterministic: torch's mode is set, no operation of a step raises, results are equal."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import tomli_w
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from models.config import ModelConfig
from models.initialization import initialize
from models.layer_specs import SequentialModel, layer_specs, logical_parameters
from models.parallel.micro_batch_info import MicroBatchInfo
from tests.conftest import GPT_SWITCHES, changed
from tests.ranks import start_ranks
from threefold.config.loading import REPOSITORY, load_recipe, parse_recipe
from threefold.prove.shrink import shrink

# Operations for which torch.use_deterministic_algorithms is documented to raise on CUDA, by their
# ATen names, as far as a language model could use them.
RAISING = (
    "nll_loss", "put", "histc", "bincount", "median", "cumsum", "cumprod", "logcumsumexp",
    "scatter_reduce", "kthvalue", "embedding_bag", "index_reduce",
    "_scaled_dot_product_cudnn_attention_backward",
)  # fmt: skip

# pretrain.py, which here prints the mode of each step
WATCHED = """
import os, torch
from recipes import pretrain
from threefold.engine.engine import Engine

train_step = Engine.train_step

def watched(self, *arguments):
    mode = (
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
        torch.backends.cuda.cudnn_sdp_enabled(),
        os.environ.get("CUBLAS_WORKSPACE_CONFIG"),
    )
    print("mode:", *mode, flush=True)
    return train_step(self, *arguments)

Engine.train_step = watched
pretrain.main()
"""
MODES = {True: "mode: True False False :4096:8\n", False: "mode: False False True None\n"}


def test_a_run_computes_deterministically_with_the_same_numbers(
    small: dict[str, Any], tmp_path: Path
) -> None:
    found = {}
    for mode in (True, False):
        table = changed(small, training__steps=3, training__deterministic=mode)
        file = tmp_path / f"{mode}.toml"
        file.write_text(tomli_w.dumps(table))
        folder = tmp_path / str(mode)
        arguments = ["-c", WATCHED, str(file), "--run-dir", str(folder)]
        codes, outputs = start_ranks(1, arguments, folder=tmp_path, seconds=120)
        assert codes == [0], outputs
        assert outputs[0].count(MODES[mode]) == 3, outputs
        lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
        found[mode] = [(line["loss"], line["grad_norm"]) for line in lines]
    assert found[True] == found[False] and len(found[True]) == 3


class Operations(TorchDispatchMode):
    """Collect the names of the operations that run, without the overload and a trailing "_"."""

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()

    def __torch_dispatch__(
        self, function: Any, types: Any, arguments: Any = (), settings: Any = None
    ):
        self.names.add(function.overloadpacket.__name__.removesuffix("_"))
        return function(*arguments, **(settings or {}))


@contextmanager
def deterministic() -> Iterator[None]:
    """Enable torch's deterministic mode, which also fills uninitialised memory with NaN."""
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


def step(config: ModelConfig, dtype: torch.dtype) -> list[torch.Tensor]:
    """Return the loss and all gradients of a micro-batch."""
    model = SequentialModel(layer_specs(config))
    initialize(logical_parameters(model, config), config, seed=0)
    model.to(dtype)
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(config.vocab_size, (2, config.sequence_length), generator=generator)
    loss = model(tokens, tokens.roll(-1, 1), MicroBatchInfo())
    loss.backward()
    return [loss.detach(), *(parameter.grad for parameter in model.parameters())]


@pytest.fixture(params=["llama", "gpt"])
def config(request: pytest.FixtureRequest, small: dict[str, Any]) -> ModelConfig:
    table = small if request.param == "llama" else changed(small, **GPT_SWITCHES)
    return parse_recipe(table, "small").model


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.float16], ids=["fp32", "bf16", "fp16"]
)
def test_no_operation_of_a_step_raises_and_none_reads_uninitialised_memory(
    config: ModelConfig, dtype: torch.dtype
) -> None:
    expected = step(config, dtype)
    with deterministic(), Operations() as seen:
        found = step(config, dtype)
    assert "embedding_dense_backward" in seen.names  # names are recorded at all
    assert [name for name in seen.names if name.startswith(RAISING)] == []
    assert all(map(torch.equal, found, expected))


def test_an_operation_that_raises_would_be_found() -> None:
    with Operations() as seen:
        nn.functional.cross_entropy(torch.randn(3, 5), torch.tensor([1, 2, 3]))
    assert [name for name in seen.names if name.startswith(RAISING)] == ["nll_loss_forward"]


def test_a_proof_keeps_the_deterministic_mode(tmp_path: Path) -> None:
    settings = ["training.deterministic=true", "training.compile=false"]
    recipe = load_recipe(REPOSITORY / "recipes" / "tiny.toml", settings)
    small = shrink(recipe, ranks=2, layers=2, steps=2, corpus=tmp_path)
    assert small.training.deterministic and small.training.compile is False
