"""The first RL run of docs/serve.md as its readers do it: the page's lines, in a folder with this tree's environment."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.code_blocks import code_blocks
from tests.support.libraries import FOLDER, ROOT, cookbook, recipes
from tests.support.serve_process import serving

PAGE = ROOT / "docs" / "serve.md"


@pytest.mark.long
@pytest.mark.timeout(1800)
@pytest.mark.shows("server: the first RL run of docs/serve.md as it stands: a recipe of the real cookbook learns")
def test_the_first_rl_run_is_as_its_page_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cookbook()
    recipes()
    (tmp_path / ".venv").symlink_to(sys.prefix)
    (tmp_path / ".libraries").symlink_to(FOLDER)
    first, second = (block.text for block in code_blocks(PAGE) if block.first.endswith(" terminal"))
    _, libraries, task, serve = first.splitlines()
    assert libraries == 'make libraries ARGS="cookbook recipes"', "which is there already"
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    subprocess.run(["sh", "-c", task], check=True)
    with serving(["sh", "-c", f"exec {serve}"]):
        subprocess.run(["sh", "-e", "-c", second], check=True)
    rows = [json.loads(line) for line in (tmp_path / "first/log/metrics.jsonl").read_text().splitlines()]
    rewards = [row["env/all/reward/total"] for row in rows if "env/all/reward/total" in row]
    assert len(rewards) == 15 and sum(rewards[-5:]) / 5 >= sum(rewards[:3]) / 3 + 0.2, rewards
    assert all(abs(row["optim/kl_sample_train_v1"]) <= 1e-6 for row in rows if "optim/kl_sample_train_v1" in row)
