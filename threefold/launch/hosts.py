"""The hosts of a run, and how they agree with the [cluster] section of its recipe.

They come from a hostfile, as `deepspeed` reads it, or from a Slurm allocation.
"""

import contextlib
import os
import re
import subprocess
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

from models.errors import UserError, counted
from threefold.config.deepspeed_json import require_auto
from threefold.config.layout import Cluster, Layout
from threefold.config.loading import load_recipe, origin, short
from threefold.config.parallel_dims import LaunchEnvironment
from threefold.config.phases import PhasePlan
from threefold.config.recipe import Recipe
from threefold.gpus.datasheet import device_names_of_machine, gpu_of_device, machine_has_gpu
from threefold.pretrain.experiment import check_phases

# A name that begins with a hyphen, also after USER@, would be an option of ssh. deepspeed ignores
# everything after slots=N, such as max_slots=N.
LINE = re.compile(
    r"(?!(\S*@)?-)(?P<name>[^\s\0]+)\s+slots=(?P<slots>[0-9]{1,4})(\s+(?!slots=)[\w-]+=\S*)*"
)
SECONDS_FOR_SCONTROL = 30.0  # it waits if the controller does not answer
EXAMPLE = "for example: node1 slots=8"
Slots = Mapping[str, int | None]  # host -> slots, which are None in a Slurm job


def read_slots(file: Path) -> dict[str, int]:
    """Return the hosts of a hostfile and the number of slots of each, in its order.

    Args:
        file: a line "NAME slots=N" for each host; empty lines, comments after #, other settings
            such as max_slots=N and a byte order mark are ignored

    Raises:
        UserError: the file cannot be read, or a line is not valid.
    """
    try:
        lines = file.read_text(encoding="utf-8-sig").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "it is not a text file"
        raise UserError(
            f"--hostfile {file}: {reason}; use a file with one line per host, {EXAMPLE}"
        ) from None
    slots: dict[str, int] = {}
    for number, line in enumerate(lines, 1):
        text = line.partition("#")[0].strip()
        if not text:
            continue
        match = LINE.fullmatch(text)
        if not match:
            is_option = re.match(r"(\S*@)?-", text)
            reason = " (a name cannot begin with a hyphen)" if is_option else ""
            raise UserError(f"{file}, line {number}: {text!r:.80} is not a host{reason}; {EXAMPLE}")
        if match["name"] in slots:
            raise UserError(
                f"{file}, line {number}: {match['name']} is listed twice; remove one of the lines"
            )
        if int(match["slots"]) == 0:
            raise UserError(
                f"{file}, line {number}: {match['name']} has slots=0; use slots=1 or more, or "
                f"remove the line"
            )
        slots[match["name"]] = int(match["slots"])
    if not slots:
        raise UserError(f"{file} lists no host; add a line per host, {EXAMPLE}")
    return slots


def read_hostfile(file: Path, *, processes: int) -> list[str]:
    """Return the names of the hosts in a hostfile, in its order.

    Args:
        file: see `read_slots`
        processes: ranks of each host, `cluster.gpus_per_node`

    Raises:
        UserError: the file is not valid, or a host has fewer slots than ranks.
    """
    slots = read_slots(file)
    check_slots(slots, processes)
    return list(slots)


def check_slots(slots: Slots, processes: int) -> None:
    """Check that each host has a slot for each of its ranks.

    Raises:
        UserError: a host has fewer slots.
    """
    for host, count in slots.items():
        if count is not None and count < processes:
            raise UserError(
                f"the hostfile has slots={count} for {host}, and cluster.gpus_per_node = "
                f"{processes}; use slots={processes} or more, or "
                f"--set cluster.gpus_per_node={count}"
            )


