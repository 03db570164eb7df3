"""The sizes of the base model, at which every parametrization is the standard one."""

from collections.abc import Mapping
from typing import Literal

from models.errors import UserError

Parametrization = Literal["standard", "mup", "completep"]

REQUIRED: dict[str, tuple[str, ...]] = {
    "standard": (),
    "mup": ("base_hidden_size",),
    "completep": ("base_hidden_size", "base_layers"),
}
OPTIONAL: dict[str, tuple[str, ...]] = {
    "standard": (),
    "mup": ("base_head_size",),
    "completep": ("base_head_size",),
}


def check_base_sizes(
    parametrization: Parametrization,
    given: Mapping[str, int | None],
    own: Mapping[str, int],
) -> None:
    """Check that the sizes of the base model are those that the parametrization reads.

    Args:
        parametrization: the parametrization
        given: the sizes of the base model by key; None: not given
        own: the sizes of the model itself by the same keys

    Raises:
        UserError: a required size is missing, or a size has no effect.
    """
    required = REQUIRED[parametrization]
    for key in required:
        if given[key] is None:
            raise UserError(
                f'{key} is missing and required with parametrization = "{parametrization}"; use '
                f"that of the model whose learning rate was tuned, such as {key} = {own[key]}"
            )
    for key, value in given.items():
        if value is None or key in (*required, *OPTIONAL[parametrization]):
            continue
        others = [each for each in REQUIRED if key in (*REQUIRED[each], *OPTIONAL[each])]
        choices = " or ".join(f'"{each}"' for each in others)
        raise UserError(
            f'{key} = {value} has no effect with parametrization = "{parametrization}"; leave it '
            f"out, or use parametrization = {choices}"
        )
