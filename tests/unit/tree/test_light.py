"""Which unit tests ``make check`` runs."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.claims import ROOT
from tests.support.light import is_light, light_tests

PLAIN = "import json\nfrom rl_backend import far\n\n\ndef test_one() -> None:\n    assert json\n"


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    (tmp_path / "rl_backend").mkdir()
    (tmp_path / "rl_backend" / "__init__.py").touch()
    (tmp_path / "rl_backend" / "far.py").write_text("from rl_backend import near\n")
    (tmp_path / "rl_backend" / "near.py").write_text("import torch\n\n\ndef load() -> None:\n    import transformers\n")
    return tmp_path


@pytest.mark.parametrize(
    ("text", "light"),
    [
        (PLAIN, True),
        (PLAIN + "\n\ndef test_two() -> None:\n    import ray.util\n", False),
        (PLAIN + '\n\nverl = pytest.importorskip("verl")\n', False),
        (PLAIN + "\n\ndef test_two() -> None:\n    import subprocess\n", False),
        (PLAIN + "\n\ndef test_two(tied_model: object) -> None: ...\n", False),
    ],
)
def test_a_test_that_imports_something_heavy_or_starts_a_process_is_not_light(tree: Path, text: str, light: bool) -> None:
    file = tree / "test_some.py"
    file.write_text(text)
    assert is_light(file, tree) == light


@pytest.mark.parametrize(
    "line",
    ["import vllm", "try:\n    from verl import x\nexcept ImportError:\n    x = None", "class A:\n    import megatron.core"],
)
def test_what_an_imported_module_imports_counts_outside_of_its_functions(tree: Path, line: str) -> None:
    file = tree / "test_some.py"
    file.write_text(PLAIN)
    (tree / "rl_backend" / "near.py").write_text(line)
    assert not is_light(file, tree)
    (tree / "rl_backend" / "near.py").write_text("from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import vllm\n")
    assert is_light(file, tree)


def test_a_name_that_a_package_imports_when_it_is_used_counts_where_it_is_imported(tree: Path) -> None:
    lazy = "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from rl_backend.heavy import Run\n"
    (tree / "rl_backend" / "__init__.py").write_text(lazy)
    (tree / "rl_backend" / "heavy.py").write_text("import ray\nRun = 1\n")
    file = tree / "test_some.py"
    file.write_text(PLAIN)
    assert is_light(file, tree)
    file.write_text("from rl_backend import Run\n")
    assert not is_light(file, tree)


def test_many_unit_tests_are_light_and_none_of_actors_that_start_ray() -> None:
    names = {file.relative_to(ROOT / "tests" / "unit").as_posix() for file in light_tests()}
    assert len(names) >= 40
    assert {"rl_backend/contracts/test_batch.py", "rl_backend/primitive/test_log_prob.py"} <= names
    assert not names & {"actors/cluster/test_tcp_proxy.py", "rl_backend/runtime/bridge/test_config.py"}
