"""Setup of a rank before the model is built: GPU support, device, memory, process groups."""

import contextlib
import ctypes
import errno
import io
import os
import pickle
import re
import resource
import shutil
import socket
import subprocess
import sysconfig
import tempfile
import warnings
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any, Literal, TypeVar

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator
from deepspeed.constants import default_pg_timeout

from models.errors import UserError
from models.parallel.collectives import all_gather_single, create_host_groups
from threefold.config.parallel_dims import LaunchEnvironment
from threefold.gpus.datasheet import is_cpu
from threefold.runtime.environment import (
    check_address,
    check_workspace,
    cores_of_rank,
    set_flight_recorder,
    set_torch_variables,
)
from threefold.runtime.exits import PortInUse
from threefold.runtime.launchers import free_port, launchers_of

# Check that the installed torch has kernels for this machine's GPUs.

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
    if not built_for or any(runs_on(built, capability) for built in built_for):
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
    match = ARCHITECTURE.fullmatch(architecture)
    if match is None:  # a build with other names for its targets cannot be checked
        return True
    built = int(match["major"]), int(match["minor"])
    if match["suffix"] == "a":
        return built == capability
    if match["kind"] == "compute" and not match["suffix"]:
        return built <= capability
    return built[0] == capability[0] and built <= capability


M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # of glibc's malloc.h
MAX_KEPT_BLOCK_BYTES = 32 * 2**20  # glibc's upper limit of the threshold
NO_TIMEOUT = timedelta(days=365)
T = TypeVar("T")
COLLECTIVE_TIMEOUT_MARGIN = timedelta(minutes=5)  # on top of the patience of supervision


def on_gpu() -> bool:
    """Return True if DeepSpeed runs on GPUs here."""
    return get_accelerator().device_name() == "cuda"


def driver_name() -> str:
    """Return the driver's name of this rank's GPU; "cpu" on a CPU."""
    return torch.cuda.get_device_name() if on_gpu() else "cpu"


def should_compile(setting: bool | Literal["auto"]) -> bool:
    """Return True if kernels are to be compiled; collective, and the same on all ranks.

    With training.compile = "auto", the ranks compile if they run on GPUs and every rank has a
    compiler. If only some ranks compiled, the replicas of a weight would diverge.
    """
    here = would_compile(setting)
    if setting != "auto" or not on_gpu():
        return here
    return all(gathered(here))


def would_compile(setting: bool | Literal["auto"]) -> bool:
    """Return True if this rank would compile kernels, regardless of the other ranks."""
    return setting is True or (setting == "auto" and on_gpu() and has_compiler())


