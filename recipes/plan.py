"""Predict a run's memory, step time and fastest layout before you request a GPU.

    python recipes/plan.py recipes/llama/70b.toml
    python recipes/plan.py recipes/llama/7b.toml --nodes 16 --gpu H200 --top 3
    python recipes/plan.py recipes/llama/7b.toml --write recipes/mine.toml
    python recipes/plan.py recipes/megatron/1t.toml --software megatron-lm-2021
    python recipes/plan.py recipes/llama/70b.toml --timeline timeline.png --heatmap heatmap.png
    python recipes/plan.py recipes/llama/7b.toml --nodes 64 --largest 30
    python recipes/plan.py recipes/llama/405b.toml --trace --rank 0
    python recipes/plan.py recipes/llama/7b.toml --calibrate runs/sweeps/7b/sweep.csv
    python recipes/plan.py --table measured.csv --calibrate others.csv
    python recipes/plan.py --catalogue

A plan needs neither a GPU nor torch, and takes about a second. --trace runs one rank of the job on
fake tensors, which takes minutes, and counts the memory it allocates and the bytes it sends.
Exit code 0: the recipe's layout fits, or --largest names a model; 1: it does not fit, or no model
is trained in time; 2: the recipe or an option is rejected.
"""

import sys
from pathlib import Path

if __name__ == "__main__":  # import from the repository's root, not from recipes/
    sys.path[0] = str(Path(__file__).resolve().parents[1])

import argparse
import json
import os

from models.errors import UserError
from recipes.planning.inputs.cluster import recipe_on_cluster
from recipes.planning.inputs.job import Job, Machine, job_without_layout, own_job
from recipes.planning.inputs.option_types import duration_in_days, picture_file, share
from recipes.planning.inputs.software import THREEFOLD, load_software
from recipes.planning.measured.comparison import compare
from recipes.planning.measured.fit import fit_table
from recipes.planning.memory.peak import fits
from recipes.planning.output import family_report, plan_report, plan_table, recipe_edits
from recipes.planning.output.catalogue import catalogue_lines
from recipes.planning.search.family import largest, members
from recipes.planning.search.layout_search import DEFAULT_HEADROOM, SearchResult, search
from recipes.planning.time.step_time import step_time
from recipes.training.recipe.loading import DEFAULT_RECIPE
from recipes.training.recipe.schema import Recipe
from recipes.training.recipe.sections.layout import Cluster

DEFAULTS = {"software": THREEFOLD.name, "headroom": DEFAULT_HEADROOM}
REQUIRED_OPTIONS = {"scatter": "table", "rank": "trace"}


MODES = ("trace", "largest", "table", "catalogue")  # instead of a plan


def main() -> None:
    """Run the command; errors of the recipe or the options are printed on stderr."""
    options = parse_command_line()
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
        print("\n".join(catalogue_lines()))
        return 0
    if options.table:
        return compare_tables(options)
    recipe, cluster = recipe_on_cluster(
        options.recipe,
        options.set,
        nodes=options.nodes,
        gpus_per_node=options.gpus_per_node,
        gpu=options.gpu,
    )
    if options.trace:
        return trace(recipe, cluster, options)
    if options.largest:
        return print_family(cluster, options)
    return plan(recipe, cluster, options)


def plan(recipe: Recipe, cluster: Cluster, options: argparse.Namespace) -> int:
    """Print a plan of the recipe's own layout and the fastest layouts; return the exit code."""
    machine, software = Machine.of_cluster(cluster), load_software(options.software)
    fit = fit_table(options.calibrate)
    job = fit.factors.of(job_without_layout(recipe, machine, software))
    own, problem = own_job(recipe, machine, software)
    own = fit.factors.of(own) if own else None
    count = max(options.top, 1 if options.write else 0)
    result = search(job, count, headroom=options.headroom) if count else SearchResult()
    if options.json:
        table = {"cluster": cluster.model_dump()} | plan_table.search_table(recipe, result)
        own_table = plan_table.job_table(own, recipe.training.steps) if own else None
        table |= {"own": own_table, "own_rejected": problem, "calibration": fit.table()}
        print(json.dumps(table))
    else:
        if fit.source:
            print(plan_report.calibration_text(fit))
        print(plan_report.heading(recipe, own or job), end="\n\n")
        print_plan(recipe, own, problem)
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
    return 0 if own and fits(own) else 1


