"""Choice of a sweep's trials: the planner's best layouts, all of them, or a grid of settings."""

import itertools
import tomllib
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from models.errors import UserError
from threefold.config.deepspeed_json import build_deepspeed_config, require_auto
from threefold.config.loading import load_recipe
from threefold.config.parallel_dims import LaunchEnvironment
from threefold.config.phases import PhasePlan
from threefold.config.recipe import Recipe
from threefold.config.sections import FIRST_PHASE, short
from threefold.plan.job import Machine, job_without_layout, recipe_on_cluster
from threefold.plan.memory.peak import GIB, fits, host_bytes
from threefold.plan.recipe_edits import (
    edits,
    in_layout,
    problem_in_run,
    replacement_text,
    value_of,
)
from threefold.plan.search import (
    INVALID_IN_RUN,
    TOO_LARGE_FOR_GPU,
    TOO_LARGE_FOR_HOST,
    Plan,
    choose_valid_plans,
    search,
)
from threefold.plan.software import THREEFOLD
from threefold.sweep.trial import Rejection, Trial

ALL = 10**9  # more layouts than a search finds


@dataclass(frozen=True, kw_only=True)
class TrialRequest:
    """The trials that a user asks for.

    Attributes:
        settings: values of --set; commas separate the values of a grid
        nodes: numbers of nodes; None for the recipe's [cluster]
        gpus_per_node: numbers of GPUs per node; None for the recipe's [cluster]
        gpu: name of the GPU; None for the recipe's [cluster]
        layouts: the planner's `top` best layouts, all that fit, or the recipe's own; None for
            "own" if a setting has several values, otherwise "best"
        top: number of layouts for each recipe, cluster and combination of the grid
        warm_up: steps before the measured ones
        steps: measured steps
        split: True if all trials measure the split of a step; otherwise only those of recipes with
            tracking.timeline_step do
    """

    recipes: Sequence[Path]
    settings: Sequence[str] = ()
    nodes: Sequence[int] | None = None
    gpus_per_node: Sequence[int] | None = None
    gpu: str | None = None
    layouts: Literal["best", "all", "own"] | None = None
    top: int = 10
    warm_up: int = 2
    steps: int = 5
    split: bool = False


@dataclass
class Choice:
    """The trials of a sweep, and the combinations that are not tried.

    Attributes:
        trials: in the order in which they run
        rejections: combinations that cannot run or do not fit, with their reasons
        ruled_out: reason -> number of layouts that the planner's search left out
        replaced: sentences about settings of a DeepSpeed JSON that layouts replace
    """

    trials: list[Trial] = field(default_factory=list)
    rejections: list[Rejection] = field(default_factory=list)
    ruled_out: Counter[str] = field(default_factory=Counter)
    replaced: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Combination:
    """One recipe with one value of every setting, on one cluster."""

    path: Path
    overrides: tuple[str, ...]
    cluster: dict[str, Any]  # the given keys of [cluster]

    def __str__(self) -> str:
        parts = [
            *self.overrides,
            *(f"cluster.{key}={value}" for key, value in self.cluster.items()),
        ]
        return ", ".join(parts) or "unchanged"

    def recipe(self) -> Recipe:
        """Return the recipe with all phases and a [cluster] section.

        Raises:
            UserError: the recipe or a setting is not valid.
        """
        recipe, _ = recipe_on_cluster(self.path, self.overrides, **self.cluster)
        return recipe


def choose(request: TrialRequest) -> Choice:
    """Return the trials of a request, by kind of workers and then by predicted step time.

    Raises:
        UserError: a recipe cannot be read, or no combination can run.
    """
    for path in request.recipes:
        load_recipe(path)
    grid = [values_of_setting(setting) for setting in request.settings]
    layouts = request.layouts or ("own" if any(len(values) > 1 for values in grid) else "best")
    choice, seen = Choice(), set()
    for combination in combinations(request, grid):
        with rejected_if_invalid(choice, combination):
            for recipe, replaced in recipes_of(combination, layouts, request.top, choice.ruled_out):
                with rejected_if_invalid(choice, combination):
                    trial = trial_of(recipe, request, source=str(short(combination.path)))
                    if trial.key not in seen:
                        seen.add(trial.key)
                        add(choice, trial, str(combination))
                        if trial in choice.trials[-1:] and replaced not in ("", *choice.replaced):
                            choice.replaced.append(replaced)
    if not choice.trials:
        raise UserError(nothing_to_run(choice))
    choice.trials.sort(key=lambda trial: (trial.workers, trial.planned_seconds))
    return choice


@contextmanager
def rejected_if_invalid(choice: Choice, combination: Combination) -> Iterator[None]:
    """Note a UserError as the reason why a combination, or one of its layouts, is not tried."""
    try:
        yield
    except UserError as problem:
        rejection = Rejection(str(short(combination.path)), str(combination), str(problem))
        choice.rejections.append(rejection)


