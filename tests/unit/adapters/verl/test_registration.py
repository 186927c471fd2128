"""Which engine verl builds: by the class of the configuration, or by ``VERL_ENGINE_VENDOR``."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import logging
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from adapters.verl import registration
from adapters.verl.registration import VENDORS, register_config_class, register_vendors
from rl_backend.contracts import ConfigError, RegistryError, UnsupportedError

VENDOR = "VERL_ENGINE_VENDOR"


@pytest.fixture(autouse=True)
def registry(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """verl's registry with our engines in it, put back afterwards."""
    from verl.workers.engine import EngineRegistry

    monkeypatch.delenv(VENDOR, raising=False)
    before = {
        model: dict(engines["megatron"]) for model, engines in EngineRegistry._engines.items() if "megatron" in engines
    }
    yield EngineRegistry
    for model, engines in before.items():
        EngineRegistry._engines[model]["megatron"] = engines


def choose_engine(model_type: str, engine_config: Any, backend: str | None) -> tuple[type, Any]:
    from adapters.verl.engine_config import choose_engine

    return choose_engine(model_type, engine_config, backend)


def stock(**fields: Any) -> Any:
    from verl.workers.config import McoreEngineConfig

    return McoreEngineConfig(**fields)


def ours(**fields: Any) -> Any:
    from adapters.verl.engine_config import RLBackendEngineConfig

    return RLBackendEngineConfig(**fields)


@pytest.mark.shows("verl: one override, or VERL_ENGINE_VENDOR, chooses the engine of a role; the log says which it is")
def test_the_configurations_class_chooses_the_engine_and_the_log_says_so(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "adapters.verl.engine_config"):
        engine, config = choose_engine("language_model", ours(backend="bridge", dtype="float32"), None)
        critic, _ = choose_engine("value_model", ours(), None)
    assert (engine.__name__, critic.__name__) == ("LanguageModelEngine", "ValueModelEngine")
    assert (config.backend, config.dtype) == ("bridge", "float32")
    assert "rl_backend's LanguageModelEngine, backend bridge, because the configuration's class" in caplog.messages[0]


def test_engines_are_registered_when_verls_registry_is_imported_and_not_before(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "late_registry.py").write_text("known = ['of verl']")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(registration, "_REGISTRY_MODULE", "late_registry")
    for name in ("_register_vendors", "_register_config_class"):
        monkeypatch.setattr(registration, name, lambda module, name=name: module.known.append(name))
    before = list(sys.meta_path)
    register_vendors()
    register_config_class()
    # Looking for it is not importing it.
    assert importlib.util.find_spec("late_registry") is not None
    assert "late_registry" not in sys.modules
    module = importlib.import_module("late_registry")
    assert sorted(module.known) == ["_register_config_class", "_register_vendors", "of verl"]
    assert sys.meta_path == before
    assert inspect.getsource(module).strip() == "known = ['of verl']"
    register_vendors()
    assert len(module.known) == 4
    del sys.modules["late_registry"]


def test_verls_own_configuration_still_gets_verls_engine(monkeypatch: pytest.MonkeyPatch, registry: Any) -> None:
    register_config_class()
    found = registry.get_engine_cls("language_model", "megatron")
    monkeypatch.setattr("verl.utils.device.get_device_name", lambda: "cpu")
    with pytest.raises(
        ConfigError, match=r"Megatron engine does not run on cpu; set _target_ of this role to adapters\.verl"
    ):
        found(None, stock(), None, None)
    monkeypatch.setattr("verl.utils.device.get_device_name", lambda: "cuda")
    engine, config = choose_engine("value_model", stock(), None)
    assert engine.__name__ == "MegatronEngineWithValueHead" and type(config).__name__ == "McoreEngineConfig"
    monkeypatch.setattr("verl.workers.engine.MegatronEngineWithLMHead", None)
    with pytest.raises(UnsupportedError, match="verl's MegatronEngineWithLMHead cannot be imported here"):
        choose_engine("language_model", stock(), None)


@pytest.mark.parametrize("vendor", VENDORS)
def test_the_vendor_gives_verls_own_configuration_to_our_engine(
    vendor: str, monkeypatch: pytest.MonkeyPatch, registry: Any
) -> None:
    register_vendors()
    monkeypatch.setenv(VENDOR, vendor)
    assert registry.get_engine_cls("language_model", "megatron").rl_backend_chooses
    given = stock(tensor_model_parallel_size=2, override_ddp_config={"bucket_size": 1})
    _, config = choose_engine("language_model", given, VENDORS[vendor])
    assert config.backend == VENDORS[vendor]
    assert {name: config[name] for name in given} == dict(given)


def test_an_engine_of_somebody_else_in_our_place_is_named(monkeypatch: pytest.MonkeyPatch, registry: Any) -> None:
    from verl.utils.device import get_device_name
    from verl.workers.engine import BaseEngine

    monkeypatch.setenv(VENDOR, "somebody")
    registry.register("value_model", "megatron", device=get_device_name(), vendor="somebody")(BaseEngine)
    with pytest.raises(RegistryError, match=r"verl\.workers\.engine\.base\.BaseEngine for value_model, megatron.*somebody"):
        register_config_class()


def test_a_device_without_a_runtime_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VERL_ENGINE_DEVICE", "npu")
    with pytest.raises(UnsupportedError, match="device 'npu': the runtimes are for cpu and cuda"):
        register_config_class()
