from __future__ import annotations

import pytest

from rl_backend.contracts import BACKEND_CONFIGS, RegistryError, RuntimeConfig
from rl_backend.runtime import create_runtime, register_runtime
from tests.support.unigram_runtime import UnigramConfig, UnigramRuntime


def test_a_runtime_registered_from_outside_the_package_is_built_by_name() -> None:
    runtime = create_runtime(RuntimeConfig(backend="unigram", hf_path="unused"))
    assert type(runtime) is UnigramRuntime
    assert runtime.build_model().name == "unigram"


def test_registering_the_same_runtime_again_changes_nothing() -> None:
    register_runtime("unigram", UnigramConfig, UnigramRuntime)
    assert BACKEND_CONFIGS.get("unigram") is UnigramConfig


def test_a_name_that_is_taken_is_refused() -> None:
    with pytest.raises(RegistryError, match="runtime 'native' is registered already"):
        register_runtime("native", UnigramConfig, UnigramRuntime)


def test_an_unknown_name_lists_what_is_known() -> None:
    with pytest.raises(RegistryError, match=r"unknown runtime 'naitve'; known: .*native.*unigram"):
        BACKEND_CONFIGS.get("naitve")
