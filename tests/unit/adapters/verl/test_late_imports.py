"""Actions on modules that somebody imports later: once, after the module has run, and with nothing left behind."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Iterator
from importlib.abc import MetaPathFinder
from importlib.machinery import BuiltinImporter, ModuleSpec, PathFinder
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from adapters.verl.late_imports import when_imported

NAMES = ("late_one", "late_two", "late_package")


@pytest.fixture(autouse=True)
def modules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Modules that nobody has imported; finders and modules are put back."""
    (tmp_path / "late_one.py").write_text("value = 1\nloader = __loader__\nspec_loader = __spec__.loader\n")
    (tmp_path / "late_two.py").write_text("import late_one\nvalue = 2\n")
    (tmp_path / "late_package").mkdir()
    (tmp_path / "late_package" / "__init__.py").write_text("value = 3\n")
    (tmp_path / "late_package" / "inner.py").write_text("value = 4\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    before = list(sys.meta_path)
    yield tmp_path
    sys.meta_path[:] = before
    for name in [name for name in sys.modules if name.startswith("late_")]:
        del sys.modules[name]


def test_a_module_that_is_there_is_acted_on_at_once() -> None:
    import json

    found: list[ModuleType] = []
    before = list(sys.meta_path)
    when_imported("json", found.append)
    assert found == [json] and sys.meta_path == before


def test_each_of_two_modules_gets_its_own_action_once_after_it_has_run() -> None:
    found: list[tuple[str, str, int]] = []
    before = list(sys.meta_path)
    for name in ("late_one", "late_two"):
        when_imported(name, lambda module, name=name: found.append((name, module.__name__, module.value)))  # type: ignore[misc]
    assert len(sys.meta_path) == len(before) + 2 and not found
    importlib.import_module("late_two")
    assert found == [("late_one", "late_one", 1), ("late_two", "late_two", 2)]
    assert sys.meta_path == before
    module = importlib.reload(sys.modules["late_one"])
    assert len(found) == 2 and module.value == 1


def test_two_actions_on_one_module_are_both_taken() -> None:
    found: list[str] = []
    before = list(sys.meta_path)
    when_imported("late_one", lambda module: found.append("first"))
    when_imported("late_one", lambda module: found.append("second"))
    importlib.import_module("late_one")
    assert sorted(found) == ["first", "second"] and sys.meta_path == before


def test_a_module_sees_its_own_loader_and_can_be_inspected() -> None:
    when_imported("late_one", lambda module: None)
    module: Any = importlib.import_module("late_one")
    assert type(module.loader).__name__ == type(module.spec_loader).__name__ == "SourceFileLoader"
    assert module.__spec__.loader is module.__loader__ is module.loader
    assert module.__spec__.origin == module.__file__


def test_a_module_of_a_package_is_found_in_the_packages_folder_and_others_are_left_alone() -> None:
    found: list[str] = []
    when_imported("late_package.inner", lambda module: found.append(module.__name__))
    # Neither the package nor another module of that last name.
    assert importlib.import_module("late_package").value == 3 and not found
    importlib.import_module("late_package.inner")
    assert found == ["late_package.inner"]


def test_looking_for_a_module_that_does_not_exist_finds_nothing_and_changes_nothing() -> None:
    # A finder of distributions has no modules to find.
    sys.meta_path.append(SimpleNamespace())
    when_imported("late_missing", lambda module: pytest.fail("there is no such module"))
    finder = sys.meta_path[0]
    assert isinstance(finder, MetaPathFinder)
    assert importlib.util.find_spec("late_missing") is None
    assert finder.find_spec("late_one", None) is None
    with pytest.raises(ModuleNotFoundError, match="late_missing"):
        importlib.import_module("late_missing")
    assert sys.meta_path[0] is finder


def test_finders_before_it_and_specs_without_a_loader_are_not_asked_twice() -> None:
    asked: list[str] = []

    class Watching(MetaPathFinder):
        def __init__(self, name: str, spec: ModuleSpec | None) -> None:
            self.name, self.spec = name, spec

        def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
            if name != "late_one":
                return None
            asked.append(self.name)
            return self.spec

    sys.meta_path.insert(0, Watching("after", None))
    # A namespace without a loader is no module to act on.
    sys.meta_path.insert(0, Watching("namespace", ModuleSpec("late_one", None)))
    found: list[str] = []
    when_imported("late_one", lambda module: found.append(module.__name__))
    sys.meta_path.insert(0, Watching("before", None))
    importlib.import_module("late_one")
    assert asked == ["before", "namespace", "after"] and found == ["late_one"]
    assert BuiltinImporter in sys.meta_path and PathFinder in sys.meta_path


def test_an_error_of_the_module_leaves_the_action_for_the_next_import(modules: Path) -> None:
    found: list[int] = []
    (modules / "late_one.py").write_text("raise ValueError('broken')\n")
    when_imported("late_one", lambda module: found.append(module.value))
    with pytest.raises(ValueError, match="broken"):
        importlib.import_module("late_one")
    assert not found and "late_one" not in sys.modules
    (modules / "late_one.py").write_text("value = 11  # longer than what was broken\n")
    importlib.invalidate_caches()
    importlib.import_module("late_one")
    assert found == [11]
