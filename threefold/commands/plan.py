"""The command recipes/plan.py: predictions of memory, step time and the fastest layout."""

import argparse
import json
import os
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any

from models.errors import UserError
from models.hugging_face.config import export_problem
from threefold.config.layout import Cluster
from threefold.config.loading import DEFAULT_RECIPE, load_recipe
from threefold.config.phases import PhasePlan, Segment
from threefold.config.recipe import Recipe
from threefold.config.sections import FIRST_PHASE
from threefold.data.manifest import unused_rows
from threefold.plan import catalogue, recipe_edits, report
from threefold.plan.calibration.fit import Fit, compare, fit_table
from threefold.plan.catalogue import largest, members, recipe_table, zero_stage_lines
from threefold.plan.goodput import (
    GoodputCase,
    fault_costs,
    goodput_lines,
    goodput_table,
    snapshot_costs,
)
from threefold.plan.job import (
    Job,
    LinkOverrides,
    Machine,
    job_without_layout,
    own_job,
    recipe_on_cluster,
)
from threefold.plan.memory.peak import fits
from threefold.plan.report import phase_row, phases_lines, phases_table, seconds_of_segments
from threefold.plan.search import DEFAULT_HEADROOM, SearchResult, search
from threefold.plan.software import THREEFOLD, load_software
from threefold.plan.time.step import step_time
from threefold.runtime.command_line import (
    Options,
    Subcommand,
    add_cluster_options,
    add_json,
    add_overrides,
    duration_in_days,
    failures_per_day,
    file_path,
    imbalance,
    latency_in_microseconds,
    link_rate,
    parse_subcommand,
    picture_file,
    seconds,
    share,
)
from threefold.runtime.exits import raise_at_interrupt
from threefold.runtime.output import escape_output, report_unwritable, stdout_for_json


def main(description: str | None = None) -> None:
    """Run the command; errors of the recipe or the options are printed on stderr."""
    raise_at_interrupt()
    escape_output()
    options = parse_subcommand("plan.py", description or "", COMMANDS, MOVED_FLAGS)
    try:
        code = options.command(options)
        print(end="", flush=True)  # stdout is None if the shell closed it
    except UserError as problem:
        print(f"plan.py: {problem}", file=sys.stderr)
        code = 2
    except OSError as problem:  # the reader of a pipe has closed it, or a disk is full
        report_unwritable("plan.py", problem)
        code = 2
    sys.exit(code)


def read_recipe(options: argparse.Namespace) -> tuple[PhasePlan, Recipe, Cluster]:
    """Return all phases, the recipe of the first phase or of `--phase`, and its cluster."""
    recipe, cluster = recipe_on_cluster(
        options.recipe,
        options.set,
        nodes=options.nodes,
        gpus_per_node=options.gpus_per_node,
        gpu=options.gpu,
    )
    whole = PhasePlan(recipe)
    return whole, whole.recipe_of(options.phase) if options.phase else recipe, cluster


def cluster_changes(options: argparse.Namespace, cluster: Cluster) -> list[str]:
    """Return the values of --set that change the recipe's [cluster], if it has one."""
    own = load_recipe(options.recipe, options.set).cluster
    keys = ("nodes", "gpus_per_node", "gpu") if own else ()
    return [
        f"cluster.{key}={getattr(cluster, key)}"
        for key in keys
        if getattr(cluster, key) != getattr(own, key)
    ]


