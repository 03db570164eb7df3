"""Take hosts away from a run that launch.py has started, give them back, and compare the losses.

The run has one rank on each of four hosts of a simulated cluster. At random steps a host is killed,
its link is cut, or all its processes are suspended; when two hosts are missing, both come back. A
restart reads the newest snapshot from the memory of the remaining hosts. Some faults kill a host
together with the partner that has copies of its files, so that the restart needs the disk. The run
must finish with exit code 0 and leave no process and no snapshot. Each step must have the loss of
an undisturbed run in one process, up to rounding, and the same samples. The command prints a line
per fault, and its exit code is 1 if a check fails.

    python tests/fault_injection/node_loss.py
    python tests/fault_injection/node_loss.py --faults 3 --seed 7
    python tests/fault_injection/node_loss.py --kinds cut stop
    python tests/fault_injection/node_loss.py --snapshot-every 0     # restarts from the disk
"""

import sys
from pathlib import Path

if __name__ == "__main__":  # the repository, not tests/, is where imports start
    sys.path[0] = str(Path(__file__).resolve().parents[2])

import argparse
import json
import random
import subprocess
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any

import tomli_w

from tests.cluster.cluster import Cluster, missing
from tests.conftest import VOCAB_SIZE, changed, small_recipe
from threefold.checkpoint.snapshots.writer import partner_nodes
from threefold.config.loading import REPOSITORY
from threefold.prove.shrink import write_corpus

HOSTS = 4
STEPS_PER_FAULT = 40
LOSS_TOLERANCE = 1e-6  # relative
NODE_SECONDS = 3
SECONDS_TO_RESTART = 120  # from a fault to the next finished step, with slack for a loaded machine
SECONDS_TO_END = 15
ENVIRONMENT = {"OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu", "PYTHONUNBUFFERED": "1"}
OURS = r"pretrain\.py|node_agent\.py|standby\.py|launch\.py|watchdog\.py"
KINDS = {"kill": 4, "cut": 2, "stop": 2, "pair": 1}  # kind of fault: relative frequency
SNAPSHOT_EVERY, SAVE_EVERY = 3, 30  # steps


@dataclass
class Fault:
    """A fault that has been injected, and the time until the next finished step.

    Attributes:
        kind: "kill", "cut", "stop", or "pair" for killing a host and its partner
        hosts: the hosts
        step: last finished step before the fault
        left: number of hosts that remained
        seconds: time to the next step that was finished by another attempt
        repeated: steps that had to be repeated
        parts: the seconds by part
        source: "memory" or "disk"
    """

    kind: str
    hosts: Sequence[str]
    step: int
    left: int
    seconds: float = 0.0
    repeated: int = 0
    parts: dict[str, float] = field(default_factory=dict)
    source: str = ""

    def __str__(self) -> str:
        parts = ", ".join(f"{part} {seconds:.1f}" for part, seconds in self.parts.items())
        return (
            f"{self.kind} {' and '.join(self.hosts)} at step {self.step}, {self.left} hosts left: "
            f"next step after {self.seconds:.1f} s ({parts}), from {self.source}, {self.repeated} "
            f"steps repeated"
        )


