"""The transfer check: run the learning-rate sweep and the coordinate check, and print the verdicts.

Both are sweeps of trainings on the runner of the layout sweep (`Scheduler`): the ranks of a world
train one trial after the other, and a rerun of the same command continues.
"""

import argparse
import json
from collections.abc import Callable, Iterator
from pathlib import Path

from models.errors import UserError
from threefold.checkpoint.compatibility import check_initial_weights
from threefold.config.deepspeed_json import build_deepspeed_config
from threefold.config.parallel_dims import World
from threefold.config.recipe import Recipe
from threefold.data.corpus import check_document_starts, open_corpus
from threefold.runtime.output import stdout_for_json
from threefold.sweep.ranks.launchers import Launcher
from threefold.sweep.scheduler import Scheduler, measure_all
from threefold.sweep.trial import Result, Trial
from threefold.sweep.width_transfer import report
from threefold.sweep.width_transfer.coordinates import Check, CoordinateCheck
from threefold.sweep.width_transfer.learning_rates import Outcome, Sweep, comparisons, verdicts
from threefold.sweep.width_transfer.models import (
    TABLE,
    Curve,
    Models,
    TrainingTrial,
    TransferFolder,
    by_family,
    curves_of,
)

Say = Callable[[str], None]
RATE = "optimizer.learning_rate"
SETTINGS = {"measures": "trainings"}  # a folder of a layout sweep has others
LOSS_PICTURE, SIZE_PICTURE = "learning_rates.svg", "coordinates.svg"


def check_transfer(
    options: argparse.Namespace, launcher: Launcher, folder_path: Path, say: Say
) -> int:
    """Run the checks that the options ask for, and return the exit code.

    Args:
        options: of the command line
        launcher: starts the ranks
        folder_path: folder of the results
        say: prints a line

    Raises:
        UserError: a recipe or an option is invalid.
        SweepStopped: the disk is full, or no ranks can be started.
    """
    # 1. Trials: reject what cannot run before any process starts.
    curves = curves_of(models_of(options))
    steps, rates = options.coordinate_check, options.learning_rate
    check = None if steps is None else Check(curves, steps, options.seeds)
    sweep = None if rates is None else Sweep(curves, rates or None, options.seeds)
    check_request(options, curves)
    for curve in curves if sweep else []:
        check_training(curve.recipe)
    check_trials([*(check.trials() if check else []), *(sweep.trials() if sweep else [])], launcher)

    # 2. Measure: trials with a result in the folder are not repeated.
    folder = TransferFolder(folder_path, SETTINGS)
    try:
        if options.retry:
            folder.retry_failures()
        with stdout_for_json(options.json):
            run(folder, launcher, options.seconds_per_trial, check, sweep, say)
        folder.write_table()
        checks = check.outcomes(folder.result) if check else []
        outcomes = sweep.outcomes(folder.result) if sweep else []
    finally:
        folder.close()

    # 3. Summary
    for line in summary(outcomes, checks):
        say(line)
    draw(folder.path, outcomes, checks, say)
    say(f"wrote {folder.path / TABLE}")
    found = verdicts(outcomes)
    if options.json:
        table = report.as_json(outcomes, found, comparisons(outcomes), checks)
        print(json.dumps(table | {"folder": str(folder.path)}))
    complete = all(each.best is not None and not each.failures for each in outcomes)
    passes = all(each.passes for each in checks) and all(each.passes for each in found)
    return 0 if passes and complete else 1


def models_of(options: argparse.Namespace) -> Models:
    """Return the models that the options describe.

    Raises:
        UserError: --nodes or --gpus-per-node has several values, or the learning rate is given
            twice.
    """
    cluster: dict[str, object] = {"gpu": options.gpu}
    for key in ("nodes", "gpus_per_node"):
        values = getattr(options, key)
        if values is not None and len(values) > 1:
            raise UserError(
                f"--{key.replace('_', '-')} {','.join(map(str, values))}: the losses of all trials "
                f"are compared on the same number of ranks; use --{key.replace('_', '-')} "
                f"{values[-1]}"
            )
        cluster[key] = values[0] if values else None
    settings = list(options.set)
    if options.learning_rate is not None:
        if any(setting.partition("=")[0].strip() == RATE for setting in settings):
            raise UserError(
                f"--set {RATE}=... and --learning-rate set the same key; use --learning-rate with "
                f"the values, such as --learning-rate 1e-3,2e-3"
            )
        if options.steps is not None:
            settings.append(f"training.steps={options.steps}")
    return Models(
        recipes=options.recipes, settings=settings, widths=options.widths, cluster=cluster
    )


