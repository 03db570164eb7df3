"""Plan a run before a GPU is asked for: does it fit, how fast is it, and which layout is the best.

    python recipes/plan.py recipes/llama/70b.toml
    python recipes/plan.py recipes/llama/7b.toml --nodes 16 --gpu H200 --top 3
    python recipes/plan.py recipes/llama/7b.toml --write recipes/mine.toml
    python recipes/plan.py recipes/megatron/1t.toml --software megatron-lm-2021
    python recipes/plan.py recipes/llama/70b.toml --timeline timeline.png --heatmap heatmap.png
    python recipes/plan.py recipes/llama/405b.toml --trace --rank 0
    python recipes/plan.py --table measured.csv --calibrate others.csv
    python recipes/plan.py --catalogue

It needs neither a GPU nor torch; only --trace, which builds a rank of the job on fake tensors and
counts what it allocates and sends, takes a while. Exit code 0: the recipe's layout fits; 1: it does
not; 2: the recipe or an option is refused.
"""

import sys
from pathlib import Path

if __name__ == "__main__":  # the repository, not recipes/, is where imports start
    sys.path[0] = str(Path(__file__).resolve().parents[1])

import argparse
import json
import os
from typing import Any

import tomli_w

from models.cost import parameter_count
from models.errors import UserError
from recipes.planning.inputs.job import Job, Machine, job_of, unspread_job
from recipes.planning.inputs.software import THREEFOLD, Software, load_software
from recipes.planning.measured import evaluation
from recipes.planning.measured.comparison import calibration_from, compare
from recipes.planning.output import plan_report
from recipes.planning.output.catalogue import catalogue_lines
from recipes.planning.search.layout_search import Found, search
from recipes.planning.time.step_time import step_time
from recipes.training.recipe.loading import DEFAULT_RECIPE, load_recipe, parse_recipe
from recipes.training.recipe.schema import Recipe

MOST_GPUS = 10**6
GOES_WITH = {"scatter": "table", "calibrate": "table", "rank": "trace"}
WITHOUT_CLUSTER = {"nodes": 1, "gpus_per_node": 2, "gpu": "cpu"}  # of a recipe that names none


def main() -> None:
    """Do what the options ask for; refusals go to stderr."""
    options = parse_command_line()
    try:
        code = run(options)
        sys.stdout.flush()
    except UserError as problem:
        print(f"plan.py: {problem}", file=sys.stderr)
        code = 2
    except OSError as problem:  # nobody reads on, or a disk is full
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        if not isinstance(problem, BrokenPipeError):
            print(f"plan.py: {problem}", file=sys.stderr)
        code = 2
    sys.exit(code)


def run(options: argparse.Namespace) -> int:
    """The one thing that is asked for; its exit code."""
    if options.catalogue:
        print("\n".join(catalogue_lines()))
        return 0
    if options.table:
        return compare_tables(options)
    recipe = on_machine(options)
    if options.trace:
        return trace(recipe, options)
    return plan(recipe, options)


def on_machine(options: argparse.Namespace) -> Recipe:
    """The recipe with the machine that the options name."""
    recipe = load_recipe(options.recipe, options.set)
    table = recipe.model_dump(mode="json", exclude_none=True)
    asked = {key: value for key in WITHOUT_CLUSTER if (value := getattr(options, key)) is not None}
    cluster = table["cluster"] = WITHOUT_CLUSTER | table.get("cluster", {}) | asked
    if cluster["nodes"] * cluster["gpus_per_node"] > MOST_GPUS:
        raise UserError(
            f"cluster.nodes = {cluster['nodes']} x cluster.gpus_per_node = "
            f"{cluster['gpus_per_node']} are more than {MOST_GPUS:,} GPUs; use fewer"
        )
    return parse_recipe(table, str(options.recipe))  # again, so that it is checked


