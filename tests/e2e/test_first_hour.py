"""The page of the first hour as its readers do it: a new environment with the wheel, an empty folder, files and commands."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import venv
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.support.claims import ROOT
from tests.support.code_blocks import code_blocks
from tests.unit.tree.test_packaging import copy_sources

PAGE = ROOT / "docs" / "first_hour.md"
OF_THE_TESTS = {
    *("PYTHONPATH", "RAY_ADDRESS", "RAY_prestart_worker_first_driver", "RAY_worker_niceness", "TORCH_COMPILE_DISABLE")
}
"""Variables that a reader does not have."""
SECONDS = 600.0


@pytest.fixture
def environment(tmp_path: Path) -> Path:
    """A new virtual environment with the wheel.

    All that the wheel needs is found in the packages of these tests, by a ``.pth`` file: it takes gigabytes, and vLLM's
    build for CPUs is on no index. This tree, which is installed there too, is not found that way.
    """
    source, folder = copy_sources(tmp_path / "source"), tmp_path / "venv"
    pip = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check"]
    wheel = [*pip, "wheel", "--no-deps", "--no-build-isolation", "--no-index", "--wheel-dir", str(tmp_path), str(source)]
    subprocess.run(wheel, check=True)
    shutil.rmtree(source)
    (built,) = tmp_path.glob("rl_backend-*.whl")
    venv.create(folder, symlinks=True)
    install = [*pip, "--python", str(folder / "bin" / "python"), "install", "--no-deps", "--no-index", str(built)]
    subprocess.run(install, check=True)
    (site,) = folder.glob("lib/python*/site-packages")
    (site / "packages_of_the_tests.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return folder


def run(environment: Path, folder: Path, words: Sequence[str]) -> str:
    """What a command prints, given in ``folder`` with the environment activated."""
    variables = {name: value for name, value in os.environ.items() if name not in OF_THE_TESTS}
    variables |= {"VIRTUAL_ENV": str(environment), "PATH": f"{environment / 'bin'}:{os.environ['PATH']}"}
    done = subprocess.run(words, cwd=folder, env=variables, capture_output=True, text=True, timeout=SECONDS, check=False)
    assert done.returncode == 0, f"{' '.join(words)}\n{done.stdout}{done.stderr}"
    return done.stdout


@pytest.mark.long
@pytest.mark.shows(
    "examples: docs/first_hour.md as it stands, with the wheel in a new environment: own model, data and reward, learned"
)
def test_the_first_hour_is_as_its_page_says(environment: Path, tmp_path: Path) -> None:
    folder, printed = tmp_path / "empty", dict[str, str]()
    folder.mkdir()
    for block in code_blocks(PAGE):
        if block.language == "python":
            (folder / block.first.removeprefix("# ")).write_text(block.text)
        for words in block.commands:
            printed[" ".join(words[:2])] = run(environment, folder, words)
    modules = "import actors, rl_backend; print(actors.__file__, rl_backend.__file__)"
    places = run(environment, folder, ["python", "-c", modules]).split()
    assert all(Path(place).is_relative_to(environment) for place in places)
    assert "nothing refuses this run" in printed["rl-backend check"]
    assert "REFUSED" not in printed["rl-backend check"]
    metrics = [json.loads(line) for line in (folder / "runs" / "first" / "metrics.jsonl").read_text().splitlines()]
    rewards = [line["reward"] for line in metrics]
    assert len(rewards) == 40 and "reward/characters" in metrics[0]
    assert sum(rewards[-5:]) / 5 >= sum(rewards[:5]) / 5 + 0.3, rewards
    found = re.search(r"train: mean@1 (\d\.\d+)", printed["rl-backend eval"])
    assert found is not None and float(found[1]) >= sum(rewards[:5]) / 5 + 0.3
    assert {"report.html", "summary.json", "model"} <= {path.name for path in (folder / "runs" / "first").iterdir()}
