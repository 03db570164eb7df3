"""A preflight on several ranks: a slow or faulty one is named, and the run continues or stops."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import tomli_w

from tests.conftest import changed, quick_and_long, small_recipe
from tests.ranks import join_world, run_ranks, start_ranks
from threefold.launch.diagnosis import unfit_hosts
from threefold.pretrain.preflight.evaluate import SPARE_NODES
from threefold.pretrain.preflight.run import (
    EXCHANGE_TIMEOUT,
    SECONDS_WITHOUT_PROGRESS,
    hang_limit,
    ranks_per_node,
)
from threefold.run_folder.folder import RunFolder
from threefold.runtime.exits import FINISHED, HUNG, UNFIT
from threefold.runtime.processes import RankTree
from threefold.supervision.hang_report import Breadcrumb
from threefold.supervision.supervisor import Supervisor

# One rank per node, in an otherwise ordinary run. Every node but one has the same rates, so that
# the load of this machine does not matter.
SCRIPT = """
import os, sys, time
os.environ["LOCAL_WORLD_SIZE"] = "1"
os.environ.update({variables})
{install}
from recipes import pretrain
from threefold.pretrain.preflight import run
rank = int(os.environ["RANK"])
fault = "{fault}" if rank == 2 else ""
measured = []
def matmul_tflops(*_, **__):
    measured.append(fault)
    if fault == "hang":
        time.sleep(1000)
    if fault == "error":
        raise RuntimeError("CUDA error: uncorrectable ECC error encountered")
    return 0.2 if fault == "slow" or (fault == "disturbed" and len(measured) == 1) else 1.0
run.matmul_tflops = matmul_tflops
run.SECONDS_WITHOUT_PROGRESS = 4
def release_memory(device):
    if fault == "error":
        raise RuntimeError("CUDA error")
run.release_memory = release_memory
seconds, wrong_rows = run.LinkTest._seconds, run.wrong_rows
def multiply(left, right):
    product = left @ right
    product[3, 5] += fault == "wrong"
    return product
def timed(test, seconds_of, size, repetitions):
    measured = seconds(test, seconds_of, size, repetitions)
    return None if measured is None else 1.0
