"""Inject faults into runs on a simulated cluster, and check how the runs end.

Each run is started by `deepspeed`, on the head alone (two ranks) or over ssh on two hosts with two
ranks each. Once it trains, a fault is injected. The run must end with a failure code (except for
one case in which DeepSpeed returns success) and leave no process on any host. It must save if it
can, and explain a hang. If nobody reads the output of a run on two hosts, its processes on the
hosts must end, and `deepspeed` and pdsh once the output is read. The command prints a table, and
its exit code is 1 if a check fails.

    python tests/fault_injection/faults.py
    python tests/fault_injection/faults.py --only "SIGSTOP to a rank"
    python tests/fault_injection/faults.py --one-host --output "full pipe" --output "closed pipe"
"""

import sys
from pathlib import Path

if __name__ == "__main__":  # the repository, not tests/, is where imports start
    sys.path[0] = str(Path(__file__).resolve().parents[2])

import argparse
import contextlib
import json
import re
import shlex
import signal
import subprocess
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import product

import tomli_w

from tests.cluster.cluster import Cluster, missing
from tests.conftest import VOCAB_SIZE, changed, small_recipe
from tests.fault_injection.unread import UNREAD, Output
from threefold.config.loading import REPOSITORY
from threefold.prove.shrink import write_corpus
from threefold.run_folder.history import newest_step
from threefold.runtime.exits import HUNG, INTERRUPTED, STOPPED

HANG_SECONDS = 6
# The watchdog adds 8 seconds, and launchers look once a second.
LIMIT_SECONDS = HANG_SECONDS + 14  # from the fault to the exit of the last process, if ranks notice
SECONDS_TO_TRAIN = 240
HOSTS = ("node1", "node2")
ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "DS_ACCELERATOR": "cpu",
    # Otherwise `deepspeed` exits with 120 when its own output cannot be written at the end.
    "PYTHONUNBUFFERED": "1",
}
PRINTERS = r"bin/deepspeed|pdsh -S"  # on the head, of a run on several hosts
FAULTY = "tests/cluster/faulty_pretrain.py"
SECONDS_AFTER_READING = 10  # in which `deepspeed` and pdsh end once their output is read
OURS = r"pretrain\.py|deepspeed\.launcher|bin/deepspeed|watchdog\.py|pdsh"
RANK, LAUNCHER, DEEPSPEED = (
    r"-u [^ ]*pretrain\.py --local_rank={}", r"^[^ ]*python[^ ]* -u -m deepspeed\.launcher\.launch",
    r"^[^ ]*python[^ ]* [^ ]*bin/deepspeed",
)  # fmt: skip


@dataclass
class Job:
    """A run in progress.

    hosts: the hosts of its ranks; empty if it runs on the head, without ssh
    """

    cluster: Cluster
    folder: Path
    hosts: Sequence[str]
    process: subprocess.Popen
    output: Output

    def signal(self, name: str, pattern: str, host: str = "head") -> None:
        """Send a signal to the processes of a host with such a command line."""
        done = self.cluster.run(f"pkill -{name} -f -- {shlex.quote(pattern)}", host=host)
        assert done.returncode == 0, f"no process {pattern} on {host}"

    def wait_for_step(self, step: int) -> None:
        """Wait until a step is done."""
        deadline = time.monotonic() + SECONDS_TO_TRAIN
        while self.steps() < step:
            if time.monotonic() > deadline or self.process.poll() is not None:
                raise RuntimeError(f"the run does not train: {self.words()}")
            time.sleep(0.05)

    def steps(self) -> int:
        """Return the number of finished steps."""
        metrics = self.folder / "metrics.jsonl"
        return metrics.read_text().count("\n") if metrics.exists() else 0

    def words(self) -> str:
        """Return the output of the run, as far as it can be read."""
        return self.output.text()

    def left(self) -> list[str]:
        """Return the command lines of the job's processes on all hosts."""
        return self.cluster.processes(OURS)

    @property
    def is_held_by_output(self) -> bool:
        """True if `deepspeed` and pdsh end only when their output is read.

        pdsh prints the output of all hosts, and waits if nobody reads it, as any program does. The
        processes on the hosts must not wait for it.
        """
        return bool(self.hosts) and self.output.kind == "full pipe"

    def wait_for_end(self, deadline: float) -> list[str]:
        """Wait until the job has ended; return the command lines of the processes that are left."""
        held = self.is_held_by_output
        while left := [line for line in self.left() if not (held and re.search(PRINTERS, line))]:
            if time.monotonic() > deadline:
                break
            time.sleep(0.1)
        return left


