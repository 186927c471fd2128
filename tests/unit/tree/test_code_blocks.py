"""Every code block of README and docs runs, is read by the parser that it is for, or is listed here with the reason."""

from __future__ import annotations

import ast
import importlib
import re
import shlex
import tomllib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from actors.run import parse_config
from rl_backend.cli import main as command_line
from rl_backend.cli.example import EXAMPLES
from rl_backend.contracts import ConfigError, NativeConfig, ParallelConfig
from rl_backend.data.examples import read_examples
from rl_backend.model.blocks import require_divided
from tests.mutations import reach, waves
from tests.mutations.check import problems
from tests.mutations.fault import Fault
from tests.support.claims import ROOT
from tests.support.code_blocks import PAGES, CodeBlock, code_blocks

BLOCKS = [block for page in PAGES for block in code_blocks(page)]
PYTHON = [block for block in BLOCKS if block.language == "python"]
COMMANDS = [block for block in BLOCKS if block.commands]
OTHERS = [block for block in BLOCKS if block not in PYTHON and block not in COMMANDS]

RUN_BY = {
    "README.md": "tests/e2e/test_documentation_loops.py",
    "docs/adding_a_model.md": "tests/unit/rl_backend/model/test_outside_folder.py",
    "docs/algorithms.md": "tests/unit/rl_backend/algorithm/test_algorithm_page.py",
    "docs/checkpoints.md": "tests/unit/tree/test_documentation.py",
    "docs/coming_from_trl.md": "tests/unit/tree/test_coming_from_trl.py",
    "docs/data.md": "tests/unit/rl_backend/data/test_prompts.py",
    "docs/environments.md": "tests/unit/examples/test_episodes.py",
    "docs/first_hour.md": "tests/e2e/test_first_hour.py",
    "docs/layouts.md": "tests/unit/tree/test_code_blocks.py",
    "docs/lora.md": "tests/unit/tree/test_documentation.py",
    "docs/rewards.md": "tests/unit/rl_backend/data/test_rewards.py",
    "docs/router_replay.md": "tests/e2e/test_families.py",
    "docs/runtime_api.md": "tests/unit/tree/test_documentation.py",
    "docs/schedules.md": "tests/unit/rl_backend/pipeline/test_schedule_page.py",
    "docs/writing_a_loop.md": "tests/e2e/test_documentation_loops.py",
}
"""Page -> the test that runs all of its fenced Python as it stands."""

NOT_PARSED = {
    "ray": "needs a cluster; tests/e2e/test_cluster_jobs.py runs what the page says",
    "chmod": "the system's",
    "unzip": "the system's",
    "export": "the shell's",
}
"""Programs whose arguments nothing here reads, and why."""

OF_A_RUN = ["--model", "DIR", "--dataset", "train.jsonl", "--reward", "my_reward.py:compute_score"]
"""What ``...`` stands for in a command."""


def is_mean_over_tokens(block: CodeBlock) -> None:
    class Data(NamedTuple):
        meta: dict[str, float]

    mask = torch.tensor([1.0, 0.0, 1.0, 1.0])
    names = {"token_losses": torch.arange(4.0), "mask": mask, "data": Data({"batch_num_tokens": 3.0, "dp_size": 1})}
    assert eval(block.text, names).item() == pytest.approx(5 / 3)


def is_signature_of_rewards(block: CodeBlock) -> None:
    names: dict[str, Any] = {}
    exec(block.text, names)
    assert names["compute_score"](data_source="", solution_str="", ground_truth="", extra_info=None) is None


def are_rows_with_answers(block: CodeBlock) -> None:
    Path("rows.jsonl").write_text(block.text)
    assert [example.ground_truth for example in read_examples("rows.jsonl")] == ["4"] * 3


def is_row_with_tools(block: CodeBlock) -> None:
    Path("rows.jsonl").write_text(block.text)
    (example,) = read_examples("rows.jsonl")
    assert [tool["function"]["name"] for tool in example.tools] == ["add"]


def are_commands_of_waves(block: CodeBlock) -> None:
    lines = [shlex.split(line, comments=True) for line in block.text.splitlines()]
    given = [words[words.index("-m") + 1 :] for words in lines]
    commands = [waves.options_of(words).command for module, *words in given if module == waves.__name__]
    assert commands == ["draw", "try"]
    assert [words for module, *words in given if module == "pytest"] == [["-p", reach.__name__, "tests/unit"]]


