"""Recipes of tinker-cookbook, unmodified, against the real routes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks.tinker import run_recipe
from benchmarks.tinker_task import NAME, write_names
from tests.support.libraries import cookbook, recipes
from tests.support.served import served

SMALL: Mapping[str, Mapping[str, Any]] = {
    "math_rl": {"group_size": 4, "groups_per_batch": 3, "save_every": 1},
    "sl_loop": {"batch_size": 8, "save_every": 1},
    "rl_loop": {"batch_size": 2, "group_size": 3, "max_tokens": 4, "save_every": 1},
    "guess_number": {"group_size": 2, "batch_size": 2, "max_tokens": 3},
}


@pytest.fixture(scope="module")
def named(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SimpleNamespace]:
    cookbook()
    recipes()
    folder = tmp_path_factory.mktemp("names")
    write_names(folder, 0, 20)
    with served(folder / NAME, tmp_path_factory.mktemp("state"), max_tokens=1024, name=NAME) as found:
        found.folder = folder
        yield found


@pytest.mark.long
@pytest.mark.timeout(600)
@pytest.mark.parametrize("recipe", SMALL)
def test_recipes_of_the_cookbook_run_unmodified(recipe: str, named: SimpleNamespace, tmp_path: Path) -> None:
    rows = run_recipe(recipe, named.url, named.folder, tmp_path, 2, SMALL[recipe])
    assert len(rows) >= 2
    gaps = [abs(row["optim/kl_sample_train_v1"]) for row in rows if "optim/kl_sample_train_v1" in row]
    assert all(gap < 1e-6 for gap in gaps) and bool(gaps) == (recipe in ("math_rl", "guess_number"))
    names = {path.rsplit("/", 1)[1] for path in (each["tinker_path"] for each in named.server.checkpoints("local"))}
    assert "final" in names
