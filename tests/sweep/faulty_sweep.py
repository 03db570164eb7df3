"""sweep.py with faults in chosen trials, and on request with ranks that do not measure.

The environment variable FAULTS names a JSON file {key of a trial, or "links": fault}:

out_of_memory: rank 1 cannot allocate memory; hang: rank 1 sleeps; crash: rank 1 is killed; error:
rank 1 raises; full: rank 0 fills the file system of the sweep folder before it reports its result

DONE names a file to which rank 0 appends the key of every trial that it has finished. With
FAKE_RANKS = 1, ranks import no torch, and their step times are derived from the layouts.
"""

import json
import math
import os
import signal
import sys
import time
import zlib
from pathlib import Path
from typing import Any

if __name__ == "__main__":  # the repository is where imports start
    sys.path[0] = str(Path(__file__).resolve().parents[2])

from threefold.sweep.ranks import protocol
from threefold.sweep.ranks.protocol import START, WorkerFiles, read_message, write_message

FAKE_SECONDS = 0.03
FAKE_BEST_RATE = 0.032
PATIENCE = "SECONDS_WITHOUT_HEARTBEAT"  # environment variable for fake ranks


def fail(fault: str, rank: int, folder: Path) -> None:
    """Cause a fault on this rank."""
    if fault == "full" and rank == 0:
        fill(folder)
    if rank != 1:
        return
    if fault == "out_of_memory":
        if "torch" in sys.modules:
            sys.modules["torch"].empty(2**50)
        raise MemoryError("as injected")
    if fault == "error":
        raise RuntimeError("a defect, as injected")
    if fault == "hang":
        time.sleep(10_000)
    if fault == "crash":
        os.kill(os.getpid(), signal.SIGKILL)


def fill(folder: Path) -> None:
    """Fill the file system of a folder."""
    with (folder / "filling").open("wb", buffering=0) as stream:
        for size in (2**16, 1):
            try:
                while True:
                    stream.write(bytes(size))
            except OSError:
                continue


def fault_of(key: str) -> str:
    """Return the fault of a trial; empty if it has none."""
    file = os.environ.get("FAULTS")
    return json.loads(Path(file).read_text()).get(key, "") if file else ""


def note_end(key: str, rank: int) -> None:
    """Note that a trial is finished."""
    if rank == 0 and "DONE" in os.environ:
        with open(os.environ["DONE"], "a") as stream:
            stream.write(f"{key}\n")


def fake_rank(folder: Path) -> None:
    """Answer requests without measuring."""
    if PATIENCE in os.environ:
        protocol.SECONDS_WITHOUT_HEARTBEAT = float(os.environ[PATIENCE])
    files, rank = WorkerFiles(folder), int(os.environ["RANK"])
    watch = protocol.RankWatch(files)
    watch.start()
    (folder / f"up-{rank}").touch()
    while len(list(folder.glob("up-*"))) < int(os.environ["WORLD_SIZE"]):
        time.sleep(0.01)
    if rank == 0:
        write_message(files.result, {"number": START, "result": {"outcome": "ok"}})
    number = START + 1
    while True:
        request = read_message(files.request, number)
        if request is None:
            time.sleep(0.01)
            continue
        watch.begin(number, request["seconds"])
        key = request["key"]
        fault = fault_of(key)
        try:
            fail(fault, rank, folder.parents[2])
        except Exception as problem:
            reason = f"{type(problem).__name__}: {problem}"
            outcome = "out_of_memory" if isinstance(problem, MemoryError) else "crashed"
            message = {"rank": rank, "outcome": outcome, "reason": reason, "log": "", "time": 0.0}
            write_message(files.failure(rank), message | {"number": number})
            write_message(files.failed, {"number": number})
            fault = "failed"
        if fault in ("", "full") and rank == 0:
            time.sleep(FAKE_SECONDS)
            recipe = request["recipe"]
            drawn = str([recipe["layout"], recipe["batch"], recipe["deepspeed"]])
            seconds = [1 + zlib.crc32(drawn.encode()) / 2**32] * request["steps"]
            result = {"outcome": "ok", "step_seconds": seconds, "memory_gib": 1.0}
            if "kind" in request:
                result["training"] = fake_training(recipe)
            if request["split"]:
                from threefold.sweep.trial import PARTS  # imports the whole planner

                parts = dict.fromkeys(PARTS, seconds[0] / len(PARTS))
                result["split"] = parts | {"rank": 1, "instrumented_seconds": 2.0}
            note_end(key, rank)
            write_message(files.result, {"number": number, "result": result})
        watch.end()
        number += 1


def fake_training(recipe: dict[str, Any]) -> dict[str, Any]:
    """Return losses whose best learning rate is FAKE_BEST_RATE; high ones diverge."""
    rate, steps = recipe["optimizer"]["learning_rate"], recipe["training"]["steps"]
    if rate > 20 * FAKE_BEST_RATE:
        return {"losses": [3.0], "validation": [], "diverged": 2}
    loss = 2 + recipe["seed"] / 1000 + math.log2(rate / FAKE_BEST_RATE) ** 2 / 10
    return {"losses": [loss] * steps, "validation": [[steps, loss]], "diverged": None}


def inject_faults() -> None:
    """Let the ranks fail in chosen trials."""
    from threefold.sweep.ranks import worker  # torch, which fake ranks do not need

    healthy = worker.measure

    def measure(request: dict[str, Any], world: Any, *arguments: Any) -> Any:
        fail(fault_of(request["key"]), world.rank, Path(request["recipe"]["data"]["tokenizer"]))
        result = healthy(request, world, *arguments)
        note_end(request["key"], world.rank)
        return result

    worker.measure = measure


def main() -> None:
    """Run the command, or a rank of it."""
    if "--rank-of" in sys.argv:
        if os.environ.get("FAKE_RANKS"):
            fake_rank(Path(sys.argv[sys.argv.index("--rank-of") + 1]))
        inject_faults()
    from threefold.commands import sweep  # fake ranks, which start quickly, do not need it

    sweep.main()


if __name__ == "__main__":
    main()
