"""Environment variables that torch reads only once, and what the launcher of a rank sets.

They must be set before torch is imported, so this file does not import torch. Variables that the
user has set are not changed.
"""

import contextlib
import os
import random
import signal
import socket
import time
from collections.abc import Mapping, MutableMapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from models.errors import UserError
from threefold.config.parallel_dims import World

RENAMED_IN = (2, 9)  # version of torch that renamed the allocator's and the recorder's variables
ACCELERATORS = ("cuda", "cpu")
ALLOCATOR_VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF")
RECORDER_VARIABLES = ("TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE")
RECORDED_COLLECTIVES = 2000  # torch's own default from 2.13 on
WORKSPACE = "CUBLAS_WORKSPACE_CONFIG"
DETERMINISTIC_WORKSPACES = (":4096:8", ":16:8")  # the values that cuBLAS documents
PIPELINE_VARIABLES = {
    # Loading a kernel at its first use waits for all streams, including a posted receive, whose
    # message may depend on that very kernel.
    "CUDA_MODULE_LOADING": "EAGER",
    # Streams share the hardware queues: with the default of 8, a transfer that waits for its peer
    # can hold up kernels of other streams that were launched after it. 32 is the maximum.
    "CUDA_DEVICE_MAX_CONNECTIONS": "32",
    # Otherwise torch warns on every rank that the sends and receives of a group are serialized.
    # That is intended: each ordered pair of stages has a group of its own.
    "TORCH_NCCL_SHOW_EAGER_INIT_P2P_SERIALIZATION_WARNING": "false",
}


def set_torch_variables(
    environment: MutableMapping[str, str],
    *,
    deterministic: bool = False,
    pipelined: bool = False,
    torch_version: str | None = None,
) -> None:
    """Set the environment variables of torch that the user has not set.

    - The CUDA allocator grows its segments instead of adding new ones. Activations of different
      sizes then leave no unusable gaps, and `cudaFree`, which waits for the whole device, is rarely
      needed.
    - Inductor chooses kernels without timing them. Each tensor rank computes the gradients of
      replicated weights itself; if each chose kernels by its own timings, the kernels might round
      differently, and the replicas would diverge.
    - Deterministic runs: cuBLAS uses a workspace of fixed size.
    - Pipelined runs: kernels are loaded before the first step, and streams do not share queues.

    Args:
        environment: `os.environ`
        deterministic: the recipe's `training.deterministic`
        pipelined: whether the layout has more than one pipeline stage
        torch_version: such as "2.13.0+cu130"; None for the version of the installed torch
    """
    _set_renamed(environment, ALLOCATOR_VARIABLES, "expandable_segments:True", torch_version)
    environment.setdefault("TORCHINDUCTOR_DETERMINISTIC", "1")
    if deterministic:
        environment.setdefault(WORKSPACE, DETERMINISTIC_WORKSPACES[0])
    if pipelined:
        for name, value in PIPELINE_VARIABLES.items():
            environment.setdefault(name, value)


def set_flight_recorder(
    environment: MutableMapping[str, str], *, on_gpu: bool, torch_version: str | None = None
) -> None:
    """Set the number of collectives that torch's flight recorder keeps, unless the user has set it.

    torch reads the number when the first process group starts.

    On GPUs, hang reports need the recorder: NCCL runs collectives in the background, so a rank's
    Python stack shows where it waits for the device, and seldom the collective that does not end.

    On CPUs the recorder is off. gloo's callers wait inside the collective, so the stacks in the
    hang report already name it. Each record holds a Python traceback on the heap, between the
    activations of the step; the traceback keeps the free blocks on its two sides from being merged,
    so the heap fragments and grows (benchmarks/memory_growth.py). On a GPU the activations are not
    on this heap.
    """
    size = RECORDED_COLLECTIVES if on_gpu else 0
    _set_renamed(environment, RECORDER_VARIABLES, str(size), torch_version)


def _set_renamed(
    environment: MutableMapping[str, str],
    names: tuple[str, ...],
    value: str,
    torch_version: str | None,
) -> None:
    """Set a variable by the name of torch's version, unless the user has set it by any name.

    names: the name from RENAMED_IN on, the name before, and other names
    """
    release = torch_version or _installed_torch()
    is_new = release is None or tuple(map(int, release.split(".")[:2])) >= RENAMED_IN
    if not any(name in environment for name in names):
        environment[names[0 if is_new else 1]] = value


def set_thread_count(environment: MutableMapping[str, str], world: World) -> None:
    """Set OMP_NUM_THREADS to the rank's share of the cores, unless the user has set it.

    By default, every rank would start as many threads as there are cores. `torchrun` sets one
    thread per rank, and leaves cores idle if there are fewer ranks than cores.

    environment: `os.environ`
    """
    environment.setdefault("OMP_NUM_THREADS", str(cores_of_rank(environment, world)))


