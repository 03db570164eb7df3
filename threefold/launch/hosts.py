"""The hosts of a run: their list, whether it fits the recipe's [cluster], and which ones answer.

The hosts come from a hostfile, as `deepspeed` reads it, or from a Slurm allocation.
"""

import contextlib
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from models.errors import UserError, counted
from threefold.config.deepspeed_json import require_auto
from threefold.config.layout import Cluster, Layout
from threefold.config.loading import load_recipe, origin, short
from threefold.config.parallel_dims import LaunchEnvironment
from threefold.config.phases import PhasePlan
from threefold.config.recipe import Recipe
from threefold.gpus.datasheet import device_names_of_machine, gpu_of_device, machine_has_gpu
from threefold.launch.connection import MAX_CONNECTING, Agent, Connections
from threefold.launch.diagnosis import Failures
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


def slurm_hosts(environment: Mapping[str, str], *, remedy: str = "") -> list[str]:
    """Return the names of the hosts of this Slurm allocation, in Slurm's order.

    Args:
        remedy: advice for a message; "": that of launch.py

    Raises:
        UserError: this is not a Slurm job, or Slurm cannot expand its list of nodes.
    """
    nodes = environment.get("SLURM_JOB_NODELIST")
    if not nodes:
        raise UserError(
            "SLURM_JOB_NODELIST is not set, so this is not a Slurm job; "
            + (remedy or "use --hostfile FILE, or submit the run with slurm/submit.sh")
        )
    try:
        hosts = subprocess.run(
            ["scontrol", "show", "hostnames", nodes],
            capture_output=True,
            encoding="utf-8",
            check=True,
            timeout=SECONDS_FOR_SCONTROL,
        ).stdout.split()
        reason = "it printed no host"
    except (OSError, subprocess.SubprocessError) as error:
        said = error.stderr if isinstance(error, subprocess.CalledProcessError) else ""
        hosts, reason = [], (said or str(error)).strip()
    if not hosts:
        raise UserError(
            f'scontrol show hostnames "{nodes}" failed ({reason}); '
            + (remedy or "use --hostfile FILE with the nodes of the job")
        )
    return hosts


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
    _raise_problems(problems)
    return recipe, overrides


def check_before_hosts(recipe: Recipe, name: str) -> None:
    """Check a recipe with a [cluster] section as `recipe_on_hosts` does, before hosts are known.

    Args:
        name: the recipe's file and the overrides

    Raises:
        UserError: the recipe is rejected.
    """
    mistakes, _ = _check(recipe, name, {}, shares_machine=False)
    _raise_problems(mistakes)


def _raise_problems(problems: Sequence[str]) -> None:
    """Raise a UserError with all problems, if there are any."""
    if problems:
        several = [f"{len(problems)} problems"] if len(problems) > 1 else []
        raise UserError("\n  ".join([*several, *problems]))


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


# The nodes of a run: which ones answer, which are spare, and which have failed too often.

SECONDS_TO_CONNECT = 60.0
SECONDS_BETWEEN_LISTS = 10.0  # of hosts, which a user may extend
SECONDS_BETWEEN_CONNECTS = 5.0  # to a host that does not answer


