"""Pretrain on several nodes, and continue on what is left when nodes fail.

    python recipes/launch.py --hostfile hosts recipes/llama/7b.toml
    python recipes/launch.py recipes/llama/7b.toml                    # in a Slurm job
    python recipes/launch.py --hostfile hosts --launcher local recipes/mine.toml   # on one machine

The ranks run recipes/pretrain.py, with the same options. If a node is lost, the ranks are started
again on the remaining nodes. With fewer nodes, the run keeps its layout with fewer data ranks,
unless the planner predicts another layout to be faster. It resumes from the newest snapshot in
memory or checkpoint. The loss does not depend on the layout, so the loss curve does not show the
restart.
Nodes that return are used again. events.jsonl in the run folder records every start and its reason.

A hostfile has a line "NAME slots=N" per host, like that of deepspeed. Hosts beyond cluster.nodes
are spare. A recipe without a [cluster] section uses all hosts. The exit codes are those of
pretrain.py; 130: Ctrl-C before any ranks were started.
"""

import sys
from pathlib import Path

if __name__ == "__main__":  # import from the repository's root, not from recipes/
    sys.path[0] = str(Path(__file__).resolve().parents[1])
    from recipes.training.runtime.exits import end_at_interrupt

    end_at_interrupt()

import argparse
import os
import resource
import signal
import time
from functools import partial

from models.errors import UserError
from recipes.gpus.datasheet import machine_has_gpu
from recipes.launching.attempt import Command
from recipes.launching.environment import forwarded, in_container
from recipes.launching.launcher import Launcher
from recipes.launching.replanning import Replanner
from recipes.nodes.connection import on_this_machine, over_srun, over_ssh
from recipes.nodes.hosts import (
    Slots,
    check_cluster,
    cluster_of_hosts,
    read_hostfile,
    read_slots,
    slurm_hosts,
    unused,
)
from recipes.training.loop.experiment import check_stages
from recipes.training.recipe.deepspeed_config import require_auto
from recipes.training.recipe.loading import REPOSITORY, load_recipe, origin, short
from recipes.training.recipe.schema import Recipe
from recipes.training.recipe.sections.layout import Cluster
from recipes.training.recipe.stages.plan import StagePlan
from recipes.training.recipe.topology import World
from recipes.training.run_folder.folder import RunFolder
from recipes.training.run_folder.lock import SECONDS_TO_WAIT, FolderInUse
from recipes.training.runtime.exits import BUSY, REJECTED, raise_at_interrupt
from recipes.training.runtime.streams import outlive_output
from recipes.training.runtime.torch_variables import set_torch_variables

PRETRAIN = Path(__file__).with_name("pretrain.py")
CONNECT_BY_LAUNCHER = {"ssh": over_ssh, "srun": over_srun, "local": on_this_machine}


def main() -> None:
    """Run the command, and exit with the code of the run."""
    options = parse_command_line()
    outlive_output()
    # Each node needs three open files.
    _, hard_limit = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard_limit, hard_limit))
    try:
        launcher = prepare(options)
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1):
            if signal.getsignal(number) is not signal.SIG_IGN:  # nohup relies on an ignored SIGHUP
                signal.signal(number, launcher.request_stop)
        code = launcher.run()
    except FolderInUse as problem:
        say(str(problem))
        sys.exit(BUSY)
    except UserError as problem:
        say(str(problem))
        sys.exit(REJECTED)
    sys.exit(code)


