"""The connection to Weights & Biases: settings, mode and its reason, and the run itself."""

import contextlib
import json
import logging
import os
import re
import secrets
import shutil
import socket
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal
from urllib.parse import urlparse

from pydantic import ValidationError

from models.errors import UserError
from threefold.config.recipe import Recipe
from threefold.run_folder.folder import code_version
from threefold.run_folder.json_lines import write_whole
from threefold.runtime.exits import ECHO_SECONDS

MODES = ("online", "offline", "disabled", "shared", "dryrun", "run")  # of WANDB_MODE
OTHER_NAMES = {"dryrun": "offline", "run": "online"}  # of a mode


def check_wandb(recipe: Recipe, folder: Path, *, keeps_id: bool) -> None:
    """Check the settings of Weights & Biases before the engine is built.

    Args:
        keeps_id: the run continues the W&B run that the folder names

    Raises:
        UserError: a variable or the file with the run's id is wrong.
    """
    if recipe.tracking.mode == "disabled":
        return
    check_variables()
    run_id = folder / "wandb" / "run_id"
    if keeps_id and run_id.exists():
        read_run_id(run_id)


def requested_mode(mode: str) -> tuple[str, str]:
    """Return the mode that a run asks for, and the reason.

    WANDB_MODE overrides the recipe's mode for one run, except that it does not turn on what the
    recipe turns off: on many clusters it is set for all runs.

    Args:
        mode: the recipe's `tracking.mode`

    Returns:
        A mode of `wandb.init`, or "auto". The reason is empty if the recipe's mode is the default,
        or if it is the common case of a mode.
    """
    variable, own = os.environ.get("WANDB_MODE"), f'tracking.mode = "{mode}"'
    if not variable:
        return mode, own if mode == "offline" else ""
    wanted = OTHER_NAMES.get(variable, variable)
    if mode == "disabled":
        ignored = f"{own}; WANDB_MODE = {variable} does not change that"
        return mode, "" if wanted == mode else ignored
    overridden = "" if mode in ("auto", wanted) else f" overrides {own}"
    return wanted, f"WANDB_MODE = {variable}{overridden}"


def check_variables() -> None:
    """Check the variables of W&B, without importing it, and unset empty ones, which it rejects.

    Raises:
        UserError: WANDB_MODE is not a mode, or WANDB_BASE_URL is not a URL.
    """
    for name in [name for name, value in os.environ.items() if not value]:
        if name.startswith("WANDB_"):
            del os.environ[name]
    mode, url = os.environ.get("WANDB_MODE"), os.environ.get("WANDB_BASE_URL")
    if mode and mode not in MODES:
        raise UserError(f"WANDB_MODE = {mode} is not one of {', '.join(MODES)}; unset it")
    if not url:
        return
    try:
        parts = urlparse(url)
        problem = "" if parts.scheme in ("http", "https") and parts.hostname else "not a URL"
    except ValueError as error:
        problem = str(error)
    if problem:
        raise UserError(
            f"WANDB_BASE_URL = {url}: {problem}; use https://HOST:PORT, or unset it"
        ) from None


def wandb_arguments(recipe: Recipe, folder: Path) -> dict[str, Any]:
    """Return the arguments of `wandb.init` but the mode; a resumed folder keeps its run id."""
    home = folder / "wandb"
    home.mkdir(exist_ok=True)
    run_id = home / "run_id"
    if not run_id.exists():
        write_whole(run_id, secrets.token_hex(4))
    return common_arguments(recipe, folder) | {"name": recipe.name, "id": read_run_id(run_id)}


def common_arguments(recipe: Recipe, folder: Path) -> dict[str, Any]:
    """Return the arguments of `wandb.init` that follow from a recipe and a folder alone."""
    tracking = recipe.tracking
    owners = {"entity": tracking.team, "group": tracking.group}
    return {name: owner for name, owner in owners.items() if owner} | {
        "project": tracking.project,
        "tags": list(tracking.tags),
        "config": recipe.model_dump(mode="json") | {"code_version": code_version()},
        "dir": str(folder),
    }


def read_wandb_key() -> None:
    """Set WANDB_API_KEY from the file that WANDB_API_KEY_FILE names, unless it is already set.

    Raises:
        UserError: the file cannot be read, other users can read it, or it holds no key.
    """
    name = os.environ.get("WANDB_API_KEY_FILE")
    if not name or os.environ.get("WANDB_API_KEY"):
        return
    file = Path(os.path.expanduser(name))
    try:
        readers, key = file.stat().st_mode & 0o077, file.read_bytes().strip()
    except OSError as error:
        raise UserError(
            f"WANDB_API_KEY_FILE = {name} cannot be read ({error.strerror}); use a file with the "
            f"key and nothing else, or unset it"
        ) from None
    if readers:
        raise UserError(f"WANDB_API_KEY_FILE = {name} can be read by others; use chmod 600 {name}")
    if not re.fullmatch(rb"[!-~]+", key):
        raise UserError(
            f"WANDB_API_KEY_FILE = {name} does not hold a key; use a file with the key and nothing "
            f"else, or unset it"
        )
    os.environ["WANDB_API_KEY"] = key.decode()


