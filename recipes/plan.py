"""Predict a run's memory, step time and fastest layout before you request a GPU.

    python recipes/plan.py recipes/llama/70b.toml
    python recipes/plan.py recipes/llama/7b.toml --nodes 16 --gpu H200 --top 3
    python recipes/plan.py recipes/llama/7b.toml --write recipes/mine.toml
    python recipes/plan.py recipes/megatron/1t.toml --software megatron-lm-2021
    python recipes/plan.py recipes/llama/70b.toml --timeline timeline.png --heatmap heatmap.png
    python recipes/plan.py recipes/llama/7b.toml --nodes 64 --largest 30
    python recipes/plan.py recipes/llama/7b.toml --nodes 16 --network 25 --network-latency 20
    python recipes/plan.py recipes/llama/405b.toml --failures-per-day 8 --storage 200
    python recipes/plan.py recipes/llama/405b.toml --trace --rank 0
    python recipes/plan.py recipes/llama/7b.toml --calibrate runs/sweeps/7b/sweep.csv
    python recipes/plan.py --table measured.csv --calibrate others.csv
    python recipes/plan.py --catalogue

A plan needs neither a GPU nor torch, and takes about a second. --trace runs one rank of the job on
fake tensors, which takes minutes, and counts the memory it allocates and the bytes it sends.
Exit code 0: the recipe's layout fits, or --largest names a model; 1: it does not fit, or no model
is trained in time; 2: the recipe or an option is rejected, or --catalogue leaves a recipe out.
"""

import sys
from pathlib import Path

if __name__ == "__main__":  # import from the repository's root, not from recipes/
    sys.path[0] = str(Path(__file__).resolve().parents[1])
    from threefold.runtime.exits import end_at_interrupt

    end_at_interrupt()

import argparse
import json
import os
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any

from models.errors import UserError
from models.hugging_face.config import export_problem
from threefold.commands.plan_options import (
    given_options,
    links_of,
    parse_command_line,
)
from threefold.config.layout import Cluster
from threefold.config.phases import StagePlan
from threefold.config.recipe import Recipe
from threefold.data.corpus import unused_rows
from threefold.plan import catalogue, recipe_edits, report
from threefold.plan import report as plan_table
from threefold.plan.calibration.compare import compare
from threefold.plan.calibration.fit import Fit, fit_table
from threefold.plan.catalogue import recipe_table, zero_stage_lines
from threefold.plan.goodput import (
    GoodputCase,
    fault_costs,
    goodput_lines,
    goodput_table,
    snapshot_costs,
)
from threefold.plan.job import (
    Job,
    Machine,
    job_without_layout,
    own_job,
    recipe_on_cluster,
    zero3_in_pipeline,
)
from threefold.plan.memory.peak import fits
from threefold.plan.report import stage_rows, stages_lines, stages_table
from threefold.plan.search import SearchResult, largest, members, search
from threefold.plan.software import load_software
from threefold.plan.time.step import step_time
from threefold.runtime.exits import raise_at_interrupt
from threefold.runtime.output import escape_output, stdout_for_json


def main() -> None:
    """Run the command; errors of the recipe or the options are printed on stderr."""
    escape_output()
    options = parse_command_line(__doc__ or "")
    try:
        code = run(options)
        sys.stdout.flush()
    except UserError as problem:
        print(f"plan.py: {problem}", file=sys.stderr)
        code = 2
    except OSError as problem:  # the reader of a pipe has closed it, or a disk is full
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        if not isinstance(problem, BrokenPipeError):
            print(f"plan.py: {problem}", file=sys.stderr)
        code = 2
    sys.exit(code)


def run(options: argparse.Namespace) -> int:
    """Run the requested mode and return its exit code."""
    if options.catalogue:
        lines, problems = recipe_table()
        print("\n".join([*lines, "", *zero_stage_lines()]))
        for problem in problems:
            leave_out(problem)
        return 2 if problems else 0
    if options.table:
        return compare_tables(options)
    recipe, cluster = recipe_on_cluster(
        options.recipe,
        options.set,
        nodes=options.nodes,
        gpus_per_node=options.gpus_per_node,
        gpu=options.gpu,
    )
    whole = StagePlan(recipe)
    if options.stage:
        recipe = whole.recipe_of(options.stage)
    if options.trace:
        return trace(recipe, cluster, options)
    if options.largest:
        return print_family(cluster, options)
    return plan(recipe, cluster, options, whole=whole)