def slurm_hosts(environment: Mapping[str, str]) -> list[str]:
    """Return the names of the hosts of this Slurm allocation, in Slurm's order.

    Raises:
        UserError: this is not a Slurm job, or Slurm cannot expand its list of nodes.
    """
    nodes = environment.get("SLURM_JOB_NODELIST")
    if not nodes:
        raise UserError(
            "SLURM_JOB_NODELIST is not set, so this is not a Slurm job; use --hostfile FILE, or "
            "submit the run with slurm/submit.sh"
        )
    try:
        shown = subprocess.run(
            ["scontrol", "show", "hostnames", nodes],
            capture_output=True,
            encoding="utf-8",
            check=True,
            timeout=SECONDS_FOR_SCONTROL,
        )
    except (OSError, subprocess.SubprocessError) as error:
        said = error.stderr if isinstance(error, subprocess.CalledProcessError) else ""
        reason = (said or str(error)).strip()
        raise UserError(
            f'scontrol show hostnames "{nodes}" failed ({reason}); use --hostfile FILE with the '
            f"nodes of the job"
        ) from None
    return shown.stdout.split()


def recipe_on_hosts(
    file: Path,
    overrides: Sequence[str],
    hostfile: Path | None,
    *,
    shares_machine: bool,
    say: Callable[[str], None],
) -> tuple[Recipe, list[str]]:
    """Check a recipe and the list of hosts, and report the mistakes of both at once.

    Args:
        overrides: the user's values of --set
        hostfile: the list of hosts; None for the hosts of this Slurm job
        shares_machine: all ranks run on this machine
        say: called with what is used for lack of a [cluster] section, and with what is not used

    Returns:
        The recipe, and its overrides. Without a [cluster] section, they describe the hosts.

    Raises:
        UserError: the recipe or the list is rejected, or the hosts do not suffice for the recipe.
    """
    slots: Slots = {}
    problems: list[str] = []
    with _collected(problems):
        slots = read_slots(hostfile) if hostfile else dict.fromkeys(slurm_hosts(os.environ))
    with _collected(problems):
        recipe, overrides = load_recipe(file, overrides), list(overrides)
        name = origin(file, overrides)
        if recipe.cluster is None:
            path = str(short(file))
            keys = cluster_of_hosts(slots, recipe.layout, path, shares_machine=shares_machine)
            hosts, gpu = (
                f"{keys[0]} and {keys[1]} as in {hostfile}",
                f"{keys[2]} as on this machine",
            )
            say(f"{path} has no [cluster] section; using {hosts}, and {gpu}")
            overrides += [f"cluster.{key}" for key in keys]
            recipe = load_recipe(file, overrides)
        mistakes, not_used = _check(recipe, name, slots, shares_machine=shares_machine)
        if mistakes:  # the number of nodes or slots may be their cause
            problems += mistakes + not_used
        else:
            cluster = recipe.cluster
            if cluster and 0 < len(slots) < cluster.nodes:
                minimum = f"cluster.minimum_nodes = {cluster.minimum_nodes}"
                say(f"continuing on {counted(len(slots), 'host')} ({minimum}): {not_used.pop(0)}")
            for message in not_used:
                say(message)
    if problems:
        several = [f"{len(problems)} problems"] if len(problems) > 1 else []
        raise UserError("\n  ".join([*several, *problems]))
    return recipe, overrides


def _check(
    recipe: Recipe, name: str, slots: Slots, *, shares_machine: bool
) -> tuple[list[str], list[str]]:
    """Return the mistakes of a recipe on its hosts, and messages about what it does not use.

    Args:
        recipe: the recipe, with a [cluster] section
        name: the recipe's file and the overrides
        slots: the hosts; empty if they are unknown
    """
    assert recipe.cluster
    mistakes, not_used = list[str](), list[str]()
    with _collected(mistakes, name):
        check_cluster(recipe.cluster, slots)
        not_used = unused(recipe.cluster, slots) if slots else []
    with _collected(mistakes, name):
        size = recipe.cluster.gpus_per_node
        world = LaunchEnvironment(size=recipe.cluster.nodes * size, local_size=size)
        has_gpu = not shares_machine or machine_has_gpu(os.environ)
        check_phases(world, PhasePlan(recipe), name, has_gpu=has_gpu)
        require_auto(recipe, "launch.py chooses the layout anew if a node is lost")
    return mistakes, not_used


