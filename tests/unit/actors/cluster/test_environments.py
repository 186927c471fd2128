"""What keeps Ray from starting engines with the Python of another environment is said before it is tried."""

from __future__ import annotations

import json
import platform
import sys
from pathlib import Path

import pytest
import ray

from actors.cluster.environments import why_not_for_engines


def test_an_environment_with_the_same_python_and_ray_will_do() -> None:
    assert why_not_for_engines(sys.executable) == ""


def test_what_is_missing_is_named(tmp_path: Path) -> None:
    assert "it cannot be run: [Errno 2] No such file" in why_not_for_engines(str(tmp_path / "python"))
    bare = Path(sys.base_prefix, "bin", "python3.12")
    assert why_not_for_engines(str(bare)).startswith(f"it has Python {platform.python_version()} and no Ray; all processes")
    assert why_not_for_engines("/bin/false") == "it is not a Python that runs: it says nothing"


@pytest.mark.parametrize(
    ("told", "problem"),
    [
        (["3.12.99", ray.__version__, True], "it has Python 3.12.99 and Ray"),
        ([platform.python_version(), "2.0.1", True], "and Ray 2.0.1; all processes of a cluster need the same"),
        ([platform.python_version(), ray.__version__, False], "vllm is not installed there"),
    ],
)
def test_other_versions_are_refused(tmp_path: Path, told: list[object], problem: str) -> None:
    python = tmp_path / "python"
    python.write_text(f"#!/bin/sh\necho '{json.dumps(told)}'\n")
    python.chmod(0o755)
    assert problem in why_not_for_engines(str(python))


def stand_in(folder: Path, *lines: str) -> str:
    python = folder / "python"
    python.write_text("\n".join(("#!/bin/sh", *lines)) + "\n")
    python.chmod(0o755)
    return str(python)


def test_a_folder_of_the_name_of_a_package_does_not_count_as_installed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    versions = json.dumps([platform.python_version(), ray.__version__])[:-1]
    python = stand_in(tmp_path, f"""[ "$(pwd)" = / ] && echo '{versions}, false]' || echo '{versions}, true]'""")
    monkeypatch.chdir(tmp_path)
    assert "vllm is not installed there" in why_not_for_engines(python)


@pytest.mark.parametrize(
    ("lines", "said"),
    [
        (("echo 5",), "it is not a Python that runs: 5"),
        (("echo null",), "it is not a Python that runs: null"),
        (("echo [1]",), "it is not a Python that runs: [1]"),
        (("echo out", "echo the reason >&2"), "it is not a Python that runs: the reason"),
    ],
)
def test_what_a_program_says_that_is_no_python_is_told(lines: tuple[str, ...], said: str, tmp_path: Path) -> None:
    assert why_not_for_engines(stand_in(tmp_path, *lines)) == said


def test_a_python_that_does_not_answer_is_not_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("actors.cluster.environments._SECONDS", 0.05)
    assert why_not_for_engines(stand_in(tmp_path, "exec sleep 5")).startswith("it cannot be run: ")
