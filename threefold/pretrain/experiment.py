"""The experiment of a run: the options of pretrain.py, and a validated recipe on its ranks.

Nothing here imports torch, so that a bad recipe is rejected within a fraction of a second.
"""

import argparse
import errno
import hashlib
import os
import shlex
import socket
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from models.errors import SharedError, UserError
from threefold.config.deepspeed_json import build_deepspeed_config, precision
from threefold.config.loading import DEFAULT_RECIPE, load_recipe, origin
from threefold.config.parallel_dims import LaunchEnvironment, ParallelDims
from threefold.config.phases import PhasePlan
from threefold.config.recipe import Recipe
from threefold.gpus.datasheet import machine_has_gpu
from threefold.plan.job import Machine
from threefold.run_folder.lock import SECONDS_TO_WAIT, FolderInUse
from threefold.runtime.command_line import add_overrides, file_path, filled, seconds_to_wait
from threefold.runtime.environment import check_accelerator
from threefold.runtime.exits import BUSY, REJECTED, PortInUse, exit_now

# Rejection of a run that cannot start: one message, and an exit code on every rank.

SECONDS_FOR_RANK_0_TO_SPEAK = 5


@contextmanager
def exit_on_user_error(world: LaunchEnvironment, origin: str = "") -> Iterator[None]:
    """Turn a UserError into one message and an exit code: 6 if folder or port is in use, else 2.

    Launchers end all ranks when the first one exits. The other ranks therefore wait for rank 0 to
    print its message. Each other message is then printed by one rank per node. Errors that rank 0
    always has, too, are left to rank 0: a `SharedError`, and a folder or port in use.
    """
    try:
        yield
    except UserError as problem:
        is_busy = isinstance(problem, FolderInUse | PortInUse)  # always found by rank 0
        text = f"{origin}: {problem}" if origin else str(problem)
        with socket.socket(socket.AF_UNIX) as claim:
            tells = world.rank == 0
            if not tells:
                tells = not (is_busy or isinstance(problem, SharedError)) and _claims(claim, text)
                # A rank that prints nothing leaves later, because launchers end all ranks then.
                time.sleep(SECONDS_FOR_RANK_0_TO_SPEAK + (not tells))
                host = f" ({socket.gethostname()})" if world.size > world.local_size else ""
                text = f"rank {world.rank}{host}: {text}"
            if tells:
                print(f"pretrain.py: {text}", file=sys.stderr, flush=True)
            exit_now(BUSY if is_busy else REJECTED)


def _claims(claim: socket.socket, text: str) -> bool:
    """Return True for the first rank of this node with a message, while it keeps the socket open.

    The kernel lets a name (of the abstract namespace, without a file) be bound only once. The name
    includes the parent process (the launcher) and the port, so that two runs on a node do not share
    claims.
    """
    run = f"{os.getppid()} {os.environ.get('MASTER_PORT')}"
    try:
        claim.bind(f"\0threefold-{hashlib.sha256(f'{run} {text}'.encode()).hexdigest()[:32]}")
    except OSError as error:
        return error.errno != errno.EADDRINUSE
    return True


@dataclass(frozen=True)
class Experiment:
    """A validated recipe, and the settings that follow from it on the ranks of the launcher.

    Attributes:
        phase_plan: the phases of the whole recipe, with the overrides of the command line
        phase: the name of the phase that the ranks train
        recipe: the recipe of this phase, without [[phase]] tables
        origin: the recipe's file and the overrides, for messages
        dims: the layout of the ranks in this phase
        precision: "fp32", "bf16" or "fp16"
    """

    world: LaunchEnvironment
    phase_plan: PhasePlan
    phase: str
    recipe: Recipe
    origin: str
    dims: ParallelDims
    config: dict[str, Any]
    precision: str

    @property
    def whole_recipe(self) -> Recipe:
        """The recipe with its phases."""
        return self.phase_plan.recipe

    def at(self, step: int) -> "Experiment":
        """Return the experiment in the phase of a step.

        Raises:
            UserError: the phase cannot run on the ranks.
        """
        segment = self.phase_plan.at(step)
        dims = segment.recipe.parallel_dims(self.world)
        config = build_deepspeed_config(segment.recipe, dims)
        return replace(
            self,
            phase=segment.phase,
            recipe=segment.recipe,
            dims=dims,
            config=config,
            precision=precision(config),
        )


