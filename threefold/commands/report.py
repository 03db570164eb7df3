"""The command recipes/report.py: runs as a page."""

import argparse
import sys
from pathlib import Path

from models.errors import UserError
from threefold.gpus.datasheet import load_gpu
from threefold.report.charts import MAX_RUNS
from threefold.report.page import Watcher, Watching, may_be_replaced, render, serve
from threefold.report.run_record import names_of, read_run
from threefold.run_folder.json_lines import write_whole
from threefold.runtime.command_line import file_path, seconds
from threefold.runtime.exits import raise_at_interrupt
from threefold.runtime.output import escape_output

DEFAULT_EVERY_SECONDS = 5.0


def main(description: str | None = None) -> None:
    """Run the command; errors of the run folders or the options are printed on stderr."""
    raise_at_interrupt()
    escape_output()
    options = parse_command_line(description)
    try:
        report(options)
    except UserError as problem:
        print(f"report.py: {problem}", file=sys.stderr)
        sys.exit(2)


def report(options: argparse.Namespace) -> None:
    """Write the report, and serve it with `--watch`.

    Raises:
        UserError: a run folder or an option is rejected.
    """
    check_output(options.output)
    paths: list[Path] = options.runs
    if len(paths) > MAX_RUNS:
        raise UserError(f"{len(paths)} runs are too many to tell apart; use at most {MAX_RUNS}")
    if options.gpu is not None:
        load_gpu(options.gpu)
    for name in ("port", "every"):
        if getattr(options, name) is not None and not options.watch:
            raise UserError(f"--{name} requires --watch")
    every = options.every or DEFAULT_EVERY_SECONDS
    names = names_of(paths)

    def page(version: str = "") -> str:
        runs = [read_run(path, name) for path, name in zip(paths, names, strict=True)]
        if not version:  # once, not at each update of a watched page
            for run in runs:
                if not len(run.steps):
                    print(
                        f"warning: {run.path / 'metrics.jsonl'} has no complete step yet; the "
                        f"report has no curves of this run",
                        file=sys.stderr,
                    )
        watching = Watching(version, every) if version else None
        return render(runs, gpu=options.gpu, watching=watching)

    write(options.output, page())
    if not options.watch:
        return
    watcher = Watcher(paths, page)
    if not watcher.is_running():
        print("no process holds a run folder, so there is nothing to watch")
        return
    serve(watcher, port=options.port or 0, seconds=every)
    write(options.output, page())


def check_output(output: Path) -> None:
    """Check that a report may be written to a path.

    Raises:
        UserError: the path is that of a folder, or of a file that is not a report or cannot be
            read.
    """
    if output.is_dir():
        raise UserError(
            f"--output {output} is a folder; use a file in it, such as {output / 'report.html'}"
        )
    other = output.with_name(f"{output.stem}-2.html")
    try:
        is_free = not output.exists() or (output.is_file() and may_be_replaced(output))
    except OSError as error:
        raise UserError(
            f"--output {output} cannot be read ({error.strerror}); use another file, such as "
            f"{other}"
        ) from None
    if not is_free:
        raise UserError(
            f"--output {output} already exists and is not a report; use another file, such as "
            f"{other}"
        )


def write(output: Path, page: str) -> None:
    """Write the page, and print its path and size.

    Raises:
        UserError: the file cannot be written.
    """
    try:
        output.parent.mkdir(parents=True, exist_ok=True)
        write_whole(output, page)
    except OSError as error:
        raise UserError(
            f"--output {output} cannot be written ({error.strerror}); use another file"
        ) from None
    print(f"wrote {output} ({len(page.encode()) / 1e6:.1f} MB)", flush=True)


def html_file(name: str) -> Path:
    """Return a path, with .html added for browsers if its name has no suffix."""
    path = file_path(name)
    return path if path.suffix or path.is_dir() else path.with_name(f"{path.name}.html")


def parse_command_line(description: str | None = None) -> argparse.Namespace:
    """Return the options of the command."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "runs", nargs="+", type=file_path, metavar="RUN", help="run folder, such as runs/tiny"
    )
    parser.add_argument(
        "--output", type=html_file, default=Path("report.html"), metavar="FILE",
        help="file to write, with .html added if its name has no suffix; default: %(default)s",
    )  # fmt: skip
    parser.add_argument(
        "--gpu", metavar="NAME",
        help="datasheet for the plan, such as H100 or cpu; default: the GPU in the recipe's "
        "[cluster], or the one whose peak the metrics imply",
    )  # fmt: skip
    parser.add_argument(
        "--watch", action="store_true",
        help="serve the report on this machine only, until the run ends",
    )  # fmt: skip
    parser.add_argument("--port", type=int, help="port for --watch; default: a free one")
    parser.add_argument(
        "--every", type=seconds, metavar="SECONDS",
        help=f"how often --watch looks for new steps; default: {DEFAULT_EVERY_SECONDS:g}",
    )  # fmt: skip
    return parser.parse_args()
