"""The layout of a run on the nodes that are left: the recipe's own, or the planner's fastest."""

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from models.errors import UserError
from threefold.config.parallel_dims import ParallelDims
from threefold.config.phases import PhasePlan
from threefold.config.recipe import Recipe
from threefold.plan.job import Job, Machine, job_without_layout, own_job, recipe_on_cluster
from threefold.plan.memory.peak import GIB, StageMemory, fits, fullest_stage, limit_after_shortage
from threefold.plan.recipe_edits import (
    edits,
    options_of,
    problem_in_any_step,
    replaced_settings,
)
from threefold.plan.search import DEFAULT_HEADROOM, Plan, is_near_tie, search
from threefold.plan.software import load_software
from threefold.plan.time.step import step_time


@dataclass(frozen=True)
class Placement:
    """The nodes of an attempt and the layout of the run on them.

    Attributes:
        overrides: the values of --set that select the layout, after those of the user
        layout: the layout, for messages
        step_seconds: predicted duration of a step
        pipelined: True if the layout has pipeline stages
        memory: predicted memory of the fullest stage
        chosen: True if launch.py has chosen the layout, False if it is that of the recipe
    """

    nodes: int
    overrides: Sequence[str]
    layout: str
    step_seconds: float
    memory: StageMemory
    pipelined: bool = False
    chosen: bool = False


class Replanner:
    """Finds layouts of a recipe for other numbers of nodes, and caches the result for each number.

    Args:
        overrides: the user's values of --set
    """

    def __init__(self, file: Path, overrides: Sequence[str] = ()):
        self.file, self.overrides = file, overrides
        self.recipe, self.cluster = recipe_on_cluster(file, overrides)
        self._found: dict[int, Placement | None] = {}
        self._limit_bytes = math.inf  # of layouts that launch.py chooses

    def best(self, available: int, minimum: int) -> Placement | None:
        """Return the placement on the most nodes that have a layout.

        Args:
            available: number of nodes that can be used

        Returns:
            None if no number of nodes from `minimum` to `available` has a layout that fits.
        """
        for nodes in range(min(available, self.cluster.nodes), max(0, minimum - 1), -1):
            if placement := self.placement_on(nodes):
                return placement
        return None

    def require_layout(self, name: str) -> None:
        """Check that a layout fits on one of the numbers of nodes that the run may have.

        Raises:
            UserError: none fits, the cluster's GPU has no datasheet, or it does not compute in the
                recipe's precision. The message begins with `name` if no layout fits.
        """
        most, least = self.cluster.nodes, self.cluster.minimum_nodes
        if not self.best(most, least):
            raise UserError(
                f"{name}: no layout is predicted to fit on {least} to {most} nodes; use more of "
                f"them, for example --set cluster.nodes={2 * most}, or a GPU with more memory"
            )

    def placement_on(self, nodes: int) -> Placement | None:
        """Return the placement on a number of nodes; None if no layout fits.

        On the recipe's own number of nodes, it is the recipe's layout. On fewer nodes it is that
        layout with fewer data ranks, unless another one is predicted to be faster by more than the
        error of the prediction.

        If the recipe has phases, the layout must fit all of them, because the ranks pass from one
        phase to the next by themselves. A layout that is searched for is that of the phase with the
        most tokens in a micro-batch, and all phases then use it.
        """
        if nodes not in self._found:
            self._found[nodes] = self._find(nodes)
        return self._found[nodes]

    def exclude(self, placement: Placement) -> None:
        """Exclude a layout that ran out of memory, and all that need about as much memory.

        The recipe's own layout on all nodes is not excluded.
        """
        self._limit_bytes = limit_after_shortage(placement.memory)
        self._found.clear()

    def _find(self, nodes: int) -> Placement | None:
        """Search for the placement on a number of nodes.

        Raises:
            UserError: the cluster's GPU has no datasheet, or does not compute in the recipe's
                precision.
        """
        overrides = [f"cluster.nodes={nodes}"]
        whole, cluster = recipe_on_cluster(self.file, self.overrides, nodes=nodes)
        machine, software = Machine.of_cluster(cluster), load_software("threefold")
        phases = [segment.recipe for segment in PhasePlan(whole).phases]
        recipe = max(phases, key=lambda phase: phase.batch.micro_sequences * phase.tokens_per_rank)
        jobs = [own_job(phase, machine, software)[0] for phase in phases]
        own = jobs[phases.index(recipe)] if all(jobs) else None
        if own and nodes == self.cluster.nodes:
            return replace(_placement(whole, overrides, own), chosen=False)
        limit = min(self._limit_bytes, machine.gpu.memory_gib * GIB)
        headroom = max(DEFAULT_HEADROOM, 1 - limit / (machine.gpu.memory_gib * GIB))

        def overrides_for(plan: Plan) -> list[str]:
            return [*overrides, *options_of(whole, plan), *_options_of_phases(whole, plan)]

        def changed(plan: Plan) -> Recipe:
            return recipe_on_cluster(self.file, [*self.overrides, *overrides_for(plan)])[0]

        plans = search(
            job_without_layout(recipe, machine, software),
            1,
            headroom=headroom,
            problem_of=lambda plan: problem_in_any_step(
                lambda: changed(plan), machine, software, limit=limit
            ),
        ).plans
        if not all(job and fits(job) and fullest_stage(job).total <= limit for job in jobs):
            own = None
        if own and (not plans or is_near_tie(step_time(own).total, plans[0].time.total)):
            return _placement(whole, overrides, own)
        if not plans:
            return None
        placement = _placement(changed(plans[0]), overrides_for(plans[0]), plans[0].job)
        replaced = replaced_settings(whole, plans[0])
        if not replaced:
            return placement
        others = f"which has other values than {whole.deepspeed} of: {', '.join(replaced)}"
        return replace(placement, layout=f"{placement.layout}, {others}")


def _options_of_phases(recipe: Recipe, plan: Plan) -> list[str]:
    """Return overrides that give a layout to the phases that have another one.

    Args:
        recipe: the recipe, with its phases
    """
    placements = []
    for phase in recipe.phase:
        for name, value in edits(recipe, plan).items():
            section, _, key = name.partition(".")
            if key and key in getattr(phase, section):
                placements.append(f"phase.{phase.name}.{name}={json.dumps(value)}")
    return placements


def _placement(recipe: Recipe, overrides: Sequence[str], job: Job) -> Placement:
    """Return the placement of a recipe on its cluster, in a layout that launch.py has chosen."""
    assert recipe.cluster
    return Placement(
        recipe.cluster.nodes,
        overrides,
        _text(recipe),
        step_time(job).total,
        pipelined=PhasePlan(recipe).has_pipeline,
        memory=fullest_stage(job),
        chosen=True,
    )


def _text(recipe: Recipe) -> str:
    """Return the layout of a recipe on its cluster, for messages."""
    assert recipe.cluster
    layout, cluster = recipe.layout, recipe.cluster
    dims = ParallelDims.of_layout(layout, cluster.nodes * cluster.gpus_per_node)
    schedule = f", {layout.schedule_name}" if layout.pipeline > 1 else ""
    return f"{dims}{schedule}, {recipe.deepspeed}"
