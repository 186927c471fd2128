"""Third parties add models and runtimes from outside the package."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import rl_backend
from rl_backend import NativeConfig, RuntimeConfig, create_runtime, register_runtime
from rl_backend.contracts import ConfigError, RegistryError, UnsupportedError
from tests.support import outside_plugin
from tests.support.native import micro_batches, token_loss, train, weights

PLUGIN = "tests.support.outside_plugin"
SPLIT = [[0, 1, 2, 3], [4, 5, 6, 7]]


@pytest.fixture
def bigram(tmp_path: Path) -> Path:
    outside_plugin.write_bigram(tmp_path / "bigram")
    return tmp_path / "bigram"


@pytest.mark.shows("extending: a runtime from outside the package trains")
def test_a_runtime_from_outside_is_created_by_name_with_its_own_options(tied_model: Path) -> None:
    config = RuntimeConfig(
        plugins=(PLUGIN,), backend="counting", hf_path=str(tied_model), backend_cfg={"greeting": "good day"}
    )
    assert RuntimeConfig.model_validate_json(config.model_dump_json()) == config
    runtime = create_runtime(config)
    assert isinstance(runtime, outside_plugin.CountingRuntime)
    assert runtime.greeting == "good day"
    train(runtime, runtime.build_model(), 2)
    assert runtime.steps == 2
    runtime.close()


@pytest.mark.shows("extending: a model family from outside the package trains, saves and exports")
def test_a_model_family_from_outside_trains_saves_and_exports(bigram: Path, tmp_path: Path) -> None:
    config = RuntimeConfig(plugins=(PLUGIN,), hf_path=str(bigram), backend_cfg={"device": "cpu"})
    runtime = create_runtime(config)
    handle = runtime.build_model()
    curve = train(runtime, handle, 8)
    assert curve[-1][0] != curve[0][0]
    runtime.save_checkpoint(handle, tmp_path / "saved")
    held = weights(handle)
    train(runtime, handle, 1)
    runtime.load_checkpoint(handle, tmp_path / "saved")
    assert all(torch.equal(value, held[name]) for name, value in weights(handle).items())
    assert [name for name, _ in runtime.export_weights(handle)] == ["bigram.table", "bigram.out.weight", "bigram.out.bias"]
    runtime.close()


def test_a_familys_own_options_reach_the_model(bigram: Path) -> None:
    losses = []
    for scale in (1.0, 0.0):
        native = NativeConfig(device="cpu", model="bigram", model_cfg={"scale": scale})
        runtime = create_runtime(RuntimeConfig(hf_path=str(bigram), backend_cfg=native))
        result = runtime.forward_backward(runtime.build_model(), micro_batches(SPLIT), token_loss, forward_only=True)
        losses.append(result.loss)
        runtime.close()
    assert losses[1] == pytest.approx(torch.log(torch.tensor(128.0)).item())
    assert losses[0] != losses[1]


def test_unknown_names_list_the_known_ones(bigram: Path) -> None:
    with pytest.raises(RegistryError, match=r"unknown runtime 'bridg'; known: .*native"):
        RuntimeConfig(backend="bridg", hf_path=str(bigram))
    (bigram / "config.json").write_text('{"model_type": "mystery", "vocab_size": 128}')
    runtime = create_runtime(RuntimeConfig(hf_path=str(bigram), backend_cfg={"device": "cpu"}))
    with pytest.raises(UnsupportedError, match=r"model_type='mystery'.*qwen3"):
        runtime.build_model()
    runtime.close()


def test_a_name_is_taken_once_and_its_options_are_checked(tied_model: Path) -> None:
    with pytest.raises(RegistryError, match="'counting' is registered already"):
        register_runtime("counting", NativeConfig, outside_plugin.CountingRuntime)
    with pytest.raises(ConfigError, match="greting"):
        RuntimeConfig(backend="counting", hf_path=str(tied_model), backend_cfg={"greting": "x"})


def test_the_public_interface_is_complete() -> None:
    assert all(getattr(rl_backend, name) is not None for name in rl_backend.__all__)
    with pytest.raises(AttributeError):
        rl_backend.nothing_of_this_name  # noqa: B018
