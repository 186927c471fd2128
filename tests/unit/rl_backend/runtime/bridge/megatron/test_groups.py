"""Megatron's groups, which runtimes of one layout share: who makes them, who destroys them, and what is refused."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import pytest
import torch

from rl_backend.contracts import ConfigError, ParallelConfig
from rl_backend.runtime.bridge.megatron import groups as module

CPU, LAYOUT = torch.device("cpu"), ParallelConfig(tp=2, pp=2)


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Any]]:
    """What Megatron is asked to make, and that it is asked to destroy."""
    calls: list[Any] = []
    monkeypatch.setattr(module, "_state", module._ModelParallelState())
    monkeypatch.setattr(module.parallel_state, "is_initialized", lambda: False)
    monkeypatch.setattr(module.parallel_state, "initialize_model_parallel", lambda **sizes: calls.append(sizes))
    monkeypatch.setattr(module.parallel_state, "destroy_model_parallel", lambda: calls.append("destroyed"))
    yield calls
    assert module._state.users == 0


def test_groups_are_made_by_the_first_and_destroyed_by_the_last_of_those_who_share_them(told: list[Any]) -> None:
    module._join_model_parallel(LAYOUT, CPU, timedelta(minutes=2, seconds=30))
    (made,) = told
    assert made["distributed_timeout_minutes"] == 2.5
    assert (made["tensor_model_parallel_size"], made["pipeline_model_parallel_size"]) == (2, 2)
    assert made["virtual_pipeline_model_parallel_size"] is None
    module._join_model_parallel(ParallelConfig(tp=2, pp=2), CPU, timedelta(minutes=9))
    with pytest.raises(ConfigError, match=r"^BridgeConfig\.parallel=ParallelConfig\(tp=1.*already uses Megatron with"):
        module._join_model_parallel(ParallelConfig(), CPU, timedelta(minutes=9))
    assert told == [made] and module._state.users == 2
    module._leave_model_parallel()
    assert told == [made]
    module._leave_model_parallel()
    assert told == [made, "destroyed"] and module._state.parallel is None
    # Afterwards another layout may be made.
    module._join_model_parallel(ParallelConfig(), CPU, timedelta(minutes=1))
    module._leave_model_parallel()


def test_what_megatron_refuses_to_make_leaves_nothing(told: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(**sizes: Any) -> None:
        raise RuntimeError("not divisible")

    monkeypatch.setattr(module.parallel_state, "initialize_model_parallel", refuse)
    with pytest.raises(RuntimeError, match="not divisible"):
        module._join_model_parallel(LAYOUT, CPU, timedelta(minutes=1))
    assert told == ["destroyed"] and module._state.parallel is None


def test_groups_of_other_code_are_left_alone(told: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module.parallel_state, "is_initialized", lambda: True)
    with pytest.raises(ConfigError, match="other code has made Megatron's model parallel groups in this process"):
        module._join_model_parallel(LAYOUT, CPU, timedelta(minutes=1))
    assert told == []