@dataclass(frozen=True)
class Fault:
    """A fault that is injected into a run.

    do: injects the fault, once the run trains
    codes: allowed exit codes of `deepspeed`
    says: regular expressions that the output of the run must match
    saves: the run must have saved its last step
    inside: the fault of tests/cluster/faulty_pretrain.py to use instead; empty for none
    seconds: time limit for the end of the run
    """

    name: str
    hosts: tuple[str, ...]
    do: Callable[[Job], None]
    codes: tuple[int, ...]
    says: tuple[str, ...] = ()
    saves: bool = False
    inside: str = ""
    seconds: float = LIMIT_SECONDS


@dataclass
class Outcome:
    """The end of a run, and the checks that failed."""

    fault: Fault
    output: str
    seconds: float
    code: int | None
    left: list[str]
    wrong: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        where = f"{len(self.fault.hosts)} hosts" if self.fault.hosts else "1 host"
        verdict = "; ".join(self.wrong) or "yes"
        return (
            f"| {self.fault.name} | {where} | {self.output} | {self.seconds:.1f} | {self.code} "
            f"| {len(self.left)} | {verdict} |"
        )


def send(name: str, pattern: str, host: str = "head") -> Callable[[Job], None]:
    """Return a function that sends a signal to a process of the job."""
    return lambda job: job.signal(name, pattern, host)


def suspend(job: Job) -> None:
    """Suspend `deepspeed` on the head; ranks on other hosts do not notice, and train on."""
    job.signal("STOP", DEEPSPEED)
    before = job.steps()
    time.sleep(LIMIT_SECONDS)
    assert job.steps() > before
    job.signal("CONT", DEEPSPEED)
    job.signal("TERM", DEEPSPEED)