def plan(options: argparse.Namespace) -> int:
    """Print a plan of the recipe's own layout and the fastest layouts; return the exit code."""
    for name in ("storage", "restart"):
        if getattr(options, name) is not None and not options.failures_per_day:
            raise UserError(f"--{name} requires --failures-per-day")
    if options.top < 0:
        raise UserError(f"invalid --top {options.top}: expected 0 or more, for example 5")
    whole, recipe, cluster = read_recipe(options)
    phase = options.phase or FIRST_PHASE
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
    problem_of = recipe_edits.problem_in_run(whole.recipe, machine, software, phase)
    result = SearchResult()
    if count:
        result = search(
            job,
            count,
            headroom=options.headroom,
            problem_of=problem_of,
            processes=len(os.sched_getaffinity(0)),
        )
    replaced = ""
    if result.plans:
        replaced = recipe_edits.replacement_text(recipe, result.plans[0], "Layout 1")
    planned = whole.segments_of(phase)
    segments = whole.segments if len(whole.segments) > 1 else ()
    phases = [phase_row(segment, machine, software, adjust) for segment in segments]
    if options.json:
        table: dict[str, Any] = {"cluster": cluster.model_dump()}
        table |= {"links": report.links_table(machine)}
        table |= report.search_table(recipe, result, planned)
        own_table = report.job_table(own, seconds_of_segments(own, planned)) if own else None
        table |= {"own": own_table, "own_rejected": problem, "calibration": fit.table()}
        if phases:
            table |= {"phase": phase, "phases": phases_table(phases)}
        if own and options.failures_per_day:
            table["goodput"] = goodput_table(goodput_case(recipe, own, options))
        print(json.dumps(table))
    else:
        if fit.source:
            print(report.calibration_text(fit))
        print(report.heading(whole.recipe, own or job), end="\n\n")
        if phases:
            print(f'Phase "{phase}":')
        print_plan(recipe, own, problem, segments=planned)
        print("".join(f"{note}\n" for note in whole.notes), end="")
        if phases:
            print("\n".join(["", *phases_lines(phases)]))
        if own and options.failures_per_day:
            print("\n".join(goodput_lines(goodput_case(recipe, own, options))))
        if options.top:
            print()
            print("\n".join(report.search_lines(result, step_time(own) if own else None)))
            if result.plans:
                changes = cluster_changes(options, cluster)
                changes += recipe_edits.options_of(recipe, result.plans[0], phase)
                if changes:
                    print("To use layout 1:", *(f"--set {change}" for change in changes))
            if replaced:
                print(replaced)
    if options.write:
        recipe_edits.write_recipe(whole.recipe, result, options.write, options.recipe, phase=phase)
        where = "" if phase == FIRST_PHASE else f' in phase "{phase}"'
        print(
            f"wrote {options.write} with layout 1{where}; its run folder is that of {recipe.name} "
            f"unless you change the key `name`",
            file=sys.stderr,
        )
        if replaced and (options.json or not options.top):
            print(f"plan.py: {replaced}", file=sys.stderr)
    if own is None and result.plans and (options.timeline or options.heatmap):
        print(
            "plan.py: the recipe's own layout is not valid; the picture shows layout 1",
            file=sys.stderr,
        )
    draw(recipe, own or (result.plans[0].job if result.plans else None), options)
    return 0 if own and fits(own) and all(row.fits for row in phases) else 1


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


def print_plan(
    recipe: Recipe, own: Job | None, problem: str, *, segments: Sequence[Segment]
) -> None:
    """Print the predictions for the recipe's own layout, or the reason why it is not valid.

    segments: the segments of the phase
    """
    if own:
        print("\n".join(report.plan_text(own, seconds_of_segments(own, segments))))
        if every := recipe.training.evaluate_every:
            batches = recipe.training.evaluation_batches * len(recipe.data.validation_sets)
            if recipe.optimizer.average:
                batches *= 2  # the averaged weights are validated, too
            # A forward pass is a third of a step, or a quarter if the step repeats it.
            share = batches / every / (4 if own.layout.recompute == "full" else 3)
            if share > SHOWN_SHARE:
                print(f"The time excludes validation, which adds up to {share:.0%}.")
    else:
        print(f"The recipe's own layout is not valid: {problem}")
    if unexportable := export_problem(recipe.model):
        print(f"convert.py to-hf cannot export this model: {unexportable}")
    with suppress(UserError):  # of a damaged manifest; a plan needs no corpus
        if note := unused_rows(recipe):
            print(note)
    if recipe.data.separate_documents:
        note = "The plan counts attention over whole sequences, not per document"
        if (
            own
            and own.software.limited_attention
            and not (own.writes_scores or own.model.attention_soft_cap)
        ):
            note += ", at the speed of the kernel for documents"
        print(f"{note} (data.separate_documents).")


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
    from threefold.pipeline.picture import save_figure
    from threefold.plan import pictures

    if options.timeline:
        save_figure(pictures.timeline(job, recipe.name), options.timeline)
    if options.heatmap:
        save_figure(pictures.heatmap(recipe, job, options.headroom), options.heatmap)


def leave_out(problem: str) -> None:
    """Print one line about a recipe that a table does not have, because it is not valid."""
    print(f"plan.py: left out {problem}", file=sys.stderr)


def print_catalogue(options: argparse.Namespace) -> int:
    """Print Markdown tables of all shipped recipes, and of the ZeRO stages.

    Recipes that git does not track are the user's own, and are left out.
    """
    lines, problems = recipe_table()
    print("\n".join([*lines, "", *zero_stage_lines()]))
    for problem in problems:
        leave_out(problem)
    return 2 if problems else 0


