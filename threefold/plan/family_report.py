"""The report of `plan.py --largest`: a family of models on one machine, and the time of each."""

import shlex
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from models.cost import parameter_count
from threefold.config.layout import Cluster
from threefold.config.loading import REPOSITORY
from threefold.plan.catalogue import layout_text
from threefold.plan.family import Member, largest
from threefold.plan.job import LinkOverrides, Machine, links_text
from threefold.plan.plan_table import plan_table
from threefold.plan.report import rates, short_count

COLUMNS = f"{'model':<18}{'parameters':>11}{'tokens':>9}{'days':>10}{'MFU':>8}  layout"


def family_lines(
    family: Sequence[Member],
    cluster: Cluster,
    days: float,
    *,
    links: LinkOverrides | None = None,
    options: Sequence[str] = (),
) -> Iterator[str]:
    """Yield a table of a family, and the largest model that is trained in time.

    Args:
        family: the members, the smallest model first
        cluster: nodes and GPUs
        days: limit of the duration
        links: links that differ from the GPU's datasheet
        options: options of the command that also apply to a plan of the named model
    """
    yield (
        f"Best layouts on {cluster.nodes} x {cluster.gpus_per_node} {cluster.gpu} "
        f"(tensor x pipeline x data)"
    )
    if links and links != LinkOverrides():
        yield links_text(Machine.of_cluster(cluster, links))
    yield COLUMNS
    for member in family:
        yield _line(member)
    found = largest(family, days)
    if found is None:
        yield f"No model of the family fits and trains its tokens in {days:g} days."
        return
    machine = f"--nodes {cluster.nodes} --gpus-per-node {cluster.gpus_per_node} --gpu {cluster.gpu}"
    arguments = [_shown(found.path), *machine.split(), *options]
    yield (
        f"The largest model that trains its tokens in {days:g} days is {found.recipe.name}. "
        f"To plan it: python recipes/plan.py {shlex.join(arguments)}"
    )


def family_table(family: Sequence[Member], cluster: Cluster, days: float) -> dict[str, Any]:
    """Return the table for --json; "largest" is None if no model is trained in time."""
    found = largest(family, days)
    return {
        "cluster": cluster.model_dump(),
        "days": days,
        "models": [
            {
                "name": member.recipe.name,
                "recipe": _shown(member.path),
                "parameters": parameter_count(member.recipe.model),
                "tokens": member.recipe.training.steps * member.recipe.tokens_per_step,
                "days": member.days,
                "problem": member.problem,
                "best": plan_table(member.recipe, member.plan) if member.plan else None,
            }
            for member in family
        ],
        "largest": found.recipe.name if found else None,
    }


def _line(member: Member) -> str:
    recipe, plan = member.recipe, member.plan
    tokens = short_count(recipe.training.steps * recipe.tokens_per_step)
    start = f"{recipe.name:<18}{short_count(parameter_count(recipe.model)):>11}{tokens:>9}"
    if plan is None:
        return f"{start}{'-':>10}{'-':>8}  {member.problem}"
    mfu = rates(plan.job, plan.time.total, recipe.training.steps).mfu
    days = member.days or 0.0
    time = f"{days:,.1f}" if days >= 1 else f"{24 * days:.2g} h"
    return f"{start}{time:>10}{mfu:>8.1%}  {layout_text(plan.job.layout)}"


def _shown(path: Path) -> str:
    """Return a path relative to the repository if it is inside, otherwise the absolute path."""
    path = path.resolve()
    return str(path.relative_to(REPOSITORY) if path.is_relative_to(REPOSITORY) else path)
