"""A file imports only from lower floors; DESIGN of the tree, enforced."""

import ast
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[1]

# The first prefix that fits a module decides its floor.
FLOORS = [
    ("models.errors", 0),
    ("models.config", 0),
    ("models.cost", 0),
    ("models.sharding", 1),
    ("models.kernels", 1),
    ("models.parallel", 1),
    ("models.transformer", 2),
    ("models.initialization", 2),
    ("models.hugging_face", 2),
    ("models.layer_specs", 3),
    ("models.pipeline.order", 0),
    ("models.pipeline.simulation", 0),
    ("models.pipeline.balance", 0),
    ("models.pipeline.communication", 0),
    ("models.pipeline", 3),
    ("recipes.training.exit_codes", 4),
    ("recipes.training.garbage", 4),
    ("recipes.training.guard", 4),
    ("recipes.training.hang", 4),
    ("recipes.training.launchers", 4),
    ("recipes.training.leaving", 4),
    ("recipes.training.startup", 4),
    ("recipes.training.streams", 4),
    ("recipes.training.flight_recorder", 4),
    ("recipes.training.torch_variables", 4),
    ("recipes.training.loss_watch", 5),
    ("recipes.training.stragglers", 5),
    ("recipes.training.supervisor", 5),
    ("recipes.training.micro_batch", 3),
    ("recipes.training.gpu_support", 3),
    ("recipes.training.host_memory", 3),
    ("recipes.training.training_state", 3),
    ("recipes.training.rank_tree", 3),
    ("recipes.training.assembly", 3),
    ("recipes.training.blend", 4),
    ("recipes.training.recipe", 4),
    ("recipes.training.recipe_errors", 4),
    ("recipes.training.topology", 4),
    ("recipes.training.deepspeed_config", 4),
    ("recipes.training.deepspeed_schema", 4),
    ("recipes.training.learning_rate", 4),
    ("recipes.training.token_file", 4),
    ("recipes.training.run_folder", 4),
    ("recipes.training.folder_lock", 4),
    ("recipes.training.line_file", 4),
    ("recipes.training.history", 4),
    ("recipes.training.progress", 4),
    ("recipes.training.step_clock", 4),
    ("recipes.training.tensor_file", 4),
    ("recipes.training.manifest", 4),
    ("recipes.training.provenance", 4),
    ("recipes.planning", 4),
    ("recipes.proving.shrink", 4),
    ("recipes.proving.layouts", 4),
    ("recipes.proving.corpus", 4),
    ("recipes.training.copies", 5),
    ("recipes.training.data", 5),
    ("recipes.training.feed", 5),
    ("recipes.training.checkpoint", 5),
    ("recipes.training.checkpoint_writer", 5),
    ("recipes.training.tracking", 5),
    ("recipes.training.processes", 5),
    ("recipes.training.zero", 5),
    ("recipes.training.deepspeed_patches", 5),
    ("recipes.training.engine", 6),
    ("recipes.training.resume", 6),
    ("recipes.training.timeline", 7),
    ("recipes.tracing", 7),
    ("recipes", 8),
]
FORBIDDEN = {  # floor -> packages it does without
    1: {"deepspeed", "transformers"},
    2: {"deepspeed", "transformers"},
    4: {"torch", "deepspeed", "transformers"},
}
SOURCES = sorted(
    path
    for folder in ("models", "recipes")
    for path in (REPOSITORY / folder).rglob("*.py")
    if path.name != "__init__.py"
)


def module_name(path: Path) -> str:
    return ".".join(path.relative_to(REPOSITORY).with_suffix("").parts)


def floor(module: str) -> int:
    return next(
        level for prefix, level in FLOORS if module == prefix or module.startswith(prefix + ".")
    )


def imported_modules(source: str) -> set[str]:
    """Everything a source imports, `from package import module` as package.module."""
    found = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "relative imports hide what they import"
            for alias in node.names:
                file = REPOSITORY.joinpath(*node.module.split("."), alias.name + ".py")
                found.add(f"{node.module}.{alias.name}" if file.exists() else node.module)
    return found


def violations(module: str, source: str) -> list[str]:
    """What a module imports although its floor may not."""
    level, wrong = floor(module), []
    for name in imported_modules(source):
        package = name.split(".")[0]
        outside = package not in sys.stdlib_module_names and package not in ("models", "recipes")
        if package in FORBIDDEN.get(level, ()) or (level == 0 and outside):
            wrong.append(f"floor {level} does without {name}")
        elif package in ("models", "recipes"):
            other = floor(name)
            beside = other == level and level in (5, 6) and name != module
            if other > level or beside or (level == 1 and name == "models.config"):
                wrong.append(f"{name} (floor {other}) is not below floor {level}")
            if level == 4 and 1 <= other <= 3:
                wrong.append(f"{name} brings torch to floor 4")
    return wrong


@pytest.mark.parametrize("path", SOURCES, ids=module_name)
def test_imports_only_from_lower_floors(path: Path) -> None:
    assert violations(module_name(path), path.read_text()) == []


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("models.cost", "import torch"),
        ("models.parallel.linear", "from models.transformer import Block"),
        ("models.parallel.linear", "from models.config import ModelConfig"),
        ("recipes.training.recipe", "from models.sharding import Sharding"),
        ("recipes.training.data", "from recipes.training import checkpoint"),
        ("recipes.training.tracking", "def f():\n    from recipes.training.engine import Engine"),
    ],
)
def test_a_wrong_import_is_seen(module: str, source: str) -> None:
    assert violations(module, source)
