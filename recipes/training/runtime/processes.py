"""Setup of a rank before the model is built: device, memory, process group."""

import contextlib
import ctypes
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
from recipes.training.recipe.topology import World
from recipes.training.runtime.gpu_support import check_gpus
from recipes.training.runtime.torch_variables import check_workspace, set_torch_variables

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # of glibc's malloc.h
LARGEST_KEPT = 32 * 2**20  # bytes of a block; the most that glibc allows
NO_TIMEOUT = timedelta(days=365)
MARGIN = timedelta(minutes=5)  # of the time limit of collectives over that of supervision


def on_gpu() -> bool:
    """Whether DeepSpeed runs on GPUs here."""
    return get_accelerator().device_name() == "cuda"


def should_compile(setting: bool | Literal["auto"]) -> bool:
    """Whether kernels are compiled: as training.compile says, "auto" on GPUs with a compiler.

    Collective: all ranks compute alike, or copies of a weight would drift apart.
    """
    here = would_compile(setting)
    if setting != "auto" or not on_gpu():
        return here
    found = [False] * dist.get_world_size()
    dist.all_gather_object(found, here)
    return all(found)


def would_compile(setting: bool | Literal["auto"]) -> bool:
    """What this rank would do by itself."""
    return setting is True or (setting == "auto" and on_gpu() and has_compiler())


def has_compiler() -> bool:
    """Whether torch.compile finds what it needs beside itself: on GPUs Triton wants C."""
    headers = Path(sysconfig.get_paths()["include"]) / "Python.h"
    try:
        subprocess.run([compiler(), "--version"], capture_output=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return False
    return headers.exists() or not on_gpu()


def compiler() -> str:
    """The compiler that torch.compile asks for."""
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
        world: this rank's place and the ranks of the launcher
        precision: "fp32", "bf16" or "fp16"
        compile: the recipe's `training.compile`
        deterministic: the recipe's `training.deterministic`
        gpu: the recipe's `cluster.gpu`, or None if it names no cluster

    Raises:
        UserError: torch cannot use this machine's GPUs, or this machine cannot run the precision,
            compile kernels or store compiled ones, or the launcher has not set the address.
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
            f'training.compile = true needs a compiler, and "{compiler()}" is none that works here '
            f"(on GPUs with Python's headers); install one, name it in CXX (on GPUs CC), or use "
            f"training.compile = false"
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
        UserError: it is not.
    """
    if port is None or (re.fullmatch("[0-9]{1,5}", port) and int(port) < 2**16):
        return
    raise UserError(f'MASTER_PORT = "{port}" is not in 0 .. 65535; use 29500, or unset it')


def check_compile_cache() -> None:
    """See that torch can write compiled kernels where it was told to.

    Raises:
        UserError: it cannot.
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
            f"({problem.strerror}); use a folder of this node's disk that you may write to, or "
            f"training.compile = false"
        ) from None


def start_processes(
    world: World, *, deterministic: bool = False, patience_seconds: int | None = 0
) -> None:
    """Join the process group; a single process needs no launcher's MASTER_ADDR.

    Args:
        world: this rank's place and the ranks of the launcher
        deterministic: use only algorithms whose results are reproducible bit for bit
        patience_seconds: how long supervision waits for progress; None: without limit
    """
    set_torch_variables(os.environ, deterministic=deterministic)
    if deterministic:
        use_deterministic_algorithms()
    # DeepSpeed calls what torch has renamed.
    warnings.filterwarnings("ignore", message="`torch.distributed", category=FutureWarning)
    # Under Slurm a task may see its own GPU only.
    local_rank = world.local_rank % torch.cuda.device_count() if on_gpu() else world.local_rank
    os.environ |= {
        "RANK": str(world.rank),
        "WORLD_SIZE": str(world.size),
        "LOCAL_RANK": str(local_rank),
        "MASTER_ADDR": os.environ.get("MASTER_ADDR", "127.0.0.1"),
        "MASTER_PORT": os.environ.get("MASTER_PORT", "29500" if world.size > 1 else "0"),
    }
    # The ranks of a process group that works on the CPU are all connected with each other.
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    # Its build needs a compiler and a minute, and its all-reduce knows one group only.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    if on_gpu():
        torch.cuda.set_device(local_rank)
    else:
        keep_memory()
        if "OMP_NUM_THREADS" not in os.environ:
            torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // world.local_size))
    with quiet():
        deepspeed.init_distributed(dist_backend="nccl" if on_gpu() else "gloo", verbose=False)
    dist.distributed_c10d._set_pg_timeout(collective_timeout(patience_seconds))


def collective_timeout(patience_seconds: int | None) -> timedelta:
    """Return the time limit of collectives in the default process group.

    Supervision must notice a hang first, because it names the rank that is behind. The limit is
    therefore longer than its patience. The limit for joining stays DeepSpeed's 10 minutes.
    DEEPSPEED_TIMEOUT, in minutes, takes precedence.
    """
    if "DEEPSPEED_TIMEOUT" in os.environ:
        return default_pg_timeout
    if patience_seconds is None:
        return NO_TIMEOUT
    return max(default_pg_timeout, timedelta(seconds=patience_seconds) + MARGIN)


def use_deterministic_algorithms() -> None:
    """Let torch choose algorithms with reproducible results, and raise where it has none.

    Attention then uses the deterministic backward pass of FlashAttention instead of cuDNN's, which
    adds with atomics. torch would also fill uninitialised memory. That is turned off: no result
    depends on such memory, and filling it takes time.
    """
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = False
    torch.backends.cuda.enable_cudnn_sdp(False)


def keep_memory() -> None:
    """Let this process reuse the memory that it frees.

    glibc gives blocks back to the kernel, which clears each page again when it is next touched: up
    to 7 % of a step. Very large ones still go back, since the holes they leave would not all be
    filled. With another C library nothing is changed. Huge pages would save small models as much
    again, and cost others a tenth of a step where memory is fragmented.
    """
    with contextlib.suppress(AttributeError, OSError):
        libc = ctypes.CDLL(None)
        libc.mallopt(M_MMAP_THRESHOLD, LARGEST_KEPT)
        libc.mallopt(M_TRIM_THRESHOLD, -1)


def hosts_of_ranks() -> list[str]:
    """The names of the nodes that all ranks run on, by rank; collective."""
    hosts = [""] * dist.get_world_size()
    dist.all_gather_object(hosts, socket.gethostname())
    return hosts


def quiet() -> contextlib.AbstractContextManager:
    """Swallow what DeepSpeed prints while it builds; warnings and errors do not come that way."""
    return contextlib.redirect_stdout(io.StringIO())
