"""A real run whose node is slow, from the comparison of speeds to the alert in W&B."""

import subprocess
import sys
from pathlib import Path

import pytest
import tomli_w

from tests.conftest import changed
from threefold.config.loading import REPOSITORY
from threefold.run_folder.folder import RunFolder


@pytest.mark.long
def test_a_node_that_is_slow_is_replaced_and_the_alert_says_so(small: dict, tmp_path: Path) -> None:
    """Of two ranks, one is always a little slower than the limit of this recipe allows."""
    recipe, hosts, folder = tmp_path / "recipe.toml", tmp_path / "hosts", tmp_path / "run"
    table = changed(
        small,
        training={"steps": 120, "evaluate_every": 0, "compile": False},
        checkpoint={"every": 1000},
        tracking={"mode": "offline"},
        supervision={
            "compare_speed_every": 5,
            "slow_rank": 1.000001,
            "slow_comparisons": 1,
            "node_seconds": 2,
        },
        cluster={"nodes": 2, "gpus_per_node": 1, "gpu": "cpu", "standby": False},
    )
    recipe.write_text(tomli_w.dumps(table))
    hosts.write_text("node1 slots=1\nnode2 slots=1\nnode3 slots=1\n")
    command = [sys.executable, "recipes/launch.py", "--hostfile", str(hosts), "--launcher", "local"]
    done = subprocess.run(
        [*command, str(recipe), "--run-dir", str(folder)],
        cwd=REPOSITORY, capture_output=True, text=True, timeout=280, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    run = RunFolder(folder)
    first, second, *_ = [e for e in run.read_events() if e["event"] == "attempt"]
    replaced = next(e for e in run.read_events() if e["event"] == "replace")["nodes"]
    assert first["nodes"] == ["node1", "node2"] and len(replaced) == 1
    assert set(second["nodes"]) == {"node1", "node2", "node3"} - set(replaced)
    assert second["reason"] == f"{replaced[0]}: slow in 1 successive comparisons"
    assert [line["step"] for line in run.read_metrics()] == list(range(1, 121))
    logs = [log.read_bytes() for log in (folder / "wandb").glob("offline-run-*/*.wandb")]
    assert any(b"slow ranks" in log for log in logs)
    assert any(b"attempt 2 started" in log and b"launch/nodes" in log for log in logs)
