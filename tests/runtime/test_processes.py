"""Joining the process group: a port that another process uses, DeepSpeed, and threads."""

import os
import re
import socket
from collections.abc import Iterator
from pathlib import Path

import deepspeed
import pytest
import tomli_w
import torch

from tests.ranks import join_world, run_ranks, start_ranks
from threefold.run_folder.folder import RunFolder
from threefold.runtime.exits import BUSY
from threefold.runtime.launchers import free_port
from threefold.runtime.processes import port_advice

# Rank 0 of two ranks; the other one is not needed, because rank 0 ends first.
RANK_0 = """
import os, sys
os.environ |= {{"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_PORT": "{port}"}}
sys.argv = ["pretrain.py", "{recipe}", "--run-dir", "{folder}/run", *{options}]
from recipes import pretrain
from threefold.runtime import processes
processes.launchers_of = lambda pid: {launchers}
pretrain.main()
"""


@pytest.fixture
def busy_port() -> Iterator[int]:
    """Return a port on which this process listens."""
    with socket.create_server(("", free_port())) as server:
        yield server.getsockname()[1]


@pytest.mark.parametrize(
    ("options", "launchers", "code", "said"),
    [
        ([], [], BUSY, r"is used by another process .*; use a free port: MASTER_PORT=(\d+) in "),
        ([], [1], BUSY, r"is used by .*; use a free port: deepspeed --master_port (\d+)$"),
        (["--lease", "x.1"], [1], 1, r"port (\d+), chosen by launch.py, is now in use by"),
    ],
)
def test_a_busy_port_is_one_line_with_a_free_port(
    options: list[str], launchers: list[int], code: int, said: str, small: dict, busy_port: int,
    tmp_path: Path,
) -> None:  # fmt: skip
    recipe = tmp_path / "small.toml"
    recipe.write_text(tomli_w.dumps(small))
    program = RANK_0.format(
        port=busy_port, recipe=recipe, folder=tmp_path, options=options, launchers=launchers
    )
    codes, (output,) = start_ranks(1, ["-c", program], folder=tmp_path, seconds=60)
    assert codes == [code], output
    assert "Traceback" not in output
    line = next(line for line in output.splitlines() if str(busy_port) in line)
    found = re.search(said, line)
    assert found, line
    assert (int(found[1]) == busy_port) == bool(options)
    assert not (tmp_path / "run").exists()


def test_a_slurm_job_gets_another_port_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("threefold.runtime.processes.launchers_of", lambda pid: [])
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    advice = port_advice(31353)
    assert "another port when the job is requeued; if it is not requeued, submit it again" in advice
    assert "In a script of your own, set MASTER_PORT=31353" in advice


def test_a_folder_in_use_is_reported_before_a_port_that_the_same_run_uses(
    small: dict, busy_port: int, tmp_path: Path
) -> None:
    recipe = tmp_path / "small.toml"
    recipe.write_text(tomli_w.dumps(small))
    program = RANK_0.format(
        port=busy_port, recipe=recipe, folder=tmp_path, options=[], launchers=[]
    )
    (folder := RunFolder(tmp_path / "run")).hold()
    codes, (output,) = start_ranks(1, ["-c", program], folder=tmp_path, seconds=60)
    folder.release()
    assert codes == [BUSY], output
    assert f"in use by process {os.getpid()} on " in output and str(busy_port) not in output


def test_a_free_port_is_free_on_all_interfaces(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("0.0.0.0", free_port())) as server:
        ports = iter([server.getsockname()[1], other := free_port()])
        monkeypatch.setattr("threefold.runtime.launchers.random_port", lambda: next(ports))
        assert free_port() == other


def operations_after_joining() -> dict[str, bool]:
    join_world()
    return deepspeed.ops.__compatible_ops__


def test_no_operation_of_deepspeed_is_probed() -> None:
    assert run_ranks(1, operations_after_joining) == [{}]


def threads_of_rank() -> int:
    """Return the number of torch's threads if it was imported before the rank got its variables."""
    os.environ["OMP_NUM_THREADS"] = "3"
    join_world()
    return torch.get_num_threads()


def test_a_rank_made_of_a_standby_process_has_its_number_of_threads() -> None:
    assert run_ranks(1, threads_of_rank) == [3]