def plan(recipe: Recipe, options: argparse.Namespace) -> int:
    """The recipe's own layout, and the best ones."""
    machine, software = Machine.of_cluster(recipe.cluster), load_software(options.software)
    steps = recipe.training.steps
    job = unspread_job(recipe, machine, software)
    own, refusal = own_job(recipe, machine, software)
    wanted = max(options.top, 1 if options.write else 0)
    found = search(job, wanted) if wanted else Found()
    if options.json:
        print(json.dumps(plan_table(recipe, own, refusal, found)))
    else:
        print(plan_report.head(recipe, own or job), end="\n\n")
        lines = (
            plan_report.plan_text(own, steps) if own else [f"Its own layout is refused: {refusal}"]
        )
        print("\n".join(lines))
        if recipe.data.separate_documents:
            print("data.separate_documents is not considered: attention over whole windows")
        if options.top:
            seconds = step_time(own).total if own else None
            print("\n" + "\n".join(plan_report.found_text(found, seconds)))
            if found.plans and (changes := plan_report.changes(recipe, found.plans[0])):
                print(f"The first: {changes}")
    if options.write:
        write(recipe, found, options.write)
    if own is None and found.plans and (options.timeline or options.heatmap):
        print("its own layout is refused; the picture shows the first one found", file=sys.stderr)
    draw(recipe, own or (found.plans[0].job if found.plans else None), options)
    return 0 if own and plan_report.fits(own) else 1


def own_job(recipe: Recipe, machine: Machine, software: Software) -> tuple[Job | None, str]:
    """The recipe's own layout on the machine, or why there is none."""
    try:
        return job_of(recipe, machine, software), ""
    except UserError as problem:
        return None, str(problem)


def plan_table(recipe: Recipe, own: Job | None, refusal: str, found: Found) -> dict[str, Any]:
    """All of it for --json."""
    steps = recipe.training.steps
    return {
        "name": recipe.name,
        "parameters": parameter_count(recipe.model),
        "tokens_per_step": recipe.tokens_per_step,
        "steps": steps,
        "cluster": recipe.cluster.model_dump(),
        "own": plan_report.job_table(own, steps) if own else None,
        "own_refused": refusal,
        "tried": found.tried,
        "best": [plan_report.plan_table(recipe, each) for each in found.plans],
        "refused": dict(found.refused),
    }


def write(recipe: Recipe, found: Found, path: Path) -> None:
    """A recipe with the best layout.

    Raises:
        UserError: nothing fits, or the file is there already.
    """
    if not found.plans:
        raise UserError(f"--write {path}: no layout fits; use more nodes or a larger GPU")
    table = recipe.model_dump(mode="json", exclude_none=True, exclude_defaults=True)
    best = found.plans[0]
    for key, value in plan_report.edits(recipe, best).items():
        section, _, name = key.rpartition(".")
        (table[section] if section else table)[name] = value
    text = tomli_w.dumps(parse_recipe(table, str(path)).model_dump(mode="json", exclude_none=True))
    try:
        with path.open("x", encoding="utf-8") as file:
            file.write(
                f"# {recipe.name} in the layout that plan.py predicts to be the fastest.\n\n"
            )
            file.write(text)
    except FileExistsError:
        raise UserError(f"--write {path}: there is such a file; use another name") from None
    except OSError as error:
        path.unlink(missing_ok=True)  # nothing half-written stays
        raise UserError(f"--write {path}: {error.strerror}; use another name") from None
    print(f"written: {path}", file=sys.stderr)


def draw(recipe: Recipe, job: Job | None, options: argparse.Namespace) -> None:
    """The pictures that are asked for."""
    if not (options.timeline or options.heatmap):
        return
    if job is None:
        raise UserError(
            "its own layout is refused and no other was found, so there is nothing to draw; use "
            "one that is legal, --top 1 or more nodes"
        )
    # Here, because a plan without a picture should not wait a second for matplotlib.
    from recipes.planning.output import plan_picture

    if options.timeline:
        plan_picture.draw_timeline(job, title=recipe.name, file=options.timeline)
    if options.heatmap:
        plan_picture.draw_heatmap(recipe, job, file=options.heatmap)


def trace(recipe: Recipe, options: argparse.Namespace) -> int:
    """What a rank allocates and sends, counted on fake tensors."""
    # Here, because nothing else of this command needs torch.
    from recipes.tracing import trace_report
    from recipes.tracing.trace import trace as trace_rank

    machine = Machine.of_cluster(recipe.cluster)
    found = trace_rank(recipe, machine.gpus, machine.gpus_per_node, options.rank)
    if options.json:
        print(json.dumps(trace_report.table(found)))
    else:
        print(trace_report.text(found))
    return 0