run.wrong_rows = lambda *arguments: wrong_rows(*arguments, multiply=multiply)
run.LinkTest._seconds = timed
pretrain.main()
"""


def run(
    corpus: Path,
    folder: Path,
    fault: str,
    spares: int | None = None,
    *,
    ranks: int = 4,
    install: str = "",
    **changes: Any,
) -> tuple[list[int], list[str], dict[str, Any]]:
    """Train two steps with a fault on rank 2; return exit codes, outputs and the preflight."""
    settings = {
        "training": {"steps": 2, "evaluate_every": 0},
        "supervision": {"preflight": True},
        "layout": {"pipeline": 2, "tensor": 1},
    }
    file = folder / "small.toml"
    file.write_text(tomli_w.dumps(changed(small_recipe(corpus), **settings | changes)))
    variables = {} if spares is None else {SPARE_NODES: str(spares)}
    script = SCRIPT.format(fault=fault, variables=variables, install=install)
    codes, outputs = start_ranks(
        ranks,
        ["-c", script, str(file), "--run-dir", str(folder / "run")],
        folder=folder,
        seconds=120,
        forked=not install,
    )
    events = [e for e in RunFolder(folder / "run").read_events() if e["event"] == "preflight"]
    assert len(events) <= 1, outputs
    return codes, outputs, events[0] if events else {}


def test_healthy_ranks_train(corpus: Path, tmp_path: Path) -> None:
    codes, outputs, event = run(corpus, tmp_path, "")
    assert codes == [FINISHED] * 4
    assert "preflight: matmul 1 TFLOP/s (slowest 1 on rank 0 (" in outputs[0]
    assert set(event["measures"]) == {
        "matmul", "network link", "pipeline link", "data all-reduce",
    }  # fmt: skip
    assert not {"issues", "below_plan", "left_out"}.intersection(event)
    assert event["seconds"] < 10
    started = [e for e in RunFolder(tmp_path / "run").read_events() if e["event"] == "first_step"]
    assert 0 < started[0]["seconds"]["preflight"] < 10


@pytest.mark.parametrize("spares", quick_and_long([None, 1], [None, 0, 1]))
def test_a_slow_rank_is_named_and_left_out_if_there_is_a_spare_node(
    spares: int | None, corpus: Path, tmp_path: Path
) -> None:
    codes, outputs, event = run(corpus, tmp_path, "slow", spares)
    assert codes == [UNFIT if spares else FINISHED] * 4, outputs
    assert "preflight: rank 2 (" in outputs[0]
    assert "matmul 0.2 TFLOP/s, the median of the others is 1 TFLOP/s" in outputs[0]
    assert event["measures"]["matmul"]["rank"] == 2
    assert ("left_out" in event) == bool(spares)
    broken, slow = unfit_hosts([event], ["a", "b", "c", "d"], 1)  # for launch.py
    assert (list(broken), list(slow)) == ([], ["c"] if spares else [])
    assert ("stopped: preflight: launch.py continues without" in outputs[0]) == bool(spares)


@pytest.mark.parametrize(
    ("fault", "words"),
    [("wrong", "4 rows of matmuls have wrong results"), ("error", "uncorrectable ECC error")],
)
def test_a_broken_rank_stops_the_run(fault: str, words: str, corpus: Path, tmp_path: Path) -> None:
    codes, outputs, event = run(corpus, tmp_path, fault)
    assert codes == [UNFIT] * 4, outputs
    assert words in outputs[0] and "use --set supervision.preflight=false" in outputs[0]
    (node,) = event["left_out"]
    assert node["rank"] == 2 and node["broken"] and words in node["reason"]
    broken, slow = unfit_hosts([event], ["a", "b", "c", "d"], 1)  # for launch.py
    assert words in broken["c"] and not slow
    last = json.loads((tmp_path / "run" / "events.jsonl").read_text().splitlines()[-1])
    assert (last["event"], last["exit_code"]) == ("stop", UNFIT)
    assert not list((tmp_path / "run" / "checkpoints").glob("step-*"))


def test_a_disturbance_is_not_a_slow_node(corpus: Path, tmp_path: Path) -> None:
    codes, outputs, event = run(corpus, tmp_path, "disturbed", spares=1)
    assert codes == [FINISHED] * 4, outputs
    assert "issues" not in event


def test_a_rank_that_does_not_respond_is_named_soon(corpus: Path, tmp_path: Path) -> None:
    codes, outputs, _ = run(corpus, tmp_path, "hang")
    # On a busy machine, a rank may notice the end of another one before it ends by itself.
    assert HUNG in codes and set(codes) <= {HUNG, 1}, outputs
    assert "no progress for 4 s: rank 2 (" in (said := "".join(outputs))
    assert "preflight: matmuls" in said
    (stop,) = [e for e in RunFolder(tmp_path / "run").read_events() if e["event"] == "stop"]
    assert stop["exit_code"] == HUNG and stop["behind"] == [2]


def test_a_slow_start_before_the_preflight_does_not_count_as_its_hang(
    world: None, tmp_path: Path
) -> None:
    supervisor = Supervisor(
        RunFolder(tmp_path), Breadcrumb(), hang_seconds=0, startup_seconds=30 * 60
    )
    with mock.patch.object(supervisor, "_end"):
        for _ in range(2 * SECONDS_WITHOUT_PROGRESS):
            supervisor._look_at_progress()
        with hang_limit(supervisor):
            supervisor._look_at_progress()
            assert supervisor.limit == SECONDS_WITHOUT_PROGRESS and not supervisor._ending
            for _ in range(SECONDS_WITHOUT_PROGRESS):
                supervisor._look_at_progress()
            assert supervisor._ending
    assert supervisor.limit == 30 * 60


def count_ranks_per_node(cases: list[list[int]]) -> list[int]:
    """Return `ranks_per_node` of this rank, for each list of the ranks' local sizes."""
    world, tree = join_world(), RankTree(EXCHANGE_TIMEOUT)
    return [ranks_per_node(replace(world, local_size=case[world.rank]), tree) for case in cases]


def test_ranks_of_unequal_nodes_take_part_in_the_same_rounds() -> None:
    cases = {(2, 2, 1): 3, (1, 1, 1): 1, (2, 2, 2): 3, (3, 3, 3): 3}
    counts = run_ranks(3, count_ranks_per_node, [list(case) for case in cases])
    assert counts == [list(cases.values())] * 3


def test_cpus_have_no_preflight_by_default(corpus: Path, tmp_path: Path) -> None:
    codes, outputs, event = run(corpus, tmp_path, "wrong", ranks=2, supervision={})
    assert codes == [FINISHED] * 2, outputs
    assert not event


@pytest.mark.long
def test_a_preflight_obeys_the_rules_of_nccl(corpus: Path, tmp_path: Path) -> None:
    install = (
        "from tests.nccl_rules.device import Rules\n"
        "from tests.nccl_rules.slots import LaunchRule\n"
        "rules = Rules(slots=2, launch=LaunchRule.POSTING_ORDER, patience=30)\n"
        "os.environ.update(rules.environment())\n"
        "sys.path.insert(0, os.getcwd())\n"
        "from tests.nccl_rules import install\n"
    )
    codes, outputs, event = run(corpus, tmp_path, "", install=install)
    assert codes == [FINISHED] * 4, outputs
    assert "issues" not in event