def is_fault_of_this_tree(block: CodeBlock) -> None:
    fault = eval(block.text, {"Fault": Fault})
    assert problems([fault]) == []


def is_error_of_a_layout(block: CodeBlock) -> None:
    with pytest.raises(ConfigError) as raised:
        require_divided("tp", 3, "num_attention_heads", 16)
    assert str(raised.value) == block.text


def are_options_of(example: str) -> Callable[[CodeBlock], None]:
    def check(block: CodeBlock) -> None:
        Path("options.yaml").write_text(block.text)
        read_options(example, ["--config", "options.yaml"])

    return check


def parses(block: CodeBlock) -> None:
    ast.parse(block.text)


OTHER_CHECKS: Sequence[tuple[str, str, Callable[[CodeBlock], None] | None, str]] = [
    ("docs/architecture.md", "benchmarks/ ", None, "folders; import-linter checks what they may import"),
    ("docs/checkpoints.md", "runs/mine/checkpoints/", None, "files of a run"),
    ("docs/cluster.md", "--environment", None, "a part of a command that needs a cluster"),
    ("docs/cluster.md", ".venv-next/", None, "needs make setup PINS=next; tests/e2e/test_engine_environments.py runs both"),
    ("docs/coming_from_trl.md", "prompts_per_step", parses, "formulas"),
    ("docs/concepts.md", "(token_losses", is_mean_over_tokens, ""),
    (
        "docs/cluster.md",
        "samples = ",
        parses,
        "not run: needs a GPU; tests/unit/actors/rollout/engine/test_engine.py has its order",
    ),
    ("docs/data.md", '{"prompt": "2', are_rows_with_answers, ""),
    ("docs/data.md", '{"prompt": [', is_row_with_tools, ""),
    ("docs/data.md", "def compute_score", is_signature_of_rewards, ""),
    ("docs/evaluation.md", "model: ", are_options_of("examples.grpo"), ""),
    (
        "docs/evaluation.md",
        "from actors.run",
        parses,
        "not run: needs a trained model; tests/e2e/test_evaluation.py has one",
    ),
    ("docs/getting_started.md", "def compute_score", is_signature_of_rewards, ""),
    ("docs/getting_started.md", "ok      packages", None, "output; tests/unit/rl_backend/cli/test_check_command.py"),
    ("docs/getting_started.md", "# mine.yaml", are_options_of("examples.grpo"), ""),
    ("docs/layouts.md", "ParallelConfig.tp=3", is_error_of_a_layout, ""),
    ("docs/lora.md", "rollout = RolloutGroup", parses, "not run: needs engines; tests/e2e/test_adapter_sync.py has them"),
    ("docs/lora.md", "model: ", are_options_of("examples.tenants"), ""),
    ("docs/parity.md", "tiny-qwen3:", None, "output"),
    ("docs/plan.md", "native on 8 ranks", None, "output; tests/unit/rl_backend/cli/test_plan_command.py"),
    ("docs/rewards.md", "model: ", are_options_of("examples.grpo"), ""),
    ("docs/serve.md", "import os", parses, "not run: needs a server; tests/unit/actors/serve/test_serve.py has one"),
    ("docs/serve.md", "# first terminal", None, "tests/e2e/test_serve_page.py runs it"),
    ("docs/serve.md", "# second terminal", None, "tests/e2e/test_serve_page.py runs it"),
    ("docs/serve.md", "# recipe", None, "needs a server; tests/unit/actors/serve/test_recipes.py runs it with one"),
    ("docs/testing.md", "Fault(", is_fault_of_this_tree, ""),
    ("docs/testing.md", "python -m tests", are_commands_of_waves, ""),
    ("docs/verl.md", "", None, "verl's overrides, environment and log; tests/unit/adapters/verl/test_verl_page.py"),
    ("docs/writing_a_loop.md", "from actors import Loss, RLRun", parses, "not run: has ... in it; examples/grpo.py has not"),
]
"""(page, how the block begins, what checks it, why that is not all)."""


def test_there_are_blocks_of_every_kind_and_all_lists_name_some() -> None:
    assert min(len(PYTHON), len(COMMANDS), len(OTHERS)) >= 10
    assert {block.page for block in PYTHON} == set(RUN_BY)
    assert {check_of(block) for block in OTHERS} == set(range(len(OTHER_CHECKS)))
    assert all((check is not None and check is not parses) or why for _, _, check, why in OTHER_CHECKS)
    assert NOT_PARSED.keys() <= {words[0] for block in COMMANDS for words in block.commands}


