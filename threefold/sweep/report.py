"""Reports of a sweep: lines about trials and results, and runs in Weights & Biases."""

import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import combinations
from statistics import mean, median
from typing import Any

from models.errors import UserError, counted
from threefold.plan.calibration.fit import (
    MIN_RANKED_LAYOUTS,
    RankedTime,
    Ranking,
    leading,
    rank_correlation,
)
from threefold.plan.report import layout_line
from threefold.plan.time.step import TIME_PARTS
from threefold.sweep.choice import Choice
from threefold.sweep.folder import SweepFolder, SweepStopped, row_of_result, row_of_trial
from threefold.sweep.trial import (
    FAULTS,
    OUTCOMES,
    PARTS,
    Result,
    Split,
    Trial,
    competitors,
    planned_parts,
)
from threefold.tracking.wandb_connection import (
    WandbStatus,
    check_variables,
    common_arguments,
    read_wandb_key,
    requested_mode,
    restart_offline,
    start_wandb,
    tear_down,
    untold,
)

MAX_BEST = 5  # layouts in the summary, for each recipe and number of GPUs
MAX_REASON_CHARACTERS = 160  # in a progress line


@dataclass
class SweepProgress:
    """The progress of this command's trials.

    Attributes:
        total: number of trials of this command that are known so far; halving adds more
    """

    total: int = 0
    done: list[tuple[Trial, Result]] = field(default_factory=list)
    _started: float = field(default_factory=time.monotonic)

    def begin_round(self, trials: Sequence[Trial], left: Sequence[Trial]) -> None:
        """Record the start of a round of trials, some of which may already be measured."""
        self.total = len(self.done) + len(left)

    def finish(self, trial: Trial, result: Result) -> str:
        """Record the end of a trial, and return its progress line."""
        self.done.append((trial, result))
        self.total = max(self.total, len(self.done))
        number = f"{len(self.done):{len(str(self.total))}}/{self.total}"
        left = duration(self._seconds_left())
        line = f"[{number}] {self.describe(trial, result)}, {left} left"
        if result.reason:
            line += f"\n    {result.reason[:MAX_REASON_CHARACTERS]}"
        return line

    def describe(self, trial: Trial, result: Result) -> str:
        """Return the trial and its result in a line."""
        seconds = result.median_seconds
        measured = f"{seconds:9.4f} s" if seconds is not None else f"{'':11}"
        gib = f"{result.memory_gib:5.1f}" if result.memory_gib is not None else f"{'':5}"
        return (
            f"{result.outcome:13} {measured} (plan {trial.planned_seconds:.4f})  "
            f"{gib} GiB (plan {trial.planned_gib:.1f})  {name_of(trial)}"
        )

    @property
    def seconds(self) -> float:
        """The duration of the sweep so far."""
        return time.monotonic() - self._started

    def _seconds_left(self) -> float:
        return self.seconds / len(self.done) * max(0, self.total - len(self.done))


def choice_lines(choice: Choice, measured: int, rounds: int = 1) -> Iterator[str]:
    """Yield lines about the trials of a command, and the combinations that are not tried.

    Args:
        choice: the trials and the rejected combinations
        measured: number of trials that already have a result, in all rounds
    """
    trials = len(choice.trials)
    ranks = Counter(trial.workers.size for trial in choice.trials)
    sizes = [(count, f"on {counted(size, 'rank')}") for size, count in sorted(ranks.items())]
    on = ": " + ", ".join(f"{count} {size}" for count, size in sizes)
    if len(sizes) == 1:
        on = f", {sizes[0][1]}"
    before = f"; {measured} are already measured" if measured else ""
    repeated = ""
    if rounds > 1:
        repeated = f" in {rounds} rounds"
        before = f"; {measured} of {rounds * trials} measurements are already done"
    yield f"{counted(trials, 'trial')}{repeated}{on}{before}"
    for reason, count in choice.ruled_out.most_common():
        yield f"skipped {count:,} layouts that are {reason} according to the plan"
    yield from choice.replaced
    for rejection in choice.rejections:
        yield (
            f"{rejection.outcome}: {rejection.source} ({rejection.settings}): {rejection.reason}"
        )


