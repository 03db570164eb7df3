"""The planner's numbers for a preflight."""

from typing import Any

import pytest

from tests.conftest import changed
from threefold.config.loading import parse_recipe
from threefold.config.parallel_dims import LaunchEnvironment
from threefold.gpus.datasheet import load_gpu
from threefold.plan.job import Machine
from threefold.pretrain.preflight.evaluate import (
    DATA,
    MATMUL,
    NETWORK,
    NODE_LINK,
    TENSOR,
    LinkReport,
    Planned,
    planned,
)

BYTES = {NODE_LINK: 2**26, NETWORK: 2**26, TENSOR: 2**26, DATA: 2**26}


def numbers(table: dict[str, Any], gpu: str, *, nodes: int = 2) -> Planned:
    """Return the planner's numbers for nodes of eight GPUs."""
    table = changed(table, layout={"tensor": 4, "pipeline": 2}, model__kv_heads=4)
    recipe = parse_recipe(table, "small")
    machine = Machine.of(load_gpu(gpu), gpus=8 * nodes, gpus_per_node=8)
    return planned(
        recipe,
        recipe.parallel_dims(LaunchEnvironment(size=8 * nodes, local_size=8)),
        machine,
        precision="bf16",
        matmul_size=8192,
        links=LinkReport(bytes=BYTES if nodes > 1 else {NODE_LINK: 2**26}),
    )


def test_the_numbers_are_close_to_the_datasheet(small: dict[str, Any]) -> None:
    found = numbers(small, "H100")
    gpu = load_gpu("H100")
    reached = gpu.peak_tflops["bf16"] * gpu.matmul_efficiency
    assert 0.7 * reached < found.rates[MATMUL] < reached
    inside = gpu.node_link_gigabytes_per_second * gpu.node_link_efficiency
    assert numbers(small, "H100", nodes=1).rates[NODE_LINK] == pytest.approx(inside, rel=0.1)
    assert not {NODE_LINK, NETWORK} & found.rates.keys()  # pairs share NCCL's channels
    assert found.rates[TENSOR] < inside and found.rates[DATA] < inside
    assert len(found.memory_gib) == 2 and all(0 < each < 10 for each in found.memory_gib)


def test_cpus_and_unknown_gpus_have_no_numbers(small: dict[str, Any]) -> None:
    assert numbers(small, "cpu") == Planned()
    recipe = parse_recipe(small, "small")
    dims = recipe.parallel_dims(LaunchEnvironment())
    links = LinkReport(bytes=BYTES)
    assert planned(
        recipe, dims, None, precision="bf16", matmul_size=8192, links=links
    ) == Planned()  # fmt: skip
