"""The command of the ranks on the nodes, with its environment variables and its container."""

import argparse
import os
import sys
import time
from collections.abc import Mapping
from pathlib import Path

from models.errors import UserError
from threefold.config.loading import REPOSITORY
from threefold.config.phases import PhasePlan
from threefold.config.recipe import Recipe
from threefold.launch.attempt import Command
from threefold.run_folder.folder import RunFolder
from threefold.runtime.environment import set_torch_variables

PRETRAIN = REPOSITORY / "recipes" / "pretrain.py"
FORWARDED = (  # beginnings of the names of environment variables that the ranks get
    "CUBLAS_", "CUDA_", "DEEPSPEED_TIMEOUT", "DS_", "FI_", "GLOO_", "HF_", "LD_LIBRARY_PATH",
    "MKL_", "NCCL_", "NETRC", "OMP_", "PATH", "PYTHON", "PYTORCH_", "TORCH", "TRITON_", "UCX_",
    "WANDB_", "http_proxy", "https_proxy", "no_proxy",
)  # fmt: skip
FORWARDED_NAMES = ("CC", "CXX")
OF_CONTAINERS = ("LD_LIBRARY_PATH", "PATH", "PYTHONHOME", "PYTHONPATH", *FORWARDED_NAMES)


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
        file: the recipe, with the user's overrides

    Raises:
        UserError: the option --resume is not supported.
    """
    assert recipe.cluster
    # The agents run in the container, and start the ranks there.
    python = in_container(options.container) if options.container else [sys.executable]
    words = [python[-1], "-u", str(PRETRAIN), str(file)]
    words += ["--run-dir", str(folder.path), "--resume", _resume_option(options, recipe)]
    words += ["--resume-once", options.resume_once or f"launch-{time.time_ns():x}"]
    pipelined = PhasePlan(recipe).is_pipelined
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


def _resume_option(options: argparse.Namespace, recipe: Recipe) -> str:
    """Return the option --resume of the ranks, with an absolute path.

    Raises:
        UserError: the option is "never", for which the run folder would have to be moved.
    """
    if options.resume == "never":
        raise UserError(
            f"--resume never is not supported, because launch.py holds the run folder; use another "
            f"one, for example --run-dir runs/{recipe.name}-2, or rename that of the earlier run"
        )
    return "auto" if options.resume == "auto" else str(Path(options.resume).absolute())


def in_container(image: str) -> list[str]:
    """Return the command that starts Python in an Apptainer image, with the GPUs of its host."""
    return ["apptainer", "exec", "--nv", image, "python"]


def forwarded(environment: Mapping[str, str], *, container: bool = False) -> dict[str, str]:
    """Return the environment variables that the ranks on all nodes get.

    They travel through the input of the agents, so they appear in no process list and no log.

    Args:
        environment: the environment of launch.py
        container: True if the ranks run in a container, which has programs and libraries of its own
    """
    return {
        name: value
        for name, value in environment.items()
        if (name.startswith(FORWARDED) or name in FORWARDED_NAMES)
        and not (container and name in OF_CONTAINERS)
    }
