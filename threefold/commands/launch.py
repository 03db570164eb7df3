"""The command recipes/launch.py: ranks on several nodes, restarted when nodes fail."""

import argparse
import os
import resource
import signal
import sys
import time
from functools import partial

from models.errors import UserError
from threefold.config.loading import REPOSITORY, origin
from threefold.launch.attempt import check_container, rank_command, resume_option
from threefold.launch.connection import on_this_machine, over_srun, over_ssh
from threefold.launch.hosts import read_hostfile, recipe_on_hosts, slurm_hosts
from threefold.launch.launcher import Launcher, say
from threefold.launch.replanning import Replanner
from threefold.run_folder.folder import RunFolder
from threefold.run_folder.lock import SECONDS_TO_WAIT, FolderInUse
from threefold.runtime.command_line import add_overrides, file_path, filled, seconds_to_wait
from threefold.runtime.exits import BUSY, REJECTED, raise_at_interrupt
from threefold.runtime.output import use_nonblocking_output

CONNECT_BY_LAUNCHER = {"ssh": over_ssh, "srun": over_srun, "local": on_this_machine}


def main(description: str | None = None) -> None:
    """Run the command, and exit with the code of the run."""
    raise_at_interrupt()
    options = parse_command_line(description)
    use_nonblocking_output()
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
    shares_machine = launcher == "local"
    if options.container:
        check_container(options.container, shares_machine=shares_machine)
    recipe, overrides = recipe_on_hosts(
        options.recipe, options.set, options.hostfile, shares_machine=shares_machine, say=say
    )
    assert recipe.cluster
    resume_option(options.resume, recipe)  # before anything is written
    Replanner(options.recipe, overrides).require_layout(origin(options.recipe, options.set))
    folder = RunFolder(options.run_dir or REPOSITORY / "runs" / recipe.name)
    lock_folder(folder, wait_seconds=options.wait_for_folder)
    # A requeued job has the same options, and would forget the failures since its first start.
    is_requeued = os.environ.get("SLURM_RESTART_COUNT", "0") != "0"
    if options.forget_failures and not is_requeued:
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
        rank_command(options, recipe, folder, file=file, shares_machine=shares_machine),
        replanner=Replanner(file),
        list_hosts=list_hosts,
        connect=CONNECT_BY_LAUNCHER[launcher],
    )


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


def parse_command_line(description: str | None = None) -> argparse.Namespace:
    """Return the options of the command."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("recipe", type=file_path, help="recipe to train")
    parser.add_argument(
        "--hostfile",
        type=file_path,
        metavar="FILE",
        help='hosts, one per line: "node1 slots=8"; default: the nodes of this Slurm job',
    )
    parser.add_argument(
        "--launcher",
        choices=list(CONNECT_BY_LAUNCHER),
        help="how nodes are reached; local starts all ranks on this machine, to try out a recipe; "
        "default: ssh with a hostfile, otherwise srun",
    )
    add_overrides(parser, "override a key for this run, as for pretrain.py; repeatable")
    parser.add_argument(
        "--resume",
        type=filled,
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
        type=seconds_to_wait,
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
        help="use nodes again that earlier starts of this run have left out, after a repair; "
        "ignored if Slurm has requeued the job",
    )
    parser.add_argument(
        "--run-dir", type=file_path, help="default: runs/ and the name in the recipe"
    )
    return parser.parse_args()