def summary_lines(results: Sequence[tuple[Trial, Result]], choice: Choice) -> Iterator[str]:
    """Yield the fastest layouts and the number of trials of each outcome.

    The split of a step follows the fastest layouts, if it was measured for the first of them.
    """
    splits = {trial.key: result.split for trial, result in results}
    for (source, ranks), group in competitors(results).items():
        yield f"Fastest layouts of {source} on {ranks} ranks:"
        # With successive halving, a layout was slower than those with more steps.
        fastest = sorted(group, key=lambda timed: (-timed[1].steps, timed[0]))[:MAX_BEST]
        halved = len({trial.steps for _, trial in fastest}) > 1
        for rank, (seconds, trial) in enumerate(fastest, start=1):
            error = trial.planned_seconds / seconds - 1
            steps = f" in {trial.steps} steps" if halved else ""
            yield (
                f"{rank:3}. {seconds:9.4f} s{steps} (plan {trial.planned_seconds:.4f}, "
                f"{error:+.0%})  {layout_line(trial.job.layout)}"
            )
        _, best = fastest[0]
        if (split := splits[best.key]) is not None:
            yield from split_lines(best, split)
    counts = outcomes(results, choice)
    yield "Outcomes: " + ", ".join(f"{count} {name}" for name, count in counts.items() if count)


def round_lines(
    groups: Mapping[tuple[str, int], Sequence[tuple[Trial, RankedTime]]],
) -> Iterator[str]:
    """Yield what the rounds say about noise, the fastest layouts, and the order of the plan.

    Args:
        groups: the times of competing trials by recipe file and number of ranks
    """
    times = {key: [time for _, time in group] for key, group in groups.items()}
    repeated = {key: group for key, group in times.items() if min(map(rounds_in, group)) > 1}
    if line := agreement_line(repeated.values()):
        yield line
    for (source, ranks), group in repeated.items():
        if len(group) > 1:
            yield f"{source} on {ranks} ranks: {leaders_text(group)}"
    ranking = Ranking.of_groups(
        [one for one in repeated.values() if len(one) >= MIN_RANKED_LAYOUTS]
    )
    if ranking.tau is not None:
        yield (
            f"{ranking.pairs - ranking.within_noise} of {ranking.pairs} pairs of layouts differ by "
            f"more than the noise; the plan orders these with Kendall's tau = {ranking.tau:.2f}"
        )
    if ranking.max_regret is not None:
        yield (
            f"the plan's first choice is at most {ranking.max_regret:.1%} slower than the fastest "
            f"layout"
        )


def rounds_in(time: RankedTime) -> int:
    """Return the number of rounds of a trial."""
    return len(time.rounds)


def leaders_text(group: Sequence[RankedTime]) -> str:
    """Say which of the layouts may be the fastest, by their numbers in the list of the fastest."""
    ordered = sorted(group, key=lambda time: time.measured)
    leaders = leading(ordered)
    rounds = rounds_in(ordered[0])
    if len(leaders) == 1:
        return f"layout 1 is faster than all others by more than the noise ({rounds} rounds)"
    names = [f"{index + 1}" for index in leaders if index < MAX_BEST]
    if slower := len(leaders) - len(names):
        names.append(counted(slower, "slower layout"))
    *others, last = names
    return f"layouts {', '.join(others)} and {last} cannot be told apart in {rounds} rounds"