class Nodes:
    """The hosts of a run and the connections to them.

    Args:
        connections: the connections, at first none
        node_seconds: time without a sign of life after which a host is lost
        distinct: reject hosts that are the same machine under two names

    Attributes:
        gpu_errors: (host, error, severe) of errors that agents have reported and that launch.py has
            not handled
        aliases: host -> the host of the list that is the same machine
    """

    def __init__(
        self,
        list_hosts: Callable[[], list[str]],
        connections: Connections,
        failures: Failures,
        *,
        node_seconds: float,
        distinct: bool = True,
    ):
        self.list_hosts, self.hosts = list_hosts, list_hosts()
        self._listed_at = time.monotonic()
        self.connections, self.failures, self.node_seconds = connections, failures, node_seconds
        self.gpu_errors: list[tuple[str, str, bool]] = []
        self.aliases: dict[str, str] = {}
        self._distinct = distinct
        self._machines: dict[str, str] = {}  # host -> machine
        connections.admit = self.admit
        self._next_connect: dict[str, float] = {}  # for hosts without an agent

    def agent(self, host: str) -> Agent | None:
        """Return the agent of a connected host; None for a host without a connection."""
        return self.connections.agents.get(host)

    def usable(self) -> list[str]:
        """Return the hosts that answer and are not left out, in the order of the list.

        Hosts that were slow come last.
        """
        hosts = [host for host in self.hosts if self._answers(host) and self._may_be_used(host)]
        return sorted(hosts, key=self.failures.is_slow)

    def spares(self, used: Collection[str]) -> int:
        """Return the number of usable hosts that are neither used nor slow."""
        others = set(self.usable()).difference(used)
        return sum(not self.failures.is_slow(host) for host in others)

    def keep_connected(self) -> list[str]:
        """Connect to the hosts without an agent, and drop the agents that do not answer.

        Returns:
            The hosts of the dropped agents.
        """
        dropped, now = list[str](), time.monotonic()
        agents = self.connections.agents.values()
        free = MAX_CONNECTING - sum(not agent.ready for agent in agents)
        for host in self.hosts:
            if self.agent(host) is None:
                due = now >= self._next_connect.get(host, 0.0)
                if due and free > 0 and self._may_be_used(host):
                    free -= 1
                    self._open(host)
            elif self.is_silent(host):
                self.drop(host)
                dropped.append(host)
        return dropped

    def _open(self, host: str) -> None:
        try:
            self.connections.open(host)
        except OSError:
            self.drop(host)

    def is_silent(self, host: str) -> bool:
        """Return True if a host has a connection but has not answered for too long."""
        agent = self.agent(host)
        if agent is None:
            return False
        return agent.silent_seconds() > (self.node_seconds if agent.ready else SECONDS_TO_CONNECT)

    def drop(self, host: str) -> None:
        """End the connection to a host, and try again later."""
        if host in self.connections.agents:
            self.connections.close(host)
        self._next_connect[host] = time.monotonic() + SECONDS_BETWEEN_CONNECTS

    def wait_for(self, count: int, *, seconds: float, stop: Callable[[], bool]) -> None:
        """Wait until `count` hosts can be used, `seconds` have passed, or `stop` returns True."""
        deadline = time.monotonic() + seconds
        while len(self.usable()) < count and time.monotonic() < deadline and not stop():
            self._poll()

    def wait_for_answers(self, *, seconds: float, stop: Callable[[], bool]) -> None:
        """Wait, as `wait_for` does, until no connection to a host that may be used is pending."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline and not stop():
            if all(host in self._next_connect for host in self.missing()):
                return
            self._poll()

    def missing(self) -> list[str]:
        """Return the hosts that may be used and have not answered."""
        return [host for host in self.hosts if self._may_be_used(host) and not self._answers(host)]

    def wait_for_all(self, most: int, *, seconds: float, stop: Callable[[], bool]) -> None:
        """Wait until all hosts, or `most` of them, can be used, as `wait_for` does."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline and not stop():
            if len(self.usable()) >= min(most, sum(map(self._may_be_used, self.hosts))):
                return
            self._poll()

    def note_gpus(self, host: str, content: Mapping[str, Any]) -> None:
        """Note the errors of GPUs that an agent has reported."""
        self.gpu_errors += [(host, str(text), bool(severe)) for text, severe in content["errors"]]

    def _poll(self) -> None:
        # Read the reports before looking for silent hosts; they wait while launch.py is busy.
        for report in self.connections.reports():
            if report.content is None:
                self.drop(report.host)
            elif report.content["is"] == "gpus":
                self.note_gpus(report.host, report.content)
        self.keep_connected()

    def admit(self, host: str, machine: str) -> bool:
        """Return False for a host that is the same machine as another host of the list.

        Otherwise, the agents of the two hosts would kill each other.

        Args:
            host: a host whose agent has just started
            machine: name and boot ID of its machine; "" if they are unknown
        """
        other = owner(machine, self._machines, self.hosts)
        if self._distinct and other not in ("", host):
            self.aliases[host] = other
            name = machine.partition(" ")[0]
            print(f"launch.py: {host} and {other} are the same machine ({name}), so {host} is not "
                  f"used; remove one of them from the hostfile",
                  file=sys.stderr, flush=True)  # fmt: skip
            return False
        self._machines[host] = machine
        return True

    def refresh(self) -> str:
        """Read the list of hosts again if the last time is SECONDS_BETWEEN_LISTS ago.

        Returns:
            A message if the list is not valid; otherwise "".
        """
        if time.monotonic() - self._listed_at < SECONDS_BETWEEN_LISTS:
            return ""
        self._listed_at = time.monotonic()
        try:
            self.hosts = self.list_hosts()
            self.aliases = {host: other for host, other in self.aliases.items()
                            if other in self.hosts}  # fmt: skip
        except UserError as problem:
            return str(problem)
        return ""

    def absence(self, host: str) -> str:
        """Return the reason why a host is not used."""
        if host in self.aliases:
            return f"the same machine as {self.aliases[host]}"
        if reason := self.failures.reason(host):
            return f"left out: {reason}"
        if not self._answers(host):
            return "no answer"
        return "spare, because it was slow" if self.failures.is_slow(host) else "spare"

    def _may_be_used(self, host: str) -> bool:
        return host not in self.aliases and not self.failures.left_out(host)

    def _answers(self, host: str) -> bool:
        agent = self.agent(host)
        return agent is not None and agent.ready


def owner(machine: str, machines: Mapping[str, str], hosts: Sequence[str]) -> str:
    """Return the host that was the first to be on a machine; "" if there is none.

    Args:
        machine: name and boot ID of the machine; "" if they are unknown
        machines: host -> its machine, for hosts that have been admitted
        hosts: the hosts of the list; a user may have removed others
    """
    known = (name for name in hosts if machine and machines.get(name) == machine)
    return next(known, "")