def print_family(options: argparse.Namespace) -> int:
    """Plan the recipe's family on one cluster, and name the largest model that trains in time.

    Every model is planned with the tokens of its own recipe. Exit code 1: no model is trained in
    time.
    """
    check_family_settings(options.set)
    _, _, cluster = read_recipe(options)
    fit = fit_table(options.calibrate, cluster.gpu)
    family = members(
        options.recipe, options.set, cluster=cluster, software=load_software(options.software),
        calibrate=fit.factors.of, headroom=options.headroom, links=links_of(options),
        warn=leave_out, processes=len(os.sched_getaffinity(0)),
    )  # fmt: skip
    if options.json:
        table = catalogue.family_table(family, cluster, options.days)
        links = report.links_table(Machine.of_cluster(cluster, links_of(options)))
        print(json.dumps(table | {"links": links, "calibration": fit.table()}))
    else:
        if fit.source:
            print(report.calibration_text(fit))
        lines = catalogue.family_lines(
            family,
            cluster,
            options.days,
            links=links_of(options),
            options=given_options(options),
        )
        print("\n".join(lines))
    return 0 if largest(family, options.days) else 1


def trace(options: argparse.Namespace) -> int:
    """Run a step of one rank on fake tensors, and count the memory and the bytes that it sends.

    It takes minutes and needs no GPU.
    """
    # Only this command needs torch, which takes seconds to import. DeepSpeed logs to standard
    # output while it is imported.
    with stdout_for_json(True):
        from threefold.trace import trace as trace_report
        from threefold.trace.trace import trace as trace_rank

    _, recipe, cluster = read_recipe(options)
    machine = Machine.of_cluster(cluster)
    with stdout_for_json(options.json):
        traced = trace_rank(recipe, machine.gpus, machine.gpus_per_node, options.rank)
    if options.json:
        print(json.dumps(trace_report.table(traced)))
    else:
        print(trace_report.text(traced))
    return 0


def compare_tables(options: argparse.Namespace) -> int:
    """Print predictions next to measured runs, for one table or all tables of a folder."""
    fit = fit_table(options.calibrate)
    results, left_out = compare(options.table, fit.factors)
    for path in left_out:
        print(f"plan.py: skipped {path}: not a table of runs", file=sys.stderr)
    if options.json:
        tables = {name: result | {"calibration": fit.table()} for name, result in results.items()}
        print(json.dumps(tables if options.table.is_dir() else next(iter(tables.values()))))
    else:
        if fit.source:
            print(report.calibration_text(fit))
        if options.groups:
            print("\n".join(report.groups_lines(results.values())))
        else:
            print(report.EVALUATION_HEADER)
            for name, result in results.items():
                print(report.evaluation_text(name, result["summary"]))
        for line in report.notes_on_rows(results.values()):
            print(f"plan.py: {line}", file=sys.stderr)
    if options.scatter or options.heatmap:
        # As in `draw`: matplotlib takes a second to import.
        from threefold.pipeline.picture import save_figure
        from threefold.plan import pictures

        if options.scatter:
            save_figure(pictures.scatter(results), options.scatter)
        if options.heatmap:
            save_figure(pictures.heatmaps(results), options.heatmap)
    return 0


# The command-line options of plan.py.

SHOWN_SHARE = 0.02  # of the time that validations add
SEARCHED = ("layout.", "batch.micro_sequences")  # keys that a search chooses
LINK_OPTIONS = ("node_link", "network", "network_latency")


def add_plan_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of a plan."""
    add_recipe(parser)
    add_machine_options(parser)
    parser.add_argument(
        "--expert-imbalance", type=imbalance, default=1.0, metavar="RATIO",
        help="tokens of the busiest expert rank, relative to the mean (default: 1, all equal)",
    )  # fmt: skip
    faults = parser.add_argument_group("goodput")
    faults.add_argument(
        "--failures-per-day", type=failures_per_day, metavar="NUMBER",
        help="predict the goodput (share of wall time spent on steps that are kept) and the best "
        "interval between saves",
    )  # fmt: skip
    faults.add_argument(
        "--storage", type=link_rate, metavar="GB/S",
        help="rate at which all nodes together write and read checkpoints (default: 1 per node)",
    )  # fmt: skip
    faults.add_argument(
        "--restart", type=seconds, metavar="SECONDS",
        help="time from a failure to the next step (default: supervision.node_seconds, 60 seconds "
        "and the time to read the checkpoint)",
    )  # fmt: skip
    output = parser.add_argument_group("output")
    add_phase(output)
    output.add_argument(
        "--top", type=int, default=5, help="number of fastest layouts to print (default: 5)"
    )
    output.add_argument(
        "--write",
        type=file_path,
        metavar="TOML",
        help="write a copy of the recipe with layout 1 of the list",
    )
    output.add_argument(
        "--timeline", type=picture_file, metavar="PICTURE",
        help="draw the pipeline schedule and the memory of each stage (.png, .svg or .pdf)",
    )  # fmt: skip
    output.add_argument(
        "--heatmap", type=picture_file, metavar="PICTURE",
        help="draw the fastest layouts of the recipe's family by number of nodes",
    )  # fmt: skip
    add_json(output)


def add_trace_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of a trace."""
    add_recipe(parser)
    add_cluster_options(parser)
    add_phase(parser)
    parser.add_argument("--rank", type=int, default=0, help="rank to trace (default: 0)")
    add_json(parser)


