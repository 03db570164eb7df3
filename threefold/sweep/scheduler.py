"""The scheduler of a sweep: measures every trial, even if its ranks fail."""

import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from threefold.gpus.datasheet import is_cpu
from threefold.plan.calibration.fit import RankedTime, leading
from threefold.plan.stage_contents import stage_parameters
from threefold.sweep.folder import SweepFolder, SweepStopped
from threefold.sweep.ranks.controller import (
    WorkerLauncher,
    Workers,
    WorkersAbandoned,
    WorkersFailed,
)
from threefold.sweep.trial import SPLIT_STEPS, Result, Trial, competitors

# Time limit of a trial. Building initializes the weights and may compile kernels.
SECONDS_TO_BUILD = 60.0
PARAMETERS_BUILT_PER_SECOND = 5e7
MAX_TIMES_THE_PLAN = 20  # a slower step is treated as a hang
MAX_TIMES_THE_PLAN_ON_CPU = 100  # CPUs vary more in speed, and other jobs may share them
MIN_SECONDS_OF_STEPS_ON_CPU = 240.0
SECONDS_BETWEEN_CLAIMS = 1.0
MAX_FAILED_STARTS = 2  # in a row
FIRST_HALVING_STEPS = 2


@dataclass
class Scheduler:
    """Measures trials with workers that it starts and replaces.

    Attributes:
        seconds_per_trial: time limit of a trial; None: derived from the plan
        measured_seconds: duration of all steps so far
    """

    folder: SweepFolder
    launcher: WorkerLauncher
    seconds_per_trial: float | None = None
    measured_seconds: float = 0.0
    _workers: Workers | None = None
    _numbers: Iterator[int] = field(default_factory=lambda: itertools.count(1))

    def measure(self, trials: Sequence[Trial]) -> Iterator[tuple[Trial, Result]]:
        """Measure the trials without a result, and yield each as soon as it is recorded.

        If another scheduler measures a trial, wait for its result, or take the trial over if that
        scheduler dies.

        Raises:
            SweepStopped: the disk is full, or no ranks can be started.
        """
        left = [trial for trial in trials if self.folder.result_of(trial) is None]
        while left:
            held = []
            for trial in left:
                with self.folder.claimed(trial.key) as is_claimed:
                    if not is_claimed:
                        held.append(trial)
                        continue
                    result = self.folder.result_of(trial)  # another scheduler may have measured it
                    if result is None:
                        with self.folder.stops_without_space():
                            result = self._run(trial)
                        self.folder.record(trial, result)
                yield trial, result
            left = held
            if held:
                self.stop()
                time.sleep(SECONDS_BETWEEN_CLAIMS)

    def stop(self) -> None:
        """Stop the ranks, if there are any."""
        if self._workers is not None:
            self._workers.stop()
            self._workers = None

    def _run(self, trial: Trial) -> Result:
        """Measure a trial, and stop the workers unless the outcome is "ok"."""
        request = trial.request(self.folder.corpus)
        try:
            result = self._workers_for(trial).run(request, self._limit(trial))
        except WorkersAbandoned:
            self.stop()
            return self._run(trial)
        self.measured_seconds += result.stepping_seconds
        if result.outcome != "ok":
            self.stop()
            self.folder.check_space()  # otherwise the trial would be blamed for a full disk
        return result

    def _workers_for(self, trial: Trial) -> Workers:
        """Return running ranks for a trial."""
        if self._workers is not None and self._workers.kind == trial.workers:
            return self._workers
        self.stop()
        for attempt in range(1, MAX_FAILED_STARTS + 1):
            path = self.folder.own / f"workers-{next(self._numbers)}"
            try:
                self._workers = Workers.start(trial.workers, path.resolve(), self.launcher)
                return self._workers
            except WorkersFailed as problem:
                self.folder.check_space()
                if attempt == MAX_FAILED_STARTS:
                    raise SweepStopped(f"the ranks cannot be started: {problem}") from None
        raise AssertionError("unreachable")

    def _limit(self, trial: Trial) -> float:
        """Return the time limit of a trial in seconds."""
        if self.seconds_per_trial is not None:
            return self.seconds_per_trial
        steps = trial.planned_seconds * (
            trial.warm_up + trial.steps + (SPLIT_STEPS if trial.split else 0)
        )
        building = SECONDS_TO_BUILD + max(stage_parameters(trial.job)) / PARAMETERS_BUILT_PER_SECOND
        if is_cpu(trial.workers.gpu):
            return building + max(MIN_SECONDS_OF_STEPS_ON_CPU, MAX_TIMES_THE_PLAN_ON_CPU * steps)
        return building + MAX_TIMES_THE_PLAN * steps


BeginRound = Callable[[Sequence[Trial], Sequence[Trial]], None]  # all trials, those to measure