def read_run_id(file: Path) -> str:
    """Read the id of a run folder's W&B run.

    Raises:
        UserError: the file is damaged, or cannot be read.
    """
    try:
        run_id = file.read_text(encoding="utf-8", errors="replace").strip()
    except OSError as error:
        raise UserError(
            f"{file} cannot be read ({error.strerror}); make it readable, or delete it for a new "
            f"W&B run"
        ) from None
    if not re.fullmatch(r"[A-Za-z0-9_-]+", run_id):
        raise UserError(
            f"{file} holds {run_id[:40]!r} instead of the id of a W&B run; write this run's id "
            f"into it, or delete it for a new W&B run"
        )
    return run_id


# The connection to Weights & Biases: its mode for a run, the reason, and the run itself.
#
# W&B is asked for the address of its server and for the key, because both can come from the
# environment, from the files that `wandb login` writes, or from files in the current folder. It is
# imported in these functions: that takes a second, for which the training thread need not wait.

Mode = Literal["online", "offline", "disabled", "shared"]  # of `wandb.init`
MAX_REASON_CHARACTERS = 200  # of an error, in a message
SECONDS_TO_CONNECT = 30.0
SECONDS_TO_REFUSE = 2.0  # a connection
STATUS_FILE = "wandb/status.json"
TAG_OF_EXIT = b"\x92\x01"  # field 18, `exit`, of the records in W&B's files; after the run's id
ERRORS_OF_ENDED_SERVICE = (  # wandb.sdk.mailbox and wandb.sdk.lib.service, 0.31
    "HandleAbandonedError", "MailboxClosedError", "ServicePollForTokenError",
    "WandbServiceConnectionError",
)  # fmt: skip
TAIL_BYTES = 4096  # of a run's file, with its last records
# A run's file has a header of W&B's own, and then a log in LevelDB's format. A record that does not
# fit into a block continues in the next block, after another record header.
FILE_HEADER_BYTES = 7
BLOCK_BYTES, RECORD_HEADER_BYTES = 32_768, 7


@dataclass(frozen=True)
class WandbStatus:
    """The mode of Weights & Biases for a run.

    Attributes:
        mode: "online", "offline", "disabled", "incomplete" (some data has not been sent), "failed"
            (W&B has not started), or "waiting" (for the server, before another mode is known)
        where: URL of the run's page, or the files for `wandb sync`
        reason: the reason for the mode; empty if the run is online because it has a key
    """

    mode: str
    where: str = ""
    reason: str = ""

    def __str__(self) -> str:
        upload = self._upload()
        return f"{self.announcement}; {upload}" if upload else self.announcement

    @property
    def announcement(self) -> str:
        """The mode and the reason, for the line about a mode that is new."""
        if self.mode == "waiting":
            return f"waiting {self.reason}"
        announced = f"{self._mode()}, because {self.reason}" if self.reason else self._mode()
        lost = self.mode in ("incomplete", "failed")
        return announced + ("; training is not affected" if lost else "")

    @property
    def at_stop(self) -> str:
        """The mode and the upload command, for a run that stops early; empty without data."""
        command = self._command()
        return f"{self._mode()}; upload the data so far with: {command}" if command else ""

    @property
    def summary(self) -> str:
        """The mode, and the place of the data, for the summary of a run."""
        upload = self._upload()
        return f"{self._mode()}; {upload}" if upload else self._mode()

    def _mode(self) -> str:
        if self.mode == "online":
            return f"online at {self.where}" if self.where else "online"
        return "off" if self.mode == "disabled" else self.mode

    def _upload(self) -> str:
        """Return how to upload what has not been sent; empty if there is nothing."""
        command = self._command()
        rest = "the rest " if self.mode == "incomplete" and "--include-online" in command else ""
        return f"upload {rest}with: {command}" if command else ""

    def _command(self) -> str:
        if self.mode not in ("offline", "incomplete"):
            return ""
        # Without this option, `wandb sync` skips folders of online runs, even if they are named.
        option = "" if Path(self.where).name.startswith("offline-") else "--include-online "
        return f"wandb sync {option}{self.where}"

    def write(self, folder: Path) -> None:
        """Write the status into a run folder, for the summary of the run."""
        with contextlib.suppress(OSError):
            (folder / STATUS_FILE).parent.mkdir(exist_ok=True)
            write_whole(folder / STATUS_FILE, json.dumps(asdict(self)))

    @staticmethod
    def remove(folder: Path) -> None:
        """Delete the status that an earlier process of the run has written."""
        with contextlib.suppress(OSError):
            (folder / STATUS_FILE).unlink()

    @classmethod
    def read(cls, folder: Path) -> "WandbStatus | None":
        """Return the newest status of a run; None if there is none that can be read."""
        try:
            facts = json.loads((folder / STATUS_FILE).read_bytes())
            status = cls(**{name: str(facts[name]) for name in ("mode", "where", "reason")})
            if status._upload():  # the folder may have been moved
                status = replace(status, where=str(folder / "wandb" / Path(status.where).name))
            return status
        except (OSError, ValueError, RecursionError, TypeError, KeyError):
            return None


