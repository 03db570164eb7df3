"""Environment variables that torch reads only once, at the latest when the process group starts.

They must be set before torch is imported, so this file does not import torch. Variables that the
user has set are not changed.
"""

import os
from collections.abc import Mapping, MutableMapping

from models.errors import UserError
from threefold.config.parallel_dims import LaunchEnvironment

ACCELERATORS = ("cuda", "cpu")
# The names that torch reads, the one that this program sets first.
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
    """
    _set_first(environment, ALLOCATOR_VARIABLES, "expandable_segments:True")
    environment.setdefault("TORCHINDUCTOR_DETERMINISTIC", "1")
    if deterministic:
        environment.setdefault(WORKSPACE, DETERMINISTIC_WORKSPACES[0])
    if pipelined:
        for name, value in PIPELINE_VARIABLES.items():
            environment.setdefault(name, value)


def set_flight_recorder(environment: MutableMapping[str, str], *, on_gpu: bool) -> None:
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
    _set_first(environment, RECORDER_VARIABLES, str(RECORDED_COLLECTIVES if on_gpu else 0))


def _set_first(environment: MutableMapping[str, str], names: tuple[str, ...], value: str) -> None:
    """Set a variable by the first of its names, unless the user has set it by any of them."""
    if not any(name in environment for name in names):
        environment[names[0]] = value


def set_thread_count(environment: MutableMapping[str, str], world: LaunchEnvironment) -> None:
    """Set OMP_NUM_THREADS to the rank's share of the cores, unless the user has set it.

    By default, every rank would start as many threads as there are cores. `torchrun` sets one
    thread per rank, and leaves cores idle if there are fewer ranks than cores.
    """
    environment.setdefault("OMP_NUM_THREADS", str(cores_of_rank(environment, world)))


def check_address(environment: Mapping[str, str], world: LaunchEnvironment) -> None:
    """Check that several ranks know where they meet.

    Raises:
        UserError: MASTER_ADDR is missing.
    """
    if world.size > 1 and not environment.get("MASTER_ADDR"):
        raise UserError(
            "MASTER_ADDR is not set, so the ranks cannot meet; use the name of the first node"
        )


def cores_of_rank(environment: Mapping[str, str], world: LaunchEnvironment) -> int:
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