def add_family_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of the search for the largest model."""
    add_recipe(parser)
    parser.add_argument(
        "--days", type=duration_in_days, required=True, help="time in which a model is trained"
    )
    add_machine_options(parser)
    add_json(parser)
    parser.set_defaults(phase=None)


def add_table_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of the comparison with measured runs."""
    parser.add_argument("table", type=file_path, metavar="CSV", help="a .csv, or a folder of them")
    add_calibration(parser)
    parser.add_argument(
        "--scatter", type=picture_file, metavar="PICTURE",
        help="draw the predicted and measured times",
    )  # fmt: skip
    parser.add_argument(
        "--heatmap", type=picture_file, metavar="PICTURE", help="draw the fastest rows"
    )
    parser.add_argument(
        "--groups", action="store_true", help="print the errors by software, GPU and matmul format"
    )
    add_json(parser)


def add_recipe(parser: argparse.ArgumentParser) -> None:
    """Add the recipe and --set."""
    parser.add_argument(
        "recipe", nargs="?", type=file_path, default=DEFAULT_RECIPE,
        help="recipe to plan (default: recipes/tiny.toml)",
    )  # fmt: skip
    add_overrides(parser, "change a key of the recipe, such as layout.tensor=4; repeatable")


def add_machine_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of the cluster, its links and its software."""
    machine = parser.add_argument_group("machine (default: the recipe's [cluster])")
    add_cluster_options(machine)
    rate = "datasheet rate of a GPU's links {}, in one direction (default: the GPU's datasheet)"
    machine.add_argument(
        "--node-link", type=link_rate, metavar="GB/S", help=rate.format("within a node")
    )
    machine.add_argument(
        "--network", type=link_rate, metavar="GB/S", help=rate.format("between nodes")
    )
    machine.add_argument(
        "--network-latency", type=latency_in_microseconds, metavar="MICROSECONDS",
        help="latency between nodes (default: the GPU's datasheet)",
    )  # fmt: skip
    machine.add_argument(
        "--software", default=THREEFOLD.name,
        help="training software whose kernels and overlap are assumed (default: threefold)",
    )  # fmt: skip
    parser.add_argument(
        "--headroom", type=share, default=DEFAULT_HEADROOM, metavar="SHARE",
        help="share of the GPU memory that the searched layouts leave free (default: %(default)s)",
    )  # fmt: skip
    add_calibration(parser)


def add_calibration(parser: argparse.ArgumentParser) -> None:
    """Add --calibrate."""
    parser.add_argument(
        "--calibrate", type=file_path, metavar="CSV",
        help="adjust the predictions to measured runs of the same cluster, such as sweep.csv",
    )  # fmt: skip


def add_phase(parser: Options) -> None:
    """Add --phase."""
    parser.add_argument(
        "--phase", metavar="NAME",
        help="plan this phase of the recipe in detail (default: the first one)",
    )  # fmt: skip


COMMANDS = {
    "": Subcommand(plan, add_plan_options),
    "largest": Subcommand(print_family, add_family_options),
    "trace": Subcommand(trace, add_trace_options),
    "table": Subcommand(compare_tables, add_table_options),
    "catalogue": Subcommand(print_catalogue, lambda parser: None),
}
MOVED_FLAGS = {
    "--largest": "largest --days DAYS", "--trace": "trace", "--table": "table FILE",
    "--catalogue": "catalogue",
}  # fmt: skip


def check_family_settings(settings: list[str]) -> None:
    """Raise a UserError if a --set contradicts the search over a family."""
    for setting in settings:
        key = setting.partition("=")[0].replace(" ", "")
        if key.startswith(SEARCHED):
            raise UserError(f"plan.py largest chooses the layout; leave out --set {setting}")
        if key == "name":
            raise UserError(
                f"plan.py largest identifies the family by the recipe's name; leave out --set "
                f"{setting}"
            )


def links_of(options: argparse.Namespace) -> LinkOverrides:
    """Return the links that the options name."""
    latency = options.network_latency
    return LinkOverrides(
        node_link_gigabytes_per_second=options.node_link,
        network_gigabytes_per_second=options.network,
        network_latency_seconds=None if latency is None else latency * 1e-6,
    )


def given_options(options: argparse.Namespace) -> list[str]:
    """Return the options on the command line that change the predictions of a family's cluster."""
    given = [f"--set={setting}" for setting in options.set]
    defaults = {"software": THREEFOLD.name, "headroom": DEFAULT_HEADROOM}
    for name in (*defaults, "calibrate", *LINK_OPTIONS):
        if (value := getattr(options, name)) not in (None, defaults.get(name)):
            given.append(f"--{name.replace('_', '-')}={value}")
    return given
