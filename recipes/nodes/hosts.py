"""The hosts of a run: from a hostfile, as `deepspeed` reads it, or from a Slurm allocation."""

import re
import subprocess
from collections.abc import Mapping
from pathlib import Path

from models.errors import UserError

# A name that begins with a hyphen, also after USER@, would be an option of ssh. deepspeed ignores
# everything after slots=N, such as max_slots=N.
LINE = re.compile(
    r"(?!(\S*@)?-)(?P<name>[^\s\0]+)\s+slots=(?P<slots>[0-9]{1,4})(\s+(?!slots=)[\w-]+=\S*)*"
)
SECONDS_FOR_SCONTROL = 30.0  # it waits if the controller does not answer
EXAMPLE = "for example: node1 slots=8"


def read_hostfile(file: Path, *, processes: int) -> list[str]:
    """Return the names of the hosts in a hostfile, in its order.

    Args:
        file: a line "NAME slots=N" for each host; empty lines, comments after #, other settings
            such as max_slots=N and a byte order mark are ignored
        processes: ranks of each host, `cluster.gpus_per_node`

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
    names: list[str] = []
    for number, line in enumerate(lines, 1):
        text = line.partition("#")[0].strip()
        if not text:
            continue
        found = LINE.fullmatch(text)
        if not found:
            is_option = re.match(r"(\S*@)?-", text)
            reason = " (a name cannot begin with a hyphen)" if is_option else ""
            raise UserError(f"{file}, line {number}: {text!r:.80} is not a host{reason}; {EXAMPLE}")
        if found["name"] in names:
            raise UserError(
                f"{file}, line {number}: {found['name']} is listed twice; remove one of the lines"
            )
        if int(found["slots"]) < processes:
            raise UserError(
                f"{file}, line {number}: {found['name']} has slots={found['slots']}, and "
                f"cluster.gpus_per_node = {processes}; use slots={processes} or more, or "
                f"--set cluster.gpus_per_node={found['slots']}"
            )
        names.append(found["name"])
    if not names:
        raise UserError(f"{file} lists no host; add a line per host, {EXAMPLE}")
    return names


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
