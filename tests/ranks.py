"""Run a function on several ranks, for tests of what needs more than one process."""

import os
import pickle
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parents[1]
SECONDS = 420


def run_ranks(world_size: int, function: Callable[..., Any], *arguments: Any) -> list[Any]:
    """Call a module's function on every rank of a fresh world; returns the ranks' results.

    The function finds RANK and WORLD_SIZE in the environment, as a launcher would set them.
    """
    with tempfile.TemporaryDirectory() as folder:
        call = Path(folder) / "call"
        call.write_bytes(pickle.dumps((function.__module__, function.__name__, arguments)))
        port = free_port()
        processes = [
            subprocess.Popen(
                [sys.executable, "-m", "tests.ranks", str(call)],
                cwd=REPOSITORY,
                env=os.environ | rank_environment(rank, world_size, port),
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
            for rank in range(world_size)
        ]
        try:
            outputs = [process.communicate(timeout=SECONDS)[0] for process in processes]
        finally:
            for process in processes:
                process.kill()
        for rank, (process, output) in enumerate(zip(processes, outputs, strict=True)):
            assert process.returncode == 0, f"rank {rank} of {world_size}:\n{output[-4000:]}"
        return [
            pickle.loads((Path(folder) / f"result{rank}").read_bytes())
            for rank in range(world_size)
        ]


def rank_environment(rank: int, world_size: int, port: int) -> dict[str, str]:
    """The variables that a launcher sets on one CPU rank."""
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(world_size),
        "LOCAL_WORLD_SIZE": str(world_size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "OMP_NUM_THREADS": "1",
        "DS_ACCELERATOR": "cpu",
        "CUDA_VISIBLE_DEVICES": "",
    }


def free_port() -> int:
    """A TCP port that nobody listens on."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def main() -> None:
    """One rank: call the function and write down what it returns."""
    call = Path(sys.argv[1])
    module, name, arguments = pickle.loads(call.read_bytes())
    function = getattr(__import__(module, fromlist=[name]), name)
    result = function(*arguments)
    call.with_name(f"result{os.environ['RANK']}").write_bytes(pickle.dumps(result))


if __name__ == "__main__":
    main()
