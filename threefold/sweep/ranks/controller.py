"""The workers of a sweep, as the scheduler sees them: their launchers, requests and folder."""

import contextlib
import os
import re
import secrets
import shlex
import shutil
import signal
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from models.errors import UserError
from threefold.gpus.datasheet import check_device, is_cpu
from threefold.launch.hosts import read_hostfile, slurm_hosts
from threefold.run_folder.lock import is_running, machine_id
from threefold.runtime.launchers import random_port, start_ticks
from threefold.runtime.ranks import Processes, log_file, log_tails, start_interpreters
from threefold.sweep.ranks.protocol import (
    ABANDONED,
    START,
    WorkerFiles,
    read_message,
    write_message,
)
from threefold.sweep.trial import Result, WorkerKind

# Launchers that start workers: on this machine, with `deepspeed` or with `srun`.


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
            # --export=ALL: the job may have been submitted with SBATCH_EXPORT=NONE.
            *("--kill-on-bad-exit=0", "--overlap", "--export=ALL"),
            *(sys.executable, str(self.program), "--rank-of", str(files.folder)),
        ]
        if cores := os.environ.get("SLURM_CPUS_PER_TASK"):
            command.insert(1, f"--cpus-per-task={cores}")
        # Because of --relative=0, rank 0 runs on the first node of the allocation.
        remedy = "use --launcher local, or start the sweep with sbatch"
        host = slurm_hosts(os.environ, remedy=remedy)[0]
        variables = os.environ | {"MASTER_ADDR": host, "MASTER_PORT": str(random_port())}
        processes = Processes(local=False)
        processes.start("srun", command, variables, files.launcher_log)
        return processes


def check_workers(kind: WorkerKind, launcher: WorkerLauncher) -> None:
    """Check that workers can start, and that they run on the right kind of device.

    Raises:
        UserError: the launcher cannot start them, or they would run on another kind of device.
    """
    launcher.check(kind)
    if os.environ.get("DS_ACCELERATOR") == "cpu":  # all ranks inherit it
        check_device(kind.gpu, "cpu")


# The workers, which measure one trial after the other.

SECONDS_TO_START = 600.0  # imports from a busy network file system take minutes
POLL_SECONDS = 0.05
GRACE_SECONDS = 1.0  # for failure reports of other ranks, which may name the cause
PASSED_VARIABLES = ("DS_ACCELERATOR", "OMP_NUM_THREADS", "CUDA_VISIBLE_DEVICES")
MAX_LOGS = 4  # of ranks, in a result


class WorkersFailed(Exception):
    """The workers could not be started."""


class WorkersAbandoned(Exception):
    """The ranks have exited because this process was suspended, for example by Ctrl-Z."""


@dataclass
class Workers:
    """The ranks that measure trials of one kind, one after the other.

    Attributes:
        kind: the properties that decide which trials the workers can measure
        processes: the ranks, or the process of their launcher
        number: number of the current trial
    """

    kind: WorkerKind
    files: WorkerFiles
    processes: Processes = field(default_factory=Processes)
    number: int = START

    @classmethod
    def start(cls, kind: WorkerKind, folder: Path, launcher: WorkerLauncher) -> "Workers":
        """Start the ranks, and wait until all have joined the process group.

        Args:
            folder: folder to create for the files of the workers

        Raises:
            WorkersFailed: the ranks did not start.
        """
        workers = cls(kind, WorkerFiles(folder))
        workers.files.create(rank_settings(kind), kind.size)
        try:
            workers.processes = launcher.start(workers.files, kind)
            result = workers._wait(SECONDS_TO_START)
            if result.outcome != "ok":
                raise WorkersFailed(f"{result.reason}\n{result.log}".strip())
        except BaseException:
            workers.stop()
            raise
        return workers

    def run(self, table: dict[str, Any], seconds: float) -> Result:
        """Measure a trial. After any outcome other than "ok", the caller must stop the workers.

        Args:
            table: the request, which `worker.measure` reads

        Raises:
            WorkersAbandoned: the ranks have exited because they saw no heartbeat.
        """
        self.number += 1
        started = time.monotonic()
        write_message(self.files.request, table | {"number": self.number, "seconds": seconds})
        result = self._wait(seconds)
        return Result(**vars(result) | {"seconds": time.monotonic() - started})

    def stop(self) -> None:
        """End all ranks, and remove the files of the workers.

        Ranks on other nodes exit when the folder disappears, even if the launcher cannot end them.
        """
        folder = self.files.folder
        with contextlib.suppress(OSError):
            self.files.settings.unlink()
        self.processes.stop()
        shutil.rmtree(folder, ignore_errors=True)

    def _wait(self, seconds: float) -> Result:
        """Wait for the end of the current trial, or of the start."""
        deadline = time.monotonic() + seconds
        while True:
            if message := read_message(self.files.result, self.number):
                return Result.from_json(message["result"])
            if read_message(self.files.failed, self.number) or self.processes.ended():
                return self._failure()
            if time.monotonic() > deadline:
                reason = f"not finished within {seconds:.0f} seconds"
                return Result(outcome="hung", reason=reason, log=self._log(range(self.kind.size)))
            time.sleep(POLL_SECONDS)

    def _failure(self) -> Result:
        """Return the result after the failure of one or more ranks."""
        failures = self._failures()
        if not any(failure["outcome"] == "out_of_memory" for failure in failures):
            time.sleep(GRACE_SECONDS)
            failures = self._failures()
        ended = self.processes.ended()
        if ABANDONED in ended.values():
            raise WorkersAbandoned
        killed = {name: code for name, code in ended.items() if code < 0}
        for failure in failures:  # the cause; other ranks may then fail as they lose connections
            if failure["outcome"] == "out_of_memory":
                return self._described(failure)
        if killed:
            name, code = next(iter(killed.items()))
            reason = f"{name} was killed by {signal.Signals(-code).name}"
            ranks = [int(name.split()[1])] if name.startswith("rank") else range(self.kind.size)
            return Result(outcome="crashed", reason=reason, log=self._log(ranks))
        if failures:
            return self._described(min(failures, key=lambda failure: failure["time"]))
        name, code = next(iter(ended.items()))
        log = self._log(range(self.kind.size))
        return Result(outcome="crashed", reason=f"{name} ended with exit code {code}", log=log)

    def _failures(self) -> list[dict[str, Any]]:
        messages = [
            read_message(self.files.failure(rank), self.number) for rank in range(self.kind.size)
        ]
        return [message for message in messages if message]

    def _described(self, failure: dict[str, Any]) -> Result:
        """Return the result of a failure that a rank has described."""
        reason = f"rank {failure['rank']}: {failure['reason']}"
        return Result(outcome=failure["outcome"], reason=reason, log=failure["log"])

    def _log(self, ranks: Sequence[int]) -> str:
        """Return the last lines of the launcher and of some ranks."""
        logs = [log_file(self.files.folder, rank) for rank in ranks[:MAX_LOGS]]
        return log_tails([self.files.launcher_log, *logs])


