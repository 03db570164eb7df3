"""One part in this process: python -m tests.gpu.part FUNCTION ARGUMENT SETTING."""

import importlib
import json
import os
import sys
import traceback
from collections.abc import Callable

from tests.gpu.packages import OPTIONAL
from tests.gpu.setting import Result, Setting


def main() -> None:
    """Run the part and write its result."""
    function, argument, text = sys.argv[1:]
    setting = Setting.from_json(json.loads(text))
    result = run(function, setting, argument)
    setting.save(result, result.status)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # the teardown of library threads sometimes aborts


def run(function: str, setting: Setting, argument: str = "") -> Result:
    """Run a part; an error fails the part, and a missing package skips it.

    Args:
        function: "module:function"
        setting: the machine and the sizes
        argument: passed to the function unless it is empty
    """
    module, name = function.split(":")
    try:
        part: Callable[..., Result] = getattr(importlib.import_module(module), name)
        return part(setting, argument) if argument else part(setting)
    except Exception as error:
        traceback.print_exc()
        if isinstance(error, ModuleNotFoundError) and error.name in OPTIONAL:
            return Result(skipped=f"the package {error.name} is not installed")
        if isinstance(error, ImportError) and (package := optional_package_of(error)):
            return Result(skipped=f"the package {package} cannot be imported: {error}")
        result = setting.saved()
        result.failures.append(f"{type(error).__name__}: {error}")
        return result


def optional_package_of(error: ImportError) -> str | None:
    """Return the optional package that was being imported, such as one without its dependencies."""
    frames = (frame for frame, _ in traceback.walk_tb(error.__traceback__))
    modules = (str(frame.f_globals.get("__name__")).partition(".")[0] for frame in frames)
    return next((name for name in modules if name in OPTIONAL), None)


if __name__ == "__main__":
    main()
