"""Tables that plan.py prints with --json: predictions of a layout, and the layouts of a search."""

from dataclasses import asdict
from typing import Any

from models.cost import parameter_count
from threefold.config.recipe import Recipe
from threefold.plan.job import Job, Machine
from threefold.plan.memory.peak import GIB, fits, stage_memory
from threefold.plan.recipe_edits import edits
from threefold.plan.report import rates
from threefold.plan.search import Plan, SearchResult
from threefold.plan.stage_contents import stage_imbalance
from threefold.plan.time.step import step_time


def job_table(job: Job, steps: int) -> dict[str, Any]:
    """Return a layout's predictions; memory is in bytes."""
    time, memory = step_time(job), stage_memory(job)
    return {
        "layout": asdict(job.layout),
        "micro_batches": job.micro_batches,
        "blocks": job.blocks_of_virtual_stages,
        "imbalance": stage_imbalance(job),
        "fits": fits(job),
        "memory_bytes": [asdict(stage) | {"total": stage.total} for stage in memory],
        "gpu_memory_bytes": job.machine.gpu.memory_gib * GIB,
        "step_seconds": asdict(time) | {"total": time.total},
        **asdict(rates(job, time.total, steps)),
    }


def links_table(machine: Machine) -> dict[str, float]:
    """Return the links that a plan assumes: rates per GPU in one direction, and the latency."""
    return {
        "node_link_gigabytes_per_second": machine.node_link_gigabytes_per_second,
        "network_gigabytes_per_second": machine.network_gigabytes_per_second,
        "network_latency_seconds": machine.gpu.network_latency_seconds,
    }


def plan_table(recipe: Recipe, plan: Plan) -> dict[str, Any]:
    """Return a layout of the search, with the edits that select it."""
    return job_table(plan.job, recipe.training.steps) | {"edits": edits(recipe, plan)}


def search_table(recipe: Recipe, result: SearchResult) -> dict[str, Any]:
    """Return the recipe's sizes and the fastest layouts."""
    return {
        "name": recipe.name,
        "parameters": parameter_count(recipe.model),
        "tokens_per_step": recipe.tokens_per_step,
        "steps": recipe.training.steps,
        "tried": result.tried,
        "best": [plan_table(recipe, each) for each in result.plans],
        "rejected": dict(result.rejected),
    }