def compare_tables(options: argparse.Namespace) -> int:
    """Predictions beside measurements, for one table or all of a folder."""
    factors, chosen = calibration_from(options.calibrate)
    results, left_out = compare(options.table, factors)
    for path in left_out:
        print(f"{path}: no table of runs, left out", file=sys.stderr)
    if options.scatter:
        from recipes.planning.output import plan_picture  # here, as above

        plan_picture.draw_scatter(results, file=options.scatter)
    calibration = evaluation.calibration_table(factors, chosen) if options.calibrate else None
    if options.json:
        tables = {name: result | {"calibration": calibration} for name, result in results.items()}
        print(json.dumps(tables if options.table.is_dir() else next(iter(tables.values()))))
        return 0
    if calibration:
        print(plan_report.calibration_text(calibration))
    print(plan_report.EVALUATION_HEAD)
    for name, result in results.items():
        print(plan_report.evaluation_text(name, result["summary"]))
    for reason, count in plan_report.skipped(results.values()):
        print(f"skipped, {count} rows: {reason}", file=sys.stderr)
    return 0


def parse_command_line() -> argparse.Namespace:
    """The options."""
    summary, _, examples = __doc__.partition("\n\n")
    parser = argparse.ArgumentParser(
        description=summary, epilog=examples, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "recipe", nargs="?", type=Path, default=DEFAULT_RECIPE, help="default: recipes/tiny.toml"
    )
    parser.add_argument(
        "--set", action="append", default=[], metavar="KEY=VALUE", help="change a key; repeatable"
    )
    machine = parser.add_argument_group("the machine, instead of the recipe's [cluster]")
    machine.add_argument("--nodes", type=int)
    machine.add_argument("--gpus-per-node", type=int)
    machine.add_argument("--gpu", help="a name of recipes/gpus/")
    machine.add_argument(
        "--software", default=THREEFOLD.name, help="whose kernels and overlaps; default: ours"
    )
    parser.add_argument("--top", type=int, default=5, help="best layouts to show; default: 5")
    parser.add_argument("--write", type=Path, metavar="TOML", help="a recipe with the best one")
    parser.add_argument(
        "--timeline", type=picture_file, metavar="PICTURE", help="schedule and memory"
    )
    parser.add_argument(
        "--heatmap", type=picture_file, metavar="PICTURE", help="the recipe's family by nodes"
    )
    parser.add_argument("--json", action="store_true", help="one JSON object on stdout")
    other = parser.add_argument_group("instead of a plan")
    other.add_argument("--trace", action="store_true", help="count what a rank allocates and sends")
    other.add_argument("--rank", type=int, default=0, help="of --trace; default: 0")
    other.add_argument("--table", type=Path, help="measured runs, a .csv or a folder of them")
    other.add_argument("--calibrate", type=Path, metavar="CSV", help="other runs of that cluster")
    other.add_argument(
        "--scatter", type=picture_file, metavar="PICTURE", help="predicted and measured"
    )
    other.add_argument(
        "--catalogue", action="store_true", help="all recipes, as the README's table"
    )
    options = parser.parse_args()
    for name, needs in GOES_WITH.items():
        if getattr(options, name) != parser.get_default(name) and not getattr(options, needs):
            parser.error(f"--{name} goes with --{needs}")
    if options.recipe != DEFAULT_RECIPE and (options.table or options.catalogue):
        parser.error("a recipe goes with a plan or --trace; leave --table and --catalogue out")
    for name in ("write", "timeline", "heatmap"):
        if getattr(options, name) and (options.trace or options.table or options.catalogue):
            parser.error(f"--{name} goes with a plan; leave --trace, --table and --catalogue out")
    if options.top < 0:
        parser.error(f"--top {options.top} is negative; use 5")
    return options


def picture_file(text: str) -> Path:
    """A file that a picture can be written to, for argparse."""
    path = Path(text)
    if path.suffix not in (".png", ".svg", ".pdf"):
        raise argparse.ArgumentTypeError(f"{text} is not a .png, .svg or .pdf; use plan.png")
    folder = path.absolute().parent
    if not folder.is_dir():
        raise argparse.ArgumentTypeError(f"{text}: there is no folder {folder}; use plan.png")
    if path.is_dir() or not os.access(path if path.exists() else folder, os.W_OK):
        raise argparse.ArgumentTypeError(f"{text} cannot be written; use another name or folder")
    return path


if __name__ == "__main__":
    main()
