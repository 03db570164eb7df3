"""Packages import only from lower floors, modules not in a circle, and light commands not torch."""

import ast
import functools
import json
import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[1]
# From the lowest floor up. Packages of a floor do not import each other.
ORDER = (
    ("models",),
    ("gpus", "pipeline"),
    ("config",),
    ("plan", "runtime"),
    ("run_folder",),
    ("data",),
    ("checkpoint", "supervision"),
    ("engine", "prepare_data", "report"),
    ("convert", "trace", "tracking"),
    ("pretrain",),
    ("launch", "prove"),
    ("sweep",),
    ("commands",),
    ("recipes",),
)
FLOORS = {package: floor for floor, packages in enumerate(ORDER) for package in packages}
# The packages that may import transformers, which takes seconds.
WITH_TRANSFORMERS = ("prepare_data", "convert", "commands")
# These start on a login node, in processes of their own, or before a recipe is checked.
WITHOUT_TORCH = (
    "recipes.convert",
    "recipes.generate",
    "recipes.launch",
    "recipes.plan",
    "recipes.prepare_data",
    "recipes.pretrain",
    "recipes.prove",
    "recipes.report",
    "recipes.sweep",
    "threefold.sweep.ranks.protocol",  # of the ranks, which report before they import torch
)
# Processes of their own on every node, of which some watch GPUs or hold snapshots for days.
STANDARD_LIBRARY_ONLY = (
    "threefold.launch.gpu_watch",
    "threefold.launch.node_agent",
    "threefold.launch.snapshot_server",
    "threefold.supervision.watchdog",
)
SOURCES = {
    ".".join(path.relative_to(REPOSITORY).with_suffix("").parts): path.read_text(encoding="utf-8")
    for folder in ("models", "threefold", "recipes")
    for path in sorted((REPOSITORY / folder).rglob("*.py"))
    if path.name != "__init__.py"
}


def package_of(module: str) -> str:
    """Return the package that ORDER names: that of threefold/, or "models" or "recipes"."""
    top, second = module.split(".")[:2]
    return second if top == "threefold" else top


@functools.cache
def import_statements(source: str) -> list[tuple[ast.AST, bool]]:
    """Return the import statements of a source, with True for those under `if TYPE_CHECKING`."""
    return [
        (node, for_types)
        for part in ast.parse(source).body
        for for_types in [isinstance(part, ast.If) and "TYPE_CHECKING" in ast.unparse(part.test)]
        for node in ast.walk(part)
        if isinstance(node, ast.Import | ast.ImportFrom)
    ]


def imported_modules(source: str, *, for_types: bool = True) -> set[str]:
    """Return everything that a source imports, `from package import module` as package.module.

    for_types: include imports under `if TYPE_CHECKING`
    """
    names = set()
    for node, is_for_types in import_statements(source):
        if is_for_types and not for_types:
            continue
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "relative imports hide what they import"
            for alias in node.names:
                file = REPOSITORY.joinpath(*str(node.module).split("."), alias.name + ".py")
                names.add(f"{node.module}.{alias.name}" if file.exists() else str(node.module))
    return names


def violations(module: str, source: str) -> list[str]:
    """Return the imports that are not allowed for the package of a module."""
    package = package_of(module)
    wrong = []
    for name in sorted(imported_modules(source)):
        top = name.split(".")[0]
        if top == "deepspeed" and package == "models" and module != "models.layer_specs":
            wrong.append(f"{name}: of models/, only layer_specs.py knows DeepSpeed")
        if top == "transformers" and package not in WITH_TRANSFORMERS:
            wrong.append(f"{name}: only {WITH_TRANSFORMERS} import it")
        if top in ("models", "threefold", "recipes"):
            other = package_of(name)
            if other != package and FLOORS[other] >= FLOORS[package]:
                wrong.append(f"{name}: {other} is not below {package}")
    return wrong


def test_packages_import_only_from_lower_floors() -> None:
    assert {package_of(module) for module in SOURCES} == set(FLOORS)
    wrong = {module: violations(module, source) for module, source in SOURCES.items()}
    assert {module: names for module, names in wrong.items() if names} == {}


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("models.transformer", "import deepspeed"),
        ("models.transformer", "from threefold.pipeline.schedules import Pipeline"),
        ("threefold.data.dataset", "from threefold.checkpoint import state"),
        ("threefold.data.dataset", "def f():\n    import transformers"),
        ("threefold.plan.job", "from threefold.tracking.tracker import Tracker"),
        ("threefold.supervision.supervisor", "def f():\n    from threefold.engine import build"),
        ("threefold.report.page", "from threefold.prepare_data import corpus"),
        ("threefold.launch.standby", "from recipes import pretrain"),
    ],
)
def test_a_wrong_import_is_seen(module: str, source: str) -> None:
    assert violations(module, source)


def cycle(imports: dict[str, set[str]]) -> list[str]:
    """Return modules that import each other in a circle; empty if there are none."""
    done: set[str] = set()

    def visit(module: str, path: list[str]) -> list[str]:
        if module in path:
            return [*path[path.index(module) :], module]
        if module in done:
            return []
        for other in sorted(imports.get(module, ())):
            if circle := visit(other, [*path, module]):
                return circle
        done.add(module)
        return []

    return next((circle for module in imports if (circle := visit(module, []))), [])


def test_no_modules_import_each_other() -> None:
    imports = {name: imported_modules(source, for_types=False) for name, source in SOURCES.items()}
    assert cycle(imports) == []
    assert cycle({"a": {"b"}, "b": {"c"}, "c": {"b"}}) == ["b", "c", "b"]


IMPORT = """
import importlib, json, sys
before = set(sys.modules)
for name in sys.argv[1:]:
    importlib.import_module(name)
    packages = {each.partition(".")[0] for each in sys.modules.keys() - before}
    print(json.dumps([name, sorted(packages - sys.stdlib_module_names)]))
    before = set(sys.modules)
"""


def imported_packages(*modules: str) -> dict[str, set[str]]:
    """Return the packages outside the standard library that the import of each module loads.

    One process imports all modules in turn, so a package counts to the first that imports it.
    """
    command = [sys.executable, "-c", IMPORT, *modules]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return {name: set(packages) for name, packages in map(json.loads, done.stdout.splitlines())}


def test_light_commands_do_not_import_torch() -> None:
    packages = imported_packages(*WITHOUT_TORCH)
    assert "pydantic" in set().union(*packages.values())  # an import is noticed
    heavy = {"torch", "deepspeed", "transformers"}
    assert {name: found & heavy for name, found in packages.items() if found & heavy} == {}


def test_processes_on_nodes_need_only_the_standard_library() -> None:
    packages = imported_packages(*STANDARD_LIBRARY_ONLY)
    assert {name: found - {"threefold"} for name, found in packages.items()} == {
        name: set() for name in STANDARD_LIBRARY_ONLY
    }
