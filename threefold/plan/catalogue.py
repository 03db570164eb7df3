"""Tables of the shipped recipes, of ZeRO stages, and of a family of models on one machine."""

import math
import shlex
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from models.cost import parameter_count
from models.errors import UserError
from threefold.config.layout import Cluster
from threefold.config.loading import (
    REPOSITORY,
    in_one_line,
    load_recipe,
    load_recipes,
    recipes_in_repository,
    short,
    untracked_files,
)
from threefold.config.phases import PhasePlan, Segment
from threefold.config.recipe import Recipe
from threefold.config.sections import FIRST_PHASE
from threefold.pipeline.schedules import schedule_name
from threefold.plan.job import (
    Job,
    LinkOverrides,
    Machine,
    PlannedLayout,
    job_of,
    job_without_layout,
    links_text,
    recipe_on_cluster,
)
from threefold.plan.memory.peak import GIB, fullest_stage
from threefold.plan.recipe_edits import in_layout, problem_in_run
from threefold.plan.report import (
    PhaseRow,
    cost,
    phase_row,
    plan_table,
    rates,
    seconds_of_segments,
    short_count,
    total_seconds,
)
from threefold.plan.search import Plan, is_near_tie, search
from threefold.plan.software import THREEFOLD, Software
from threefold.plan.time.step import step_time

# The family of a recipe: the shipped models of its architecture, each in the first layout that a
# search returns.

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
        limit = machine.gpu.memory_gib * GIB * (1 - headroom) if recipe.phase else math.inf
        problem_of = problem_in_run(recipe, machine, software, limit=limit)
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


# The tables.

TABLE_HEADER = (
    "| recipe | parameters | tokens | cluster | tensor x pipeline x data | micro-batch | memory | "
    "MFU | days |",
    "|---|---|---|---|---|---|---|---|---|",
)
ZERO_STAGE_HEADER = (
    "| GPUs | recipe | ZeRO-1 | ZeRO-2 | ZeRO-3 | choice |",
    "|---|---|---|---|---|---|",
)
ZERO_STAGE_ROWS = (
    (8, "llama/7b"),
    (64, "llama/13b"),
    (512, "llama/70b"),
    (1024, "llama/70b"),
    (4096, "llama/405b"),
)  # number of GPUs, recipe


def recipe_table() -> tuple[list[str], list[str]]:
    """Return a Markdown table of the shipped recipes with a [cluster], by family and model size.

    Returns:
        The lines of the table, and one line about each recipe that cannot be planned.
    """
    untracked = untracked_files("recipes")
    shipped = [path for path in recipes_in_repository() if path not in untracked]
    recipes, problems = load_recipes(shipped)
    lines = list(TABLE_HEADER)
    for path in sorted(recipes, key=lambda p: (p.parent.name, parameter_count(recipes[p].model))):
        if cluster := recipes[path].cluster:
            try:
                lines.append(recipe_row(path, recipes[path], Machine.of_cluster(cluster)))
            except UserError as problem:
                problems.append(f"{short(path)}: {in_one_line(problem)}")
    return lines, problems


def recipe_row(path: Path, recipe: Recipe, machine: Machine) -> str:
    """Return a recipe's row of the table, with the tokens and days of all phases.

    Raises:
        UserError: a step of the recipe is not valid.
    """
    gpu = machine.gpu
    job = job_of(recipe, machine)
    rate = rates(job, step_time(job).total)
    rows = [
        phase_row(segment, machine, THREEFOLD, lambda job: job)
        for segment in PhasePlan(recipe).segments
    ]
    seconds = total_seconds(rows)
    if seconds is None:
        raise UserError(next(row.problem for row in rows if row.problem))
    billions = parameter_count(recipe.model) / 1e9
    trillions = sum(row.tokens for row in rows) / 1e12
    cells = [
        str(path.relative_to(REPOSITORY / "recipes").with_suffix("")),
        f"{billions:,.0f} B" if billions > 100 else f"{billions:.3g} B",
        f"{trillions:.3g} T",
        f"{machine.gpus:,} {gpu.name}",
        layout_text(job.layout),
        str(job.layout.micro_sequences),
        f"{fullest_stage(job).total / GIB:.0f} of {gpu.memory_gib:.0f} GiB",
        f"{rate.mfu:.0%}",
        f"{cost(machine, seconds).days:,.1f}",
    ]
    return f"| {' | '.join(cells)} |"