def has_compiler() -> bool:
    """Return True if this machine has a compiler, and on GPUs the Python headers for Triton."""
    headers = Path(sysconfig.get_paths()["include"]) / "Python.h"
    try:
        subprocess.run([compiler(), "--version"], capture_output=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return False
    return headers.exists() or not on_gpu()


def compiler() -> str:
    """Return the command of the compiler that torch.compile uses."""
    if not on_gpu():
        return os.environ.get("CXX", "g++")
    return os.environ.get("CC") or next(filter(shutil.which, ("gcc", "clang")), "gcc")


def check_machine(
    world: LaunchEnvironment,
    *,
    precision: str,
    compile: bool | Literal["auto"],
    deterministic: bool = False,
    gpu: str | None = None,
) -> None:
    """Check that this machine and the launcher's settings fit the recipe.

    Args:
        compile: the recipe's `training.compile`
        deterministic: the recipe's `training.deterministic`

    Raises:
        UserError: torch cannot use this machine's GPUs, or this machine cannot run the precision,
            compile kernels or store compiled kernels, or MASTER_ADDR is missing.
    """
    check_gpus(
        gpu,
        on_gpu=on_gpu(),
        cpu_is_chosen=os.environ.get("DS_ACCELERATOR") == "cpu",
        local_rank=world.local_rank,
    )
    if deterministic:
        check_workspace(os.environ)
    if precision == "fp16" and not on_gpu():
        raise UserError(
            'deepspeed: fp16 needs a GPU and none was found; use deepspeed = "ds_configs/'
            'zero1_fp32.json" or "ds_configs/zero1_bf16.json"'
        )
    if compile is True and not has_compiler():
        raise UserError(
            f"training.compile = true needs a working compiler (on GPUs also Python's headers), "
            f'and "{compiler()}" does not work here; install one, name it in CXX (on GPUs CC), or '
            f"use training.compile = false"
        )
    if would_compile(compile):
        check_compile_cache()
    check_address(os.environ, world)
    check_port(os.environ.get("MASTER_PORT"))


def check_port(port: str | None) -> None:
    """Check that MASTER_PORT is a TCP port, before torch reads it.

    Raises:
        UserError: the value is not a TCP port.
    """
    if port is None or (re.fullmatch("[0-9]{1,5}", port) and int(port) < 2**16):
        return
    raise UserError(f'MASTER_PORT = "{port}" is not in 0 .. 65535; use 29500, or unset it')


def check_compile_cache() -> None:
    """Check that torch can write compiled kernels to TORCHINDUCTOR_CACHE_DIR, if that is set.

    Raises:
        UserError: the folder cannot be written.
    """
    folder = os.environ.get("TORCHINDUCTOR_CACHE_DIR")
    if folder is None:
        return
    try:
        os.makedirs(folder, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as problem:
        raise UserError(
            f"TORCHINDUCTOR_CACHE_DIR = {folder}: compiled kernels cannot be written there "
            f"({problem.strerror}); use a writable folder on this node's disk, or "
            f"training.compile = false"
        ) from None


def start_processes(
    world: LaunchEnvironment,
    *,
    deterministic: bool = False,
    patience_seconds: int | None = 0,
    keeps_memory: bool = True,
) -> None:
    """Join the process group; a single process does not need MASTER_ADDR.

    Args:
        deterministic: use only algorithms whose results are reproducible bit for bit
        patience_seconds: time that supervision waits for progress; None for no limit
        keeps_memory: on CPUs, reuse freed memory as `keep_memory` does

    Raises:
        PortInUse: another process listens on MASTER_PORT on the node of rank 0.
    """
    set_torch_variables(os.environ, deterministic=deterministic)
    set_flight_recorder(os.environ, on_gpu=on_gpu())
    if deterministic:
        use_deterministic_algorithms()
    # DeepSpeed calls functions of torch.distributed under deprecated names.
    warnings.filterwarnings("ignore", message="`torch.distributed", category=FutureWarning)
    # Under Slurm, a task may see only its own GPU.
    local_rank = world.local_rank % torch.cuda.device_count() if on_gpu() else world.local_rank
    os.environ |= {
        "RANK": str(world.rank),
        "WORLD_SIZE": str(world.size),
        "LOCAL_RANK": str(local_rank),
        "MASTER_ADDR": os.environ.get("MASTER_ADDR", "127.0.0.1"),
        "MASTER_PORT": os.environ.get("MASTER_PORT", "29500" if world.size > 1 else "0"),
    }
    # gloo connects every rank of a group with every other one, which takes many descriptors.
    _, hard_limit = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard_limit, hard_limit))
    # Building DeepSpeed's shared-memory operations needs a compiler and a minute, and their
    # all-reduce supports only one group. Reading this table would probe each operation.
    deepspeed.ops.__compatible_ops__ = {}
    # torch reads OMP_NUM_THREADS when it is imported, which a standby process has done before the
    # variable was set.
    threads = os.environ.get("OMP_NUM_THREADS", "")
    if threads.isdecimal() and int(threads):
        torch.set_num_threads(int(threads))
    elif "OMP_NUM_THREADS" not in os.environ and not on_gpu():
        torch.set_num_threads(cores_of_rank(os.environ, world))
    if on_gpu():
        torch.cuda.set_device(local_rank)
        # Otherwise cuBLAS may round partial sums to 16 bits, depending on the layout's shapes.
        torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
        torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction = False
    elif keeps_memory:
        keep_memory()
    try:
        with quiet():
            deepspeed.init_distributed(dist_backend="nccl" if on_gpu() else "gloo", verbose=False)
    except dist.DistNetworkError as error:
        if errno.errorcode[errno.EADDRINUSE] not in str(error):
            raise
        raise PortInUse(
            f"MASTER_PORT = {os.environ['MASTER_PORT']} is used by another process on this node, "
            f"perhaps by another run; {port_advice(free_port())}"
        ) from None
    limit, c10d = collective_timeout(patience_seconds), dist.distributed_c10d
    c10d._set_pg_timeout(limit)
    # Also the limit of groups that are created later without one, such as DeepSpeed's.
    c10d.default_pg_timeout = c10d.default_pg_nccl_timeout = limit


def port_advice(port: int) -> str:
    """Return how the ranks meet at another port, which depends on their launcher.

    port: a free port
    """
    if launchers_of(os.getpid()):
        return f"use a free port: deepspeed --master_port {port}"
    if "SLURM_JOB_ID" in os.environ:
        return (
            f"slurm/pretrain.slurm uses another port when the job is requeued; if it is not "
            f"requeued, submit it again. In a script of your own, set MASTER_PORT={port}"
        )
    return f"use a free port: MASTER_PORT={port} in the environment"


def collective_timeout(patience_seconds: int | None) -> timedelta:
    """Return the time limit of collectives.

    Supervision must notice a hang first, because its message names the rank that is behind. The
    limit is therefore longer than the patience of supervision. The limit for joining the group
    remains DeepSpeed's 10 minutes. DEEPSPEED_TIMEOUT, in minutes, takes precedence.
    """
    if "DEEPSPEED_TIMEOUT" in os.environ:
        return default_pg_timeout
    if patience_seconds is None:
        return NO_TIMEOUT
    return max(default_pg_timeout, timedelta(seconds=patience_seconds) + COLLECTIVE_TIMEOUT_MARGIN)