def prepare(options: argparse.Namespace) -> Launcher:
    """Check the recipe, the hosts and the run folder, and lock the folder.

    Raises:
        UserError: one of them is rejected.
        FolderInUse: another run holds the folder.
    """
    launcher = options.launcher or ("ssh" if options.hostfile else "srun")
    recipe, overrides = check_inputs(options, shares_machine=launcher == "local")
    assert recipe.cluster
    replanner = Replanner(options.recipe, overrides)
    check_layouts(replanner, recipe.cluster, origin(options.recipe, options.set))
    folder = RunFolder(options.run_dir or REPOSITORY / "runs" / recipe.name)
    lock_folder(folder, wait_seconds=options.wait_for_folder)
    if options.forget_failures:
        folder.event("forget", 0)
    file = folder.write_recipe("launched.toml", recipe)  # later edits do not change restarts
    if options.hostfile:
        size = recipe.cluster.gpus_per_node
        list_hosts = partial(read_hostfile, options.hostfile, processes=size)
    else:
        list_hosts = partial(slurm_hosts, os.environ)
    return Launcher(
        recipe,
        folder,
        rank_command(options, recipe, folder, file=file, shares_machine=launcher == "local"),
        replanner=Replanner(file),
        list_hosts=list_hosts,
        connect=CONNECT_BY_LAUNCHER[launcher],
    )


def check_inputs(options: argparse.Namespace, *, shares_machine: bool) -> tuple[Recipe, list[str]]:
    """Check the recipe and the list of hosts, both at once.

    Returns:
        The recipe, and its overrides. Without a [cluster] section, they describe the hosts.

    Raises:
        UserError: one of them is rejected, or both are.
    """
    slots: Slots = {}
    problems = []
    try:
        if options.hostfile:
            slots = read_slots(options.hostfile)
        else:
            slots = dict.fromkeys(slurm_hosts(os.environ))
    except UserError as problem:
        problems.append(str(problem))
    try:
        recipe, overrides = recipe_on_hosts(options, slots, shares_machine=shares_machine)
    except UserError as problem:
        problems.append(str(problem))
    if problems:
        several = [f"{len(problems)} problems"] if len(problems) > 1 else []
        raise UserError("\n  ".join([*several, *problems]))
    return recipe, overrides


def recipe_on_hosts(
    options: argparse.Namespace, slots: Slots, *, shares_machine: bool
) -> tuple[Recipe, list[str]]:
    """Return the recipe and its overrides, checked on the hosts; print what the run does not use.

    Args:
        options: the options of launch.py
        slots: the hosts; empty if they are unknown
        shares_machine: all ranks run on this machine

    Raises:
        UserError: the recipe is rejected, or the hosts do not suffice for it.
    """
    recipe, overrides = load_recipe(options.recipe, options.set), list(options.set)
    name = origin(options.recipe, options.set)
    if recipe.cluster is None:
        file = str(short(options.recipe))
        keys = cluster_of_hosts(slots, recipe.layout, file, shares_machine=shares_machine)
        nodes, gpus, gpu = keys
        say(
            f"{file} has no [cluster] section; using {nodes} and {gpus} as in {options.hostfile}, "
            f"and {gpu} as on this machine"
        )
        overrides += [f"cluster.{key}" for key in keys]
        recipe = load_recipe(options.recipe, overrides)
    assert recipe.cluster
    try:
        check_cluster(recipe.cluster, slots)
        size = recipe.cluster.gpus_per_node
        world = World(size=recipe.cluster.nodes * size, local_size=size)
        has_gpu = not shares_machine or machine_has_gpu(os.environ)
        check_stages(world, StagePlan(recipe), name, has_gpu=has_gpu)
        require_auto(recipe, "launch.py chooses the layout anew if a node is lost")
    except UserError as problem:
        raise UserError(f"{name}: {problem}") from None
    for text in unused(recipe.cluster, slots) if slots else ():
        say(text)
    return recipe, overrides


def say(text: str) -> None:
    """Print a message."""
    print(f"launch.py: {text}", file=sys.stderr, flush=True)


def check_layouts(replanner: Replanner, cluster: Cluster, name: str) -> None:
    """Check that the planner finds a layout.

    Raises:
        UserError: the cluster's GPU has no datasheet or does not compute in the recipe's precision,
            or no layout fits.
    """
    if not replanner.best(cluster.nodes, cluster.minimum_nodes):
        raise UserError(
            f"{name}: no layout is predicted to fit on {cluster.minimum_nodes} to {cluster.nodes} "
            f"nodes; use more of them, for example --set cluster.nodes={2 * cluster.nodes}, or a "
            f"GPU with more memory"
        )


