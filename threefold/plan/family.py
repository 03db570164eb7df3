"""The family of a recipe: the shipped models of its architecture, each in its best layout.

The best layout is the first one that a search returns: the simplest within 2 % of the fastest.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from models.cost import parameter_count
from models.errors import UserError
from threefold.config.layout import Cluster
from threefold.config.loading import load_recipes, recipes_in_repository
from threefold.config.phases import PhasePlan, Segment
from threefold.config.recipe import Recipe
from threefold.config.sections import FIRST_PHASE
from threefold.plan.job import (
    Job,
    LinkOverrides,
    Machine,
    job_without_layout,
    recipe_on_cluster,
)
from threefold.plan.recipe_edits import in_layout, problem_in_run
from threefold.plan.report import PhaseRow, phase_row, seconds_of_segments
from threefold.plan.search import Plan, search
from threefold.plan.software import Software

SECONDS_PER_DAY = 86_400
Warn = Callable[[str], None]


def ignored(problem: str) -> None:
    """Ignore a recipe that is not valid."""


@dataclass(frozen=True)
class Member:
    """A recipe of a family, and its best layout that fits; None if none fits.

    Attributes:
        seconds: the duration of all steps; None without a plan
        problem: reason for a missing plan, such as too little memory; empty with a plan
        settings: values of --set that the recipe needs besides those of the family
    """

    path: Path
    recipe: Recipe
    plan: Plan | None
    seconds: float | None = None
    problem: str = ""
    settings: tuple[str, ...] = ()

    @property
    def days(self) -> float | None:
        """The duration of all steps in days; None if no layout fits."""
        return None if self.seconds is None else self.seconds / SECONDS_PER_DAY

    @property
    def tokens(self) -> int:
        """The tokens of all phases, with the batches of `batch.ramp`."""
        return PhasePlan(self.recipe).total_tokens


def relatives(recipe: Recipe, warn: Warn = ignored) -> dict[Path, Recipe]:
    """Return the repository's recipes of a recipe's family, without the recipe itself.

    The family is the folder with whose name and a hyphen the recipe's name begins, such as "llama";
    of several, that with the longest name ("gpt-oss", not "gpt"). Recipes that continue from
    trained weights do not belong to it.

    warn: called with one line about each recipe that is not valid
    """
    paths = list(recipes_in_repository())
    folders = {path.parent.name for path in paths}
    family = max(
        (name for name in folders if f"{recipe.name}-".startswith(f"{name}-")), key=len, default=""
    )
    recipes, problems = load_recipes(path for path in paths if path.parent.name == family)
    for problem in problems:
        warn(problem)
    return {
        path: other
        for path, other in recipes.items()
        if other.name != recipe.name and other.training.initial_weights is None
    }


def members(
    path: Path,
    overrides: Sequence[str],
    *,
    cluster: Cluster,
    software: Software,
    calibrate: Callable[[Job], Job],
    headroom: float,
    links: LinkOverrides | None = None,
    warn: Warn = ignored,
    processes: int = 1,
) -> list[Member]:
    """Plan a recipe and the rest of its family on one cluster, the smallest model first.

    Args:
        calibrate: function that adjusts a job to measured runs
        headroom: share of the GPU memory that a layout leaves free
        warn: called with one line about each recipe of the family that is not valid
        processes: as for `search`

    Raises:
        UserError: the recipe with the overrides is not valid, or the GPU does not compute in its
            precision.
    """
    machine = Machine.of_cluster(cluster, links)

    def loaded(path: Path, settings: Sequence[str]) -> Recipe:
        return recipe_on_cluster(
            path, [*overrides, *settings], nodes=cluster.nodes,
            gpus_per_node=cluster.gpus_per_node, gpu=cluster.gpu,
        )[0]  # fmt: skip

    def planned(path: Path) -> Member:
        settings: tuple[str, ...] = ()
        try:
            recipe = loaded(path, settings)
        except UserError as problem:
            # The overrides may contradict the recipe's own layout, which the search replaces.
            settings = ("layout={}",)
            try:
                recipe = loaded(path, settings)
            except UserError:
                raise problem from None
        job = calibrate(job_without_layout(recipe, machine, software))
        problem_of = problem_in_run(recipe, machine, software)
        result = search(job, top=1, headroom=headroom, problem_of=problem_of, processes=processes)
        if result.plans:
            row_of = partial(phase_row, machine=machine, software=software, adjust=calibrate)
            seconds = seconds_of_run(recipe, result.plans[0], row_of)
            return Member(path, recipe, result.plans[0], seconds, settings=settings)
        if result.problem:
            reason = f"no layout is valid in the whole run: {result.problem}"
        elif result.nearest:
            reason = f"no layout fits; the closest needs {result.nearest[1]:.1f} GiB more per GPU"
        else:
            reasons = ", ".join(why for why, _ in result.rejected.most_common())
            reason = f"no layout fits; rejected: {reasons}"
        return Member(path, recipe, None, problem=reason)

    members = [planned(path)]
    for each, recipe in relatives(members[0].recipe, warn).items():
        try:
            members.append(planned(each))
        except UserError as problem:
            members.append(Member(each, recipe, None, problem=str(problem)))
    return sorted(members, key=lambda member: parameter_count(member.recipe.model))


def seconds_of_run(recipe: Recipe, plan: Plan, row_of: Callable[[Segment], PhaseRow]) -> float:
    """Return the time of all steps of a recipe in a layout that is valid in all of them.

    Later phases inherit the layout, unless they have their own.

    row_of: returns the predictions for a segment of the run
    """
    run = PhasePlan(recipe)
    first = run.segments_of(FIRST_PHASE)
    seconds = seconds_of_segments(plan.job, first)
    if len(first) < len(run.segments):
        changed = PhasePlan(in_layout(recipe, plan, recipe.name))
        for segment in changed.segments[len(first) :]:
            row = row_of(segment)
            assert row.seconds is not None, row.problem
            seconds += row.seconds
    return seconds


def largest(family: Sequence[Member], days: float) -> Member | None:
    """Return the largest model that fits and takes at most `days`; None if there is none."""
    in_time = [member for member in family if member.days is not None and member.days <= days]
    return in_time[-1] if in_time else None