def read_experiment(file: Path, overrides: Sequence[str]) -> Experiment:
    """Read and check a recipe; end this process if it or the launcher's settings are rejected."""
    with exit_on_user_error(LaunchEnvironment()):
        world = LaunchEnvironment.from_environment(os.environ)
        check_accelerator(os.environ)
    with exit_on_user_error(world):
        recipe = load_recipe(file, overrides)
    name = origin(file, overrides)
    with exit_on_user_error(world, name):
        has_gpu = machine_has_gpu(os.environ)
        try:
            return check_phases(world, PhasePlan(recipe), name, has_gpu=has_gpu)
        except UserError as problem:
            layout, is_launched = recipe.layout, {"RANK", "SLURM_PROCID"} & os.environ.keys()
            ranks = layout.ranks_per_data_rank
            if is_launched or ranks == 1 or recipe.cluster:
                raise
            command = shlex.join(["deepspeed", "--num_gpus", str(ranks), *sys.argv])
            raise UserError(f"{problem}; start {ranks} ranks with: {command}") from None


def check_phases(
    world: LaunchEnvironment, plan: PhasePlan, name: str, *, has_gpu: bool = True
) -> Experiment:
    """Check every phase of a recipe on the ranks of the launcher, and return the first one.

    Args:
        has_gpu: False if the ranks certainly run on CPUs

    Raises:
        UserError: a phase cannot run on the ranks; the message names the phase.
    """
    experiments = []
    for segment in plan.segments:
        with plan.naming(segment):
            recipe = segment.recipe
            dims = recipe.parallel_dims(world)
            config = build_deepspeed_config(recipe, dims, has_gpu=has_gpu)
            number_format = precision(config)
        experiments.append(
            Experiment(world, plan, segment.phase, recipe, name, dims, config, number_format)
        )
    return experiments[0]


def machine_of(experiment: Experiment, device: str) -> Machine | None:
    """Return the machine of a run for the planner; None if its GPU has no datasheet.

    Raises:
        UserError: `cluster.gpu` has no datasheet.
    """
    return Machine.of_run(experiment.recipe.cluster, experiment.world, device)


def parse_command_line(description: str | None) -> argparse.Namespace:
    """Return the options of pretrain.py."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "recipe",
        nargs="?",
        type=file_path,
        default=DEFAULT_RECIPE,
        help="recipe to train; default: recipes/tiny.toml",
    )
    add_overrides(
        parser, "override a key for this run, with a TOML value or an unquoted string; repeatable"
    )
    parser.add_argument(
        "--resume",
        type=filled,
        default="auto",
        metavar="auto|never|CHECKPOINT",
        help="auto (default): resume from the newest checkpoint, or start at step 1 if there is "
        "none; never: start at step 1; CHECKPOINT: resume from this folder",
    )
    parser.add_argument(
        "--resume-once",
        default="",
        metavar="NAME",
        help="apply --resume only the first time the run is started with this NAME, any label you "
        "choose; a later start with it, for example of a requeued job, uses --resume auto",
    )
    parser.add_argument(
        "--wait-for-folder",
        type=seconds_to_wait,
        default=SECONDS_TO_WAIT,
        metavar="SECONDS",
        help="how long to wait for the run folder's lock if the run that holds it shows no sign of "
        "life, for example because its node has died; default: %(default)s",
    )
    parser.add_argument(
        "--run-dir", type=file_path, help="default: runs/ and the name in the recipe"
    )
    parser.add_argument("--lease", default="", help=argparse.SUPPRESS)  # launch.py passes it
    # A rank that has replaced itself for the next phase passes these two.
    parser.add_argument("--continued-at", type=float, help=argparse.SUPPRESS)
    parser.add_argument("--lock", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--local_rank", type=int, help=argparse.SUPPRESS)  # deepspeed passes it
    # Other programs take DeepSpeed's JSON from these two.
    parser.add_argument("--deepspeed", nargs="?", const="", help=argparse.SUPPRESS)
    parser.add_argument("--deepspeed_config", help=argparse.SUPPRESS)
    options, unknown = parser.parse_known_args()
    if unknown:
        with exit_on_user_error(LaunchEnvironment()):
            world = LaunchEnvironment.from_environment(os.environ)
        with exit_on_user_error(world):
            raise UserError(
                f"unrecognized arguments: {shlex.join(unknown)}; pass a key of the recipe with "
                f"--set, for example --set training.steps=20, and see --help for the options"
            )
    foreign = {name: vars(options)[name] for name in ("deepspeed", "deepspeed_config")}
    if names := [f"--{name}" for name, file in foreign.items() if file is not None]:
        files = [file for file in foreign.values() if file and file.endswith(".json")]
        parser.error(
            f'the recipe key "deepspeed" names the DeepSpeed JSON file; replace '
            f"{' and '.join(names)} with --set deepspeed={[*files, 'FILE.json'][0]}, or remove "
            f"them to keep the file that the recipe names"
        )
    return options