def rank_command(
    options: argparse.Namespace,
    recipe: Recipe,
    folder: RunFolder,
    *,
    file: Path,
    shares_machine: bool,
) -> Command:
    """Return the command of the ranks.

    Args:
        options: the options of launch.py
        recipe: the recipe of the run
        folder: the run folder
        file: the recipe, with the user's overrides
        shares_machine: all nodes are this machine

    Raises:
        UserError: the option --resume is not supported.
    """
    assert recipe.cluster
    # The agents run in the container, and start the ranks there.
    python = in_container(options.container) if options.container else [sys.executable]
    words = [python[-1], "-u", str(PRETRAIN), str(file)]
    words += ["--run-dir", str(folder.path), "--resume", resume_option(options, recipe)]
    words += ["--resume-once", options.resume_once or f"launch-{time.time_ns():x}"]
    pipelined = StagePlan(recipe).is_pipelined
    variables = forwarded(os.environ, container=bool(options.container))
    set_torch_variables(variables, deterministic=recipe.training.deterministic, pipelined=pipelined)
    return Command(
        words=words,
        variables=variables,
        ranks_per_node=recipe.cluster.gpus_per_node,
        shares_machine=shares_machine,
        pipelined=pipelined,
        python=python,
    )


def resume_option(options: argparse.Namespace, recipe: Recipe) -> str:
    """Return the option --resume of the ranks, with an absolute path.

    Raises:
        UserError: the option is "never", for which the run folder would have to be moved.
    """
    if options.resume == "never":
        raise UserError(
            f"--resume never is not supported, because launch.py holds the run folder; use "
            f"--run-dir runs/{recipe.name}-2, or rename the folder of the earlier run"
        )
    return "auto" if options.resume == "auto" else str(Path(options.resume).absolute())


def lock_folder(folder: RunFolder, *, wait_seconds: float) -> None:
    """Lock the run folder; wait for a holder that shows no sign of life.

    Raises:
        FolderInUse: the holder is alive, or the time is over.
        UserError: the folder cannot be written.
    """
    deadline = time.monotonic() + wait_seconds
    while True:
        try:
            folder.hold()
        except FolderInUse as problem:
            if problem.alive or time.monotonic() > deadline:
                raise
            time.sleep(1)
        else:
            return


def parse_command_line() -> argparse.Namespace:
    """Return the options of the command."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("recipe", type=Path, help="recipe to train")
    parser.add_argument(
        "--hostfile",
        type=Path,
        metavar="FILE",
        help='hosts, one per line: "node1 slots=8"; default: the nodes of this Slurm job',
    )
    parser.add_argument(
        "--launcher",
        choices=list(CONNECT_BY_LAUNCHER),
        help="how nodes are reached; local starts all ranks on this machine, to try out a recipe; "
        "default: ssh with a hostfile, otherwise srun",
    )
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="SECTION.KEY=VALUE",
        help="override a key for this run, as for pretrain.py; repeatable",
    )
    parser.add_argument(
        "--resume",
        default="auto",
        metavar="auto|CHECKPOINT",
        help="auto (default): resume from the newest checkpoint, or start at step 1 if there is "
        "none; CHECKPOINT: start from this folder, once",
    )
    parser.add_argument(
        "--resume-once",
        default="",
        metavar="NAME",
        help="apply --resume only the first time the run is started with this NAME, for example of "
        "a requeued job",
    )
    parser.add_argument(
        "--wait-for-folder",
        type=float,
        default=SECONDS_TO_WAIT,
        metavar="SECONDS",
        help="seconds to wait for the run folder's lock if its holder shows no sign of life; "
        "default: %(default)s",
    )
    parser.add_argument(
        "--container",
        default="",
        metavar="IMAGE",
        help="run the ranks in this Apptainer image; launch.py itself runs outside of it, with the "
        "packages of .venv",
    )
    parser.add_argument(
        "--forget-failures",
        action="store_true",
        help="use nodes again that earlier starts of this run have left out, after a repair",
    )
    parser.add_argument("--run-dir", type=Path, help="default: runs/ and the name in the recipe")
    return parser.parse_args()


if __name__ == "__main__":
    raise_at_interrupt()
    main()
