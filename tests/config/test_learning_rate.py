import pytest

from threefold.config.optimization import Optimizer, learning_rate


def rates(decay: str, **schedule) -> list[float]:
    optimizer = Optimizer.model_validate(
        {
            "learning_rate": 1.0,
            "schedule": {
                "warmup_steps": 10,
                "decay": decay,
                "minimum_learning_rate": 0.1,
                **schedule,
            },
        }
    )
    return [learning_rate(step, optimizer, 100) for step in range(1, 101)]


@pytest.mark.parametrize(
    "values",
    [rates("cosine"), rates("linear"), rates("wsd", decay_steps=20)],
    ids=["cosine", "linear", "wsd"],
)
def test_the_rate_warms_up_and_decays_to_the_minimum(values: list[float]) -> None:
    assert values[:10] == pytest.approx([k / 10 for k in range(1, 11)])
    assert values[9] == max(values) == 1.0
    assert values[9:] == sorted(values[9:], reverse=True)
    assert values[-1] == pytest.approx(0.1)


def test_each_decay_has_its_shape() -> None:
    assert rates("cosine")[54] == pytest.approx(0.55)  # half way: the mean of peak and minimum
    assert rates("linear")[54] == pytest.approx(0.55)
    wsd = rates("wsd", decay_steps=20)
    assert wsd[79] == 1.0 and wsd[80] < 1.0 and wsd[89] == pytest.approx(0.55)


@pytest.mark.parametrize(("decay", "settings"), [("cosine", {}), ("wsd", {"decay_steps": 20})])
def test_a_schedule_has_its_own_length(decay: str, settings: dict[str, int]) -> None:
    whole = rates(decay, **settings)
    assert rates(decay, steps=100, **settings) == whole
    longer = rates(decay, steps=50, **settings)  # in a run of 100 steps
    assert longer[49] == 0.1 and longer[50:] == [0.1] * 50
    assert longer[48] > 0.1
    shorter = rates(decay, steps=400, **settings)
    assert shorter[:10] == whole[:10] and min(shorter[10:]) > 0.8


def test_without_warm_up_the_first_step_is_near_the_peak() -> None:
    assert rates("cosine", warmup_steps=0)[0] == pytest.approx(1.0, abs=1e-3)


def test_a_schedule_in_sequences_needs_a_length() -> None:
    with pytest.raises(ValueError, match=r"optimizer\.schedule\.steps = 1000000"):
        rates("cosine", counts="sequences")
    assert rates("cosine", counts="sequences", steps=100) == rates("cosine")


def test_a_schedule_counts_the_sequences_of_trillions_of_tokens() -> None:
    assert rates("wsd", counts="sequences", steps=2_400_000_000, decay_steps=2_399_999_900)
