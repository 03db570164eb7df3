"""Division of a stage's parameters into buckets, whose gradients are summed together.

Each bucket is an optimizer group, and so a flat tensor of its own. ZeRO divides every flat tensor
equally among the data ranks, so that one reduce-scatter sums a bucket and one all-gather returns
its updated weights.
"""

from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence

from torch import nn

from models.experts.layer import expert_layers
from models.parallel.layers import Deferring


def divide_into_buckets(
    chunks: Iterable[Sequence[nn.Parameter]],
    *,
    elements: int,
    kinds: Mapping[nn.Parameter, Hashable],
    units: Mapping[nn.Parameter, Hashable],
) -> list[list[nn.Parameter]]:
    """Return the parameters of each bucket, in the order of the layers.

    A bucket has parameters of one chunk and one kind.

    Args:
        chunks: the parameters of each chunk in the order of the layers
        elements: maximum size of a bucket, unless a single unit is larger
        kinds: properties that all parameters of a bucket share
        units: maps a parameter to its unit; the parameters of a unit are adjacent in one bucket
    """
    buckets: list[list[nn.Parameter]] = []
    for parameters in chunks:
        for kind in dict.fromkeys(kinds[each] for each in parameters):
            of_kind = [each for each in parameters if kinds[each] == kind]
            buckets += _filled(_units(of_kind, units), elements)
    return buckets


def _units(
    parameters: Sequence[nn.Parameter], units: Mapping[nn.Parameter, Hashable]
) -> Iterator[list[nn.Parameter]]:
    """Yield the parameters of each unit; a parameter without a key is a unit."""
    joined: dict[Hashable, list[nn.Parameter]] = {}
    for each in parameters:
        joined.setdefault(units.get(each, each), []).append(each)
    yield from joined.values()


def _filled(units: Iterable[list[nn.Parameter]], elements: int) -> list[list[nn.Parameter]]:
    """Join units, from the first to the last, as long as they fit into a bucket."""
    buckets: list[list[nn.Parameter]] = []
    size = 0
    for unit in units:
        more = sum(each.numel() for each in unit)
        if buckets and size + more <= elements:
            buckets[-1] += unit
            size += more
        else:
            buckets.append(list(unit))
            size = more
    return buckets


def deferring_parameters(module: nn.Module) -> set[nn.Parameter]:
    """Return the parameters whose gradients a zero-bubble schedule defers to weight passes."""
    linears = (each for each in module.modules() if isinstance(each, Deferring))
    return {
        parameter
        for each in linears
        for name, parameter in each.named_parameters()
        if not name.endswith("bias")
    }


def units_of_experts(module: nn.Module) -> dict[nn.Parameter, Hashable]:
    """Return a key for each weight of an expert: the weights of a kind in a layer are adjacent.

    `grouped_matmul` then reads them as one tensor.
    """
    return {
        parameter: (layer.number, name.split("_")[0])
        for layer in expert_layers(module)
        for name, parameter in layer.experts.named_parameters()
    }
