"""Every fault that needs no ssh, injected while no one reads the output of the run."""

from collections.abc import Iterator
from itertools import product

import pytest

from tests.cluster.cluster import Cluster, missing
from tests.conftest import in_turn_or_exhaustive
from tests.fault_injection.faults import Fault, faults, inject
from tests.fault_injection.unread import UNREAD

pytestmark = pytest.mark.skipif(bool(missing(hosts=False)), reason=missing(hosts=False))
ON_ONE_HOST = [fault for fault in faults() if not fault.hosts]
CASES = {f"{fault.name}, {kind}": (fault, kind) for fault, kind in product(ON_ONE_HOST, UNREAD)}
LONG = [  # in turn; one fault of each kind: a signal to save, a kill, a hang, a stop
    f"{name}, full pipe"
    for name in (
        "SIGUSR1 to a rank", "SIGKILL to a rank", "SIGSTOP to a rank", "SIGTERM to the launcher",
        "SIGKILL to deepspeed", "a rank sleeps",
    )
]  # fmt: skip
assert set(LONG) <= set(CASES)


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with Cluster(hosts=0) as cluster:
        yield cluster


@pytest.mark.parametrize(
    ("fault", "kind"),
    [
        pytest.param(
            *case,
            id=name,
            marks=in_turn_or_exhaustive(name, LONG, pytest.mark.long),
        )
        for name, case in CASES.items()
    ],
)
def test_a_run_ends_as_if_its_output_were_read(fault: Fault, kind: str, cluster: Cluster) -> None:
    outcome = inject(cluster, fault, list(CASES.values()).index((fault, kind)), kind, patience=3)
    print(outcome)
    assert not outcome.wrong, str(outcome)
