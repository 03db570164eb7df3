"""A run on a GPU that the installed torch cannot use is rejected before it starts."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from unittest import mock

import pytest
import torch

from models.errors import UserError
from threefold.config.loading import REPOSITORY, load_recipe
from threefold.config.parallel_dims import LaunchEnvironment
from threefold.gpus.datasheet import device_names_of_machine, load_gpu, machine_has_gpu
from threefold.runtime.processes import check_architecture, check_gpus, check_machine, runs_on

CUDA_13 = ["sm_75", "sm_80", "sm_86", "sm_90", "sm_100", "sm_120", "compute_120"]


@contextmanager
def machine(name: str, capability: tuple[int, int], *, hip: str | None = None) -> Iterator[None]:
    """Simulate a node with the given GPUs and torch's wheels for CUDA 13."""
    with (
        mock.patch("threefold.runtime.processes.on_gpu", return_value=True),
        mock.patch.object(torch.cuda, "is_available", return_value=True),
        mock.patch.object(torch.cuda, "device_count", return_value=1),
        mock.patch.object(torch.cuda, "get_device_name", return_value=name),
        mock.patch.object(torch.cuda, "get_device_capability", return_value=capability),
        mock.patch.object(torch.cuda, "get_arch_list", return_value=CUDA_13),
        mock.patch.object(torch.version, "hip", hip),
    ):
        yield


def check(gpu: str | None) -> None:
    check_machine(LaunchEnvironment(), precision="fp16", compile=False, gpu=gpu)


@pytest.mark.parametrize(
    ("architecture", "capability", "runs"),
    [
        ("sm_80", (8, 0), True),
        ("sm_80", (8, 9), True),
        ("sm_86", (8, 0), False),
        ("sm_80", (9, 0), False),
        ("sm_90a", (9, 0), True),
        ("sm_100a", (10, 3), False),
        ("sm_100f", (10, 3), True),
        ("sm_120", (12, 0), True),
        ("compute_90", (12, 0), True),
        ("compute_120", (9, 0), False),
        ("gfx942", (9, 4), True),
    ],
)
def test_code_runs_on_later_gpus_of_its_generation(
    architecture: str, capability: tuple[int, int], runs: bool
) -> None:
    assert runs_on(architecture, capability) is runs


def test_current_gpus_are_accepted() -> None:
    for capability in ((7, 5), (8, 0), (8, 9), (9, 0), (10, 0), (12, 0), (13, 0)):
        check_architecture("a GPU", capability, CUDA_13)
    with machine("NVIDIA H100 80GB HBM3", (9, 0)):
        check("H100")
    check_architecture("a GPU", (7, 0), [])  # torch reports no architectures


def test_the_message_about_a_v100_names_the_torch_to_install() -> None:
    with (
        machine("Tesla V100-SXM2-32GB", (7, 0)),
        pytest.raises(UserError) as refusal,
    ):
        check("V100-32GB")
    message = str(refusal.value)
    assert message.startswith("Tesla V100-SXM2-32GB is sm_70, and torch ")
    assert "has code for sm_75, sm_80, sm_86, sm_90, sm_100, sm_120, compute_120 only" in message
    assert "https://download.pytorch.org/whl/cu126" in message


def test_the_message_about_an_older_gpu_names_its_architecture() -> None:
    with pytest.raises(UserError, match=r"sm_61.*TORCH_CUDA_ARCH_LIST=6\.1"):
        check_architecture("Tesla P40", (6, 1), CUDA_13)


def test_each_rank_checks_its_own_gpu() -> None:
    capabilities = [(9, 0), (7, 0)]
    with (
        machine("a GPU", (9, 0)),
        mock.patch.object(torch.cuda, "device_count", return_value=2),
        mock.patch.object(torch.cuda, "get_device_capability", capabilities.__getitem__),
    ):
        for local_rank in (0, 2):
            check_machine(LaunchEnvironment(local_rank=local_rank), precision="fp16", compile=False)
        for local_rank in (1, 3):
            with pytest.raises(UserError, match="a GPU is sm_70"):
                check_machine(
                    LaunchEnvironment(local_rank=local_rank), precision="fp16", compile=False
                )


def test_a_request_for_cuda_without_gpus_is_rejected() -> None:
    with (
        machine("a GPU", (9, 0)),
        mock.patch.object(torch.cuda, "is_available", return_value=False),
        mock.patch.object(torch.cuda, "device_count", return_value=0),
        pytest.raises(UserError, match=r"DS_ACCELERATOR = cuda, but torch .* finds no GPU"),
    ):
        check(None)


def test_rocm_is_rejected() -> None:
    with (
        machine("AMD Instinct MI300X", (9, 4), hip="7.1"),
        pytest.raises(UserError, match="built for ROCm, which is not supported"),
    ):
        check("MI300X")


def test_a_recipe_for_gpus_does_not_silently_train_on_the_cpu() -> None:
    check_gpus(None, on_gpu=False, cpu_is_chosen=False)  # a recipe without a cluster
    check_gpus("MI300X", on_gpu=False, cpu_is_chosen=True)
    check_gpus("cpu", on_gpu=False, cpu_is_chosen=False)
    with pytest.raises(UserError, match=r'cluster\.gpu = "MI300X", .*"cpu".*DS_ACCELERATOR=cpu'):
        check_gpus("MI300X", on_gpu=False, cpu_is_chosen=False)


@pytest.mark.parametrize(("recipe", "says"), [("gpt/350m", "cu126"), ("qwen3/14b", "ROCm")])
def test_recipes_for_unsupported_gpus_say_so_and_can_be_planned(recipe: str, says: str) -> None:
    file = REPOSITORY / "recipes" / f"{recipe}.toml"
    comments = [line for line in file.read_text().splitlines() if line.startswith("#")]
    assert says in "\n".join(comments)
    assert load_gpu(load_recipe(file).cluster.gpu).memory_gib > 0


@pytest.mark.parametrize(
    ("file", "environment", "expected"),
    [
        (None, {}, False),
        ("dev/nvidia0", {}, True),
        ("dev/dxg", {}, True),
        ("dev/kfd", {"CUDA_VISIBLE_DEVICES": "0"}, True),
        ("dev/nvidia0", {"CUDA_VISIBLE_DEVICES": ""}, False),
        ("dev/nvidia0", {"CUDA_VISIBLE_DEVICES": "-1"}, False),
        ("dev/nvidia0", {"DS_ACCELERATOR": "cpu"}, False),
        (None, {"DS_ACCELERATOR": "cuda"}, True),
    ],
)
def test_a_gpu_is_seen_without_torch(
    file: str | None, environment: dict[str, str], expected: bool, tmp_path: Path
) -> None:
    (tmp_path / "dev").mkdir()
    if file:
        (tmp_path / file).touch()
    assert machine_has_gpu(environment, tmp_path) is expected
    assert device_names_of_machine(tmp_path) == []


def test_the_names_of_gpus_are_read_without_torch(tmp_path: Path) -> None:
    for bus in ("0000:01:00.0", "0000:02:00.0"):
        file = tmp_path / "proc/driver/nvidia/gpus" / bus / "information"
        file.parent.mkdir(parents=True)
        file.write_text("Model: \t\t NVIDIA A100-SXM4-80GB\nIRQ:   \t\t 77\n")
    assert device_names_of_machine(tmp_path) == ["NVIDIA A100-SXM4-80GB"] * 2
