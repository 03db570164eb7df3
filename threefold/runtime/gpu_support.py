"""Check that the installed torch has kernels for this machine's GPUs."""

import re
from collections.abc import Sequence

import torch

from models.errors import UserError
from threefold.gpus.datasheet import is_cpu

VOLTA = (7, 0)  # V100; not supported by CUDA 13, with which the pinned wheels are built
ARCHITECTURE = re.compile(r"(?P<kind>sm|compute)_(?P<major>\d+)(?P<minor>\d)(?P<suffix>[af]?)")


def check_gpus(
    wanted: str | None, *, on_gpu: bool, cpu_is_chosen: bool, local_rank: int = 0
) -> None:
    """Check that the installed torch supports the GPU of a rank.

    Without this check a V100 would fail at its first kernel, and a node with AMD GPUs or with a
    broken driver would silently train on its CPUs.

    Args:
        wanted: the recipe's `cluster.gpu`; None if the recipe names no cluster
        on_gpu: True if DeepSpeed uses GPUs, because it found some or because the user has set
            DS_ACCELERATOR=cuda
        cpu_is_chosen: True if the user has set DS_ACCELERATOR=cpu
        local_rank: number of the rank within this node; visible GPUs are assigned round robin

    Raises:
        UserError: torch finds no GPU although the recipe or the user names one, or torch has no
            kernels for this rank's GPU.
    """
    if on_gpu and torch.version.hip:
        raise UserError(
            f"torch {torch.__version__} is built for ROCm, which is not supported: training has "
            f"never been tested on AMD GPUs. Use NVIDIA GPUs, or DS_ACCELERATOR=cpu; plan.py "
            f"still plans for the MI300X"
        )
    if on_gpu and torch.cuda.is_available():
        device = local_rank % torch.cuda.device_count()  # as `start_processes` chooses it
        name, capability = (
            torch.cuda.get_device_name(device),
            torch.cuda.get_device_capability(device),
        )
        check_architecture(name, capability, torch.cuda.get_arch_list())
    elif on_gpu or (wanted and not is_cpu(wanted) and not cpu_is_chosen):
        asked = "DS_ACCELERATOR = cuda" if on_gpu else f'cluster.gpu = "{wanted}"'
        raise UserError(
            f"{asked}, but torch {torch.__version__} finds no GPU on this node. "
            f"NVIDIA GPUs need a driver (see nvidia-smi) and torch's CUDA wheels; AMD GPUs are not "
            f'supported. To train on CPUs, use cluster.gpu = "cpu", or set DS_ACCELERATOR=cpu on '
            f"every node (deepspeed passes it on from a file .deepspeed_env)"
        )


def check_architecture(name: str, capability: tuple[int, int], built_for: Sequence[str]) -> None:
    """Check that torch was built for an architecture that runs on a GPU.

    Args:
        name: name of the GPU as the driver reports it
        capability: its compute capability, such as (9, 0)
        built_for: result of `torch.cuda.get_arch_list()`, such as "sm_90" and "compute_120"

    Raises:
        UserError: none of the architectures runs on the GPU.
    """
    if not built_for or any(runs_on(each, capability) for each in built_for):
        return
    own = "sm_{}{}".format(*capability)
    install = (
        "pip install torch==2.13.0 --index-url https://download.pytorch.org/whl/cu126 (CUDA 12.6 "
        "is the last with code for it), and use fp16 or fp32"
        if capability >= VOLTA and capability < (7, 5)
        else f"use another GPU, or build torch with TORCH_CUDA_ARCH_LIST={own[3:-1]}.{own[-1]}"
    )
    raise UserError(
        f"{name} is {own}, and torch {torch.__version__} has code for {', '.join(built_for)} only; "
        f"{install}"
    )


def runs_on(architecture: str, capability: tuple[int, int]) -> bool:
    """Return True if code for an architecture runs on a GPU.

    Binary code (sm_) runs on its own architecture and on later ones of the same generation; with
    the suffix "a" it runs only on its own. PTX (compute_) is compiled at load time for any later
    GPU.
    """
    found = ARCHITECTURE.fullmatch(architecture)
    if found is None:  # a build with other names for its targets cannot be checked
        return True
    built = int(found["major"]), int(found["minor"])
    if found["suffix"] == "a":
        return built == capability
    if found["kind"] == "compute" and not found["suffix"]:
        return built <= capability
    return built[0] == capability[0] and built <= capability
