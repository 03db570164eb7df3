"""The family of a recipe: the shipped models of its architecture, each in its best layout.

The best layout is the first one that a search returns: the simplest within 2 % of the fastest.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from models.cost import parameter_count
from models.errors import UserError
from threefold.config.layout import Cluster
from threefold.config.loading import load_recipes, recipes_in_repository
from threefold.config.recipe import Recipe
from threefold.plan.cluster import recipe_on_cluster
from threefold.plan.job import Job, LinkOverrides, Machine, job_without_layout
from threefold.plan.search import DEFAULT_HEADROOM, Plan, SearchResult, search
from threefold.plan.software import Software

SECONDS_PER_DAY = 86_400
Warn = Callable[[str], None]


def ignored(problem: str) -> None:
    """Ignore a recipe that is not valid."""


@dataclass(frozen=True)
class Member:
    """A recipe of a family, and its best layout that fits; None if none fits.

    Attributes:
        problem: reason for a missing plan, such as too little memory; empty with a plan
    """

    path: Path
    recipe: Recipe
    plan: Plan | None
    problem: str = ""

    @property
    def days(self) -> float | None:
        """The duration of all steps in days; None if no layout fits."""
        if self.plan is None:
            return None
        return self.recipe.training.steps * self.plan.time.total / SECONDS_PER_DAY


def relatives(recipe: Recipe, warn: Warn = ignored) -> dict[Path, Recipe]:
    """Return the repository's recipes of a recipe's family, without the recipe itself.

    The family is named by the part of a recipe's name before the first hyphen, such as "llama".
    Recipes that continue from trained weights do not belong to it.

    warn: called with one line about each recipe that is not valid
    """
    kind = recipe.name.partition("-")[0]
    found, problems = load_recipes(
        path for path in recipes_in_repository() if path.parent.name == kind
    )
    for problem in problems:
        warn(problem)
    return {
        path: each
        for path, each in found.items()
        if each.name != recipe.name and each.training.initial_weights is None
    }


def best_plan(job: Job, headroom: float = DEFAULT_HEADROOM) -> Plan | None:
    """Return the best layout of a job; None if none fits."""
    plans = search(job, top=1, headroom=headroom).plans
    return plans[0] if plans else None


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
) -> list[Member]:
    """Plan a recipe and the rest of its family on one cluster, the smallest model first.

    Args:
        path: TOML file of the recipe
        overrides: values of --set, for all recipes
        cluster: nodes and GPUs
        software: the training software
        calibrate: function that adjusts a job to measured runs
        headroom: share of the GPU memory that a layout leaves free
        links: links that differ from the GPU's datasheet
        warn: called with one line about each recipe of the family that is not valid

    Raises:
        UserError: the recipe with the overrides is not valid, or the GPU does not compute in its
            precision.
    """
    machine = Machine.of_cluster(cluster, links)
    size = {"nodes": cluster.nodes, "gpus_per_node": cluster.gpus_per_node}

    def planned(each: Path) -> Member:
        recipe, _ = recipe_on_cluster(each, overrides, **size, gpu=cluster.gpu)
        job = calibrate(job_without_layout(recipe, machine, software))
        result = search(job, top=1, headroom=headroom)
        if result.plans:
            return Member(each, recipe, result.plans[0])
        return Member(each, recipe, None, f"no layout fits; {reason_for_none(result)}")

    found = [planned(path)]
    for each, recipe in relatives(found[0].recipe, warn).items():
        try:
            found.append(planned(each))
        except UserError as problem:
            found.append(Member(each, recipe, None, str(problem)))
    return sorted(found, key=lambda member: parameter_count(member.recipe.model))


def reason_for_none(result: SearchResult) -> str:
    """Return why a search has found no layout: the memory, or what rules out each size."""
    if result.nearest:
        return f"the closest needs {result.nearest[1]:.1f} GiB more per GPU"
    return f"rejected: {', '.join(reason for reason, _ in result.rejected.most_common())}"


def largest(family: Sequence[Member], days: float) -> Member | None:
    """Return the largest model that fits and takes at most `days`; None if there is none.

    Args:
        family: members, the smallest model first
        days: limit of the duration
    """
    in_time = [each for each in family if each.days is not None and each.days <= days]
    return in_time[-1] if in_time else None