def agreement_line(groups: Iterable[Sequence[RankedTime]]) -> str | None:
    """Return a line that says how well the rounds agree; None if there is nothing to compare.

    Args:
        groups: the times of competing trials; only rounds that all of them have are compared
    """
    ranked = []  # seconds by group, round and trial
    for group in groups:
        rounds = list(zip(*(time.rounds for time in group), strict=False))
        if len(group) >= MIN_RANKED_LAYOUTS and len(rounds) > 1:
            ranked.append(rounds)
    if not ranked:
        return None
    tau = mean(
        mean(
            rank_correlation(combinations(list(zip(*pair, strict=True)), 2))
            for pair in combinations(rounds, 2)
        )
        for rounds in ranked
    )
    trials = [seconds for rounds in ranked for seconds in zip(*rounds, strict=True)]
    spread = median(max(seconds) / min(seconds) - 1 for seconds in trials)
    return (
        f"Between rounds, the step time of a trial varies by up to {spread:.1%} (median), so "
        f"smaller differences between layouts are noise. The orders of two rounds agree with "
        f"Kendall's tau = {tau:.2f}."
    )


def split_lines(trial: Trial, split: Split) -> Iterator[str]:
    """Yield a table of the measured and the planned parts of a trial's step, in seconds.

    Parts of axes that the layout does not have are left out.
    """
    planned = planned_parts(trial.planned_time)
    used = {"context": trial.job.layout.context > 1, "expert": trial.job.model.experts is not None}
    every = dict.fromkeys([*TIME_PARTS, *PARTS])  # each name once
    names = [name for name in every if used.get(name, True)]
    yield "layout 1, s" + "".join(f"{name:>11}" for name in [*names, "total"])
    for title, parts in (("measured", split.parts), ("planned", planned)):
        cells = [f"{parts[name]:11.4f}" if name in parts else f"{'-':>11}" for name in names]
        yield f"{title:11}" + "".join(cells) + f"{sum(parts.values()):11.4f}"


def outcomes(results: Iterable[tuple[Trial, Result]], choice: Choice) -> dict[str, int]:
    """Return the number of trials of each outcome."""
    counts = Counter(result.outcome for _, result in results)
    counts.update(rejection.outcome for rejection in choice.rejections)
    return {name: counts[name] for name in OUTCOMES}


def overhead_line(progress: SweepProgress, measured_seconds: float) -> str:
    """Return a line with the time that the sweep has spent outside of steps."""
    count = len(progress.done)
    overhead = (progress.seconds - measured_seconds) / max(1, count)
    return (
        f"{count} trial{'s' * (count != 1)} in {duration(progress.seconds)}, of which "
        f"{duration(measured_seconds)} were steps: {overhead:.1f} s of overhead per trial"
    )


def as_json(results: Iterable[tuple[Trial, Result]], choice: Choice, folder: str) -> dict[str, Any]:
    """Return the results for --json."""
    results = list(results)
    return {
        "folder": folder,
        "outcomes": outcomes(results, choice),
        "ruled_out": dict(choice.ruled_out),
        "replaced_settings": choice.replaced,
        "trials": [
            {
                "trial": trial.key,
                "recipe": trial.source,
                "gpus": trial.workers.size,
                "layout": layout_line(trial.job.layout),
                "step_seconds": result.median_seconds,
                "planned_step_seconds": trial.planned_seconds,
                **split_as_json(trial, result),
                "outcome": result.outcome,
                "reason": result.reason,
            }
            for trial, result in results
        ],
    }


def split_as_json(trial: Trial, result: Result) -> dict[str, Any]:
    """Return the measured and the planned split of a step for --json, if it was measured."""
    if result.split is None:
        return {"split": None, "planned_split": None}
    return {"split": asdict(result.split), "planned_split": planned_parts(trial.planned_time)}


def name_of(trial: Trial) -> str:
    """Return the recipe and the layout of a trial, and its round after the first."""
    number = f", round {trial.round}" if trial.round > 1 else ""
    return f"{trial.recipe.name}: {layout_line(trial.job.layout)}{number}"


