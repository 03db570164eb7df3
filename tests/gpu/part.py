"""Run one part in this process: python -m tests.gpu.part MODULE:FUNCTION SETTING RESULT."""

import importlib
import json
import os
import sys
import traceback
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

from tests.gpu.packages import OPTIONAL
from tests.gpu.setting import Result, Setting


def main() -> None:
    """Run the part and write its result."""
    function, setting, file = sys.argv[1:]
    result = run(function, Setting.from_json(json.loads(setting)))
    Path(file).write_text(json.dumps(asdict(result) | {"status": result.status}))
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # the teardown of library threads sometimes aborts


def run(function: str, setting: Setting) -> Result:
    """Run a part; an error fails the part, and a missing package skips it."""
    module, name = function.split(":")
    try:
        part: Callable[[Setting], Result] = getattr(importlib.import_module(module), name)
        return part(setting)
    except Exception as error:
        if isinstance(error, ImportError) and error.name in OPTIONAL:
            return Result(skipped=f"the package {error.name} is not installed")
        traceback.print_exc()
        return Result(failures=[f"{type(error).__name__}: {error}"])


if __name__ == "__main__":
    main()
