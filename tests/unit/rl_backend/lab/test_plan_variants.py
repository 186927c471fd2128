"""Plans of families that are Llama but for fields of their specification."""

from __future__ import annotations

from pathlib import Path

import pytest

from rl_backend.contracts import NativeConfig, RuntimeConfig, UnsupportedError
from rl_backend.lab.plan.bridge import LocalLayers
from rl_backend.lab.plan.make import make_plan
from rl_backend.lab.plan.memory import Workload
from rl_backend.runtime.bridge.config import BridgeConfig
from rl_backend.runtime.native.layout import describe_model
from tests.support.matrix import sampled
from tests.support.native import make_config
from tests.support.variants import VARIANTS, write_variant

WORKLOAD = Workload(sequence_length=96, micro_batch_tokens=240, num_micro_batches=4)


@pytest.mark.parametrize("family", sampled(VARIANTS, "gemma3_text", "phi"))
def test_a_variant_is_planned_in_a_layout_of_the_native_runtime(tmp_path: Path, family: str) -> None:
    model = write_variant(family, tmp_path / "model")
    whole = make_plan(make_config(model), 1, WORKLOAD).ranks
    cut = make_plan(make_config(model, parallel={"tp": 2, "pp": 2}), 4, WORKLOAD).ranks
    assert (len(whole), len(cut)) == (1, 2)
    for rank in cut:
        assert 0 < rank.weights < whole[0].weights
        assert 0 < rank.activations < whole[0].activations


@pytest.mark.parametrize(
    ("family", "named"),
    [
        ("gemma", "activation, embedding_scale, from_one"),
        ("granite", "embedding_scale, logit_scale, residual_scale, scale"),
        ("olmo2", "joint_qk_norm, norms"),
        ("phi", "MLPSpec"),
    ],
)
def test_a_plan_of_megatrons_layers_refuses_by_name_what_it_does_not_count(tmp_path: Path, family: str, named: str) -> None:
    model = write_variant(family, tmp_path / "model")
    architecture = describe_model(str(model), NativeConfig(device="cpu"), "log_probs").architecture
    with pytest.raises(UnsupportedError) as refused:
        LocalLayers(architecture, BridgeConfig(device="cpu"), WORKLOAD)
    assert named in str(refused.value) and "plan with backend='native'" in str(refused.value)


@pytest.mark.parametrize(
    ("family", "named"), [("gemma", "plan with backend='native'"), ("phi", "no bridge for model_type='phi'")]
)
def test_a_plan_for_the_bridge_refuses_a_variant(tmp_path: Path, family: str, named: str) -> None:
    model = write_variant(family, tmp_path / "model")
    config = RuntimeConfig(backend="bridge", hf_path=str(model), backend_cfg=BridgeConfig(device="cpu"))
    with pytest.raises(UnsupportedError, match=named):
        make_plan(config, 1, WORKLOAD)