def print_plan(recipe: Recipe, own: Job | None, problem: str) -> None:
    """Print the predictions for the recipe's own layout, or the reason why it is not valid."""
    if own:
        print("\n".join(plan_report.plan_text(own, recipe.training.steps)))
    else:
        print(f"The recipe's own layout is not valid: {problem}")
    if recipe.data.separate_documents:
        print("data.separate_documents is ignored: attention is counted over whole sequences.")


def print_search(recipe: Recipe, own: Job | None, result: SearchResult) -> None:
    """Print the fastest layouts, and the options that select the first one."""
    time = step_time(own) if own else None
    print("\n".join(plan_report.search_lines(result, time)))
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
    from recipes.planning.output import plan_picture

    if options.timeline:
        plan_picture.draw_timeline(job, title=recipe.name, file=options.timeline)
    if options.heatmap:
        plan_picture.draw_heatmap(recipe, job, file=options.heatmap)


def print_family(cluster: Cluster, options: argparse.Namespace) -> int:
    """Print the recipe's family on a cluster; return 0 if a model is trained in time."""
    fit = fit_table(options.calibrate)
    family = members(
        options.recipe, options.set, cluster=cluster, software=load_software(options.software),
        calibrate=fit.factors.of, headroom=options.headroom,
    )  # fmt: skip
    same = [f"--set={each}" for each in options.set]
    for name, value in (("software", options.software), ("headroom", options.headroom)):
        same += [f"--{name}={value}"] if value != DEFAULTS[name] else []
    same += [f"--calibrate={options.calibrate}"] if options.calibrate else []
    if options.json:
        table = family_report.family_table(family, cluster, options.largest)
        print(json.dumps(table | {"calibration": fit.table()}))
    else:
        if fit.source:
            print(plan_report.calibration_text(fit))
        print("\n".join(family_report.family_lines(family, cluster, options.largest, same)))
    return 0 if largest(family, options.largest) else 1


def trace(recipe: Recipe, cluster: Cluster, options: argparse.Namespace) -> int:
    """Trace a rank on fake tensors, and print its allocated memory and communication."""
    # Only this mode needs torch, which takes seconds to import.
    from recipes.tracing import trace_report
    from recipes.tracing.trace import trace as trace_rank

    machine = Machine.of_cluster(cluster)
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
        from recipes.planning.output import table_picture

        if options.scatter:
            table_picture.draw_scatter(results, file=options.scatter)
        if options.heatmap:
            table_picture.draw_heatmaps(results, file=options.heatmap)
    if options.json:
        tables = {name: result | {"calibration": fit.table()} for name, result in results.items()}
        print(json.dumps(tables if options.table.is_dir() else next(iter(tables.values()))))
        return 0
    if fit.source:
        print(plan_report.calibration_text(fit))
    print(plan_report.EVALUATION_HEADER)
    for name, result in results.items():
        print(plan_report.evaluation_text(name, result["summary"]))
    for reason, count in plan_report.skipped(results.values()):
        print(f"plan.py: skipped {count} row{'s' * (count > 1)}: {reason}", file=sys.stderr)
    return 0


