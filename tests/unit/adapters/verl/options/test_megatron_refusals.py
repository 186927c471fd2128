"""Values of Megatron's own fields that are refused before anything is loaded."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from adapters.verl.options.settings import EngineSettings, engine_settings
from rl_backend.contracts import ConfigError
from rl_backend.runtime.bridge import config as bridge_config
from rl_backend.runtime.bridge.config import BridgeConfig
from tests.support.verl_configs import changed, role_configs, write_config

BACKENDS = ("native", "bridge")


@pytest.fixture(scope="module")
def dense(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_config("qwen3", "Qwen3ForCausalLM", tmp_path_factory.mktemp("verl") / "dense", num_hidden_layers=24)


@pytest.fixture(scope="module")
def experts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("verl") / "moe"
    return write_config("qwen3_moe", "Qwen3MoeForCausalLM", path, num_experts=4, num_hidden_layers=24)


def given(model: Path, backend: str, dictionary: str, fields: Mapping[str, Any], **more: Any) -> EngineSettings:
    where = "optimizer" if dictionary == "override_optimizer_config" else "engine"
    values = {f"{where}__{dictionary}__{name}": value for name, value in fields.items()}
    configs = changed(role_configs("actor", model), engine__backend=backend, **values, **more)
    return engine_settings(*configs[:4], model_type=configs.model_type)


def test_an_offload_without_a_fraction_is_refused_because_megatron_offloads_nothing(dense: Path) -> None:
    with pytest.raises(ConfigError, match=r"'optimizer_cpu_offload': True.*Megatron reads neither field without the other"):
        given(dense, "native", "override_optimizer_config", {"optimizer_cpu_offload": True})
    with pytest.raises(ConfigError, match=r"'optimizer_offload_fraction': 1.*set optimizer_cpu_offload=True"):
        given(dense, "native", "override_optimizer_config", {"optimizer_offload_fraction": 1})


@pytest.mark.parametrize("name", [name for name in bridge_config.NEEDS_TRANSFORMER_ENGINE if name != "attention_backend"])
def test_a_kernel_of_transformer_engine_is_refused_only_where_it_cannot_be_used(
    name: str, experts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fields = {name: True}
    message = rf"override_transformer_config\['{name}'\]=True: .*Transformer Engine.*remove it, or set backend=native"
    with pytest.raises(ConfigError, match=message):
        given(experts, "bridge", "override_transformer_config", fields)
    given(experts, "bridge", "override_transformer_config", {name: False})
    given(experts, "native", "override_transformer_config", fields)
    (tmp_path / "transformer_engine").mkdir()
    monkeypatch.syspath_prepend(tmp_path)
    cuda = {"engine__backend_options__device": "cuda"}
    found = given(experts, "bridge", "override_transformer_config", fields, **cuda).runtime.backend_cfg
    assert isinstance(found, BridgeConfig) and found.override_transformer_config == fields
    with pytest.raises(ConfigError, match=message):
        given(experts, "bridge", "override_transformer_config", fields)


def test_fields_of_experts_are_refused_for_a_model_without(dense: Path) -> None:
    with pytest.raises(ConfigError, match=r"\['moe_permute_fusion'\]=True: this model has no experts"):
        given(dense, "bridge", "override_transformer_config", {"moe_permute_fusion": True})


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("value", [0, -1, "2", 2.0, True, False])
def test_a_number_of_layers_that_is_none_is_refused_by_name(backend: str, value: Any, dense: Path) -> None:
    for name in ("num_layers_in_first_pipeline_stage", "num_layers_in_last_pipeline_stage"):
        with pytest.raises(ConfigError, match=rf"\['{name}'\]={value!r}: expected a number of layers"):
            given(dense, backend, "override_transformer_config", {name: value}, engine__pipeline_model_parallel_size=2)
