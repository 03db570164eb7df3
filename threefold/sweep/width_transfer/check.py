"""The comparisons over widths: sweeps of learning rates, and the coordinate check.

Both are sweeps of trainings on the runner of the layout sweep (`Scheduler`): the ranks of a world
train one trial after the other, and a rerun of the same command continues.
"""

import argparse
import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from models.errors import UserError
from threefold.checkpoint.compatibility import check_initial_weights
from threefold.config.deepspeed_json import build_deepspeed_config
from threefold.config.parallel_dims import LaunchEnvironment
from threefold.config.recipe import Recipe
from threefold.data.corpus import check_document_starts, open_corpus
from threefold.runtime.output import printer, stdout_for_json
from threefold.sweep.ranks.controller import WorkerLauncher, check_workers
from threefold.sweep.scheduler import Scheduler
from threefold.sweep.width_transfer import report
from threefold.sweep.width_transfer.coordinates import Check
from threefold.sweep.width_transfer.learning_rates import RateResult, Sweep, comparisons, verdicts
from threefold.sweep.width_transfer.models import (
    TABLE,
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


def check_learning_rates(options: argparse.Namespace, launcher: WorkerLauncher, path: Path) -> int:
    """Sweep the learning rates in a folder, print the comparisons, and return the exit code.

    Raises:
        UserError: a recipe or an option is invalid.
        SweepStopped: the disk is full, or no ranks can be started.
    """
    if any(setting.partition("=")[0].strip() == RATE for setting in options.set):
        raise UserError(
            f"--set {RATE}=... and --rates set the same key; use --rates with the values, such as "
            f"--rates 1e-3,2e-3"
        )
    settings = [] if options.steps is None else [f"training.steps={options.steps}"]
    curves = curves_of(models_of(options, [*options.set, *settings]))
    sweep = Sweep(curves, options.rates or None, options.seeds)
    for curve in curves:
        check_training(curve.recipe)
    with measured(sweep, options, launcher, path) as (folder, say):
        outcomes = sweep.outcomes(folder.result)
    for line in learning_rate_lines(outcomes):
        say(line)
    try:
        if any(outcome.best is not None for outcome in outcomes):
            # Imported only here: matplotlib takes half a second to import.
            from threefold.pipeline.picture import save_figure
            from threefold.sweep.width_transfer import picture

            file = path / LOSS_PICTURE
            steps = outcomes[0].validation[-1][0] if outcomes[0].validation else 0
            title = f"Learning rates of {path.name}, {steps} steps"
            save_figure(picture.learning_rates(outcomes, title), file)
            say(f"wrote {file}")
    finally:  # print the results even if the picture cannot be written
        say(f"wrote {path / TABLE}")
        if options.json:
            print(json.dumps(report.learning_rate_table(outcomes) | {"folder": str(path)}))
    complete = all(outcome.best is not None and not outcome.failures for outcome in outcomes)
    return 0 if complete and all(verdict.passes for verdict in verdicts(outcomes)) else 1


def check_coordinates(options: argparse.Namespace, launcher: WorkerLauncher, path: Path) -> int:
    """Compare the sizes of activations over widths, and return the exit code.

    Raises:
        UserError: a recipe or an option is invalid.
        SweepStopped: the disk is full, or no ranks can be started.
    """
    curves = curves_of(models_of(options, options.set))
    for family in by_family(curves, lambda curve: curve).values():
        if len(family) == 1:
            width = family[0].width
            raise UserError(
                f"the coordinate check compares widths, and there is only width {width}; use "
                f"--widths {width},{2 * width},{4 * width}"
            )
    check = Check(curves, options.steps, options.seeds)
    with measured(check, options, launcher, path) as (folder, say):
        checks = check.outcomes(folder.result)
    for outcome in checks:
        for line in report.coordinate_lines(outcome):
            say(line)
    try:
        if all(outcome.sizes for outcome in checks):
            from threefold.pipeline.picture import save_figure  # as above
            from threefold.sweep.width_transfer import picture

            file = path / SIZE_PICTURE
            save_figure(picture.coordinates(checks, f"Coordinate check of {path.name}"), file)
            say(f"wrote {file}")
    finally:  # as above
        say(f"wrote {path / TABLE}")
        if options.json:
            print(json.dumps(report.coordinate_table(checks) | {"folder": str(path)}))
    return 0 if all(outcome.passes for outcome in checks) else 1


@contextmanager
def measured(
    trainings: Check | Sweep, options: argparse.Namespace, launcher: WorkerLauncher, path: Path
) -> Iterator[tuple[TransferFolder, Say]]:
    """Check the trials, measure those without a result, and yield their folder and a printer."""
    check_trials(trainings.trials(), launcher)
    folder, say = TransferFolder(path, SETTINGS), printer(options.json)
    try:
        if options.retry:
            folder.retry_failures()
        scheduler = Scheduler(folder, launcher, options.seconds_per_trial)
        progress = report.TrainingProgress()
        try:
            with stdout_for_json(options.json):
                for trial, result in trainings.run(scheduler, progress.begin_round):
                    say(progress.finish(trial, result))
        except SystemExit:
            say(f"interrupted; rerun the same command to continue in {folder.path}")
            raise
        finally:
            scheduler.stop()
        folder.write_table()
        yield folder, say
    finally:
        folder.close()


def models_of(options: argparse.Namespace, settings: list[str]) -> Models:
    """Return the models that the options and settings describe."""
    cluster = {key: getattr(options, key) for key in ("nodes", "gpus_per_node", "gpu")}
    return Models(
        recipes=options.recipes, settings=settings, widths=options.widths, cluster=cluster
    )


def check_trials(trials: Sequence[TrainingTrial], launcher: WorkerLauncher) -> None:
    """Check everything that does not need a process of its own.

    Raises:
        UserError: ranks cannot be started, or a layout does not fit the ranks.
    """
    for kind in {trial.workers for trial in trials}:
        check_workers(kind, launcher)
    for trial in trials:
        local = trial.cluster.gpus_per_node
        dims = trial.recipe.parallel_dims(
            LaunchEnvironment(size=trial.workers.size, local_size=local)
        )
        build_deepspeed_config(trial.recipe, dims)


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
    schedule, steps = recipe.optimizer.schedule, recipe.training.steps
    sequences = recipe.batch.global_sequences if schedule.counts == "sequences" else 1
    warm_up = -(-schedule.warmup_steps // sequences)
    if warm_up >= steps:
        raise UserError(
            f"{recipe.name}: optimizer.schedule.warmup_steps = {warm_up} leaves no steps at the "
            f"learning rates to compare, because the training has {steps} steps; use --steps "
            f"{5 * warm_up}, or --set optimizer.schedule.warmup_steps={steps // 5}"
        )


def learning_rate_lines(outcomes: list[RateResult]) -> Iterator[str]:
    """Yield the table of losses and the comparisons."""
    yield "Validation loss after the last step (* best learning rate):"
    yield from report.loss_table(outcomes)
    yield from report.failure_lines(outcomes)
    yield from report.edge_lines(outcomes)
    for verdict in verdicts(outcomes):
        yield report.verdict_line(verdict)
    for comparison in comparisons(outcomes):
        yield report.comparison_line(comparison)
