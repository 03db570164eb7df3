"""The pairs of ranks that a preflight measures: few rounds, and two partners for every rank."""

import pytest

from threefold.pretrain.preflight.evaluate import (
    NETWORK,
    NODE_LINK,
    PIPELINE,
    Scope,
    pair_rounds,
    scopes,
    unit,
)


@pytest.mark.parametrize("size", [*range(1, 40), 128, 1023, 1024])
def test_rounds_are_few_and_disjoint_and_give_each_member_two_partners(size: int) -> None:
    rounds = pair_rounds(size)
    assert len(rounds) <= 4
    partners: dict[int, set[int]] = {member: set() for member in range(size)}
    for pairs in rounds:
        members = [member for pair in pairs for member in pair]
        assert len(set(members)) == len(members) and set(members) <= set(range(size))
        for first, second in pairs:
            assert first < second
            partners[first].add(second)
            partners[second].add(first)
    assert all(len(found) >= min(2, size - 1) for found in partners.values())


def test_partners_have_the_same_position_in_their_nodes() -> None:
    scope = Scope(NETWORK, size=3, stride=8)
    assert scope.partner(3, [(0, 1)]) == 11 and scope.partner(11, [(0, 1)]) == 3
    assert scope.partner(19, [(0, 1)]) is None
    within = Scope(NODE_LINK, size=8, stride=1)
    assert within.partner(10, [(2, 3)]) == 11


@pytest.mark.parametrize(
    ("world_size", "per_node", "stages", "expected"),
    [
        (1, 1, 1, []),
        (8, 8, 2, [(NODE_LINK, 8, 1)]),
        (16, 8, 2, [(NODE_LINK, 8, 1), (NETWORK, 2, 8)]),
        (32, 8, 2, [(NODE_LINK, 8, 1), (NETWORK, 4, 8), (PIPELINE, 2, 16)]),
        (4, 1, 4, [(NETWORK, 4, 1)]),
    ],
)
def test_scopes(
    world_size: int, per_node: int, stages: int, expected: list[tuple[str, int, int]]
) -> None:
    assert scopes(world_size, per_node, stages) == [Scope(*each) for each in expected]


def test_every_measure_has_a_unit() -> None:
    assert [unit(measure) for measure in ("matmul", "free memory", NETWORK)] == [
        "TFLOP/s", "GiB", "GB/s",
    ]  # fmt: skip
