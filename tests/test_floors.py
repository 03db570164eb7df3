"""Modules import only from their own package or from lower floors, without import cycles."""

import ast
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[1]

# From the lowest floor up. The longest prefix that fits a module decides its floor.
FLOORS = [
    [
        "models.errors",
        "models.config",
        "models.config",
        "models.experts.overlap",
        "models.cost",
        "models.parametrization",
        "models.pipeline.schedule",
        "models.context_parallel.division",
        "models.config",
    ],
    ["models.sharding", "models.kernels"],
    ["models.parallel"],
    ["models.context_parallel", "models.experts"],
    ["models.transformer", "models.initialization", "models.hugging_face"],
    ["models.layer_specs"],
    ["models.pipeline"],
    ["recipes.training.recipe"],
    ["recipes.gpus", "recipes.pictures"],
    ["recipes.planning.inputs"],
    ["recipes.planning.memory", "recipes.planning.time"],
    ["recipes.planning.search"],
    ["recipes.planning.measured", "recipes.planning.goodput"],
    ["recipes.planning.output", "recipes.planning.command_line"],
    ["recipes.training.runtime"],
    ["recipes.training.run_folder"],
    ["recipes.training.data"],
    ["recipes.training.checkpoint"],
    ["recipes.training.snapshots"],
    ["recipes.training.supervision"],
    ["recipes.training.engine"],
    ["recipes.training.evaluation"],
    ["recipes.training.tracking"],
    ["recipes.training.loop"],
    ["recipes.reporting.record"],
    ["recipes.reporting.page"],
    ["recipes.training.preflight"],  # compares its measurements with the planner's numbers
    ["recipes.nodes"],
    ["recipes.preparing", "recipes.tracing", "recipes.launching", "recipes.out_of_memory"],
    ["recipes.proving", "recipes.converting"],
    ["recipes.sweeping"],
    ["recipes"],
    ["threefold.launch.standby"],  # becomes pretrain.py
]
STANDARD_LIBRARY_ONLY = FLOORS[0]
NO_DEEPSPEED = [*FLOORS[1], *FLOORS[2], *FLOORS[3], *FLOORS[4]]
NO_TORCH = [  # imported before torch, by commands of a login node, or in processes of their own
    *FLOORS[0],
    "models.hugging_face.config",
    "models.hugging_face.config",
    "models.hugging_face.config",
    "recipes.training.recipe",
    "recipes.gpus",
    "recipes.pictures",
    "recipes.planning",
    "recipes.training.run_folder",
    "threefold.runtime.exits",
    "threefold.runtime.exits",
    "threefold.runtime.environment",
    "threefold.runtime.output",
    "threefold.runtime.environment",
    "recipes.reporting",
    "threefold.data.corpus",
    "threefold.data.corpus",
    "threefold.data.task_file",
    "threefold.data.task_file",
    "threefold.data.task_file",
    "threefold.data.corpus",
    "threefold.data.sample_order",
    "threefold.data.token_file",
    "threefold.checkpoint.compatibility",
    "threefold.checkpoint.format",
    "threefold.checkpoint.retention",
    "threefold.checkpoint.format",
    "threefold.checkpoint.snapshots.node_memory",
    "threefold.checkpoint.snapshots.node_memory",
    "threefold.checkpoint.snapshots.node_memory",
    "threefold.supervision.supervisor",
    "threefold.supervision.hang_report",
    "threefold.supervision.hang_report",
    "threefold.supervision.hang_report",
    "threefold.supervision.loss_watch",
    "threefold.supervision.stragglers",
    "threefold.supervision.watchdog",
    "threefold.tracking.profiler",
    "threefold.pretrain.after_step",
    "threefold.pretrain.experiment",
    "threefold.pretrain.after_step",
    "threefold.pretrain.rejection",
    "threefold.pretrain.after_step",
    "threefold.pretrain.run",
    "threefold.pretrain.preflight.judge",
    "threefold.pretrain.preflight.judge",
    "threefold.pretrain.preflight.judge",
    "threefold.pretrain.preflight.run",
    "threefold.pretrain.preflight.judge",
    "threefold.tracking.tracker",
    "threefold.tracking.messages",
    "threefold.run_folder.json_lines",
    "threefold.tracking.clocks",
    "threefold.tracking.clocks",
    "threefold.tracking.tracker",
    "threefold.tracking.weights_and_biases",
    "threefold.tracking.wandb_connection",
    "threefold.tracking.weights_and_biases",
    "threefold.tracking.wandb_connection",
    "threefold.tracking.weights_and_biases",
    "threefold.pretrain.out_of_memory",
    "threefold.launch.launcher",
    "threefold.launch.attempt",
    "threefold.launch.diagnosis",
    "threefold.launch.diagnosis",
    "threefold.launch.diagnosis",
    "threefold.launch.launcher",
    "threefold.launch.nodes",
    "threefold.launch.rank_command",
    "threefold.launch.replanning",
    "threefold.launch.connection",
    "threefold.launch.gpu_health",
    "threefold.launch.gpu_watch",
    "threefold.launch.hosts",
    "threefold.launch.node_agent",
    "threefold.launch.node_agent",
    "threefold.launch.snapshot_server",
    "threefold.launch.node_agent",
    "threefold.prove.layouts",
    "threefold.prove.shrink",
    "threefold.prove.shrink",
    "threefold.sweep.choice",
    "threefold.sweep.links.fit",
    "threefold.sweep.links.fit",
    "threefold.sweep.links.measure_cluster",
    "threefold.sweep.links.measurements",
    "threefold.sweep.report",
    "threefold.sweep.breakdown_parts",
    "threefold.sweep.folder",
    "threefold.commands.sweep_options",
    "threefold.sweep.table",
    "threefold.sweep.width_transfer.coordinates",
    "threefold.sweep.width_transfer.models",
    "threefold.sweep.width_transfer.models",
    "threefold.sweep.width_transfer.models",
    "threefold.sweep.trial",
    "threefold.sweep.report",
    "threefold.sweep.ranks.protocol",
    "threefold.sweep.ranks.controller",
]
# The layers of the model get sizes and groups, not the recipe's section.
NO_CONFIG = [*FLOORS[1], *FLOORS[2], *FLOORS[3]]
MAX_MODULES = 9  # in a package

