"""The state of fp16's loss scaler; weights and moments are tested by the relay."""

from types import SimpleNamespace
from typing import Any

import torch

from threefold.checkpoint.state import training_state


def fp16_optimizer(**scaler: Any) -> Any:
    """Return a stand-in for DeepSpeed's fp16 optimizer, which does not run on a CPU."""
    flat = torch.zeros(4)
    return SimpleNamespace(
        optimizer=torch.optim.AdamW([flat]),
        single_partition_of_fp32_groups=[flat],
        loss_scaler=SimpleNamespace(**scaler),
        update_lp_params=lambda: None,
        _lazy_init_hp_params_optimizer_state=lambda: None,
    )


def test_the_loss_scale_resumes_from_its_saved_value() -> None:
    fresh = {"cur_scale": 65536.0, "cur_iter": 0, "last_overflow_iter": -1, "cur_hysteresis": 2}
    later = {"cur_scale": 256.0, "cur_iter": 90, "last_overflow_iter": 7, "cur_hysteresis": 1}
    saved = training_state(fp16_optimizer(dynamic=True, **later), {}).loss_scale
    assert saved == later
    state = training_state(fp16_optimizer(dynamic=True, **fresh), {})
    state.restore(lambda kind, fragment: torch.empty(0), updates=88, loss_scale=saved)
    assert state.loss_scale == later and state.updates == 88
    assert state.optimizer._hp_optimizer_states_linked is False


def test_a_fixed_loss_scale_is_not_saved() -> None:
    state = training_state(fp16_optimizer(dynamic=False), {})
    assert state.loss_scale is None and state.updates == 0
    state.restore(lambda kind, fragment: torch.empty(0), updates=3, loss_scale={"cur_scale": 2.0})
    assert state.updates == 3 and not hasattr(state.optimizer.loss_scaler, "cur_scale")
