"""Model families from outside the package."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from rl_backend.contracts import MODEL_CONFIGS, ConfigError, NativeConfig, PackedBatch, RegistryError, RuntimeConfig
from rl_backend.model import MODEL_FAMILIES, QWEN3, find_model, register_model
from rl_backend.runtime import create_runtime

PLUGIN = "tests.support.outside_family"


@pytest.fixture(autouse=True)
def forget_the_plugin() -> Iterator[None]:
    """Every test starts as a process that has not imported the plugin."""

    def forget() -> None:
        sys.modules.pop(PLUGIN, None)
        if "tied_bigram" in MODEL_FAMILIES:
            MODEL_FAMILIES.remove("tied_bigram")
            MODEL_CONFIGS.remove("tied_bigram")

    forget()
    yield
    forget()


def make_config(path: Path | str) -> RuntimeConfig:
    return RuntimeConfig(
        plugins=(PLUGIN,),
        hf_path=str(path),
        backend_cfg={"device": "cpu", "model": "tied_bigram", "model_cfg": {"scale": 2.0}},
    )


def test_a_plugins_family_and_its_options_survive_a_json_round_trip() -> None:
    config = make_config("somewhere")
    assert isinstance(config.backend_cfg, NativeConfig)
    loaded = RuntimeConfig.model_validate_json(config.model_dump_json())
    assert loaded == config
    assert type(loaded.backend_cfg.model_cfg) is MODEL_CONFIGS.get("tied_bigram")
    assert loaded.backend_cfg.model_cfg.scale == 2.0


def test_a_plugins_family_trains_in_the_native_runtime(tmp_path: Path) -> None:
    config = make_config(tmp_path)
    table = sys.modules[PLUGIN].write_bigram(tmp_path)
    runtime = create_runtime(config)
    try:
        handle = runtime.build_model()
        ids = torch.tensor([1, 2, 3, 4, 5])
        batch = PackedBatch(ids, torch.tensor([3, 2]))
        with runtime.train_mode(handle):
            result = runtime.forward_backward(handle, [batch], lambda out, data, dp_group=None: (-out.log_probs.sum(), {}))
        expected = (2.0 * table[ids] @ table.t()).log_softmax(-1)
        torch.testing.assert_close(result.output("log_probs")[0][:2], expected[[0, 1], [2, 3]])
        assert runtime.optimizer_step(handle).ok
        ((name, weight),) = runtime.export_weights(handle)
        assert name == "tied_bigram.table"
        assert not torch.equal(weight, table)
    finally:
        runtime.close()


def test_unknown_options_of_a_plugins_family_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"scales.*unknown field"):
        RuntimeConfig(plugins=(PLUGIN,), hf_path="x", backend_cfg={"model": "tied_bigram", "model_cfg": {"scales": 2.0}})


def test_a_family_that_is_not_registered_is_refused_with_the_known_ones() -> None:
    with pytest.raises(RegistryError, match=r"unknown model family 'tied_bigram'; known: .*qwen3"):
        RuntimeConfig(hf_path="x", backend_cfg={"model": "tied_bigram", "model_cfg": {}})


def test_a_second_family_of_one_name_is_refused() -> None:
    with pytest.raises(RegistryError, match="'qwen3' is registered already"):
        register_model(replace(QWEN3, hf_model_types=("other",)))
    register_model(QWEN3)


def test_a_later_family_takes_over_a_model_type_and_the_earlier_one_keeps_its_name() -> None:
    mine = replace(QWEN3, name="my_qwen3")
    register_model(mine)
    try:
        assert find_model("auto", {"model_type": "qwen3"}) is mine
        assert find_model("qwen3", {"model_type": "qwen3"}) is QWEN3
    finally:
        MODEL_FAMILIES.remove("my_qwen3")
        MODEL_CONFIGS.remove("my_qwen3")