def trial_of(recipe: Recipe, request: TrialRequest, *, source: str) -> Trial:
    """Return the trial of a recipe.

    `tracking.timeline_step` asks for the split of a step. It is removed from the recipe, because
    the timeline of a run is available in fewer layouts than the split.
    """
    tracking = recipe.tracking.model_copy(update={"timeline_step": 0})
    return Trial(
        source,
        recipe.model_copy(update={"tracking": tracking}),
        request.warm_up,
        request.steps,
        split=request.split or recipe.tracking.timeline_step > 0,
    )


def add(choice: Choice, trial: Trial, settings: str) -> None:
    """Add a trial, or the reason why it does not fit.

    Raises:
        UserError: the recipe cannot run on its cluster.
    """
    cluster = trial.cluster
    world = LaunchEnvironment(size=trial.workers.size, local_size=cluster.gpus_per_node)
    build_deepspeed_config(trial.recipe, trial.recipe.parallel_dims(world))
    if fits(trial.job):
        choice.trials.append(trial)
        return
    gpu, host = trial.job.machine.gpu, host_bytes(trial.job) / GIB
    reason = (
        f"needs {trial.planned_gib:.1f} GiB per GPU according to the plan; the GPU has "
        f"{gpu.memory_gib:g} GiB"
    )
    if host > gpu.node_memory_gib:
        reason = (
            f"building the model needs {host:,.0f} GiB of host memory; the node has "
            f"{gpu.node_memory_gib:,.0f} GiB"
        )
    choice.rejections.append(Rejection(trial.source, settings, reason, trial))


def nothing_to_run(choice: Choice) -> str:
    """Return the message of a request without trials."""
    if choice.rejections:
        first = choice.rejections[0]
        return f"no combination can run; the first is {first.source} ({first.settings}): " + (
            first.reason
        )
    reasons = ", ".join(f"{count} {reason}" for reason, count in choice.ruled_out.most_common())
    return f"no layout is left ({reasons or 'none is valid'}); use more GPUs or a smaller model"


def combinations(request: TrialRequest, grid: Sequence[Sequence[str]]) -> Iterator[Combination]:
    """Yield the product of recipes, clusters and settings."""
    unchanged: list[int | None] = [None]
    clusters = [
        {"nodes": nodes, "gpus_per_node": gpus, "gpu": request.gpu}
        for nodes in request.nodes or unchanged
        for gpus in request.gpus_per_node or unchanged
    ]
    for path, cluster, overrides in itertools.product(
        request.recipes, clusters, itertools.product(*grid)
    ):
        given = {key: value for key, value in cluster.items() if value is not None}
        yield Combination(path, tuple(overrides), given)


def values_of_setting(setting: str) -> list[str]:
    """Return the overrides of a --set option, one for each value separated by commas.

    A TOML list, such as [1,3], is a single value.
    """
    key, equals, text = setting.partition("=")
    try:
        tomllib.loads(f"value = {text}")
    except (ValueError, RecursionError):
        return [f"{key}{equals}{value}" for value in text.split(",")]
    return [setting]


def recipes_of(
    combination: Combination, layouts: str, top: int, ruled_out: Counter[str]
) -> Iterator[tuple[Recipe, str]]:
    """Yield the recipes of a combination's first phase, one for each layout to measure.

    Each comes with a sentence about the settings of a DeepSpeed JSON that it replaces, or "".

    Layout keys that the settings name keep their values; the planner chooses the other keys. If no
    planned layout has these values, the recipe's own layout is yielded.

    Raises:
        UserError: the combination is not valid.
    """
    whole = combination.recipe()
    recipe = PhasePlan(whole).recipe_of(FIRST_PHASE)
    if layouts == "own":
        yield recipe, ""
        return
    assert recipe.cluster is not None
    require_auto(recipe, "the sweep tries other layouts")
    machine = Machine.of_cluster(recipe.cluster)
    result = search(job_without_layout(recipe, machine), ALL)
    named = [override.partition("=")[0].strip() for override in combination.overrides]
    plans = [plan for plan in result.plans if agrees(recipe, plan, named)]
    if result.plans and not plans:
        # The recipe's own layout has the values of --set. Trying it tells why the planner has no
        # such layout: it is not valid, does not fit, or is of a kind that the planner does not try,
        # such as GPipe.
        yield recipe, ""
        return
    top = ALL if layouts == "all" else top
    result.plans = []
    choose_valid_plans(result, plans, top, problem_in_run(whole, machine, THREEFOLD))
    plans = result.plans
    for reason, count in result.rejected.items():
        if reason in (TOO_LARGE_FOR_GPU, TOO_LARGE_FOR_HOST, INVALID_IN_RUN):
            ruled_out[reason] += count
    if result.problem:
        raise UserError(result.problem)
    for plan in plans[:top]:
        layouts_of_stage = f"Each layout with ZeRO-{plan.job.layout.zero_stage}"
        replaced = replacement_text(recipe, plan, layouts_of_stage)
        yield in_layout(recipe, plan, recipe.name), replaced


def agrees(recipe: Recipe, plan: Plan, keys: Sequence[str]) -> bool:
    """Return True if a plan does not change any of the keys."""
    changes = edits(recipe, plan)
    return all(changes[key] == value_of(recipe, key) for key in keys if key in changes)
