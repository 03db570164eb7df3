"""Setup of a rank before the model is built: device, memory, process group."""

import contextlib
import ctypes
import errno
import io
import os
import re
import resource
import shutil
import socket
import subprocess
import sysconfig
import tempfile
import warnings
from datetime import timedelta
from pathlib import Path
from typing import Literal

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator
from deepspeed.constants import default_pg_timeout

from models.errors import UserError
from threefold.config.parallel_dims import World
from threefold.runtime.environment import (
    check_workspace,
    cores_of_rank,
    set_flight_recorder,
    set_torch_variables,
)
from threefold.runtime.exits import PortInUse
from threefold.runtime.gpu_support import check_gpus
from threefold.runtime.launchers import free_port, launchers_of

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # of glibc's malloc.h
MAX_KEPT_BLOCK_BYTES = 32 * 2**20  # glibc's upper limit of the threshold
NO_TIMEOUT = timedelta(days=365)
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
    found = [False] * dist.get_world_size()
    dist.all_gather_object(found, here)
    return all(found)


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
    world: World,
    *,
    precision: str,
    compile: bool | Literal["auto"],
    deterministic: bool = False,
    gpu: str | None = None,
) -> None:
    """Check that this machine and the launcher's settings fit the recipe.

    Args:
        world: rank and number of ranks, as set by the launcher
        precision: "fp32", "bf16" or "fp16"
        compile: the recipe's `training.compile`
        deterministic: the recipe's `training.deterministic`
        gpu: the recipe's `cluster.gpu`, or None if it names no cluster

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
    if world.size > 1 and not os.environ.get("MASTER_ADDR"):
        raise UserError(
            "MASTER_ADDR is not set, so the ranks cannot meet; use the name of the first node"
        )
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
    world: World,
    *,
    deterministic: bool = False,
    patience_seconds: int | None = 0,
    keeps_memory: bool = True,
) -> None:
    """Join the process group; a single process does not need MASTER_ADDR.

    Args:
        world: rank and number of ranks, as set by the launcher
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
    if on_gpu():
        torch.cuda.set_device(local_rank)
    else:
        if keeps_memory:
            keep_memory()
        if "OMP_NUM_THREADS" not in os.environ:
            torch.set_num_threads(cores_of_rank(os.environ, world))
    try:
        with quiet():
            deepspeed.init_distributed(dist_backend="nccl" if on_gpu() else "gloo", verbose=False)
    except dist.DistNetworkError as error:
        if errno.errorcode[errno.EADDRINUSE] not in str(error):
            raise
        raise PortInUse(
            f"MASTER_PORT = {os.environ['MASTER_PORT']} is used by another process on this node, "
            f"perhaps by another run; use a free port: {port_option(free_port())}"
        ) from None
    dist.distributed_c10d._set_pg_timeout(collective_timeout(patience_seconds))


def port_option(port: int) -> str:
    """Return the setting that makes the ranks meet at a port, as their launcher needs it."""
    if launchers_of(os.getpid()):
        return f"deepspeed --master_port {port}"
    return f"MASTER_PORT={port} in the environment"


def collective_timeout(patience_seconds: int | None) -> timedelta:
    """Return the time limit of collectives in the default process group.

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


def hosts_of_ranks() -> list[str]:
    """Return the name of each rank's node, by rank; collective."""
    hosts = [""] * dist.get_world_size()
    dist.all_gather_object(hosts, socket.gethostname())
    return hosts


def threads_on_first_node() -> tuple[int, int, int]:
    """Return ranks, threads and cores of rank 0's node; collective.

    The threads are those of all its ranks, and the cores those that any of them may use.
    """
    mine = (socket.gethostname(), torch.get_num_threads(), os.sched_getaffinity(0))
    everyones = [mine] * dist.get_world_size()
    dist.all_gather_object(everyones, mine)
    ranks = [(threads, cores) for host, threads, cores in everyones if host == everyones[0][0]]
    cores = set().union(*(cores for _, cores in ranks))
    return len(ranks), sum(threads for threads, _ in ranks), len(cores)


def quiet() -> contextlib.AbstractContextManager:
    """Suppress standard output, where DeepSpeed prints progress; errors are not suppressed."""
    return contextlib.redirect_stdout(io.StringIO())
