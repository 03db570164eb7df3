"""Launchers that start the workers of a sweep: on this machine, with `deepspeed` or with `srun`."""

import os
import shlex
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from models.errors import UserError, reason_of
from threefold.launch.hosts import read_hostfile
from threefold.runtime.launchers import random_port
from threefold.runtime.ranks import Processes, start_interpreters
from threefold.sweep.ranks.protocol import WorkerFiles
from threefold.sweep.trial import WorkerKind


class WorkerLauncher(Protocol):
    """A way to start workers."""

    def check(self, kind: WorkerKind) -> None:
        """Check that the launcher can start the workers.

        Raises:
            UserError: it cannot.
        """

    def start(self, files: WorkerFiles, kind: WorkerKind) -> Processes:
        """Start all workers."""


@dataclass(frozen=True)
class LocalLauncher:
    """Starts one process per rank on this machine.

    Attributes:
        program: the script that runs a rank with --rank-of
    """

    program: Path

    def check(self, kind: WorkerKind) -> None:
        """See `WorkerLauncher`."""
        if kind.nodes > 1:
            raise UserError(
                f"cluster.nodes = {kind.nodes}: without --hostfile or a Slurm allocation all ranks "
                f"run on this machine; use --nodes 1, or --hostfile FILE"
            )

    def start(self, files: WorkerFiles, kind: WorkerKind) -> Processes:
        """See `WorkerLauncher`."""
        arguments = [str(self.program), "--rank-of", str(files.folder)]
        return start_interpreters(kind.size, arguments, logs=files.folder, variables={})


@dataclass(frozen=True)
class DeepSpeedLauncher:
    """Starts the ranks with `deepspeed` on the hosts of a hostfile."""

    program: Path
    hostfile: Path

    def check(self, kind: WorkerKind) -> None:
        """See `WorkerLauncher`."""
        hosts = read_hostfile(self.hostfile, processes=kind.gpus_per_node)
        if len(hosts) < kind.nodes:
            raise UserError(
                f"--hostfile {self.hostfile} has {len(hosts)} hosts, and cluster.nodes = "
                f"{kind.nodes}; use --nodes {len(hosts)} or fewer"
            )

    def start(self, files: WorkerFiles, kind: WorkerKind) -> Processes:
        """See `WorkerLauncher`."""
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

    def check(self, kind: WorkerKind) -> None:
        """See `WorkerLauncher`."""
        allocated = int(os.environ.get("SLURM_JOB_NUM_NODES", "1"))
        if kind.nodes > allocated:
            raise UserError(
                f"cluster.nodes = {kind.nodes}, and this allocation has {allocated} nodes; use "
                f"--nodes {allocated} or fewer, or a larger allocation"
            )

    def start(self, files: WorkerFiles, kind: WorkerKind) -> Processes:
        """See `WorkerLauncher`."""
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
