"""README and docs are true: the table of what works, the links, the figures and the code."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.support.claims import PAGE, ROOT, RUN_BY, claims, page_with_tables

PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


def test_the_tables_of_what_works_are_those_that_the_tests_make() -> None:
    assert PAGE.read_text() == page_with_tables(), "run: python -m tests.support.claims"


def test_every_claim_names_its_area() -> None:
    assert claims()
    assert [claim for claim in claims() if ": " not in claim] == []


def test_a_table_says_which_command_runs_the_tests_of_a_claim() -> None:
    found, file = claims(), "tests/e2e/test_verl_ppo.py"
    texts = ("trains PPO with a critic on the bridge", "trains GRPO with a KL reference and vLLM, and writes a checkpoint")
    assert [RUN_BY[found[f"verl: main_ppo {text}"][file]] for text in texts] == [" (run by name)", " (`make test-all`)"]
    assert found["loop: one seed gives the same rewards twice"] == {"tests/e2e/test_resume.py": 0}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_and_paths_on_a_page_exist(page: Path) -> None:
    text = page.read_text()
    links = re.findall(r"\]\((?!https?:)([^)#]+)\)", text)
    paths = re.findall(r"`((?:rl_backend|actors|adapters|examples|benchmarks|tests|docs)/[\w/.]*[\w/])`", text)
    missing = [link for link in links if not (page.parent / link).exists()]
    missing += [path for path in paths if not (ROOT / path).exists()]
    assert missing == []


def test_each_area_of_what_works_has_a_heading_that_can_be_linked() -> None:
    text = PAGE.read_text()
    areas = sorted({claim.partition(": ")[0] for claim in claims()})
    assert re.findall(r"^## (.*)$", text, re.MULTILINE) == areas
    assert re.findall(r"\(#([\w-]+)\)", text) == [area.lower().replace(" ", "-") for area in areas]


@pytest.mark.parametrize(
    "page", [ROOT / "README.md", ROOT / "docs" / "reference" / "measurements.md"], ids=lambda page: page.name
)
def test_figures_are_those_of_the_benchmark_results(page: Path) -> None:
    text = page.read_text()
    rows = re.findall(r"\| ([\de.-]+)x?(?: to ([\de.-]+)x?)?(?: s)? \| `([\w/]+\.json)` `([^`]+)` \|", text)
    assert len(rows) == len(re.findall(r"^\|.*\.json` `", text, re.MULTILINE)), "each figure is read"
    assert any(largest for _, largest, _, _ in rows), f"{page.name} has no figures that differ between machines"
    for smallest, largest, name, key in rows:
        value = json.loads((ROOT / "benchmarks" / name).read_text())
        for part in key.split("."):
            value = value[part]
        values = [run["value"] for run in value] if largest else [value]
        for figure, found in zip((smallest, largest or smallest), (min(values), max(values)), strict=True):
            digits = figure.partition("e")[0].partition(".")[2]
            shown = f"{found:.{len(digits)}{'e' if 'e' in figure else 'f'}}"
            assert float(shown) == float(figure), f"{name} {key}"


def test_the_runtime_page_runs_as_it_stands(tied_model: Path, tmp_path: Path) -> None:
    code = "\n".join(re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "runtime_api.md").read_text(), re.DOTALL))
    names: dict[str, Any] = {"model_dir": str(tied_model), "checkpoint_dir": str(tmp_path / "checkpoint")}
    exec(compile(code, "runtime_api.md", "exec"), names)
    assert names["ok"] is True


def test_the_page_of_tenants_runs_as_it_stands(tied_model: Path) -> None:
    code = "\n".join(re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "lora.md").read_text(), re.DOTALL))
    names: dict[str, Any] = {"model_dir": str(tied_model)}
    exec(compile(code, "lora.md", "exec"), names)
    assert [info.step for info in names["runtime"].list_lora_adapters(names["base"])] == [2, 1, 0]
    assert [row.shape for row in names["values"]] == [row.input_ids.shape for row in names["rows"]]
    names["runtime"].close()


@pytest.mark.shows("resume: your own loop, without Ray, continues from its last checkpoint, bit for bit")
def test_the_loop_on_the_page_of_checkpoints_goes_on_where_it_stopped(tied_model: Path, tmp_path: Path) -> None:
    code = "\n".join(re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "checkpoints.md").read_text(), re.DOTALL))

    def loop(checkpoints: str) -> Callable[[int], list[float]]:
        names: dict[str, Any] = {"model_dir": str(tied_model), "checkpoint_dir": str(tmp_path / checkpoints)}
        exec(compile(code, "checkpoints.md", "exec"), names)
        train: Callable[[int], list[float]] = names["train"]
        return train

    whole = loop("whole")(6)
    assert loop("stopped")(3) + loop("stopped")(6) == whole[:3] + whole[2:]
    assert sorted(path.name for path in (tmp_path / "stopped").glob("step-*")) == [
        f"step-0000000{step}" for step in (2, 4, 6)
    ]


def test_the_readme_says_what_it_is_in_a_minute_and_leaves_tests_to_their_page() -> None:
    text = (ROOT / "README.md").read_text()
    assert not re.search(r"\btest_\w+|tests/", text)
    first, _, _ = text.partition("## What is in it")
    assert first.startswith("# rl-backend\n\nA training backend for RL on language models. ")
    prose = re.sub(r"```.*?```|^ {4}.*$", "", first, flags=re.DOTALL | re.MULTILINE)
    assert len(prose.split()) <= 300