def faults() -> list[Fault]:
    """Return all faults."""
    second, one = RANK.format(1), ()
    asked = {"saves": True, "says": ("rerun the same command to resume",)}
    named = r"rank 1 \(head\) does not answer: stopped, dead or cut off"
    there = r"rank 3 \(node2\) does not answer"
    gone = "its launcher \\(process \\d+\\) has exited"
    return [
        Fault("SIGTERM to a rank", one, send("TERM", second), (INTERRUPTED,), **asked),
        Fault("SIGUSR1 to a rank", one, send("USR1", second), (INTERRUPTED,), **asked),
        Fault("SIGKILL to a rank", one, send("KILL", second), (1, 247)),
        Fault("SIGSTOP to a rank", one, send("STOP", second), (HUNG, 247), says=(named,)),
        Fault("SIGTERM to the launcher", one, send("TERM", LAUNCHER), (1,), saves=True),
        Fault("SIGINT to the launcher", one, send("INT", LAUNCHER), (1,), saves=True),
        Fault("SIGKILL to the launcher", one, send("KILL", LAUNCHER), (0, 137), saves=True,
              says=(gone,)),
        Fault("SIGSTOP to the launcher", one, send("STOP", LAUNCHER), (-9, 137), saves=True,
              says=(gone,)),
        Fault("SIGSTOP to deepspeed", one, send("STOP", DEEPSPEED), (-9, 137), saves=True,
              says=(gone,)),
        Fault("SIGTERM to deepspeed", one, send("TERM", DEEPSPEED), (-15, 143), saves=True,
              says=(gone,)),
        Fault("SIGKILL to deepspeed", one, send("KILL", DEEPSPEED), (-9, 137), saves=True,
              says=(gone,)),
        Fault("a rank's gradient is not finite", one, lambda job: None, (STOPPED,),
              says=("3 steps in a row, after 2 rollbacks",), inside="nan"),
        Fault("a rank sleeps", one, lambda job: None, (HUNG,),
              says=(r"rank 1 \(head\) is behind: step 4, .*; it waits in no collective",),
              inside="sleep"),
        Fault("a rank crashes", one, lambda job: None, (1,), says=("a bug",), inside="crash"),
        Fault("SIGTERM to a rank", HOSTS, send("TERM", second, "node1"), (INTERRUPTED,), **asked),
        Fault("SIGKILL to a rank", HOSTS, send("KILL", second, "node2"), (1, 247)),
        Fault("SIGSTOP to a rank", HOSTS, send("STOP", second, HOSTS[1]), (HUNG, 247),
              says=(there,)),
        Fault("SIGTERM to deepspeed", HOSTS, send("TERM", DEEPSPEED), (1,), saves=True),
        Fault("SIGINT to deepspeed", HOSTS, send("INT", DEEPSPEED), (1,), saves=True),
        Fault("SIGTERM to a node's launcher", HOSTS, send("TERM", LAUNCHER, "node2"),
              (1, INTERRUPTED), saves=True),
        Fault("SIGKILL to a node's launcher", HOSTS, send("KILL", LAUNCHER, "node2"),
              (INTERRUPTED, 255), saves=True),
        Fault("SIGSTOP to a node's launcher", HOSTS, send("STOP", LAUNCHER, "node2"),
              (INTERRUPTED, 255), saves=True),
        Fault("SIGSTOP to deepspeed (the run continues), then SIGTERM", HOSTS, suspend,
              (1,), saves=True, seconds=2 * LIMIT_SECONDS),
        Fault("a host's link is cut", HOSTS, lambda job: job.cluster.cut_link(HOSTS[1]),
              (HUNG, 255)),
        Fault("a host is killed", HOSTS, lambda job: job.cluster.kill_host(HOSTS[1]),
              (1, HUNG, 255)),
    ]  # fmt: skip


def inject(
    cluster: Cluster, fault: Fault, number: int, kind: str = "pipe", *, patience: int = 1
) -> Outcome:
    """Start a run, spoil its output, inject a fault, and check how the run ends.

    patience: factor of the time limit, for machines that are busy with other work
    """
    fault = replace(fault, seconds=patience * fault.seconds)
    with Output(kind) as output:
        job = start(cluster, fault, cluster.folder / f"run{number}", output)
        return end(cluster, fault, job)


def end(cluster: Cluster, fault: Fault, job: Job) -> Outcome:
    """Inject a fault into a run, and wait for the end of the run."""
    job.wait_for_step(3)
    job.output.spoil()
    started = time.monotonic()
    fault.do(job)
    left = job.wait_for_end(started + fault.seconds)
    seconds = time.monotonic() - started
    if job.is_held_by_output:
        job.output.resume_reading()
        is_over = time.monotonic() + SECONDS_AFTER_READING
        while job.left() and time.monotonic() < is_over:
            time.sleep(0.1)
        left += [line for line in job.left() if line not in left]
    outcome = Outcome(fault, job.output.kind, seconds, None, left)
    job.process.send_signal(signal.SIGCONT)  # nsenter stops itself when its child is stopped
    with contextlib.suppress(subprocess.TimeoutExpired):
        outcome.code = job.process.wait(timeout=5)
    outcome.wrong = judge(job, outcome)
    for line in outcome.left:
        cluster.run(f"kill -9 {line.split()[0]}")
    for host in cluster.hosts:  # restore the hosts
        if cluster.run("true", host=host).returncode:
            cluster.mend_link(host)
            if cluster.run("true", host=host).returncode:
                cluster.restart_host(host)
    return outcome