def plan(recipe: Recipe, cluster: Cluster, options: argparse.Namespace, *, whole: StagePlan) -> int:
    """Print a plan of the recipe's own layout and the fastest layouts; return the exit code.

    Args:
        recipe: the recipe of the first stage, or of the one that `--stage` names
        cluster: its cluster
        options: the options of the command
        whole: all stages, of which a table is printed if there are several
    """
    if options.write:  # before the search, which takes seconds
        recipe_edits.check_file(options.write)
    machine = Machine.of_cluster(cluster, links_of(options))
    software = load_software(options.software)
    fit = fit_table(options.calibrate, cluster.gpu)
    if options.expert_imbalance != 1 and recipe.model.experts is None:
        raise UserError(
            f"--expert-imbalance {options.expert_imbalance:g} has no effect on {recipe.name}, "
            f"which has no experts; leave it out"
        )
    adjust = partial(adjusted, fit=fit, imbalance=options.expert_imbalance)
    job = adjust(job_without_layout(recipe, machine, software))
    own, problem = own_job(recipe, machine, software)
    own = adjust(own) if own else None
    count = max(options.top, 1 if options.write else 0)
    result = search(job, count, headroom=options.headroom) if count else SearchResult()
    steps = len(whole.steps_of(options.stage or whole.names[0]))
    stages = stage_rows(whole, machine, software, adjust) if len(whole.spans) > 1 else []
    if options.json:
        table: dict[str, Any] = {"cluster": cluster.model_dump()}
        table |= {"links": plan_table.links_table(machine)}
        table |= plan_table.search_table(recipe, result)
        own_table = plan_table.job_table(own, steps) if own else None
        table |= {"own": own_table, "own_rejected": problem, "calibration": fit.table()}
        if stages:
            table |= {"stage": options.stage or whole.names[0], "stages": stages_table(stages)}
        if own and options.failures_per_day:
            table["goodput"] = goodput_table(goodput_case(recipe, own, options))
        print(json.dumps(table))
    else:
        if fit.source:
            print(report.calibration_text(fit))
        print(report.heading(whole.recipe, own or job), end="\n\n")
        if stages:
            print(f'Stage "{options.stage or whole.names[0]}":')
        print_plan(recipe, own, problem, steps=steps)
        if stages:
            print("\n".join(["", *stages_lines(stages)]))
        if own and options.failures_per_day:
            print("\n".join(goodput_lines(goodput_case(recipe, own, options))))
        if zero3 := zero3_in_pipeline(recipe, machine, software):
            print(report.zero3_in_pipeline_text(*map(adjust, zero3)))
        if options.top:
            print()
            print_search(recipe, own, result)
    if options.write:
        recipe_edits.write_recipe(recipe, result, options.write)
        print(f"wrote {options.write}", file=sys.stderr)
    if own is None and result.plans and (options.timeline or options.heatmap):
        print(
            "plan.py: the recipe's own layout is not valid; the picture shows the fastest layout",
            file=sys.stderr,
        )
    draw(recipe, own or (result.plans[0].job if result.plans else None), options)
    return 0 if own and fits(own) and all(row.fits for row in stages) else 1


def adjusted(job: Job, *, fit: Fit, imbalance: float) -> Job:
    """Return a job with calibrated factors and the imbalance of its experts."""
    return replace(fit.factors.of(job), expert_imbalance=imbalance)


def goodput_case(recipe: Recipe, own: Job, options: argparse.Namespace) -> GoodputCase:
    """Return the recipe's job with the failures and costs that the options name."""
    detection, restart = recipe.supervision.node_seconds, options.restart
    costs = fault_costs(
        own,
        detection_seconds=detection,
        storage_bytes_per_second=options.storage * 1e9 if options.storage else None,
        restart_seconds=restart,
    )
    snapshots = snapshot_costs(own, detection_seconds=detection, restart_seconds=restart)
    return GoodputCase(recipe, step_time(own).total, costs, snapshots, options.failures_per_day)


def print_plan(recipe: Recipe, own: Job | None, problem: str, *, steps: int) -> None:
    """Print the predictions for the recipe's own layout, or the reason why it is not valid."""
    if own:
        print("\n".join(report.plan_text(own, steps)))
    else:
        print(f"The recipe's own layout is not valid: {problem}")
    if unexportable := export_problem(recipe.model):
        print(f"convert.py to-hf cannot export this model: {unexportable}")
    with suppress(UserError):  # of a damaged manifest; a plan needs no corpus
        if note := unused_rows(recipe):
            print(note)
    if recipe.data.separate_documents:
        print("data.separate_documents is ignored: attention is counted over whole sequences.")


