"""Parts that fail, sleep or pass at once, for tests of the command; they import no torch."""

import os
import subprocess
import sys
import time

from tests.gpu.setting import Result, Setting


def sleep_with_a_child(setting: Setting) -> Result:
    """Save a result, start a process and sleep longer than any limit."""
    found = Result()
    found.check(True, "it began")
    setting.save(found)
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(120)"])
    (setting.output / "child").write_text(str(child.pid))
    time.sleep(120)
    return Result()


def raise_an_error(setting: Setting) -> Result:
    """Fail."""
    raise RuntimeError("no kernel image")


def save_and_raise(setting: Setting) -> Result:
    """Save a result and fail."""
    found = Result()
    found.say("MFU 52 %")
    setting.save(found)
    raise RuntimeError("CUDA out of memory")


def crash(setting: Setting) -> Result:
    """End the process."""
    os._exit(11)


def lack_a_package(setting: Setting) -> Result:
    """Fail as without an optional package."""
    raise ModuleNotFoundError("No module named 'transformers'", name="transformers")


def lack_a_dependency(setting: Setting) -> Result:
    """Fail as with an optional package whose own dependency is missing."""
    exec("import huggingface_hub_of_no_machine", {"__name__": "transformers.utils.hub"})
    return Result()


def lack_a_module_of_ours(setting: Setting) -> Result:
    """Fail because a module of this repository is missing."""
    import models.no_such_module  # type: ignore[import-not-found]  # noqa: F401

    return Result()


def succeed(setting: Setting) -> Result:
    """Pass."""
    result = Result()
    result.check(True, "it works")
    return result