@contextlib.contextmanager
def _collected(problems: list[str], name: str = "") -> Iterator[None]:
    """Append the message of a UserError to a list, after the name of its subject."""
    try:
        yield
    except UserError as problem:
        problems.append(f"{name}: {problem}" if name else str(problem))


def cluster_of_hosts(slots: Slots, layout: Layout, name: str, *, shares_machine: bool) -> list[str]:
    """Return the keys of a [cluster] section for the hosts, for a recipe without one.

    Nodes and GPUs per node are those of the hostfile, and the GPU is that of this machine. A
    machine without a GPU may be a login node, so the GPU is "cpu" only if all ranks run here.

    Raises:
        UserError: a key is unknown; the message has a section that a user can append to the recipe.
    """
    names = device_names_of_machine()
    known = gpu_of_device(names[0]) if names else None
    has_gpu = bool(names) or machine_has_gpu(os.environ)
    counts = [count for count in slots.values() if count is not None]
    size = min(counts, default=len(names) or (8 if has_gpu else layout.ranks_per_data_rank))
    gpu = known.name if known else "H100" if has_gpu else "cpu"
    keys = [f"nodes = {len(slots) or 2}", f"gpus_per_node = {size}", f'gpu = "{gpu}"']
    if counts and (known or (shares_machine and not has_gpu)):
        return keys
    if not slots:
        keys[0] += "  # for example"
    if not counts:
        keys[1] += "  # as on this machine" if names else "  # for example"
    if known:
        keys[2] += "  # as on this machine"
    elif has_gpu:
        keys[2] += "  # for example; replace it by the name of your GPU"
    else:
        keys[2] += '  # replace it with the GPU of the nodes, for example "H100", if they have one'
    raise UserError(
        f"{name} has no [cluster] section, which describes the nodes; append this one, and correct "
        f"the lines with a comment:\n" + "\n".join(["[cluster]", *keys])
    )


def check_cluster(cluster: Cluster, slots: Slots) -> None:
    """Check that the hosts suffice for a [cluster] section.

    Raises:
        UserError: they do not, or the section needs more nodes than it has.
    """
    minimum = cluster.minimum_nodes
    if minimum > cluster.nodes:
        raise UserError(
            f"cluster.minimum_nodes = {minimum} is more than cluster.nodes = {cluster.nodes}; use "
            f"cluster.minimum_nodes = {cluster.nodes} or less"
        )
    check_slots(slots, cluster.gpus_per_node)
    if slots and len(slots) < minimum:
        raise UserError(
            f"{_listed(slots)}, and cluster.minimum_nodes = {minimum}; list more hosts, or use "
            f"--set cluster.minimum_nodes={len(slots)}"
        )


def unused(cluster: Cluster, slots: Slots) -> list[str]:
    """Return messages about nodes and slots that a run does not use.

    Hosts beyond `cluster.nodes` are not included, because they are spare nodes.
    """
    texts = []
    if len(slots) < cluster.nodes:
        texts.append(
            f"{_listed(slots)}, fewer than cluster.nodes = {cluster.nodes}; add hosts to the list, "
            f"even while the run trains, or use --set cluster.nodes={len(slots)}"
        )
    size = cluster.gpus_per_node
    larger = [f"{host} (slots={count})" for host, count in slots.items() if (count or 0) > size]
    if larger:
        others = f" and {len(larger) - 1} more" if larger[1:] else ""
        texts.append(f"cluster.gpus_per_node = {size} leaves slots unused on {larger[0]}{others}")
    return texts


def _listed(slots: Slots) -> str:
    return "1 host is listed" if len(slots) == 1 else f"{len(slots)} hosts are listed"
