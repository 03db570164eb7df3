"""Replace a class that DeepSpeed takes from a module's globals and offers no argument for."""

from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType


@contextmanager
def replaced(module: ModuleType, name: str, value: object) -> Iterator[None]:
    """Let a module's global be another object for the duration of the context."""
    original = getattr(module, name)
    setattr(module, name, value)
    try:
        yield
    finally:
        setattr(module, name, original)