def use_deterministic_algorithms() -> None:
    """Let torch use only deterministic algorithms, and raise an error where it has none.

    Attention then uses the deterministic backward pass of FlashAttention instead of cuDNN's, which
    adds with atomics. By default torch would also fill uninitialised memory. That is turned off,
    because no result depends on such memory and filling it takes time.
    """
    torch.use_deterministic_algorithms(True)
    # torch replaces this module with an object that has the property, which mypy cannot see.
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    torch.backends.cuda.enable_cudnn_sdp(False)


def keep_memory() -> None:
    """Let this process reuse the memory that it frees.

    By default glibc returns freed blocks to the kernel, which clears each page again when it is
    next touched. This takes up to 7 % of a step. Blocks above MAX_KEPT_BLOCK_BYTES are still
    returned, because not all of the holes that they leave would be filled. With another C library
    nothing changes. Huge pages are not used: they would save small models another 7 %, but where
    memory is fragmented they would cost other models a tenth of a step.
    """
    with contextlib.suppress(AttributeError, OSError):
        libc = ctypes.CDLL(None)
        libc.mallopt(M_MMAP_THRESHOLD, MAX_KEPT_BLOCK_BYTES)
        libc.mallopt(M_TRIM_THRESHOLD, -1)


def gathered(value: T, group: dist.ProcessGroup | None = None) -> list[T]:
    """Return the value of each rank of a group, by rank; None: all ranks. Collective."""
    # As torch's all_gather_object, which would wait for the device twice for each rank.
    device = "cuda" if dist.get_backend(group) == "nccl" else "cpu"
    own = torch.frombuffer(bytearray(pickle.dumps(value)), dtype=torch.uint8)
    sizes = torch.empty(dist.get_world_size(group), dtype=torch.int64, device=device)
    all_gather_single(sizes, torch.tensor([own.numel()], device=device), group=group)
    sizes = sizes.cpu()
    padded = torch.zeros(int(sizes.max()), dtype=torch.uint8)
    padded[: own.numel()] = own
    rows = torch.empty(len(sizes) * len(padded), dtype=torch.uint8, device=device)
    all_gather_single(rows, padded.to(device), group=group)
    everyones = zip(rows.cpu().view(len(sizes), -1), sizes.tolist(), strict=True)
    return [pickle.loads(row[:size].numpy().tobytes()) for row, size in everyones]


def threads_on_first_node() -> tuple[int, int, int]:
    """Return ranks, threads and cores of rank 0's node; collective.

    The threads are those of all its ranks, and the cores those that any of them may use.
    """
    everyones = gathered((socket.gethostname(), torch.get_num_threads(), os.sched_getaffinity(0)))
    ranks = [(threads, cores) for host, threads, cores in everyones if host == everyones[0][0]]
    cores = set().union(*(cores for _, cores in ranks))
    return len(ranks), sum(threads for threads, _ in ranks), len(cores)


def quiet() -> contextlib.AbstractContextManager:
    """Suppress standard output, where DeepSpeed prints progress; errors are not suppressed."""
    return contextlib.redirect_stdout(io.StringIO())


# Gather small objects on rank 0 and broadcast them, with few connections in host memory.
#
# gloo connects all ranks of a group with each other: in a group of 1,024 ranks, each would hold
# 1,023 connections. Here the ranks form a tree, and on each level of the tree a rank belongs to at
# most one group of at most FAN_OUT ranks.

FAN_OUT = 32  # maximum number of ranks in a group


def levels(ranks: int, fan_out: int) -> list[list[list[int]]]:
    """Return the groups of each level of the tree, from the leaves to the root.

    The first rank of a group also belongs to a group of the next level. The last level is a single
    group whose first rank is 0.
    """
    levels: list[list[list[int]]] = []
    left = list(range(ranks))
    while not levels or len(left) > 1:
        levels.append([left[first : first + fan_out] for first in range(0, len(left), fan_out)])
        left = [group[0] for group in levels[-1]]
    return levels


class RankTree:
    """The groups of this rank, from the leaves to the root; the constructor is collective.

    Args:
        timeout: time limit of each exchange within a group
        fan_out: maximum number of ranks in a group
    """

    def __init__(self, timeout: timedelta, *, fan_out: int = FAN_OUT):
        self.rank = dist.get_rank()
        self.groups: list[tuple[dist.ProcessGroup, list[int]]] = []
        for partition in levels(dist.get_world_size(), fan_out):
            group = create_host_groups(partition, timeout)
            if group is not None:
                members = next(ranks for ranks in partition if self.rank in ranks)
                self.groups.append((group, members))

    def gather(self, value: T) -> dict[int, T]:
        """Return the values of all ranks by rank on rank 0, and an empty dict on the others."""
        values = {self.rank: value}
        for group, members in self.groups:
            leader = members[0]
            parts: list[Any] | None = [None] * len(members) if self.rank == leader else None
            dist.gather_object(values, parts, dst=leader, group=group)
            values = {rank: own for part in parts or [] for rank, own in part.items()}
        return dict(sorted(values.items()))

    def broadcast(self, value: T) -> T:
        """Return rank 0's value on all ranks."""
        values = [value]
        for group, members in reversed(self.groups):
            dist.broadcast_object_list(values, src=members[0], group=group)
        return values[0]
