"""A head in float32 over layers in bfloat16."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from rl_backend.contracts import BackendConfig, ConfigError, NativeConfig, RuntimeConfig
from rl_backend.runtime.bridge.config import BridgeConfig
from rl_backend.runtime.native.layout import check_config
from tests.support.native import micro_batches, open_runtime, relative_difference, token_loss
from tests.support.quiet import write_quiet
from tests.unit.rl_backend.model.test_outside_folder import make_config as outside_config
from tests.unit.rl_backend.model.test_outside_folder import write as write_outside

HEAD_IN_FLOAT32: dict[str, Any] = {"param_dtype": "bfloat16", "head_in_float32": True}


class Pass(NamedTuple):
    log_probs: Tensor
    entropy: Tensor
    gradients: dict[str, Tensor]


def run(model: Path, **native: Any) -> Pass:
    data = micro_batches([range(4), range(4, 8)], temperature=0.7, calculate_entropy=True)
    with open_runtime(model, **native) as runtime:
        handle = runtime.build_model()
        found = runtime.forward_backward(handle, data, token_loss)
        gradients = {name: value.clone() for name, value in runtime.export_gradients(handle)}
        log_probs, entropy = (torch.cat(list(found.output(name))) for name in ("log_probs", "entropy"))
    return Pass(log_probs, entropy, gradients)


@pytest.fixture(params=[True, False], ids=["tied", "untied"])
def model(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    return write_quiet(tmp_path / "model", tied=request.param)


@pytest.mark.shows(
    "native: with head_in_float32, a bfloat16 model's head rounds nothing: log-probs, entropy, gradients of norm and head "
    "equal float32's to 1e-5"
)
def test_a_head_in_float32_rounds_nothing(model: Path) -> None:
    exact, rounded, found = run(model), run(model, param_dtype="bfloat16"), run(model, **HEAD_IN_FLOAT32)
    for field in ("log_probs", "entropy"):
        expected = getattr(exact, field)
        torch.testing.assert_close(getattr(found, field), expected, atol=1e-5, rtol=0)
        assert (getattr(rounded, field) - expected).abs().max() > 1e-3, "the head in bfloat16 would pass too"
    for name in ("model.norm.weight", "lm_head.weight"):
        if name in exact.gradients:
            assert relative_difference(found.gradients[name], exact.gradients[name]) < 1e-5, name
            assert relative_difference(rounded.gradients[name], exact.gradients[name]) > 1e-3, name
    for name, gradient in exact.gradients.items():
        far, near = (relative_difference(each.gradients[name], gradient) for each in (rounded, found))
        assert near <= far, f"{name} is farther from float32 than with a head in bfloat16"


def test_a_model_that_is_not_trained_has_the_same_head(model: Path, tmp_path: Path) -> None:
    data = micro_batches([range(8)])
    with open_runtime(model, **HEAD_IN_FLOAT32) as runtime:
        trained, frozen = runtime.build_model(), runtime.build_model(forward_only=True)
        first, second = (runtime.forward_backward(each, data, None, forward_only=True) for each in (trained, frozen))
        for one, other in zip(first.output("log_probs"), second.output("log_probs"), strict=True):
            assert torch.equal(one, other)
        dtypes = {name: parameter.dtype for name, parameter in frozen.parameters.items()}
    assert {dtype for name, dtype in dtypes.items() if "layers." in name} == {torch.bfloat16}
    assert {dtype for name, dtype in dtypes.items() if "layers." not in name} == {torch.float32}


def test_engines_are_sent_a_head_of_their_own_dtype(model: Path) -> None:
    with open_runtime(model, **HEAD_IN_FLOAT32) as runtime:
        handle = runtime.build_model()
        sent = {tensor.dtype for _, tensor in runtime.export_weights(handle, dtype=torch.bfloat16)}
    assert sent == {torch.bfloat16}


def test_where_it_would_change_nothing_it_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"NativeConfig\.head_in_float32=True: with param_dtype='float32' all is computed"):
        NativeConfig(head_in_float32=True)


@pytest.mark.shows("native: head_in_float32 is refused by name by families that would ignore it, and by the bridge")
def test_those_that_would_ignore_it_refuse_it(tmp_path: Path) -> None:
    config = outside_config(write_outside(tmp_path / "model"))
    options: BackendConfig = NativeConfig(device="cpu", **HEAD_IN_FLOAT32)
    with pytest.raises(ConfigError, match=r"head_in_float32=True: model family 'gpt_neox' computes its head in param_dtype"):
        check_config(config.replace(backend_cfg=options))
    with pytest.raises(ConfigError, match=r"BridgeConfig\.head_in_float32=True: unknown field"):
        RuntimeConfig(backend="bridge", hf_path="model", backend_cfg=HEAD_IN_FLOAT32)
    assert "head_in_float32" not in BridgeConfig.model_fields
