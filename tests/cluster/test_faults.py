"""Every fault of tests/faults.py, injected for real."""

from collections.abc import Iterator

import pytest

from tests.cluster.cluster import Cluster, missing
from tests.faults import HOSTS, Fault, faults, inject

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.skipif(bool(missing()), reason=f"no cluster here: {missing()}"),
]
FAULTS = {f"{fault.name}, {len(fault.hosts) or 1} hosts": fault for fault in faults()}


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with Cluster(len(HOSTS)) as cluster:
        yield cluster


@pytest.mark.parametrize("fault", FAULTS.values(), ids=FAULTS)
def test_a_run_ends_in_order(fault: Fault, cluster: Cluster) -> None:
    outcome = inject(cluster, fault, list(FAULTS.values()).index(fault))
    print(outcome)
    assert not outcome.wrong, str(outcome)