def untold(status: WandbStatus) -> None:
    """Ignore a change of the mode of Weights & Biases."""


def start_wandb(
    requested: tuple[str, str],
    arguments: dict[str, Any],
    *,
    tell: Callable[[WandbStatus], None] = untold,
) -> tuple[Any, WandbStatus]:
    """Start a W&B run, offline if there is no key.

    After an error, such as no answer of the server, `restart_offline` continues the run.

    Args:
        requested: a mode and the reason for it, as `requested_mode` returns them
        arguments: arguments of `wandb.init`, without a mode
        tell: called before the wait for an answer of the server

    Returns:
        The run, and its status.
    """
    # At exit, W&B would wait 20 s to send reports about its own errors to a server without answer.
    os.environ.setdefault("WANDB_ERROR_REPORTING", "false")
    mode, reason = choose_mode(*requested)
    if "id" in arguments:  # not in the runs of a sweep
        remove_empty_parts(arguments)
    if mode == "offline":
        return _init(arguments, mode), WandbStatus(mode, unsent(arguments), reason)
    if mode == "disabled":
        return _init(arguments, mode), WandbStatus(mode, reason=reason)
    server, seconds = _settings().base_url, f"{SECONDS_TO_CONNECT:g} s"
    tell(WandbStatus("waiting", reason=f"for {server} to answer, for at most {seconds}"))
    run = _init(arguments | {"resume": "allow"}, mode)
    return run, WandbStatus("online", run.url or "", reason)


def restart_offline(
    arguments: dict[str, Any], error: Exception, files: str = "offline-run-*"
) -> tuple[Any, WandbStatus]:
    """Continue a run offline with the same id, after an error of W&B or its server.

    Args:
        error: the error of the run that was or should have been online
        files: the files that have not been sent
    """
    server = _settings().base_url
    if "returned error 401" in str(error):
        key, remedy = "the key", 'use "wandb login --relogin"'
        if os.environ.get("WANDB_API_KEY"):  # W&B prefers it to the key of `wandb login`
            key, remedy = "WANDB_API_KEY", 'set another key, or unset it and use "wandb login"'
        reason = f"{server} rejected {key} (401; {remedy})"
    elif _service_has_ended(error):
        reason = f"{short(error)} (Ctrl-C can cause this)"
    elif "deadline exceeded" not in str(error):
        reason = f"of an error of {server} ({short(error)})"
    elif _refuses(server):
        reason = f"{server} refuses connections"
    else:
        reason = f"{server} did not answer within {SECONDS_TO_CONNECT:g} s"
    reason += f"; the data stay in the run folder, under the W&B id {arguments['id']}"
    if _service_has_ended(error):
        # At Ctrl-C, the launcher `deepspeed` ends all processes that descend from it, several times
        # in a row. The next service process would end, too.
        time.sleep(ECHO_SECONDS)
    tear_down()  # the failed run still holds its id
    remove_empty_parts(arguments)
    return _init(arguments, "offline"), WandbStatus("offline", unsent(arguments, files), reason)


def tear_down() -> None:
    """End W&B's service process, so that its exit handler does not run.

    The handler prints a traceback if the service process has crashed.
    """
    with contextlib.suppress(Exception, SystemExit):
        import wandb

        wandb.teardown()


def end_service() -> bool:
    """Kill W&B's service process, so that calls that wait for the server fail at once.

    Returns:
        False if it has not been started yet.
    """
    with contextlib.suppress(Exception):
        from wandb.sdk import wandb_setup

        wandb_setup.singleton().assert_service()._proc._process.kill()
        return True
    return False


def has_written_all(run: Any) -> bool | None:
    """Return True if the file of a run has the record of its exit, which follows all of its data.

    Returns:
        None if the file cannot be read.
    """
    with contextlib.suppress(Exception), Path(run.settings.sync_file).open("rb") as file:
        first = max(0, file.seek(0, os.SEEK_END) - TAIL_BYTES)
        file.seek(first)
        tail, boundary = file.read(), BLOCK_BYTES - first % BLOCK_BYTES
        tail = tail[:boundary] + tail[boundary + RECORD_HEADER_BYTES :]
        return run.id.encode() + TAG_OF_EXIT in tail
    return None


