"""The messages and the event of a preflight."""

import json

from threefold.pretrain.preflight.evaluate import (
    DATA,
    MATMUL,
    MEMORY,
    NETWORK,
    Issue,
    IssueSeverity,
    PreflightResult,
    RankLayout,
    Summary,
)
from threefold.pretrain.preflight.run import event, healthy_line, mismatch, sentence, warnings

HOSTS = [f"node{rank // 8}" for rank in range(1024)]
SLOW = Issue(IssueSeverity.SLOW, MATMUL, (12,), 233.4, 701.2, 720.0)


def test_a_healthy_run_gets_one_line() -> None:
    summaries = {
        MATMUL: Summary(701.2, 690.4, 12, 720.0),
        NETWORK: Summary(44.16, 43.0, 3),
    }
    assert healthy_line(PreflightResult(summaries=summaries), HOSTS, 2.34) == (
        "preflight: matmul 701 TFLOP/s (slowest 690 on rank 12 (node1), planned 720); "
        "network link 44.2 GB/s; in 2.3 s"
    )


def test_a_finding_names_the_rank_the_host_and_the_values() -> None:
    assert sentence(SLOW, HOSTS) == (
        "rank 12 (node1): matmul 233 TFLOP/s, the median of the others is 701 TFLOP/s, planned "
        "720 TFLOP/s"
    )
    broken = Issue(
        IssueSeverity.BROKEN, MATMUL, (9,), problem="3 rows of matmuls have wrong results"
    )
    assert sentence(broken, HOSTS) == "rank 9 (node1): 3 rows of matmuls have wrong results"
    memory = Issue(IssueSeverity.SLOW, MEMORY, (3,), 50.0, 78.0, 60.0)
    assert sentence(memory, HOSTS) == (
        "rank 3 (node0): 50 GiB of memory are free, the median of the others is 78 GiB, planned "
        "60 GiB; another process may use the device"
    )


def test_a_large_group_is_shortened() -> None:
    shared = Issue(IssueSeverity.SHARED, DATA, tuple(range(0, 1024, 8)), 10.0, 45.0)
    text = sentence(shared, HOSTS)
    assert text.startswith("ranks 0, 8, 16, 24, 32, 40, 48, 56, ... (node0, node1, ")
    assert text.endswith("the nodes cannot be told apart") and len(text) < 250


def test_many_findings_stay_short() -> None:
    slow = [Issue(IssueSeverity.SLOW, MATMUL, (rank,), 100.0, 700.0) for rank in range(1024)]
    result = PreflightResult(
        slow, {MATMUL: Summary(700.0, 100.0, 0)}, [NETWORK], {1: SLOW}, stops=True
    )
    result.summaries[NETWORK] = Summary(10.0, 10.0, 0, 45.0)  # type: ignore[index]
    lines = warnings(result, HOSTS)
    assert len(lines) == 10 and lines[8] == "preflight: 1016 more issues of this kind"
    assert lines[9].startswith("preflight: network link reaches 10 GB/s on all ranks, and the")
    facts = event(result, RankLayout(8), HOSTS, 1.23456)
    assert len(json.dumps(facts)) < 2000
    assert len(facts["issues"]) == 8 and facts["seconds"] == 1.235
    assert facts["below_plan"] == [NETWORK]
    assert facts["left_out"] == [{"rank": 8, "reason": sentence(SLOW, HOSTS), "broken": False}]
    assert facts["measures"][MATMUL] == {
        "median": 700.0, "lowest": 100.0, "rank": 0, "host": "node0",
    }  # fmt: skip


def test_a_lack_of_memory_on_all_devices_has_a_remedy() -> None:
    assert "plan.py shows layouts that need less" in mismatch(MEMORY, None)
