"""Every command with --json prints one JSON object on standard output, and nothing else."""

import contextlib
import importlib
import json
import logging
import os
import re
import subprocess
import sys
from collections import defaultdict
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from tests.conftest import long_in_turn
from threefold.config.loading import REPOSITORY

TINY = str(REPOSITORY / "recipes" / "tiny.toml")
RANDOM = np.random.default_rng(0)
ROW = {"ratio": 1.0, "mlp": 1.0, "matmuls": 1.0}
# Command -> its options, and the functions that measure, with what they return here.
COMMANDS: dict[str, tuple[list[str], dict[str, Any]]] = {
    "benchmarks.activation_memory": ([], {"rows": []}),
    "benchmarks.bf16_layouts": ([], {"losses": lambda: RANDOM.random(60)}),
    "benchmarks.communication_slots": ([], {"measure": ROW}),
    "benchmarks.expert_overhead": ([], {"compare": ROW}),
    "benchmarks.gpu_kernels": ([], {"has_gpu": True, "measure": [ROW]}),
    "benchmarks.kernels": ([], {"residual": 1.0, "attention": 1.0, "windowed": 1.0}),
    "benchmarks.muon": ([], {"run_ranks": [[SimpleNamespace(ratio=1.0)]]}),
    "benchmarks.reduction_error": ([], {"ring_errors": {8: 1e-7}}),
    "benchmarks.reductions": ([], {"compare": []}),
    "benchmarks.schedules": ([], {"time_all": {}, "real_layers.compare": {}}),
    "benchmarks.small_step": (
        [],
        {"prepare": None, "players": contextlib.nullcontext, "take_round": {"ours": (1.0, 2.0)}},
    ),
    "benchmarks.step": ([], {"MEASURE": [ROW]}),
    "threefold.commands.plan": (
        ["trace", TINY, "--gpu", "H100", "--nodes", "1", "--gpus-per-node", "2"],
        {"threefold.trace.trace.trace": None},
    ),
    "threefold.commands.prove": ([TINY], {"Proof.run": SimpleNamespace(passes=True)}),
    "threefold.commands.sweep": (["links", "mine"], {"ClusterMeasurement.run": (None, None)}),
}  # fmt: skip
REPORTS: dict[str, dict[str, Any]] = {  # functions that would need real results
    "threefold.commands.plan": {"threefold.trace.trace.table": {}},
    "threefold.commands.prove": {"plan": (SimpleNamespace(), []), "model_text": "", "as_json": {}},
    "threefold.commands.sweep": {"report_table": {}},
}


def noisy(result: Any) -> Callable[..., Any]:
    """Return a function that writes to standard output in every way, and returns a result."""

    def measure(*_: Any, **__: Any) -> Any:
        print("printed")
        os.write(1, b"written by a library\n")
        subprocess.run(["echo", "printed by a child"], check=True)
        logging.getLogger("DeepSpeed").warning("logged")
        return result() if callable(result) else result

    return measure


def replace(command: Any, name: str, stub: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    if name.startswith("threefold."):
        monkeypatch.setattr(name, stub)
    elif name == "MEASURE":
        monkeypatch.setattr(command, name, defaultdict(lambda: stub))
    else:
        *owners, attribute = name.split(".")
        for owner in owners:
            command = getattr(command, owner)
        monkeypatch.setattr(command, attribute, stub)


@pytest.mark.parametrize("name", COMMANDS)
def test_standard_output_is_one_json_object(
    name: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    command = importlib.import_module(name)
    options, stubs = COMMANDS[name]
    for attribute, result in stubs.items():
        measure = noisy(result)
        lazily = lambda *_, measure=measure, **__: (measure() for _ in "1")  # noqa: E731
        replace(command, attribute, lazily if attribute == "Proof.run" else measure, monkeypatch)
    for attribute, result in REPORTS.get(name, {}).items():
        replace(command, attribute, lambda *_, result=result, **__: result, monkeypatch)
    if name == "threefold.commands.sweep":  # it would end this process
        monkeypatch.setattr(command, "exit_now", sys.exit)
        monkeypatch.setattr(command, "use_nonblocking_output", lambda: None)
    monkeypatch.setattr(sys, "argv", [f"{name}.py", *options, "--json"])
    # As DeepSpeed's handler, which keeps the stream that was standard output at its import.
    with open(1, "w", buffering=1, closefd=False) as stream:
        handler = logging.StreamHandler(stream)
        monkeypatch.setattr(logging.getLogger("DeepSpeed"), "handlers", [handler])
        capfd.readouterr()
        try:
            command.main()
        except SystemExit as end:
            assert not end.code
    output, errors = capfd.readouterr()
    assert isinstance(json.loads(output), dict | list)
    assert output.count("\n") == 1
    for way in ("printed\n", "written by a library", "printed by a child", "logged"):
        assert way in errors
    print("restored")
    assert capfd.readouterr().out == "restored\n"


def test_every_command_with_json_is_tested() -> None:
    folders = (REPOSITORY / "threefold" / "commands", REPOSITORY / "benchmarks")
    files = [file for folder in folders for file in folder.rglob("*.py")]
    modules = {
        ".".join(file.relative_to(REPOSITORY).with_suffix("").parts)
        for file in files
        if re.search(r'"--json"|add_json\(', file.read_text())
    }
    assert modules == set(COMMANDS)


IMPORT_EACH = """
import importlib, os, sys
import torch
for name in sys.argv[1:]:
    child = os.fork()
    if not child:
        importlib.import_module(name)
        sys.stdout.flush()
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0, name
"""


@long_in_turn(1)
def test_nothing_is_printed_while_a_command_is_imported() -> None:
    """DeepSpeed logs the kind of device when it is imported, unless DS_ACCELERATOR is set."""
    variables = {key: value for key, value in os.environ.items() if key != "DS_ACCELERATOR"}
    done = subprocess.run(
        [sys.executable, "-c", IMPORT_EACH, *COMMANDS],
        cwd=REPOSITORY, env=variables, capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert done.stdout == ""
    assert "Setting accelerator to CPU" in done.stderr or "accelerator" in done.stderr
    trace = [sys.executable, "recipes/plan.py", "trace", TINY, "--gpus-per-node", "2", "--json"]
    done = subprocess.run(
        trace, cwd=REPOSITORY, env=variables, stdout=subprocess.PIPE, text=True, check=True
    )
    assert json.loads(done.stdout)["name"] == "tiny"