@pytest.mark.parametrize("block", PYTHON, ids=str)
def test_python_is_run_by_the_test_that_names_its_page(block: CodeBlock) -> None:
    parses(block)
    test = (ROOT / RUN_BY[block.page]).read_text()
    assert Path(block.page).name in test and any(how in test for how in ("exec(", "inspect.getsource", "(block.text)"))


@pytest.mark.shows("docs: a loop starts Ray before its training group, and runs in a process that has none")
@pytest.mark.parametrize("page", sorted({block.page for block in PYTHON if "TrainGroup(" in block.text}))
def test_a_loop_starts_ray_before_its_groups(page: str) -> None:
    """Tests run the pages in processes that have Ray."""
    code = "\n".join(block.text for block in PYTHON if block.page == page)
    assert 0 <= code.find("\ninit_local_ray(") < min(code.find(f"{group}(") for group in ("TrainGroup", "RolloutGroup"))


def test_the_layout_of_the_page_is_one() -> None:
    (block,) = (block for block in PYTHON if block.page == "docs/layouts.md")
    names: dict[str, Any] = {}
    exec(block.text, names)
    assert NativeConfig(**names["backend_cfg"]).parallel == ParallelConfig(tp=2, pp=2, ep=4)


@pytest.mark.parametrize("block", COMMANDS, ids=str)
def test_commands_are_what_their_own_parsers_read(block: CodeBlock, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for page in ("docs/getting_started.md", "docs/lora.md"):
        for number, text in enumerate(block.text for block in OTHERS if block.page == page and "model: " in block.text):
            (tmp_path / ("users.yaml" if "users:" in text else "mine.yaml")).write_text(text)
            assert number == 0
    for program, *arguments in block.commands:
        match program:
            case "make":
                check_make(arguments)
            case "pip":
                check_extras(arguments)
            case "rl-backend":
                check_sub_command(arguments, monkeypatch)
            case _ if program in NOT_PARSED:
                pass
            case "python" if arguments[0].endswith(".py"):
                assert any(each.page == block.page and each.first == f"# {arguments[0]}" for each in PYTHON)
            case _:
                assert arguments[0] == "-m"
                read_options(arguments[1], arguments[2:])


@pytest.mark.parametrize("block", OTHERS, ids=str)
def test_every_other_block_is_checked_or_listed(block: CodeBlock, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    _, _, check, _ = OTHER_CHECKS[check_of(block)]
    if check is not None:
        check(block)


def check_of(block: CodeBlock) -> int:
    (found,) = (
        number
        for number, (page, start, *_) in enumerate(OTHER_CHECKS)
        if block.page == page and block.text.startswith(start)
    )
    return found


def read_options(module: str, arguments: Sequence[str]) -> None:
    """As the module's own ``main`` does, which ends before anything starts."""
    example = importlib.import_module(module)
    found = re.search(r"(?:parse_config\(|run_command\(main,)\s*(\w+)", Path(str(example.__file__)).read_text())
    assert found is not None, f"{module} has options"
    left_out = "..." in arguments
    given = [argument for argument in arguments if argument != "..."] + (OF_A_RUN if left_out else [])
    parse_config(getattr(example, found[1]), "", given)


def check_make(arguments: Sequence[str]) -> None:
    target, *variables = arguments
    makefile = (ROOT / "Makefile").read_text()
    assert target in {name for line in re.findall(r"^([\w -]+):", makefile, re.MULTILINE) for name in line.split()}
    values = dict(variable.split("=", 1) for variable in variables)
    assert all(re.search(rf"\$\({name}\)|^{name} ", makefile, re.MULTILINE) for name in values)
    if target == "demo":
        read_options("examples.demo.__main__", shlex.split(values.get("ARGS", "")))


def check_extras(arguments: Sequence[str]) -> None:
    known = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    for extras in re.findall(r"(?:rl-backend|\.)\[(.*?)\]", " ".join(arguments)):
        assert set(extras.split(",")) <= known.keys()


def check_sub_command(arguments: Sequence[str], monkeypatch: pytest.MonkeyPatch) -> None:
    if arguments[0] in EXAMPLES:
        return read_options(f"examples.{arguments[0]}", arguments[1:])
    module = importlib.import_module(command_line.COMMANDS[arguments[0]][0])
    monkeypatch.setattr(module, "run", lambda parsed: 0)
    assert command_line.main(arguments) == 0
    return None
