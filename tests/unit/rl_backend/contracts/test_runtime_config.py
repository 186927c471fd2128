"""Layouts over ranks, registries and plugins."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import pytest

from rl_backend.contracts import ConfigError, ParallelConfig, Registry, RegistryError, RuntimeConfig
from rl_backend.contracts.runtime_config import NativeConfig, import_plugins


@pytest.mark.parametrize(
    ("layout", "world", "size"),
    [
        ({"tp": 3, "cp": 2, "pp": 5}, 60, 2),
        ({"ep": 4, "etp": 2, "pp": 3}, 24, 8),
        ({"tp": 2, "ep": 3}, 12, 6),
        ({"vpp": 4, "pp": 2}, 6, 3),
    ],
)
def test_the_data_parallel_size_is_what_the_dense_model_leaves(layout: dict[str, int], world: int, size: int) -> None:
    assert ParallelConfig(**layout).data_parallel_size(world) == size


@pytest.mark.parametrize(
    ("layout", "world", "message"),
    [
        ({"tp": 2, "pp": 3}, 16, "of tp*pp*cp = 2*3*1 = 6; use 12 or 18 ranks"),
        ({"tp": 2, "cp": 5}, 3, "of tp*pp*cp = 2*1*5 = 10; use 10 ranks"),
        ({"tp": 2, "ep": 3, "etp": 2}, 16, "of ep*etp*pp = 3*2*1 = 6; use 12 or 18 ranks"),
        ({"tp": 4, "ep": 3}, 31, "of tp*pp*cp = 4*1*1 = 4; use 24 or 36 ranks"),
    ],
)
def test_a_world_that_does_not_divide_is_told_the_next_that_do(layout: dict[str, int], world: int, message: str) -> None:
    with pytest.raises(ConfigError) as refused:
        ParallelConfig(**layout).data_parallel_size(world)
    assert str(refused.value) == f"world size {world} is not a multiple {message}"
    assert refused.value.details == {"world_size": world}


def test_a_registry_adds_gives_lists_and_removes() -> None:
    registry: Registry[list[int]] = Registry("thing", "add_thing(...)")
    with pytest.raises(RegistryError, match=r"^unknown thing 'a'; known: none; add_thing\(...\) adds one$"):
        registry.get("a")
    one, other = [1], [2]
    registry.add("b", one)
    registry.add("a", other)
    registry.add("b", [1])
    assert list(registry) == ["b", "a"] and "a" in registry and registry.get("a") is other
    with pytest.raises(RegistryError, match="thing 'b' is registered already; choose another name"):
        registry.add("b", [3])
    assert registry.get("b") == [1]
    with pytest.raises(RegistryError, match="unknown thing 'c'; known: a, b;"):
        registry.remove("c")
    registry.remove("b")
    assert "b" not in registry and list(registry) == ["a"]
    assert list(Registry("thing", "add_thing(...)")) == [], "registries share nothing"


def test_a_registry_imports_what_is_built_in_when_it_is_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "built_in_things.py").write_text(
        "from tests.unit.rl_backend.contracts import test_runtime_config as asks\nasks.MADE[-1].add('late', 3)\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    for ask in (lambda made: made.get("late"), lambda made: "late" in made, lambda made: list(made) == ["late"]):
        sys.modules.pop("built_in_things", None)
        MADE.append(Registry("thing", "add", built_in="built_in_things"))
        assert ask(MADE[-1])
    sys.modules.pop("built_in_things", None)


MADE: list[Registry[int]] = []


def test_plugins_are_imported_in_order_and_text_has_commas_between_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("plugin_one", "plugin_two"):
        (tmp_path / f"{name}.py").write_text(
            "import sys\nsys.seen_plugins = [*getattr(sys, 'seen_plugins', []), __name__]\n"
        )
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "seen_plugins", [], raising=False)
    config = RuntimeConfig(hf_path="x", plugins=" plugin_two, ,plugin_one,")
    assert config.plugins == ("plugin_two", "plugin_one")
    assert sys.seen_plugins == ["plugin_two", "plugin_one"]  # type: ignore[attr-defined]
    for name in ("plugin_one", "plugin_two"):
        del sys.modules[name]
    assert import_plugins(["plugin_one"]) == ["plugin_one"]
    del sys.modules["plugin_one"]


@pytest.mark.parametrize(
    ("source", "error", "message"),
    [
        ("raise SystemExit(3)", ConfigError, r"plugins='wrong_plugin': fails when .* imports it \(SystemExit: 3\)"),
        (
            "raise ValueError('no')",
            ConfigError,
            r"fails when process \d+ on node \S+ imports it \(ValueError: no\); mend it",
        ),
        ("import no_such_module_here", ConfigError, r"cannot be imported by process \d+ .*no_such_module_here"),
        (
            "from rl_backend.contracts import RegistryError\nraise RegistryError('taken')",
            RegistryError,
            "^taken$",
        ),
    ],
)
def test_a_plugin_that_fails_says_how(
    source: str, error: type[Exception], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("RANK", raising=False)
    (tmp_path / "wrong_plugin.py").write_text(source)
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(error, match=message) as refused:
        import_plugins(("os", "wrong_plugin"))
    assert f"process {os.getpid()}" in str(refused.value) or "wrong_plugin" not in str(refused.value) or "ends" in message
    monkeypatch.setenv("RANK", "0")
    if "fails" in message:
        with pytest.raises(ConfigError, match="fails when training rank 0, process"):
            import_plugins(("wrong_plugin",))


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"head_in_float32": True}, "head_in_float32"),
        ({"log_prob_chunk_tokens": 0}, "log_prob_chunk_tokens"),
    ],
)
def test_native_options_without_effect_are_refused(fields: dict[str, Any], field: str) -> None:
    with pytest.raises(ConfigError, match=f"NativeConfig.{field}"):
        NativeConfig(**fields)
    NativeConfig(head_in_float32=True, param_dtype="bfloat16")


def test_options_of_another_kind_are_not_handed_out() -> None:
    config = RuntimeConfig(hf_path="x", backend_cfg={"log_prob_chunk_tokens": 5})
    assert config.options(NativeConfig).log_prob_chunk_tokens == 5
    with pytest.raises(ConfigError, match=r"NativeConfig=\[1\]: input should be a valid dictionary or instance of"):
        RuntimeConfig(hf_path="x", backend_cfg=[1])
