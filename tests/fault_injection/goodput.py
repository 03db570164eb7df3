"""Compare the goodput of a run whose ranks are killed at random with the predicted one.

`launch.py --launcher local` starts two ranks on this machine, as two nodes that take snapshots in
memory. One rank at a time is killed, at exponentially distributed times. The prediction gets the
means of steps, pauses and restarts of the run, and the rate of its failures; it predicts the shares
of kept and of repeated steps. The exit code is 1 if the shares of kept steps differ by more than 3
percentage points.

    python tests/fault_injection/goodput.py
    python tests/fault_injection/goodput.py --failures 20 --seed 2
"""

import sys
from pathlib import Path

if __name__ == "__main__":  # the repository, not tests/, is where imports start
    sys.path[0] = str(Path(__file__).resolve().parents[2])

import argparse
import contextlib
import os
import random
import signal
import subprocess
import tempfile
import time
from dataclasses import dataclass
from statistics import mean
from typing import Any

import tomli_w

from tests.conftest import VOCAB_SIZE, changed, small_recipe
from tests.fault_injection.node_loss import ENVIRONMENT, lines_of
from threefold.config.loading import REPOSITORY
from threefold.plan.goodput import SECONDS_PER_DAY, FaultCosts, goodput
from threefold.prove.shrink import write_corpus
from threefold.runtime.command_line import count

MAX_SHARE_DIFFERENCE = 0.03  # 3 percentage points
SNAPSHOT_EVERY = 60  # steps
MAX_STEPS = 1_000_000  # the run is stopped before


@dataclass
class Run:
    """A run of launch.py on this machine, in progress."""

    folder: Path
    process: subprocess.Popen[bytes]

    def events(self, name: str) -> list[dict[str, Any]]:
        """Return the events of a kind."""
        return [e for e in lines_of(self.folder / "events.jsonl") if e["event"] == name]

    def wait_for_attempt(self, number: int) -> None:
        """Wait until an attempt has finished its first step."""
        while len(self.events("first_step")) < number:
            self.check()
            time.sleep(0.05)

    def check(self) -> None:
        """Raise an error with the end of the log if launch.py has ended."""
        if self.process.poll() is not None:
            raise RuntimeError((self.folder.parent / "log").read_text()[-4000:])

    def ranks(self) -> list[int]:
        """Return the processes of the current ranks."""
        lease = (self.folder / "lease").read_text().strip()
        found = []
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit():
                with contextlib.suppress(OSError):  # it has ended
                    words = (entry / "cmdline").read_bytes().split(b"\0")
                    is_rank = any(word.endswith(b"pretrain.py") for word in words)
                    if is_rank and lease.encode() in words:
                        found.append(int(entry.name))
        return found


def start(folder: Path) -> Run:
    """Start the run."""
    write_corpus(folder / "corpus", VOCAB_SIZE)
    table = changed(
        small_recipe(folder / "corpus"),
        name="goodput",
        batch={"global_sequences": 8, "micro_sequences": 1},
        model__sequence_length=256,
        training={"steps": MAX_STEPS, "evaluate_every": 0},
        checkpoint={"every": MAX_STEPS, "snapshot_every": SNAPSHOT_EVERY},
        cluster={"nodes": 2, "gpus_per_node": 1, "gpu": "cpu", "node_failures": 0}
        | {"standby": False},  # the command line of a standby process has no lease
    )
    recipe, hosts = folder / "recipe.toml", folder / "hosts"
    recipe.write_text(tomli_w.dumps(table))
    hosts.write_text("node1 slots=1\nnode2 slots=1\n")
    command = [sys.executable, "recipes/launch.py", "--hostfile", str(hosts), "--launcher", "local"]
    command += [str(recipe), "--run-dir", str(folder / "run")]
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(
            command, cwd=REPOSITORY, env=os.environ | ENVIRONMENT, stdout=log, stderr=log
        )
    return Run(folder / "run", process)


def disturb(run: Run, failures: int, *, mean_seconds: float, chance: random.Random) -> list[float]:
    """Kill a rank at random times; return the times of the failures.

    The time to the next failure also runs during a restart, so a restart can fail too.
    """
    run.wait_for_attempt(1)
    times: list[float] = []
    while len(times) < failures:
        due = time.time() + chance.expovariate(1 / mean_seconds)
        ranks: list[int] = []
        while time.time() < due or len(run.events("attempt")) <= len(times) or not ranks:
            run.check()
            time.sleep(0.05)
            ranks = run.ranks()
        failed = time.time()
        with contextlib.suppress(ProcessLookupError):  # it has just ended: draw another time
            os.kill(chance.choice(ranks), signal.SIGKILL)
            times.append(failed)
    while run.events("first_step")[-1]["time"] < times[-1]:  # an attempt may have no first step
        run.check()
        time.sleep(0.05)
    return times


def judge(run: Run, times: list[float]) -> bool:
    """Print the measured and the predicted shares; return True if they agree."""
    lines = lines_of(run.folder / "metrics.jsonl")
    trained = [event["time"] for event in run.events("first_step")]
    began, end = run.events("attempt")[0]["time"], run.events("stop")[-1]
    between = mean(line["between_seconds"] for line in lines)
    step = mean(line["step_seconds"] for line in lines) - between
    # A restart that fails again is not complete.
    restarts = [
        done - failed - step
        for failed, later in zip(times, [*times[1:], end["time"]], strict=True)
        if (done := min(t for t in trained if t > failed)) < later
    ]
    costs = FaultCosts(
        pause_seconds=between * SNAPSHOT_EVERY,
        write_seconds=2 * step,  # a snapshot is complete about two steps after it was taken
        restart_seconds=mean(restarts),
    )
    seconds = end["time"] - trained[0]
    predicted = goodput(SNAPSHOT_EVERY * step, costs, len(times) / seconds * SECONDS_PER_DAY)
    print(f"{len(times)} failures in {seconds:.0f} s; a step takes {step:.3f} s, a restart "
          f"{costs.restart_seconds:.1f} s, a snapshot pauses for {costs.pause_seconds:.3f} s",
          )  # fmt: skip
    # The prediction has no first start.
    measured = {
        name: share * (end["time"] - began) / seconds for name, share in end["wall_time"].items()
    }
    print(f"kept:     measured {measured['kept']:.1%}, predicted {predicted.kept:.1%}")
    print(f"repeated: measured {measured['repeated']:.1%}, predicted {predicted.repeated:.1%}")
    return abs(measured["kept"] - predicted.kept) <= MAX_SHARE_DIFFERENCE


def main() -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--failures", type=count, default=12)
    parser.add_argument("--seconds", type=float, default=40, help="mean time between failures")
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        run = start(Path(name))
        try:
            chance = random.Random(options.seed)
            times = disturb(run, options.failures, mean_seconds=options.seconds, chance=chance)
        finally:
            run.process.terminate()
            run.process.wait()
        agrees = judge(run, times)
    print("the shares agree" if agrees else "the shares differ")
    sys.exit(not agrees)


if __name__ == "__main__":
    main()
