"""Temporary replacement of an attribute that other code reads and that no argument can change."""

from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def replaced(owner: object, name: str, value: object) -> Iterator[None]:
    """Replace an attribute of a module or a class for the duration of the context.

    An attribute that a class inherits is inherited again afterwards.
    """
    attributes = vars(owner)  # unlike getattr, it returns static methods as such
    is_own, original = name in attributes, attributes.get(name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        if is_own:
            setattr(owner, name, original)
        else:
            delattr(owner, name)