def duration(seconds: float) -> str:
    """Format a duration as 01:23 or 1:02:03."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes:02}:{rest:02}"


# Trials of a sweep as runs of one group in Weights & Biases.


def check_wandb(trials: Sequence[Trial]) -> None:
    """Check the settings of Weights & Biases before the first trial.

    Raises:
        UserError: a recipe turns tracking off, or the key or a variable is wrong.
    """
    for trial in trials:
        if trial.recipe.tracking.mode == "disabled":
            raise UserError(
                f'--wandb: {trial.source} has tracking.mode = "disabled"; use --set '
                f"tracking.mode=auto, or omit --wandb"
            )
        check_variables()
        mode, reason = requested_mode(trial.recipe.tracking.mode)
        if mode == "disabled":
            raise UserError(f"--wandb: {reason}; unset the variable, or omit --wandb")
    read_wandb_key()


def publish(
    folder: SweepFolder,
    results: Sequence[tuple[Trial, Result]],
    *,
    tell: Callable[[WandbStatus], None] = untold,
) -> tuple[int, WandbStatus | None]:
    """Publish the trials that have not been published yet.

    Trials are published after all measurements, because W&B's own work would slow the steps down.

    Args:
        tell: called before the first trial waits for the server

    Returns:
        The number of these trials, and the status of their runs; None without such a trial.

    Raises:
        SweepStopped: W&B does not work, or the disk is full.
    """
    home = folder.path / "wandb"
    home.mkdir(exist_ok=True)
    published = {trial.key: home / f"published-{run_key(trial)}" for trial, _ in results}
    left = [(trial, result) for trial, result in results if not published[trial.key].exists()]
    status: WandbStatus | None = None
    offline_modes: set[str] = set()  # modes of recipes whose runs are offline
    for trial, result in left:
        # A server that has failed once is not asked again in the same mode: each attempt can take
        # half a minute. Recipes with another mode are still sent.
        is_offline = trial.recipe.tracking.mode in offline_modes
        requested = requested_mode(trial.recipe.tracking.mode)
        if is_offline:
            requested = "offline", "the server has not answered before"
        try:
            of_trial = publish_trial(
                trial, result, folder, requested, tell=untold if status else tell
            )
        except Exception as problem:  # libraries raise errors of many classes
            tear_down()
            raise SweepStopped(
                f"Weights & Biases failed ({problem}); all results are in {folder.path}; rerun "
                f"the same command to publish the other trials, or omit --wandb"
            ) from None
        status = status if is_offline else of_trial
        if of_trial.mode == "offline":
            offline_modes.add(trial.recipe.tracking.mode)
        with folder.stops_without_space():
            published[trial.key].touch()
    return len(left), status


def publish_trial(
    trial: Trial,
    result: Result,
    folder: SweepFolder,
    requested: tuple[str, str],
    *,
    tell: Callable[[WandbStatus], None],
) -> WandbStatus:
    """Publish one trial: its steps, and its row of the table as the summary.

    `requested` and `tell` are those of `start_wandb`.
    """
    arguments = arguments_of(trial, folder)
    try:
        run, status = start_wandb(requested, arguments, tell=tell)
    except Exception as error:
        run, status = restart_offline(arguments, error)
    for step, seconds in enumerate(result.step_seconds, start=1):
        run.log({"step": step, "step_seconds": seconds})
    run.summary.update(row_of_trial(trial) | row_of_result(trial, result))
    run.finish(exit_code=int(result.outcome in FAULTS))
    return status


def arguments_of(trial: Trial, folder: SweepFolder) -> dict[str, Any]:
    """Return the arguments of `wandb.init` for a trial."""
    return common_arguments(trial.recipe, folder.path) | {
        "group": folder.path.name,
        "job_type": "sweep",
        "name": row_of_trial(trial)["row_id"],
        "id": f"{folder.path.name}-{run_key(trial)}",
    }


def run_key(trial: Trial) -> str:
    """Return the key of a trial's run, which has the trial's rounds in common."""
    return trial.in_round(1).key