SOURCES = {
    ".".join(path.relative_to(REPOSITORY).with_suffix("").parts): path
    for folder in ("models", "recipes")
    for path in sorted((REPOSITORY / folder).rglob("*.py"))
    if path.name != "__init__.py"
}


def is_within(module: str, prefixes: list[str]) -> bool:
    return any(module == prefix or module.startswith(prefix + ".") for prefix in prefixes)


def floor(module: str) -> tuple[int, str]:
    """Return the floor of a module, and the prefix that decides it."""
    fitting = [
        (len(prefix), level, prefix)
        for level, prefixes in enumerate(FLOORS)
        for prefix in prefixes
        if is_within(module, [prefix])
    ]
    _, level, prefix = max(fitting)
    return level, prefix


def imported_modules(source: str, *, for_types: bool = True) -> set[str]:
    """Return everything that a source imports, `from package import module` as package.module.

    for_types: include imports under `if TYPE_CHECKING`
    """
    found, tree = set(), ast.parse(source)
    if not for_types:
        tree.body = [node for node in tree.body if "TYPE_CHECKING" not in ast.unparse(node)]
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "relative imports hide what they import"
            for alias in node.names:
                file = REPOSITORY.joinpath(*node.module.split("."), alias.name + ".py")
                found.add(f"{node.module}.{alias.name}" if file.exists() else node.module)
    return found


def violations(module: str, source: str) -> list[str]:
    """Return the imports that the floor of a module does not allow."""
    level, prefix = floor(module)
    wrong = []
    at_run_time = imported_modules(source, for_types=False)
    for name in imported_modules(source):
        package = name.split(".")[0]
        ours = package in ("models", "recipes")
        if is_within(module, STANDARD_LIBRARY_ONLY) and not (
            ours or package in sys.stdlib_module_names
        ):
            wrong.append(f"{name} is not in the standard library")
        if package == "transformers" and level < floor("recipes.preparing")[0]:
            wrong.append(f"{name} is for commands")
        if package == "deepspeed" and is_within(module, NO_DEEPSPEED):
            wrong.append(f"{name} brings DeepSpeed")
        no_torch = is_within(module, NO_TORCH) and name in at_run_time
        if no_torch and (
            package in ("torch", "deepspeed") or (ours and not is_within(name, NO_TORCH))
        ):
            wrong.append(f"{name} brings torch")
        if ours:
            other, its_prefix = floor(name)
            same = its_prefix == prefix
            if other > level or (other == level and not same and level > 0):
                wrong.append(f"{name} is not below {prefix}")
            if is_within(module, NO_CONFIG) and name == "models.config":
                wrong.append("models.config is for the model's higher floors")
    return wrong


@pytest.mark.parametrize("module", SOURCES)
def test_imports_only_from_lower_floors(module: str) -> None:
    assert violations(module, SOURCES[module].read_text()) == []


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("models.cost", "import torch"),
        ("models.parallel.layers", "from models.transformer import Block"),
        ("models.parallel.layers", "from models.config import ModelConfig"),
        ("models.transformer", "import deepspeed"),
        ("threefold.config.recipe", "from models.sharding import Sharding"),
        ("threefold.data.dataset", "from threefold.checkpoint import state"),
        ("threefold.data.dataset", "def f():\n    import transformers"),
        ("threefold.plan.job", "from threefold.tracking.tracker import Tracker"),
        (
            "threefold.supervision.hang_report",
            "from threefold.supervision.supervisor import Supervisor",
        ),
        (
            "threefold.supervision.supervisor",
            "def f():\n    from threefold.engine.engine import Engine",
        ),
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
        for other in imports.get(module, ()):
            if found := visit(other, [*path, module]):
                return found
        done.add(module)
        return []

    return next((found for module in imports if (found := visit(module, []))), [])


def test_no_modules_import_each_other() -> None:
    imports = {
        name: imported_modules(path.read_text(), for_types=False) for name, path in SOURCES.items()
    }
    assert cycle(imports) == []
    assert cycle({"a": {"b"}, "b": {"c"}, "c": {"b"}}) == ["b", "c", "b"]


def test_packages_are_small() -> None:
    counts: dict[Path, int] = {}
    for path in SOURCES.values():
        counts[path.parent] = counts.get(path.parent, 0) + 1
    counts.pop(REPOSITORY / "recipes")  # one module for each command
    assert {folder: count for folder, count in counts.items() if count > MAX_MODULES} == {}
    assert not list((REPOSITORY / "recipes" / "training").glob("[!_]*.py"))