def start(cluster: Cluster, fault: Fault, folder: Path, output: Output) -> Job:
    """Start a run on the hosts of a fault."""
    corpus = cluster.folder / "corpus"
    if not corpus.exists():
        write_corpus(corpus, VOCAB_SIZE)
    ranks = 2 * max(1, len(fault.hosts))
    table = changed(
        small_recipe(corpus),
        name=f"small-{fault.inside or 'sound'}",
        layout={"tensor": 2, "pipeline": ranks // 2},
        training={"steps": 10**6, "evaluate_every": 0},
        checkpoint={"every": 3 if fault.inside == "nan" else 10**5},
        supervision={"hang_seconds": HANG_SECONDS},
        tracking={"mode": "disabled"},
    )
    recipe = cluster.folder / f"{folder.name}.toml"
    recipe.write_text(tomli_w.dumps(table))
    where = "--num_gpus 2"
    if fault.hosts:
        (cluster.folder / "hostfile").write_text("".join(f"{h} slots=2\n" for h in fault.hosts))
        where = f"--hostfile {cluster.folder}/hostfile --num_nodes {len(fault.hosts)}"
    script = FAULTY if fault.inside else "recipes/pretrain.py"
    command = f"exec deepspeed {where} {script} {recipe} --run-dir {folder}"
    process = subprocess.Popen(
        cluster.command(command),
        cwd=REPOSITORY,
        env=cluster.environment | ENVIRONMENT,
        stdin=subprocess.DEVNULL,
        stdout=output.descriptor,
        stderr=output.descriptor,
        start_new_session=True,
    )
    return Job(cluster, folder, fault.hosts, process, output)


def judge(job: Job, outcome: Outcome) -> list[str]:
    """Return the checks that failed."""
    fault, wrong = outcome.fault, []
    if outcome.code not in fault.codes:
        wrong.append(f"exit code {outcome.code}, not {fault.codes}")
    if outcome.left:
        wrong.append(f"left: {outcome.left}")
    if outcome.seconds > fault.seconds:
        wrong.append(f"more than {fault.seconds} s")
    if job.output.kind in ("pipe", "full pipe"):  # otherwise no one can know
        words = job.words()
        wrong += [f"does not say {text!r}" for text in fault.says if not re.search(text, words)]
    lines = (job.folder / "metrics.jsonl").read_text().splitlines()
    newest = newest_step(job.folder / "checkpoints")
    if fault.saves and newest != json.loads(lines[-1])["step"]:
        wrong.append(f"saved step {newest}, had done {json.loads(lines[-1])['step']}")
    if wrong:
        wrong.append(job.words()[-3000:])
    return wrong


def main() -> None:
    """Inject the chosen faults, and print a table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", action="append", help="names of faults")
    parser.add_argument("--one-host", action="store_true", help="only faults that need no ssh")
    parser.add_argument(
        "--output", action="append", choices=["pipe", *UNREAD], help="of the run; default: pipe"
    )
    options = parser.parse_args()
    if missing(hosts=not options.one_host):
        sys.exit(f"faults.py: {missing(hosts=not options.one_host)}")
    print("| fault | on | output | seconds | exit code | processes left | as expected |")
    print("|---|---|---|---|---|---|---|")
    chosen = [f for f in faults() if not options.only or f.name in options.only]
    chosen = [f for f in chosen if not (options.one_host and f.hosts)]
    with Cluster(0 if options.one_host else len(HOSTS)) as cluster:
        outcomes = []
        for number, (fault, kind) in enumerate(product(chosen, options.output or ["pipe"])):
            outcomes.append(inject(cluster, fault, number, kind))
            print(outcomes[-1], flush=True)
    sys.exit(any(outcome.wrong for outcome in outcomes))


if __name__ == "__main__":
    main()