@dataclass
class Run:
    """A run on the cluster, in progress."""

    cluster: Cluster
    folder: Path
    process: subprocess.Popen[bytes]
    absent: dict[str, str] = field(default_factory=dict)  # host -> kind of its fault

    def metrics(self) -> list[dict[str, Any]]:
        """Return the lines of metrics.jsonl, without one that is being written."""
        return lines_of(self.folder / "metrics.jsonl")

    def step(self) -> int:
        """Return the last finished step."""
        lines = self.metrics()
        return lines[-1]["step"] if lines else 0

    def events(self, name: str) -> list[dict[str, Any]]:
        """Return the events of a kind."""
        return [e for e in lines_of(self.folder / "events.jsonl") if e["event"] == name]

    def wait(self, condition: Callable[[], bool], seconds: float, what: str) -> None:
        """Wait until a condition holds, or raise an error."""
        deadline = time.monotonic() + seconds
        while not condition():
            if time.monotonic() > deadline or self.process.poll() is not None:
                raise RuntimeError(f"{what} did not happen: {self.log()}")
            time.sleep(0.05)

    def log(self) -> str:
        """Return the end of the run's output."""
        return (self.folder.parent / "log").read_text(errors="replace")[-4000:]

    def trains(self) -> bool:
        """Return True if the current attempt has finished its first step."""
        kinds = [e["event"] for e in lines_of(self.folder / "events.jsonl")]
        newest = {kind: place for place, kind in enumerate(kinds)}
        return newest.get("first_step", -1) > newest.get("attempt", 0)

    def inject(self, hosts: Sequence[str], kind: str) -> Fault:
        """Inject a fault, and wait for the next finished step."""
        attempts = len(self.events("attempt"))
        first_steps = len(self.events("first_step"))
        step, started = self.step(), time.time()
        for host in hosts:
            self.absent[host] = kind
            {"cut": self.cluster.cut_link, "stop": self.cluster.stop_host}.get(
                kind, self.cluster.kill_host
            )(host)
        fault = Fault(kind, hosts, step, HOSTS - len(self.absent))
        self.wait(
            lambda: (
                len(self.events("attempt")) > attempts
                and len(self.events("first_step")) > first_steps
            ),
            SECONDS_TO_RESTART,
            f"a step after {kind} {hosts} at step {step}",
        )
        first_step = self.events("first_step")[first_steps]
        resume = self.events("resume")[-1]
        fault.seconds = first_step["time"] - started
        noticed = self.events("attempt_end")[attempts - 1]["time"] - started
        starting = sum(first_step["seconds"].values())
        fault.parts = {
            "notice and end": noticed,
            "start ranks": fault.seconds - noticed - starting,
            **{part: seconds for part, seconds in first_step["seconds"].items() if seconds > 0.05},
        }
        fault.source = "memory" if resume.get("from_memory") else "disk"
        fault.repeated = max(0, step - resume["step"])
        return fault

    def partner_of(self, host: str) -> str:
        """Return the host that has copies of a host's files in the current attempt."""
        hosts = self.events("attempt")[-1]["nodes"]
        group = next(g for g in partner_nodes(len(hosts)) if hosts.index(host) in g)
        return str(hosts[group[(group.index(hosts.index(host)) + 1) % len(group)]])

    def heal_all(self) -> None:
        """Bring all hosts back, and wait until the run uses them."""
        for absent in list(self.absent):
            self.heal(absent)
        self.wait(
            lambda: len(self.events("attempt")[-1]["nodes"]) == HOSTS and self.trains(),
            SECONDS_TO_RESTART,
            "an attempt on all hosts",
        )

    def heal(self, host: str) -> None:
        """Bring a host back."""
        kind = self.absent.pop(host)
        if kind in ("kill", "pair"):
            self.cluster.restart_host(host)
        elif kind == "cut":
            self.cluster.mend_link(host)
        else:
            self.cluster.resume_host(host)


def lines_of(file: Path) -> list[dict[str, Any]]:
    """Return the complete lines of a file of JSON objects."""
    if not file.exists():
        return []
    complete = file.read_text().rpartition("\n")[0]
    return [json.loads(line) for line in complete.split("\n") if line]


def write_recipe(folder: Path, steps: int, *, snapshot_every: int = SNAPSHOT_EVERY) -> Path:
    """Write the recipe of the run and its corpus."""
    write_corpus(folder / "corpus", VOCAB_SIZE)
    table = changed(
        small_recipe(folder / "corpus"),
        name="node-loss",
        batch={"global_sequences": 12, "micro_sequences": 1},
        model__hidden_size=128,
        model__layers=4,
        model__ffn_hidden_size=384,
        model__sequence_length=256,
        optimizer__learning_rate=3e-5,  # a larger rate amplifies rounding differences
        optimizer__schedule__minimum_learning_rate=3e-6,
        training={"steps": steps, "evaluate_every": 0},
        checkpoint={"every": SAVE_EVERY, "snapshot_every": snapshot_every},
        supervision={"node_seconds": NODE_SECONDS},
        cluster={"nodes": HOSTS, "gpus_per_node": 1, "gpu": "cpu", "node_failures": 0},
    )
    recipe = folder / "recipe.toml"
    recipe.write_text(tomli_w.dumps(table))
    return recipe


