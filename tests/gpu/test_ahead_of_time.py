"""Every fused function compiles to machine code of an H100, on a machine without a GPU."""

import importlib.util
import os
import subprocess
import sys

import pytest

from tests.conftest import TODAY, long_in_turn
from threefold.config.loading import REPOSITORY

TRITON = REPOSITORY / ".venv" / "triton"  # for a torch without it: `make long` installs it there
DAYS = 18  # in which the tests compile all calls
UNSIGNED_CONSTANT = (
    "from models.kernels import elementwise as kernels; "
    "kernels.GOLDEN_32_ON_GPU = kernels.GOLDEN_32_ON_CPU; "
)

pytestmark = pytest.mark.skipif(
    not TRITON.exists() and importlib.util.find_spec("triton") is None,
    reason="Triton is not installed: make long",
)


def compile_all(before: str = "", *options: str) -> subprocess.CompletedProcess:
    """Run the command in a process of its own, in which Triton can be imported."""
    code = (
        f"import sys; {before}from tests.gpu.ahead_of_time import main; sys.exit(main({options}))"
    )
    return subprocess.run(
        [sys.executable, "-c", code],
        cwd=REPOSITORY,
        env=os.environ
        | {
            "PYTHONPATH": os.pathsep.join([str(TRITON), os.environ.get("PYTHONPATH", "")]),
            "DS_ACCELERATOR": "cpu",
        },
        capture_output=True,
        text=True,
    )


@pytest.mark.long
def test_every_fused_function_compiles() -> None:
    """A portion of the calls each day; tests.gpu.ahead_of_time compiles all of them."""
    done = compile_all("", "--portion", f"{TODAY % DAYS}/{DAYS}")
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-2000:]
    assert ": 1 kernel\n" in done.stdout
    assert "every fused function of models/ compiles for sm_90" in done.stdout


@long_in_turn(3)
def test_a_constant_that_does_not_fit_fails() -> None:
    done = compile_all(UNSIGNED_CONSTANT, "--only", "_drop_out", "--recipe", "GPT, bf16")
    assert done.returncode == 1
    assert "2654435769 is out of range for type int32" in done.stdout


@long_in_turn(4)
def test_a_function_that_no_recipe_reaches_fails() -> None:
    done = compile_all("", "--only", "no function", "--recipe", "mup")
    assert done.returncode == 1
    assert "no traced recipe calls models.kernels.elementwise._drop_out" in done.stdout
