"""Run a function on several ranks, for tests of what needs more than one process."""

import os
import pickle
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from recipes.proving.worlds import free_port, rank_variables
from recipes.training.processes import start_processes
from recipes.training.topology import World

REPOSITORY = Path(__file__).resolve().parents[1]
SECONDS = 420


def run_ranks(
    world_size: int, function: Callable[..., Any], *arguments: Any, seconds: float = SECONDS
) -> list[Any]:
    """Call a module's function on every rank of a fresh world; returns the ranks' results.

    The function finds RANK and WORLD_SIZE in the environment, as a launcher would set them.

    seconds: after which they are ended
    """
    with tempfile.TemporaryDirectory() as folder:
        call = Path(folder) / "call"
        call.write_bytes(pickle.dumps((function.__module__, function.__name__, arguments)))
        codes, outputs = start_ranks(
            world_size, ["-m", "tests.ranks", str(call)], folder=Path(folder), seconds=seconds
        )
        assert not any(codes), "\n".join(
            f"rank {rank} of {world_size}, exit code {code}:\n{output[-4000:]}"
            for rank, (code, output) in enumerate(zip(codes, outputs, strict=True))
        )
        return [
            pickle.loads((Path(folder) / f"result{rank}").read_bytes())
            for rank in range(world_size)
        ]


def start_ranks(
    world_size: int, arguments: list[str], *, folder: Path, seconds: float
) -> tuple[list[int], list[str]]:
    """Run `python ARGUMENTS` on every rank of a fresh world; exit codes and outputs.

    Outputs go to files: a rank whose pipe nobody reads would stop, and the others wait for it.
    """
    port = free_port()
    logs = [folder / f"rank{rank}.log" for rank in range(world_size)]
    processes = [
        subprocess.Popen(
            [sys.executable, *arguments],
            cwd=REPOSITORY,
            env=os.environ | rank_environment(rank, world_size, port),
            stdout=log.open("wb"),
            stderr=subprocess.STDOUT,
        )
        for rank, log in enumerate(logs)
    ]
    try:
        codes = [process.wait(timeout=seconds) for process in processes]
    finally:
        for process in processes:
            process.kill()
    return codes, [log.read_text(errors="replace") for log in logs]


def rank_environment(rank: int, world_size: int, port: int) -> dict[str, str]:
    """The variables that a launcher sets on one CPU rank, and what keeps it to one core."""
    return rank_variables(rank, world_size, port) | {
        "OMP_NUM_THREADS": "1",
        "DS_ACCELERATOR": "cpu",
        "CUDA_VISIBLE_DEVICES": "",
    }


def join_world() -> World:
    """On a rank: its world, joined, with one thread."""
    world = World.from_environment(os.environ)
    torch.set_num_threads(1)
    start_processes(world)
    return world


def main() -> None:
    """One rank: call the function and write down what it returns."""
    call = Path(sys.argv[1])
    module, name, arguments = pickle.loads(call.read_bytes())
    function = getattr(__import__(module, fromlist=[name]), name)
    result = function(*arguments)
    call.with_name(f"result{os.environ['RANK']}").write_bytes(pickle.dumps(result))
    # The interpreter's teardown of torch's threads sometimes aborts; it is not what is tested.
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