def remove_empty_parts(arguments: Mapping[str, Any]) -> None:
    """Delete those folders of this run, one per start, whose file has only a header.

    If `wandb sync` finds such a file, it sends none of the run's folders. W&B's service process
    leaves one behind if it is killed while it starts.
    """
    run_id, folder = arguments["id"], Path(arguments["dir"])
    for file in folder.glob(f"wandb/*run-*-{run_id}/run-{run_id}.wandb"):
        with contextlib.suppress(OSError):
            if file.stat().st_size <= FILE_HEADER_BYTES:
                shutil.rmtree(file.parent)


def choose_mode(wanted: str, reason: str) -> tuple[Mode, str]:
    """Return the mode of a run, and the reason for it.

    Args:
        wanted: the mode that the run asks for, as `requested_mode` returns it

    Returns:
        The mode, and a reason that is empty if the run is online because it has a key.
    """
    import wandb
    from wandb.sdk.lib import wbauth

    if wanted == "offline":
        return "offline", reason
    if wanted == "disabled":
        return "disabled", reason
    settings = _settings()
    if wanted == "auto" and settings.mode not in ("online", "run", "shared"):
        mode: Mode = "disabled" if settings.mode == "disabled" else "offline"
        files = " and ".join(map(str, settings.read_system_settings().sources))
        return mode, f"{files} sets mode = {mode}"
    try:
        host = wbauth.HostUrl(settings.base_url, app_url=settings.app_url)
        key = wbauth.authenticate_session(
            host=host, source="pretrain.py", prompt=False, update_session=False
        )
    except wandb.Error as error:
        return "offline", short(error)
    if key is None:
        default = type(settings).model_fields["base_url"].default
        server = settings.base_url
        if server == default:
            server += f", the default server of wandb {wandb.__version__}"
        reason = f'there is no key for {server} (log in with "wandb login" to be online)'
        if wanted == "online":
            reason += ', although the mode "online" is requested'
        return "offline", reason
    return ("shared" if settings.mode == "shared" else "online"), reason


def _refuses(server: str) -> bool:
    """Return True if no program listens at the port of a server, which answers at once."""
    url = urlparse(server)
    port = url.port or {"http": 80}.get(url.scheme, 443)
    try:
        socket.create_connection((url.hostname or "", port), timeout=SECONDS_TO_REFUSE).close()
    except OSError as error:
        return isinstance(error, ConnectionRefusedError)
    return False


def _service_has_ended(error: Exception) -> bool:
    """Return True if an error means that W&B's service process has ended.

    A ConnectionError comes from the socket to the service process, because only that process talks
    to the server.
    """
    return isinstance(error, ConnectionError) or type(error).__name__ in ERRORS_OF_ENDED_SERVICE


def short(error: Exception) -> str:
    """Return the first sentence or line of an error for a message."""
    if _service_has_ended(error):
        return "wandb's process on this machine has ended"
    line = next(iter(str(error).strip().splitlines()), "") or type(error).__name__
    if isinstance(error, ValidationError):  # the first line has only the number of problems
        first = error.errors()[0]
        line = f"{'.'.join(map(str, first['loc']))} = {first['input']!r}: {first['msg']}"
    return line.rstrip(".")[:MAX_REASON_CHARACTERS]


def unsent(arguments: dict[str, Any], files: str = "offline-run-*") -> str:
    """Return the files that have not been sent, as a pattern for `wandb sync`."""
    return str(Path(arguments["dir"]) / "wandb" / files)


def _settings() -> Any:
    """Return the settings of W&B: defaults, its files, and the environment."""
    import wandb
    from wandb.sdk import wandb_setup

    wandb.termsetup(wandb.Settings(silent=True), None)
    settings = wandb_setup.singleton().settings  # does not start W&B's service process
    settings.silent = True  # the settings that were just read would print messages again
    wandb.termsetup(settings, None)
    return settings


def _init(arguments: dict[str, Any], mode: Mode) -> Any:
    import wandb

    _settings()
    logging.getLogger("wandb").addFilter(_silence_handlers)
    settings = wandb.Settings(silent=True, console="off", init_timeout=SECONDS_TO_CONNECT)
    run = wandb.init(**arguments, mode=mode, settings=settings)
    run.define_metric("*", step_metric="step")
    return run


def _silence_handlers(record: logging.LogRecord) -> bool:
    """Let the handlers of W&B's logger drop the messages that they cannot write.

    On a full disk, Python would print a traceback for each message in W&B's debug.log. W&B adds the
    handler of that file while it starts a run and writes messages at once, so a filter of the
    logger is the first code that sees the handler.
    """
    for handler in logging.getLogger("wandb").handlers:
        handler.handleError = lambda record: None  # type: ignore[method-assign]
    return True