def cores_of_rank(environment: Mapping[str, str], world: World) -> int:
    """Return the number of cores for the threads of a rank.

    The ranks of a node divide the cores that this process may use. That is already done if Slurm
    has started a task per rank: its --cpus-per-task is the share. Without it, Slurm may have bound
    the task to fewer cores than the job has on this node, which are the share then. Slurm has not
    divided the cores if its tasks are the agents of launch.py, each of which starts many ranks.
    """
    cores = len(os.sched_getaffinity(0))
    if environment.get("SLURM_NTASKS") == str(world.size):
        per_task, on_node = (
            int(text) if (text := environment.get(name, "")).isdecimal() else 0
            for name in ("SLURM_CPUS_PER_TASK", "SLURM_CPUS_ON_NODE")
        )
        if per_task or cores < on_node:
            return min(cores, per_task or cores)
    return max(1, cores // world.local_size)


def _installed_torch() -> str | None:
    """Return the version of torch; None for a build in place, which has no metadata."""
    try:
        return version("torch")
    except PackageNotFoundError:
        return None


def check_accelerator(environment: MutableMapping[str, str]) -> None:
    """Check DS_ACCELERATOR, because DeepSpeed would raise a plain ValueError.

    Raises:
        UserError: the device is not supported.
    """
    chosen = environment.get("DS_ACCELERATOR")
    if chosen not in (None, *ACCELERATORS):
        raise UserError(
            f'DS_ACCELERATOR = "{chosen}" is not supported; use {" or ".join(ACCELERATORS)}, or '
            f"unset it"
        )


def check_workspace(environment: MutableMapping[str, str]) -> None:
    """Check that the user's cuBLAS workspace makes cuBLAS deterministic.

    Raises:
        UserError: the results of the workspace differ from run to run.
    """
    workspace = environment.get(WORKSPACE)
    if workspace not in (None, *DETERMINISTIC_WORKSPACES):
        raise UserError(
            f"training.deterministic = true: with {WORKSPACE} = {workspace} the matmuls of cuBLAS "
            f"differ from run to run; unset it, or use {DETERMINISTIC_WORKSPACES[0]}"
        )


# The launchers of a rank: its ancestor processes, their ages and states, and ports for ranks.

LAUNCHER_MODULES = {
    "deepspeed.launcher.launch",
    "deepspeed.launcher.runner",
    "torch.distributed.run",
}
NODE_AGENT = "node_agent.py"  # of launch.py
LAUNCHER_NAMES = {"deepspeed", "torchrun", NODE_AGENT}
STATE, PARENT, START = 0, 1, 19  # fields of /proc/PID/stat after the name, see proc_pid_stat(5)


class Process:
    """A process, distinguished by its start time from a later process with the same PID.

    Raises:
        OSError: the process does not exist.
    """

    def __init__(self, pid: int):
        self.pid = pid
        self._started = _stat(pid)[START]

    def state(self) -> str:
        """Return the process's state, "T" if a signal has stopped it, or "" if it is gone."""
        try:
            fields = _stat(self.pid)
        except OSError:
            return ""
        return "" if fields[STATE] in "ZX" or fields[START] != self._started else fields[STATE]

    def kill(self) -> bool:
        """End the process with SIGKILL; return False if it was gone before.

        A pidfd (Linux 5.3) always refers to the same process, so the signal goes to the process
        that was found alive. Without pidfds, there is a small chance that the PID is reused between
        the check and the signal.
        """
        try:
            descriptor = os.pidfd_open(self.pid)
        except ProcessLookupError:
            return False
        except (AttributeError, OSError):  # an older kernel, or a container that forbids it
            descriptor = None
        try:
            if not self.state():
                return False
            if descriptor is None:
                os.kill(self.pid, signal.SIGKILL)
            else:
                signal.pidfd_send_signal(descriptor, signal.SIGKILL)
        except ProcessLookupError:
            return False
        finally:
            if descriptor is not None:
                os.close(descriptor)
        return True


def launchers_of(pid: int) -> list[int]:
    """Return the PIDs of the launchers among a process's ancestors, nearest first."""
    found = []
    with contextlib.suppress(OSError):  # an ancestor has just ended
        while pid > 1:
            pid = int(_stat(pid)[PARENT])
            if not is_launcher(Path(f"/proc/{pid}/cmdline")):
                break
            found.append(pid)
    return found


def is_launcher(command_line: Path) -> bool:
    """Return True if a process is `deepspeed`, `torchrun`, or the launcher of one node.

    Args:
        command_line: the file /proc/PID/cmdline of the process
    """
    words = _words(command_line)
    return bool(LAUNCHER_MODULES.intersection(words)) or any(
        Path(word).name in LAUNCHER_NAMES for word in words[:2]
    )


def is_node_agent(pid: int) -> bool:
    """Return True if a process is the agent of launch.py on this node."""
    return any(Path(word).name == NODE_AGENT for word in _words(Path(f"/proc/{pid}/cmdline"))[:2])


def _words(command_line: Path) -> list[str]:
    """Return the first words of a command line; its options follow."""
    if not command_line.exists():
        return []
    return command_line.read_bytes().decode(errors="replace").split("\0")[:8]


def age_seconds(pid: int) -> float:
    """Return the age of a process, to a hundredth of a second.

    Raises:
        OSError: the process has ended.
    """
    started = int(_stat(pid)[START]) / os.sysconf("SC_CLK_TCK")  # after the machine's boot
    return time.clock_gettime(time.CLOCK_BOOTTIME) - started


def start_ticks(pid: int) -> int | None:
    """Return when a process started, in clock ticks since boot; None if it has ended."""
    try:
        fields = _stat(pid)
    except OSError:
        return None
    return None if fields[STATE] in "ZX" else int(fields[START])


def free_port() -> int:
    """Return an unused TCP port of this machine."""
    while True:
        port = random_port()
        with contextlib.suppress(OSError), socket.socket() as listener:
            listener.bind(("", port))
            return port


def random_port() -> int:
    """Return a random TCP port, which may be in use.

    It is below the range from which the system assigns ports to connections, because such a port
    may be taken a moment later on a busy machine.
    """
    return random.SystemRandom().randrange(10_000, 32_000)


def _stat(pid: int) -> list[str]:
    return (
        Path(f"/proc/{pid}/stat")
        .read_text(encoding="utf-8", errors="replace")
        .rpartition(")")[2]
        .split()
    )