def rank_settings(kind: WorkerKind) -> dict[str, Any]:
    """Return the settings that the ranks read before they import torch.

    Launchers do not pass all environment variables to other nodes.
    """
    environment = {key: os.environ[key] for key in PASSED_VARIABLES if key in os.environ}
    if is_cpu(kind.gpu):
        environment |= {"DS_ACCELERATOR": "cpu", "CUDA_VISIBLE_DEVICES": ""}
    return {
        "environment": environment,
        "deterministic": kind.deterministic,
        "pipelined": kind.pipelined,
    }


# The folder of the workers that one command starts, with the heartbeat that their ranks watch.

HEARTBEAT_SECONDS = 2.0
ABANDONED_SECONDS = 60.0  # without a heartbeat; ranks exit after SECONDS_WITHOUT_HEARTBEAT


class WorkersFolder:
    """A folder of one command's workers, next to those of other commands.

    Its name identifies the process that owns it, so that other commands can remove it even if the
    owner was killed before it wrote the first file.

    Args:
        parent: the folder of all commands; all ranks can access it
    """

    def __init__(self, parent: Path):
        self.parent = parent
        process = os.getpid()
        owner = f"{_machine()}-{process}-{start_ticks(process)}"
        self.path = parent / f"{owner}-{secrets.token_hex(4)}"
        self.heartbeat = self.path / "heartbeat"
        self._closed = threading.Event()

    def create(self) -> None:
        """Create the folder.

        Raises:
            OSError: it cannot be written.
        """
        self.path.mkdir(parents=True)
        self.heartbeat.touch()

    def start_heartbeat(self) -> None:
        """Remove the folders that dead commands left behind, and start the heartbeat."""
        self._remove_abandoned()
        threading.Thread(target=self._beat, name="heartbeat", daemon=True).start()

    def close(self) -> None:
        """Remove the folder, and those that dead commands left behind."""
        self._closed.set()
        self._remove_abandoned()
        shutil.rmtree(self.path, ignore_errors=True)
        with contextlib.suppress(OSError):  # another command uses it
            self.parent.rmdir()

    def _remove_abandoned(self) -> None:
        """Remove the folders of commands that no longer run.

        Their heartbeats are compared with this command's own, because the clocks of different
        nodes may disagree.
        """
        now = self.heartbeat.stat().st_mtime if self.heartbeat.exists() else 0.0
        for folder in self.parent.iterdir() if self.parent.exists() else ():
            if folder != self.path and _is_abandoned(folder, now):
                shutil.rmtree(folder, ignore_errors=True)

    def _beat(self) -> None:
        """Touch the heartbeat, which the ranks of this command watch."""
        while not self._closed.wait(HEARTBEAT_SECONDS):
            with contextlib.suppress(OSError):
                os.utime(self.heartbeat)


def _machine() -> str:
    """Return the identifier of this machine, without characters that are unusual in file names."""
    return re.sub(r"\W+", "_", machine_id())


def _is_abandoned(folder: Path, now: float) -> bool:
    """Return True if the command that a folder belongs to appears to be dead.

    Args:
        now: time of the newest heartbeat of this command
    """
    owner = re.fullmatch(r"(\w+)-(\d+)-(\d+)-\w+", folder.name)
    if owner and owner[1] == _machine():
        return not is_running({"process": int(owner[2]), "started": int(owner[3])})
    with contextlib.suppress(OSError):
        heartbeat = folder / "heartbeat"
        newest = heartbeat if heartbeat.exists() else folder
        return now - newest.stat().st_mtime > ABANDONED_SECONDS
    return False