def print_search(recipe: Recipe, own: Job | None, result: SearchResult) -> None:
    """Print the fastest layouts, and the options that select the first one."""
    time = step_time(own) if own else None
    print("\n".join(report.search_lines(result, time)))
    if result.plans and (changes := recipe_edits.changes(recipe, result.plans[0])):
        print(f"To use layout 1: {changes}")


def draw(recipe: Recipe, job: Job | None, options: argparse.Namespace) -> None:
    """Draw the requested pictures.

    Raises:
        UserError: there is no job to draw, or a file cannot be written.
    """
    if not (options.timeline or options.heatmap):
        return
    if job is None:
        raise UserError(
            "the recipe's own layout is not valid and no other was found, so there is nothing to "
            "draw; use a valid layout, --top 1 or more nodes"
        )
    # Imported only here: matplotlib takes a second to import, and most plans draw no picture.
    from threefold.plan import pictures as plan_picture

    if options.timeline:
        plan_picture.draw_timeline(job, title=recipe.name, file=options.timeline)
    if options.heatmap:
        plan_picture.draw_heatmap(recipe, job, file=options.heatmap, headroom=options.headroom)


def leave_out(problem: str) -> None:
    """Print one line about a recipe that a table does not have, because it is not valid."""
    print(f"plan.py: left out {problem}", file=sys.stderr)


def print_family(cluster: Cluster, options: argparse.Namespace) -> int:
    """Print the recipe's family on a cluster; return 0 if a model is trained in time."""
    fit = fit_table(options.calibrate, cluster.gpu)
    family = members(
        options.recipe, options.set, cluster=cluster, software=load_software(options.software),
        calibrate=fit.factors.of, headroom=options.headroom, links=links_of(options),
        warn=leave_out,
    )  # fmt: skip
    if options.json:
        table = catalogue.family_table(family, cluster, options.largest)
        links = plan_table.links_table(Machine.of_cluster(cluster, links_of(options)))
        print(json.dumps(table | {"links": links, "calibration": fit.table()}))
    else:
        if fit.source:
            print(report.calibration_text(fit))
        lines = catalogue.family_lines(
            family,
            cluster,
            options.largest,
            links=links_of(options),
            options=given_options(options),
        )
        print("\n".join(lines))
    return 0 if largest(family, options.largest) else 1


def trace(recipe: Recipe, cluster: Cluster, options: argparse.Namespace) -> int:
    """Trace a rank on fake tensors, and print its allocated memory and communication."""
    # Only this mode needs torch, which takes seconds to import.
    from threefold.trace import report as trace_report
    from threefold.trace.trace import trace as trace_rank

    machine = Machine.of_cluster(cluster)
    with stdout_for_json(options.json):
        traced = trace_rank(recipe, machine.gpus, machine.gpus_per_node, options.rank)
    if options.json:
        print(json.dumps(trace_report.table(traced)))
    else:
        print(trace_report.text(traced))
    return 0


def compare_tables(options: argparse.Namespace) -> int:
    """Print predictions next to measurements, for one table or all tables of a folder."""
    fit = fit_table(options.calibrate)
    results, left_out = compare(options.table, fit.factors)
    for path in left_out:
        print(f"plan.py: skipped {path}: not a table of runs", file=sys.stderr)
    if options.scatter or options.heatmap:
        # As in `draw`: matplotlib takes a second to import.
        from threefold.plan import pictures

        if options.scatter:
            pictures.draw_scatter(results, file=options.scatter)
        if options.heatmap:
            pictures.draw_heatmaps(results, file=options.heatmap)
    if options.json:
        tables = {name: result | {"calibration": fit.table()} for name, result in results.items()}
        print(json.dumps(tables if options.table.is_dir() else next(iter(tables.values()))))
        return 0
    if fit.source:
        print(report.calibration_text(fit))
    print(report.EVALUATION_HEADER)
    for name, result in results.items():
        print(report.evaluation_text(name, result["summary"]))
    for reason, count in report.skipped(results.values()):
        print(f"plan.py: skipped {count} row{'s' * (count > 1)}: {reason}", file=sys.stderr)
    return 0


if __name__ == "__main__":
    raise_at_interrupt()
    main()
