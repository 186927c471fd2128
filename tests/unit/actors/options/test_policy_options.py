"""Options of a policy: what its loss is given, and which adapters engines can serve."""

from __future__ import annotations

from typing import Any

import pytest

from actors.options.policy_options import LoRAOptions, PolicyLoss, tenant_config
from actors.train.loss import Loss
from rl_backend.contracts import ConfigError
from rl_backend.contracts.lora import LoRAConfig
from tests.unit.actors.options.test_sampled_config import config_of

NORMED = "seq-mean-token-sum-norm"


@pytest.mark.parametrize(
    ("options", "passed"),
    [
        ({}, {}),
        ({"loss_agg_mode": NORMED}, {"loss_agg_mode": NORMED, "loss_scale_factor": 40.0}),
        (
            {"name": "gspo", "loss_agg_mode": NORMED, "loss_scale_factor": 8.0, "clip_ratio_low": 0.0},
            {"clip_ratio_low": 0.0, "loss_agg_mode": NORMED, "loss_scale_factor": 8.0},
        ),
        ({"name": "cispo", "clip_ratio_high": 0.28}, {"clip_ratio_high": 0.28}),
    ],
    ids=str,
)  # fmt: skip
def test_a_policys_loss_gets_the_options_that_were_given(options: dict[str, Any], passed: dict[str, Any]) -> None:
    loss = PolicyLoss(**options).function(40, entropy_coef=0.5)
    expected = Loss(f"rl_backend.algorithm:{options.get('name', 'grpo')}_loss", **passed, entropy_coef=0.5)
    assert repr(loss) == repr(expected)
    with pytest.raises(
        ConfigError, match=r"PolicyLoss\.loss_scale_factor=8\.0: only loss_agg_mode='seq-mean-token-sum-norm'"
    ):
        PolicyLoss(loss_scale_factor=8.0)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"rank": 513, "push": "adapter"}, r"PolicyLoRA\.push='adapter': .* at most 512, and lora\.rank=513; leave it out"),
        ({"rank": 4, "use_dora": True, "push": "adapter"}, r"PolicyLoRA\.push='adapter': vLLM serves no adapters with DoRA"),
        ({"dropout": 0.5, "alpha": 3.0}, r"PolicyLoRA\.alpha=3\.0: has no effect"),
    ],
)  # fmt: skip
def test_adapters_that_engines_cannot_serve_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        config_of(lora=options)


def test_adapters_of_the_largest_rank_are_served_and_larger_or_dora_ones_are_merged() -> None:
    assert config_of(lora={"rank": 512}).rollout.max_adapter_rank == 512
    for larger in ({"rank": 513}, {"rank": 4, "use_dora": True}, {"rank": 600, "use_dora": True, "push": "merged"}):
        merged = config_of(lora=larger)
        assert (merged.rollout.max_adapters, merged.rollout.max_adapter_rank) == (0, 16)
    assert tenant_config(LoRAOptions(rank=3, alpha=5.0, save_merged=True)) == LoRAConfig(rank=3, alpha=5.0)
    assert LoRAOptions(alpha=LoRAConfig.model_fields["alpha"].default) == LoRAOptions(), "a default asks for nothing"
