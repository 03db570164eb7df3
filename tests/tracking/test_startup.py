import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.conftest import changed
from threefold.config.loading import REPOSITORY, parse_recipe
from threefold.run_folder.folder import RunFolder
from threefold.runtime.launchers import age_seconds
from threefold.tracking.clocks import Startup
from threefold.tracking.tracker import Tracker

SECONDS_IN_RANK = 1.5
LAUNCHED = f"""
import json, os, time
from threefold.tracking.clocks import Startup
if "TORCHELASTIC_RESTART_COUNT" not in os.environ:
    time.sleep({SECONDS_IN_RANK})
print(json.dumps(Startup().seconds))
"""
LAUNCHER = """
import subprocess, sys, time
time.sleep(0.3)
subprocess.run([sys.executable, "-c", {code!r}], check=True)
"""
WITHOUT_COMPILER = """
import os, sys
import torch, deepspeed
from threefold.engine.deepspeed_overrides import import_muon
import_muon()
from deepspeed.runtime.zero.muon import muon_optimizer
assert "torch._inductor.compile_fx" not in sys.modules and "TORCHDYNAMO_DISABLE" not in os.environ
assert torch.compile(torch.nn.Identity())._orig_mod  # others still compile
assert "torch._inductor.compile_fx" in sys.modules
"""


@pytest.fixture
def startup() -> Startup:
    return Startup()


def test_laps_add_up_to_the_age_of_the_process(startup: Startup) -> None:
    startup.mark("imports")
    time.sleep(0.05)
    startup.mark("data")
    startup.mark("model")
    time.sleep(0.05)
    startup.mark("data")  # again
    parts = startup.seconds
    assert list(parts) == ["imports", "data", "model"]  # pytest is not a launcher
    assert 0.1 <= parts["data"] < 1.0 and parts["model"] < 0.05
    assert sum(parts.values()) == pytest.approx(age_seconds(os.getpid()), abs=0.05)


def launched(tmp_path: Path, **environment: str) -> dict[str, float]:
    """Return the first times of a process that a `torchrun` has started."""
    (tmp_path / "torchrun").write_text(LAUNCHER.format(code=LAUNCHED))
    done = subprocess.run(
        [sys.executable, str(tmp_path / "torchrun")],
        cwd=REPOSITORY,
        env=os.environ | {"PYTHONPATH": str(REPOSITORY)} | environment,
        capture_output=True,
        text=True,
        check=True,
    )
    return json.loads(done.stdout)


def test_a_launcher_counts_from_its_own_start(tmp_path: Path) -> None:
    began = time.monotonic()
    seconds = launched(tmp_path)
    assert list(seconds) == ["launcher"]
    assert 0.3 <= seconds["launcher"] < time.monotonic() - began - SECONDS_IN_RANK


def test_a_launcher_that_starts_ranks_again_is_left_out(tmp_path: Path) -> None:
    assert launched(tmp_path, TORCHELASTIC_RESTART_COUNT="1") == {}


def test_the_first_step_is_reported(
    small, startup: Startup, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = RunFolder(tmp_path)
    tracker = Tracker(parse_recipe(changed(small), "test"), folder)
    startup.seconds = {"launcher": 2.25}
    startup.mark("imports")
    assert startup.running
    tracker.started(1, startup.stop("first step"), compiled=True)
    assert not startup.running
    event = folder.read_events()[-1]
    assert (event["event"], event["step"]) == ("first_step", 1)
    assert event["seconds"] == startup.seconds and event["compiled"] is True
    said = capsys.readouterr().out
    assert said.startswith("started in ") and "s: launcher 2.2, imports " in said
    tracker.close()


@pytest.mark.long
def test_an_optimizer_that_no_recipe_has_brings_no_compiler() -> None:
    environment = {k: v for k, v in os.environ.items() if k != "TORCHDYNAMO_DISABLE"}
    command = [sys.executable, "-c", WITHOUT_COMPILER]
    subprocess.run(command, cwd=REPOSITORY, env=environment | {"DS_ACCELERATOR": "cpu"}, check=True)