def parse_command_line() -> argparse.Namespace:
    """Return the options of the command line."""
    summary, _, examples = (__doc__ or "").partition("\n\n")
    parser = argparse.ArgumentParser(
        description=summary, epilog=examples, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_plan_options(parser)
    add_other_modes(parser)
    options = parser.parse_args()
    check_combinations(parser, options)
    return options


def add_plan_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of a plan."""
    parser.add_argument(
        "recipe", nargs="?", type=Path, default=DEFAULT_RECIPE,
        help="recipe to plan (default: recipes/tiny.toml)",
    )  # fmt: skip
    parser.add_argument(
        "--set", action="append", default=[], metavar="KEY=VALUE",
        help="change a key of the recipe, such as layout.tensor=4; repeatable",
    )  # fmt: skip
    machine = parser.add_argument_group("machine (default: the recipe's [cluster])")
    machine.add_argument("--nodes", type=int, help="number of nodes")
    machine.add_argument("--gpus-per-node", type=int, help="number of GPUs in each node")
    machine.add_argument("--gpu", help="name of a GPU in recipes/gpus/datasheets/, such as H100")
    machine.add_argument(
        "--software", default=DEFAULTS["software"],
        help="training software whose kernels and overlap are assumed (default: threefold)",
    )  # fmt: skip
    parser.add_argument(
        "--headroom", type=share, default=DEFAULTS["headroom"], metavar="SHARE",
        help="share of the GPU memory that the searched layouts leave free (default: %(default)s)",
    )  # fmt: skip
    output = parser.add_argument_group("output")
    output.add_argument(
        "--top", type=int, default=5, help="number of fastest layouts to print (default: 5)"
    )
    output.add_argument(
        "--write", type=Path, metavar="TOML", help="write the recipe with the fastest layout"
    )
    output.add_argument(
        "--timeline", type=picture_file, metavar="PICTURE",
        help="draw the pipeline schedule and the memory of each stage (.png, .svg or .pdf)",
    )  # fmt: skip
    output.add_argument(
        "--heatmap", type=picture_file, metavar="PICTURE",
        help="draw the fastest layouts of the recipe's family by number of nodes, or the fastest "
        "rows of --table",
    )  # fmt: skip
    output.add_argument("--json", action="store_true", help="print one JSON object instead of text")


def add_other_modes(parser: argparse.ArgumentParser) -> None:
    """Add the options of the modes that run instead of a plan."""
    modes = parser.add_argument_group("other modes, instead of a plan")
    modes.add_argument(
        "--trace", action="store_true", help="count the memory and the communication of one rank"
    )
    modes.add_argument("--rank", type=int, default=0, help="rank for --trace (default: 0)")
    modes.add_argument(
        "--largest", type=duration_in_days, metavar="DAYS",
        help="plan the recipe's family, and name the largest model that fits and trains its "
        "tokens in this time",
    )  # fmt: skip
    modes.add_argument(
        "--table", type=Path, metavar="CSV", help="compare with measured runs: a .csv or a folder"
    )
    modes.add_argument(
        "--calibrate", type=Path, metavar="CSV",
        help="adjust the predictions to measured runs of the same cluster, such as sweep.csv",
    )  # fmt: skip
    modes.add_argument(
        "--scatter", type=picture_file, metavar="PICTURE",
        help="draw the predicted and measured times of --table",
    )  # fmt: skip
    modes.add_argument(
        "--catalogue", action="store_true", help="print all shipped recipes as a Markdown table"
    )


def check_combinations(parser: argparse.ArgumentParser, options: argparse.Namespace) -> None:
    """Exit with an error if options exclude each other or require another one."""
    for name, required in REQUIRED_OPTIONS.items():
        if getattr(options, name) != parser.get_default(name) and not getattr(options, required):
            parser.error(f"--{name} requires --{required}")
    modes = [name for name in MODES if getattr(options, name)]
    if len(modes) > 1:
        parser.error(f"--{modes[0]} and --{modes[1]} exclude each other; leave out one of them")
    if options.recipe != DEFAULT_RECIPE and (options.table or options.catalogue):
        parser.error("--table and --catalogue take no recipe; leave the recipe out")
    for name in ("write", "timeline", "heatmap"):
        if getattr(options, name) and modes and (name, modes[0]) != ("heatmap", "table"):
            parser.error(f"--{name} requires a plan; leave out --{modes[0]}")
    if options.top < 0:
        parser.error(f"invalid --top {options.top}: expected 0 or more, for example 5")


if __name__ == "__main__":
    main()
