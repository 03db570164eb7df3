"""Start of a phase that needs another engine: every rank replaces itself with a new process.

A phase may change the sequence length, the size of micro-batches or the layout, on which the
process groups, the kernels and the engine depend. The run saves a checkpoint, and each rank
calls `execve` with its own command. The process keeps its PID, so its launcher notices nothing. The
new program resumes from the checkpoint as after any other interruption. No memory, group or
compiled kernel of the earlier engine is left.

- The ranks meet at another port, which rank 0 chooses. The store at the earlier port may still hold
  the keys of the earlier process group (torchrun's store lives as long as torchrun).
- All descriptors are closed by `execve`, except for the standard streams and the lock of the run
  folder, which therefore stays locked.
- `--resume` is dropped, so that the default `auto` applies. An explicit `--resume` would begin
  another branch.
"""

import fcntl
import os
import sys
import time
from collections.abc import Mapping, Sequence
from typing import NoReturn

import torch.distributed as dist

from threefold.config.sections import REPOSITORY
from threefold.run_folder.folder import RunFolder
from threefold.runtime.launchers import free_port
from threefold.runtime.output import finish_output

AGENT_STORE = "TORCHELASTIC_USE_AGENT_STORE"  # set by torchrun
SECONDS_FOR_READER = 30.0  # maximum wait until the reader of the output has taken all of it


def replace_process(folder: RunFolder, environment: Mapping[str, str]) -> NoReturn:
    """Replace this rank with a new process that resumes the run; collective.

    Args:
        folder: the run folder, whose lock the new process takes over
        environment: the environment variables that the launcher has given to this process
    """
    started = time.monotonic()
    variables = dict(environment)
    if dist.get_world_size() > 1:
        port = [free_port() if dist.get_rank() == 0 else 0]
        dist.broadcast_object_list(port)
        variables["MASTER_PORT"] = str(port[0])
    if AGENT_STORE in variables:
        variables[AGENT_STORE] = "False"  # rank 0 holds the store at the new port
    dist.barrier()
    dist.destroy_process_group()
    lock = folder.lock_descriptor
    command = command_of(sys.argv[1:], started, lock)
    finish_output(SECONDS_FOR_READER)
    for name in os.listdir("/proc/self/fd"):
        descriptor = int(name)
        if descriptor > 2:
            _set_inheritable(descriptor, inheritable=descriptor == lock)
    os.execve(command[0], command, variables)


def command_of(arguments: Sequence[str], started: float, lock: int | None) -> list[str]:
    """Return the command that resumes the run of this process.

    Args:
        arguments: the options of this process
        started: time.monotonic() at the beginning of the replacement, in seconds
        lock: the descriptor of the run folder's lock; None if this process does not hold it
    """
    kept: list[str] = []
    words = iter(arguments)
    for word in words:
        if word in ("--resume", "--resume-once", "--continued-at", "--lock"):
            next(words, None)
        elif not word.startswith(("--resume=", "--resume-once=", "--continued-at=", "--lock=")):
            kept.append(word)
    holds = [] if lock is None else [f"--lock={lock}"]
    script = str(REPOSITORY / "recipes" / "pretrain.py")
    return [sys.executable, script, *kept, f"--continued-at={started!r}", *holds]


def _set_inheritable(descriptor: int, *, inheritable: bool) -> None:
    try:
        flags = fcntl.fcntl(descriptor, fcntl.F_GETFD)
        without = flags & ~fcntl.FD_CLOEXEC
        fcntl.fcntl(descriptor, fcntl.F_SETFD, without if inheritable else flags | fcntl.FD_CLOEXEC)
    except OSError:  # the descriptor of the listing itself, which is closed
        return
