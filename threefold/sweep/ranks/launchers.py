"""Launchers that start the ranks of a world: on this machine, with `deepspeed` or with `srun`."""

import contextlib
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from models.errors import UserError, reason_of
from threefold.launch.hosts import read_hostfile
from threefold.prove.ranks import rank_variables
from threefold.runtime.launchers import free_port, random_port
from threefold.sweep.ranks.protocol import WorldFiles
from threefold.sweep.trial import WorldKind

SECONDS_TO_TERMINATE = 10.0  # for a launcher to end its processes on other nodes
# Run a command that the kernel kills when its parent process ends, for whatever reason. The
# setting (PR_SET_PDEATHSIG) survives `exec`.
DIES_WITH_PARENT = """
import ctypes, os, sys
ctypes.CDLL(None).prctl(1, 9)
if os.getppid() == int(sys.argv[1]):  # otherwise the parent has ended before the call
    os.execvp(sys.argv[2], sys.argv[2:])
"""


def killed_with_parent(command: Sequence[str]) -> list[str]:
    """Wrap a command so that the kernel kills it when this process ends."""
    return [sys.executable, "-SEc", DIES_WITH_PARENT, str(os.getpid()), *command]


@dataclass
class Processes:
    """The running processes of a launcher.

    Attributes:
        running: name for messages -> process
        local: True if all processes are ranks on this machine, which may be killed at once
    """

    running: dict[str, subprocess.Popen] = field(default_factory=dict)
    local: bool = True

    def start(
        self, name: str, command: Sequence[str], environment: Mapping[str, str], log: Path
    ) -> None:
        """Start a process in its own session. The kernel kills it when this process ends."""
        with log.open("ab") as output:
            self.running[name] = subprocess.Popen(
                killed_with_parent(command),
                env=dict(environment),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def ended(self) -> dict[str, int]:
        """Return the exit codes of processes that have ended, negative after a signal."""
        codes = {name: process.poll() for name, process in self.running.items()}
        return {name: code for name, code in codes.items() if code is not None}

    def stop(self) -> None:
        """End all processes, and wait for them."""
        if not self.local:
            self._signal(signal.SIGTERM)
            deadline = time.monotonic() + SECONDS_TO_TERMINATE
            while len(self.ended()) < len(self.running) and time.monotonic() < deadline:
                time.sleep(0.1)
        self._signal(signal.SIGKILL)
        for process in self.running.values():
            process.wait()

    def _signal(self, number: int) -> None:
        for process in self.running.values():
            if process.poll() is None or not self.local:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, number)


class Launcher(Protocol):
    """A way to start the ranks of a world."""

    def check(self, kind: WorldKind) -> None:
        """Check that the launcher can start a world.

        Raises:
            UserError: it cannot.
        """

    def start(self, files: WorldFiles, kind: WorldKind) -> Processes:
        """Start all ranks of a world."""


@dataclass(frozen=True)
class LocalLauncher:
    """Starts one process per rank on this machine.

    Attributes:
        program: the script that runs a rank with --rank-of
    """

    program: Path

    def check(self, kind: WorldKind) -> None:
        """See `Launcher`."""
        if kind.nodes > 1:
            raise UserError(
                f"cluster.nodes = {kind.nodes}: without --hostfile or a Slurm allocation all ranks "
                f"run on this machine; use --nodes 1, or --hostfile FILE"
            )

    def start(self, files: WorldFiles, kind: WorldKind) -> Processes:
        """See `Launcher`."""
        processes, port = Processes(), free_port()
        for rank in range(kind.size):
            command = [sys.executable, str(self.program), "--rank-of", str(files.folder)]
            variables = os.environ | rank_variables(rank, kind.size, port)
            processes.start(f"rank {rank}", command, variables, files.log(rank))
        return processes


@dataclass(frozen=True)
class DeepSpeedLauncher:
    """Starts the ranks with `deepspeed` on the hosts of a hostfile."""

    program: Path
    hostfile: Path

    def check(self, kind: WorldKind) -> None:
        """See `Launcher`."""
        hosts = read_hostfile(self.hostfile, processes=kind.gpus_per_node)
        if len(hosts) < kind.nodes:
            raise UserError(
                f"--hostfile {self.hostfile} has {len(hosts)} hosts, and cluster.nodes = "
                f"{kind.nodes}; use --nodes {len(hosts)} or fewer"
            )

    def start(self, files: WorldFiles, kind: WorldKind) -> Processes:
        """See `Launcher`."""
        deepspeed = Path(sys.executable).with_name("deepspeed")
        command = [
            *(str(deepspeed), "--hostfile", str(self.hostfile.resolve())),
            *("--num_nodes", str(kind.nodes), "--num_gpus", str(kind.gpus_per_node)),
            # Without --force_multi, deepspeed would run a single node on this machine instead of on
            # the first host.
            *("--force_multi", "--master_port", str(random_port())),
            # deepspeed passes the arguments to the remote shell without quoting them.
            *(shlex.quote(str(self.program)), "--rank-of", shlex.quote(str(files.folder))),
        ]
        processes = Processes(local=False)
        processes.start("deepspeed", command, os.environ, files.launcher_log)
        return processes


@dataclass(frozen=True)
class SlurmLauncher:
    """Starts the ranks with `srun` in this allocation, one task per GPU."""

    program: Path

    def check(self, kind: WorldKind) -> None:
        """See `Launcher`."""
        allocated = int(os.environ.get("SLURM_JOB_NUM_NODES", "1"))
        if kind.nodes > allocated:
            raise UserError(
                f"cluster.nodes = {kind.nodes}, and this allocation has {allocated} nodes; use "
                f"--nodes {allocated} or fewer, or a larger allocation"
            )

    def start(self, files: WorldFiles, kind: WorldKind) -> Processes:
        """See `Launcher`."""
        command = [
            *("srun", f"--nodes={kind.nodes}", f"--ntasks={kind.size}"),
            *(f"--ntasks-per-node={kind.gpus_per_node}", "--distribution=block", "--relative=0"),
            *("--kill-on-bad-exit=0", "--overlap"),
            *(sys.executable, str(self.program), "--rank-of", str(files.folder)),
        ]
        if cores := os.environ.get("SLURM_CPUS_PER_TASK"):
            command.insert(1, f"--cpus-per-task={cores}")
        # Because of --relative=0, rank 0 runs on the first node of the allocation.
        variables = os.environ | {"MASTER_ADDR": first_host(), "MASTER_PORT": str(random_port())}
        processes = Processes(local=False)
        processes.start("srun", command, variables, files.launcher_log)
        return processes


def first_host() -> str:
    """Return the first host of this Slurm allocation.

    Raises:
        UserError: scontrol does not print the hosts.
    """
    command = ["scontrol", "show", "hostnames", os.environ.get("SLURM_JOB_NODELIST", "")]
    try:
        done = subprocess.run(command, capture_output=True, encoding="utf-8")
        if done.returncode == 0 and (hosts := done.stdout.split()):
            return hosts[0]
        reason = done.stderr.strip() or "it printed nothing"
    except OSError as error:
        reason = reason_of(error)
    raise UserError(
        f"scontrol does not name the hosts of this allocation ({reason}); use --launcher local, or "
        f"start the sweep with sbatch"
    )
