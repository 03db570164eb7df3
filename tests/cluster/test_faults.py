"""Every fault of tests/fault_injection/faults.py, injected for real."""

from collections.abc import Iterator

import pytest

from tests.cluster.cluster import Cluster, missing
from tests.fault_injection.faults import HOSTS, Fault, faults, inject
from tests.fault_injection.unread import UNREAD

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.skipif(bool(missing()), reason=f"no cluster here: {missing()}"),
]
FAULTS = {  # tests/fault_injection/test_faults.py has those on one host with other outputs
    f"{fault.name}, {len(fault.hosts) or 1} hosts, {kind}": (fault, kind)
    for fault in faults()
    for kind in ("pipe", *(UNREAD if fault.hosts else ()))
}


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with Cluster(len(HOSTS)) as cluster:
        yield cluster


@pytest.mark.parametrize(
    ("fault", "kind"),
    [
        pytest.param(
            *case, id=name, marks=[] if name.endswith(", pipe") else pytest.mark.exhaustive
        )
        for name, case in FAULTS.items()
    ],
)
def test_a_run_ends_in_order(fault: Fault, kind: str, cluster: Cluster) -> None:
    outcome = inject(cluster, fault, list(FAULTS.values()).index((fault, kind)), kind)
    print(outcome)
    assert not outcome.wrong, str(outcome)