def measure_all(
    scheduler: Scheduler, trials: Sequence[Trial], begin_round: BeginRound
) -> Iterator[tuple[Trial, Result]]:
    """Measure all trials without a result.

    Args:
        begin_round: called once with the trials, and with those that have no result
    """
    folder = scheduler.folder
    for trial in trials:
        folder.add(trial)
    begin_round(trials, [trial for trial in trials if folder.result_of(trial) is None])
    yield from scheduler.measure(trials)


def repeat(
    scheduler: Scheduler,
    trials: Sequence[Trial],
    begin_round: BeginRound,
    *,
    rounds: int,
    most: int = 0,
) -> Iterator[tuple[Trial, Result]]:
    """Measure all trials several times, each time in a new round over all of them.

    This way, a disturbance of a few minutes slows down only one round of a trial. Trials that do
    not end as "ok" have no further rounds. Further rounds, up to `most`, measure only the trials
    that may be the fastest of their group.

    Args:
        begin_round: called at the start of every round, as in `measure_all`; the trials to measure
            include those of later rounds
    """
    folder = scheduler.folder
    in_rounds = [[trial.in_round(n) for trial in trials] for n in range(1, rounds + 1)]
    waiting = [
        [trial for trial in in_round if folder.result_of(trial) is None] for in_round in in_rounds
    ]
    going = {trial.identity for trial in trials}  # those that have not failed
    for number, current in enumerate(in_rounds, start=1):
        current = [trial for trial in current if trial.identity in going]
        later = [
            trial for in_round in waiting[number:] for trial in in_round if trial.identity in going
        ]  # fmt: skip

        def begin(every: Sequence[Trial], left: Sequence[Trial], later: list = later) -> None:
            begin_round(every, [*left, *later])

        yield from measure_all(scheduler, current, begin)
        results = [(trial, folder.result(trial.key)) for trial in current]
        going = {trial.identity for trial, result in results if result and result.outcome == "ok"}
    candidates = [trial for trial in trials if trial.identity in going]
    for number in range(rounds + 1, most + 1):
        candidates = undecided(folder, candidates)
        yield from measure_all(scheduler, [one.in_round(number) for one in candidates], begin_round)


def undecided(folder: SweepFolder, trials: Sequence[Trial]) -> list[Trial]:
    """Return the trials that may be the fastest of their group, if these are several."""
    left = []
    for group in rounds_of_groups(folder, trials).values():
        leaders = [group[index][0] for index in leading([time for _, time in group])]
        left += leaders if len(leaders) > 1 else []
    return left


def rounds_of(folder: SweepFolder, trial: Trial) -> list[tuple[Trial, Result]]:
    """Return a trial and its result in each round that was measured."""
    found: list[tuple[Trial, Result]] = []
    while (result := folder.result((one := trial.in_round(len(found) + 1)).key)) is not None:
        found.append((one, result))
    return found


def rounds_of_groups(
    folder: SweepFolder, trials: Sequence[Trial]
) -> dict[tuple[str, int], list[tuple[Trial, RankedTime]]]:
    """Return the times of competing trials by recipe file and number of ranks.

    Trials with a round that failed are left out.
    """
    groups: dict[tuple[str, int], list[tuple[Trial, RankedTime]]] = {}
    for trial in trials:
        results = [result for _, result in rounds_of(folder, trial)]
        rounds = [result.median_seconds for result in results if result.outcome == "ok"]
        seconds = [each for each in rounds if each is not None]
        if seconds and len(seconds) == len(results):
            time = RankedTime(trial.planned_seconds, min(seconds), seconds)
            groups.setdefault((trial.source, trial.workers.size), []).append((trial, time))
    return groups


def halve(
    scheduler: Scheduler, trials: Sequence[Trial], begin_round: BeginRound
) -> Iterator[tuple[Trial, Result]]:
    """Measure by successive halving: each round measures the faster half for twice the steps.

    Jamieson and Talwalkar 2016 (arXiv 1502.07943). Only trials of the same recipe on the same
    number of GPUs compete with each other.
    """
    steps = FIRST_HALVING_STEPS
    while trials:
        trials = [trial.with_steps(steps) for trial in trials]
        yield from measure_all(scheduler, trials, begin_round)
        trials = faster_half(scheduler.folder, trials)
        steps *= 2


def faster_half(folder: SweepFolder, trials: Sequence[Trial]) -> list[Trial]:
    """Return the faster half of each group of competing trials; groups of one or two end here."""
    results = [(trial, result) for trial in trials if (result := folder.result(trial.key))]
    close = []
    for group in competitors(results).values():
        if len(group) > 2:
            ordered = sorted(group, key=lambda timed: (timed[0], timed[1].key))
            close += [trial for _, trial in ordered[: (len(group) + 1) // 2]]
    return sorted(close, key=lambda trial: (trial.workers, trial.planned_seconds))