def layout_text(layout: PlannedLayout) -> str:
    """Return the sizes of the axes, and every setting that is not the default."""
    extras = [
        *layout.optional_sizes,
        *(["expert overlap"] if layout.expert_overlap else []),
        *(["sequence parallel"] if layout.sequence_parallel else []),
        *([f"recompute {layout.recompute}"] if layout.recompute != "none" else []),
        *(
            [schedule_name(layout.schedule, layout.virtual_stages)]
            if layout.schedule != "1f1b"
            else []
        ),
        *([f"ZeRO-{layout.zero_stage}"] if layout.zero_stage != 1 else []),
        *([f"shard group {layout.dp_shard}"] if layout.dp_shard else []),
    ]
    return ", ".join([f"{layout.tensor} x {layout.pipeline} x {layout.data}", *extras])


def zero_stage_lines() -> Iterator[str]:
    """Yield a Markdown table: time, memory and layout (tensor x pipeline x data) of each stage."""
    yield from ZERO_STAGE_HEADER
    for gpus, name in ZERO_STAGE_ROWS:
        recipe = load_recipe(REPOSITORY / "recipes" / f"{name}.toml")
        assert recipe.cluster is not None
        machine = replace(Machine.of_cluster(recipe.cluster), gpus=gpus)
        plans = fastest_of_each_stage(job_without_layout(recipe, machine))
        texts = (plan_text(plans[n]) if n in plans else "does not fit" for n in (1, 2, 3))
        yield f"| {' | '.join([f'{gpus:,}', name, *texts, choice(plans)])} |"


def fastest_of_each_stage(job: Job) -> dict[int, Plan]:
    """Return the plan with the shortest step for each ZeRO stage with a layout that fits."""
    fastest: dict[int, Plan] = {}
    for plan in search(job, sys.maxsize).plans:
        stage = plan.job.layout.zero_stage
        if stage not in fastest or plan.time.total < fastest[stage].time.total:
            fastest[stage] = plan
    return fastest


def choice(plans: dict[int, Plan]) -> str:
    """Return the stages whose times are within NEAR_TIE of the fastest one, as text."""
    best = min(plan.time.total for plan in plans.values())
    close = [str(n) for n, plan in sorted(plans.items()) if is_near_tie(plan.time.total, best)]
    return "ZeRO-" + " or ".join(close)


def plan_text(plan: Plan) -> str:
    """Return the seconds per step, the memory, and the layout without its ZeRO stage."""
    layout = layout_text(replace(plan.job.layout, zero_stage=1))
    micro = plan.job.layout.micro_sequences
    return f"{plan.time.total:.1f} s, {plan.memory.total / GIB:.0f} GiB: {layout}, micro {micro}"


# The report of `plan.py largest`: a family of models on one machine, and the time of each.

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
        days: limit of the duration
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
    settings = [f"--set={setting}" for setting in found.settings]
    arguments = [_shown(found.path), *machine.split(), *options, *settings]
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
                "tokens": member.tokens,
                "days": member.days,
                "problem": member.problem,
                "best": plan_table(member.recipe, member.plan, member.seconds)
                if member.plan and member.seconds
                else None,
            }
            for member in family
        ],
        "largest": found.recipe.name if found else None,
    }


def _line(member: Member) -> str:
    recipe, plan, days = member.recipe, member.plan, member.days
    parameters, tokens = short_count(parameter_count(recipe.model)), short_count(member.tokens)
    start = f"{recipe.name:<18}{parameters:>11}{tokens:>9}"
    if plan is None or days is None:
        return f"{start}{'-':>10}{'-':>8}  {member.problem}"
    mfu = rates(plan.job, plan.time.total).mfu
    time = f"{days:,.1f}" if days >= 1 else f"{24 * days:.2g} h"
    return f"{start}{time:>10}{mfu:>8.1%}  {layout_text(plan.job.layout)}"


def _shown(path: Path) -> str:
    """Return a path relative to the repository if it is inside, otherwise the absolute path."""
    path = path.resolve()
    return str(path.relative_to(REPOSITORY) if path.is_relative_to(REPOSITORY) else path)
