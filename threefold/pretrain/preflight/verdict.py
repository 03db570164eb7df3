"""The judgement of a preflight: what is broken or slow, and which nodes are left out."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntEnum


class Severity(IntEnum):
    """The severity of a finding.

    A shared link or group is slow, but its nodes cannot be told apart; a slow node is slow with
    all its partners; a broken one fails or computes wrong results.
    """

    SHARED = 0
    SLOW = 1
    BROKEN = 2


@dataclass(frozen=True)
class Finding:
    """A measure of some ranks that is worse than that of the others.

    Attributes:
        severity: what is wrong
        measure: the measure
        ranks: the global ranks, on one node unless the severity is SHARED
        value: the measured value, in unit(measure); None for a broken device
        median_of_others: the median of the others, in unit(measure)
        planned: the planner's value, in unit(measure); None if there is none
        problem: text of a broken device
    """

    severity: Severity
    measure: str
    ranks: tuple[int, ...]
    value: float | None = None
    median_of_others: float | None = None
    planned: float | None = None
    problem: str = ""

    @property
    def ratio(self) -> float:
        """The median of the others divided by the measured value."""
        return (
            self.median_of_others / self.value
            if self.median_of_others and self.value
            else float("inf")
        )


@dataclass(frozen=True)
class Summary:
    """A measure over all ranks: the median, the lowest value, its first rank, the planned value."""

    median: float
    lowest: float
    rank: int
    planned: float | None = None


@dataclass(frozen=True)
class Verdict:
    """The judgement of a preflight.

    Attributes:
        findings: what is broken or slow, the worst first
        summaries: measure -> its values over all ranks
        mismatches: measures that are worse on all ranks than the planner assumes
        left_out: the nodes that launch.py should not use, by index, with their worst finding
        stops: True if the run must not start on these nodes
    """

    findings: Sequence[Finding] = ()
    summaries: Mapping[str, Summary] = field(default_factory=dict)
    mismatches: Sequence[str] = ()
    left_out: Mapping[int, Finding] = field(default_factory=dict)
    stops: bool = False

    @property
    def has_slow(self) -> bool:
        """True if something seems slow, and nothing is broken: a second measurement may help."""
        return bool(self.findings) and self.findings[0].severity < Severity.BROKEN


@dataclass(frozen=True)
class RankLayout:
    """The ranks of a run.

    Attributes:
        per_node: ranks of each node
        stages: pipeline stages
        groups: axis -> the global ranks of every group
    """

    per_node: int
    stages: int = 1
    groups: Mapping[str, Sequence[Sequence[int]]] = field(default_factory=dict)

    def node(self, rank: int) -> int:
        """Return the index of a rank's node."""
        return rank // self.per_node