def start(cluster: Cluster, folder: Path, recipe: Path) -> Run:
    """Start the run with launch.py on the head, over ssh."""
    hostfile = folder / "hostfile"
    hostfile.write_text("".join(f"{host} slots=1\n" for host in cluster.hosts))
    command = f"exec python recipes/launch.py --hostfile {hostfile} {recipe} --run-dir {folder}/run"
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(
            cluster.command(command),
            cwd=REPOSITORY,
            env=cluster.environment | ENVIRONMENT,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
    return Run(cluster, folder / "run", process)


def disturb(run: Run, *, kinds: Sequence[str], chance: random.Random) -> list[Fault]:
    """Inject faults at random steps, and bring hosts back at others; print a line per fault.

    The number of hosts goes from 4 to 3 and 2, and back to 4.

    Args:
        run: the run
        kinds: the kinds of the faults
        chance: chooses steps and hosts
    """
    injected = []
    run.wait(run.trains, 2 * SECONDS_TO_RESTART, "the first step")
    for number, kind in enumerate(kinds):
        if kind == "pair" and run.absent:
            run.heal_all()
        target = run.step() + chance.randrange(4, STEPS_PER_FAULT // 2)
        run.wait(lambda t=target: run.step() >= t, SECONDS_TO_RESTART, f"step {target}")
        host = chance.choice([host for host in run.cluster.hosts if host not in run.absent])
        hosts = [host, run.partner_of(host)] if kind == "pair" else [host]
        fault = run.inject(hosts, kind)
        injected.append(fault)
        print(f"{number + 1:3}: {fault}", flush=True)
        if len(run.absent) == 2:
            run.heal_all()
    for absent in list(run.absent):
        run.heal(absent)
    return injected


def reference(cluster: Cluster, folder: Path, recipe: Path) -> list[dict[str, Any]]:
    """Train the recipe in one process without faults, and return its metrics."""
    done = cluster.run(
        f"python recipes/pretrain.py {recipe} --run-dir {folder}/reference --set cluster.nodes=1",
        env=ENVIRONMENT,
        timeout=3600,
        cwd=REPOSITORY,
    )
    assert done.returncode == 0, done.stderr
    return lines_of(folder / "reference" / "metrics.jsonl")


def judge(run: Run, expected: list[dict[str, Any]]) -> list[str]:
    """Return the checks that failed."""
    wrong = []
    code = run.process.wait(timeout=1200)
    if code:
        wrong.append(f"exit code {code}: {run.log()}")
    deadline = time.monotonic() + SECONDS_TO_END
    while (left := run.cluster.processes(OURS)) and time.monotonic() < deadline:
        time.sleep(0.1)
    if left:
        wrong.append(f"left: {left}")
    for host in run.cluster.hosts:
        if left_files := run.cluster.run("ls /dev/shm", host=host).stdout:
            wrong.append(f"left in the memory of {host}: {left_files}")
    found = run.metrics()
    if [line["step"] for line in found] != [line["step"] for line in expected]:
        wrong.append(f"steps {[line['step'] for line in found]}")
    for line, other in zip(found, expected, strict=False):
        if abs(line["loss"] - other["loss"]) > LOSS_TOLERANCE * other["loss"]:
            wrong.append(f"step {line['step']}: loss {line['loss']}, expected {other['loss']}")
        if line["tokens"] != other["tokens"]:
            wrong.append(f"step {line['step']}: {line['tokens']} tokens, not {other['tokens']}")
    return wrong


def main() -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--faults", type=int, default=20, help="number of faults; default: 20")
    parser.add_argument("--seed", type=int, default=1, help="chooses hosts and steps; default: 1")
    parser.add_argument(
        "--snapshot-every",
        type=int,
        default=SNAPSHOT_EVERY,
        help="steps between snapshots in memory; 0: none; default: %(default)s",
    )
    parser.add_argument(
        "--kinds",
        nargs="+",
        choices=KINDS,
        default=list(KINDS),
        help="kinds of faults; default: %(default)s",
    )
    options = parser.parse_args()
    if reason := missing():
        sys.exit(f"no cluster here: {reason}")
    with Cluster(HOSTS) as cluster:
        folder = cluster.folder / "job"
        folder.mkdir()
        recipe = write_recipe(
            folder, steps=STEPS_PER_FAULT * options.faults, snapshot_every=options.snapshot_every
        )
        run = start(cluster, folder, recipe)
        try:
            chance = random.Random(options.seed)
            weights = [KINDS[kind] for kind in options.kinds]
            kinds = chance.choices(options.kinds, weights=weights, k=options.faults)
            injected = disturb(run, kinds=kinds, chance=chance)
            wrong = judge(run, reference(cluster, folder, recipe))
        except BaseException:
            print(run.log(), file=sys.stderr)
            raise
        print(summary(run, injected, lines_of(folder / "reference" / "metrics.jsonl")))
    print("\n".join(wrong) or "all checks passed")
    sys.exit(bool(wrong))


def summary(run: Run, injected: list[Fault], expected: list[dict[str, Any]]) -> str:
    """Return the attempts, the times of the restarts and the largest difference of a loss.

    Args:
        run: the run, which has ended
        injected: its faults
        expected: the metrics of an undisturbed run
    """
    attempts = Counter(len(event["nodes"]) for event in run.events("attempt"))
    lines = [f"attempts by number of hosts: {dict(attempts)}"]
    for source in ("memory", "disk"):
        seconds = sorted(fault.seconds for fault in injected if fault.source == source)
        if seconds:
            lines.append(
                f"{len(seconds)} restarts from {source}: next step after {median(seconds):.1f} s "
                f"(median), at most {seconds[-1]:.1f} s"
            )
    pairs = zip(run.metrics(), expected, strict=False)
    largest = max(abs(own["loss"] / other["loss"] - 1) for own, other in pairs)
    return "\n".join([*lines, f"largest difference of a loss: {largest:.1e}"])


if __name__ == "__main__":
    main()