def check_request(options: argparse.Namespace, curves: list[Curve]) -> None:
    """Check that the coordinate check has widths to compare.

    Raises:
        UserError: a family has only one width.
    """
    if options.coordinate_check is None:
        return
    for family in by_family(curves, lambda curve: curve).values():
        if len(family) == 1:
            width = family[0].width
            raise UserError(
                f"--coordinate-check compares widths, and there is only width {width}; use "
                f"--widths {width},{2 * width},{4 * width}"
            )


def check_trials(trials: list[TrainingTrial], launcher: Launcher) -> None:
    """Check everything that does not need a process of its own.

    Raises:
        UserError: ranks cannot be started, or a layout does not fit the ranks.
    """
    for kind in {trial.world for trial in trials}:
        launcher.check(kind)
    for trial in trials:
        local = trial.cluster.gpus_per_node
        topology = trial.recipe.topology(World(size=trial.world.size, local_size=local))
        build_deepspeed_config(trial.recipe, topology)


def check_training(recipe: Recipe) -> None:
    """Check the schedule, the initial weights and the data of a learning-rate sweep's recipe.

    Learning rate and seed do not matter, so one check serves all trials of a curve.

    Raises:
        UserError: the data or the initial weights do not fit the model, or the warm-up is as long
            as the training.
    """
    check_warm_up(recipe)
    check_initial_weights(recipe)
    check_document_starts(recipe)
    data = recipe.data
    if not data.validation_sets:
        raise UserError(
            f"{recipe.name}: data.validation is missing, and the learning rates are compared by "
            f'validation loss; use for example data.validation = "data/books/validation"'
        )
    for path in (*(source.path for source in data.train), *data.validation_sets.values()):
        open_corpus(path, recipe)


def check_warm_up(recipe: Recipe) -> None:
    """Check that the warm-up ends before the training, so that it trains at its learning rate.

    Raises:
        UserError: the warm-up is as long as the training, or longer.
    """
    warm_up, steps = recipe.optimizer.schedule.warmup_steps, recipe.training.steps
    if warm_up >= steps:
        raise UserError(
            f"{recipe.name}: optimizer.schedule.warmup_steps = {warm_up} leaves no steps at the "
            f"learning rates to compare, because the training has {steps} steps; use --steps "
            f"{5 * warm_up}, or --set optimizer.schedule.warmup_steps={steps // 5}"
        )


def run(
    folder: TransferFolder,
    launcher: Launcher,
    seconds_per_trial: float | None,
    check: Check | None,
    sweep: Sweep | None,
    say: Say,
) -> None:
    """Measure the trials without a result."""
    scheduler = Scheduler(folder, launcher, seconds_per_trial)
    progress = report.TrainingProgress()

    def measured() -> Iterator[tuple[Trial, Result]]:
        if check:
            yield from measure_all(scheduler, check.trials(), progress.begin_round)
        if sweep:
            yield from sweep.run(scheduler, progress.begin_round)

    try:
        for trial, result in measured():
            say(progress.finish(trial, result))
    except SystemExit:
        say(f"interrupted; rerun the same command to continue in {folder.path}")
        raise
    finally:
        scheduler.stop()


def summary(outcomes: list[Outcome], checks: list[CoordinateCheck]) -> Iterator[str]:
    """Yield the tables and the verdicts."""
    for check in checks:
        yield from report.coordinate_lines(check)
    if not outcomes:
        return
    yield "Validation loss after the last step (* best learning rate):"
    yield from report.loss_table(outcomes)
    yield from report.failure_lines(outcomes)
    yield from report.edge_lines(outcomes)
    for verdict in verdicts(outcomes):
        yield report.verdict_line(verdict)
    for comparison in comparisons(outcomes):
        yield report.comparison_line(comparison)


def draw(folder: Path, outcomes: list[Outcome], checks: list[CoordinateCheck], say: Say) -> None:
    """Write the pictures into the folder."""
    # Imported only here: matplotlib takes half a second to import, and most sweeps draw no picture.
    from threefold.sweep.width_transfer import picture

    if checks and all(each.sizes for each in checks):
        file = folder / SIZE_PICTURE
        picture.draw_coordinates(checks, title=f"Coordinate check of {names(folder)}", file=file)
        say(f"wrote {file}")
    if any(each.best is not None for each in outcomes):
        file = folder / LOSS_PICTURE
        steps = outcomes[0].validation[-1][0] if outcomes[0].validation else 0
        title = f"Learning rates of {names(folder)}, {steps} steps"
        picture.draw_learning_rates(outcomes, title=title, file=file)
        say(f"wrote {file}")


def names(folder: Path) -> str:
    """Return the name of a sweep for titles: that of its folder."""
    return folder.name
