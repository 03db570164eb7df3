"""Every fault of tests/fault_injection/faults.py, injected for real."""

from collections.abc import Iterator

import pytest

from tests.cluster.cluster import Cluster, missing
from tests.conftest import in_turn_or_exhaustive
from tests.fault_injection.faults import HOSTS, Fault, faults, inject
from tests.fault_injection.unread import UNREAD

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.skipif(bool(missing()), reason=f"no cluster here: {missing()}"),
]
QUICK = [  # in turn; the others are exhaustive tests. Six on one host are long, with a full pipe
    "a rank's gradient is not finite, 1 hosts", "a rank crashes, 1 hosts",
    "SIGTERM to a rank, 2 hosts", "SIGSTOP to a rank, 2 hosts", "SIGTERM to deepspeed, 2 hosts",
    "SIGKILL to a node's launcher, 2 hosts", "a host's link is cut, 2 hosts",
    "a host is killed, 2 hosts",
]  # fmt: skip
FAULTS = {  # tests/fault_injection/test_faults.py has those on one host with other outputs
    f"{fault.name}, {len(fault.hosts) or 1} hosts, {kind}": (fault, kind)
    for fault in faults()
    for kind in ("pipe", *(UNREAD if fault.hosts else ()))
}
assert {f"{name}, pipe" for name in QUICK} <= set(FAULTS)


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with Cluster(len(HOSTS)) as cluster:
        yield cluster


@pytest.mark.parametrize(
    ("fault", "kind"),
    [
        pytest.param(
            *case,
            id=name,
            marks=in_turn_or_exhaustive(name.removesuffix(", pipe"), QUICK),
        )
        for name, case in FAULTS.items()
    ],
)
def test_a_run_ends_in_order(fault: Fault, kind: str, cluster: Cluster) -> None:
    outcome = inject(cluster, fault, list(FAULTS.values()).index((fault, kind)), kind, patience=3)
    print(outcome)
    assert not outcome.wrong, str(outcome)
