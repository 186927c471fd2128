"""``rl-backend gpu-check`` on a machine whose GPU, git and pytest are stand-ins."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from xml.etree import ElementTree

import pytest

from rl_backend.cli import gpu_check
from rl_backend.cli.main import main
from rl_backend.options.parser import CommandError


@dataclasses.dataclass
class Torch:
    """What a probe of torch has found."""

    error: str | None = None
    devices: tuple[str, ...] = ("H100", "H200")
    cuda_build: str | None = "13.0"


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Torch:
    """A checkout without git, with tests."""
    found = Torch()
    (tmp_path / "tests" / "gpu").mkdir(parents=True)
    monkeypatch.setattr(gpu_check, "ROOT", tmp_path)
    monkeypatch.setattr(gpu_check, "TorchProbe", SimpleNamespace(run=lambda: found))
    monkeypatch.setattr(gpu_check, "read_machine", lambda: Torch(cuda_build="the machine"))
    packages = [SimpleNamespace(distribution="a", installed="1"), SimpleNamespace(distribution="b", installed=None)]
    monkeypatch.setattr(gpu_check, "read_packages", lambda: packages)
    return found


def case_of(outcome: str, name: str, reason: str = "") -> dict[str, Any]:
    return {"test": name, "outcome": outcome, **({} if outcome == "passed" else {"reason": reason})}


@pytest.mark.parametrize(
    ("status", "outcomes", "expected"),
    [
        (0, ["passed", "skipped"], 0),
        (0, ["passed"], 0),
        (0, ["skipped"], 1),
        (0, [], 1),
        (1, ["passed", "failed"], 1),
        (2, ["passed"], 1),
    ],
)
def test_the_status_says_whether_every_test_that_ran_passed(
    machine: Torch, status: int, outcomes: Sequence[str], expected: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cases = [case_of(outcome, f"t::{number}", "why\nmore") for number, outcome in enumerate(outcomes)]
    given: list[Any] = []

    def run_stages(tests: Path, arguments: list[str]) -> tuple[int, list[dict[str, Any]]]:
        given.append((tests, arguments))
        return status, cases

    monkeypatch.setattr(gpu_check, "run_stages", run_stages)
    path = tmp_path / "new" / "folder" / "result.json"
    assert main(["gpu-check", "--json", str(path), "--", "-k", "nccl"]) == expected
    assert given == [(tmp_path / "tests" / "gpu", ["-k", "nccl"])]
    result = json.loads(path.read_text())
    assert result["pytest_status"] == status and result["tests"] == cases and result["commit"] is None
    assert sum(result["counts"].values()) == len(outcomes)
    assert result["packages"] == {"a": "1", "b": None} and result["torch"]["devices"] == ["H100", "H200"]
    assert result["machine"]["cuda_build"] == "the machine" and result["time"].endswith("+00:00")


def test_what_did_not_pass_is_named_with_the_first_line_of_its_reason(
    machine: Torch, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    cases = [
        case_of("passed", "t::one"),
        case_of("skipped", "t::two", "no NCCL\nsecond line"),
        case_of("failed", "t::three"),
        case_of("passed", "t::four") | {"measured": {"sft_tokens_per_second": "24017", "returned_bytes": "3"}},
        case_of("passed", "t::five") | {"measured": {"sft_tokens_per_second_compiled": "26400"}},
    ]
    monkeypatch.setattr(gpu_check, "run_stages", lambda tests, arguments: (1, cases))
    monkeypatch.setattr(gpu_check, "_present", lambda module: module not in ("vllm", "megatron.core"))
    path = tmp_path / "result.json"
    assert main(["gpu-check", "--json", str(path)]) == 1
    assert capsys.readouterr().out.splitlines() == [
        "vllm is not installed: the tests that need it are skipped and named",
        "megatron.core is not installed: the tests that need it are skipped and named",
        "",
        "1 failed, 3 passed, 1 skipped on H100, H200",
        "  skipped: t::two: no NCCL",
        "  failed: t::three: no reason given",
        "0.6B, one GPU                  H100          prime-rl, H100",
        "supervised training, tokens/s  26,400        26,000",
        "RL steps, tokens/s             not measured  11,900",
        f"result: {path}",
    ]
    monkeypatch.setattr(gpu_check, "run_stages", lambda tests, arguments: (5, []))
    main(["gpu-check", "--json", str(path)])
    assert "no tests on H100, H200" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("built", "why"), [(None, "this torch is built without CUDA"), ("13.0", "torch finds no CUDA device")]
)
def test_without_a_gpu_the_tests_that_would_run_are_listed(
    machine: Torch, built: str | None, why: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    machine.devices, machine.cuda_build = (), built
    commands: list[Any] = []

    def run(command: list[str], **options: Any) -> Any:
        commands.append((command, options["cwd"]))
        return SimpleNamespace(stdout=output, stderr="no module\n")

    monkeypatch.setattr(subprocess, "run", run)
    path, output = tmp_path / "result.json", "a.py::one\n\na.py::two\n2 tests collected\n"
    assert main(["gpu-check", "--json", str(path)]) == 3
    text = capsys.readouterr().out
    assert text.startswith(f"No GPU: {why}. Nothing was run") and text.endswith("would run:\n  a.py::one\n  a.py::two\n")
    ((command, folder),) = commands
    assert folder == tmp_path and "--collect-only" in command and command[command.index("-m", 2) :][:2] == ["-m", "gpu"]
    output = "an error\n"
    assert main(["gpu-check", "--json", str(path)]) == 3
    assert capsys.readouterr().out.endswith("  an error\nno module\n\n") and not path.exists()


def test_what_cannot_be_run_is_refused_with_the_reason(
    machine: Torch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    machine.error = "libcudart is missing"
    assert main(["gpu-check"]) == 2
    assert capsys.readouterr().err.endswith(": libcudart is missing\n")
    (tmp_path / "tests" / "gpu").rmdir()
    assert main(["gpu-check"]) == 2
    assert "gpu is not there: gpu-check runs from a checkout" in capsys.readouterr().err


def git(folder: Path, *arguments: str) -> str:
    identity = ("-c", "user.name=a", "-c", "user.email=a@b")
    command = ["git", "-C", str(folder), *identity, *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


def test_the_commit_is_the_one_that_is_checked_out_if_there_is_one(machine: Torch, tmp_path: Path) -> None:
    torch: Any = machine
    git(tmp_path, "init", "-q")
    assert gpu_check._result(torch, 0, [])["commit"] is None, "nothing is committed yet"
    git(tmp_path, "commit", "-q", "--allow-empty", "-m", "first")
    commit = gpu_check._result(torch, 0, [])["commit"]
    assert commit == git(tmp_path, "rev-parse", "HEAD") and len(commit) == 40


STAGE = gpu_check.Stage("a few", ("test_a.py", "test_b.py"), 7.5)


def test_pytest_that_ends_before_it_writes_a_report_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []

    def start(command: list[str], **options: Any) -> Any:
        seen.append((command, options))
        return SimpleNamespace(pid=2**30, wait=lambda timeout=None: seen.append(timeout) or 4)

    monkeypatch.setattr(subprocess, "Popen", start)
    monkeypatch.setenv("HF_HUB_OFFLINE", "0")
    monkeypatch.delenv("RAY_USAGE_STATS_ENABLED", raising=False)
    tests = tmp_path / "tests" / "gpu"
    with pytest.raises(CommandError, match="pytest ended with status 4 before it ran a test"):
        gpu_check.run_tests(tests, ["-k", "x"], STAGE)
    (command, options), bound, _ = seen
    assert command[3:5] == [str(tests / "test_a.py"), str(tests / "test_b.py")]
    assert command[-2:] == ["-k", "x"] and options["cwd"] == tmp_path and options["start_new_session"] and bound == 7.5
    assert (options["env"]["HF_HUB_OFFLINE"], options["env"]["RAY_USAGE_STATS_ENABLED"]) == ("0", "0"), (
        "the user's goes first"
    )


TEST = "from pytest import mark\n\n@mark.gpu\ndef test_it() -> None: ...\n"
SLEEPS = """
import subprocess
import sys
import time

with open(sys.argv[1], "w") as file:
    file.write(str(subprocess.Popen(["sleep", "600"]).pid))
time.sleep(600)
"""


@pytest.mark.shows("gpu-check: a stage that takes too long is ended with all that it started, and the next one runs")
def test_a_stage_that_takes_too_long_is_ended_and_the_next_one_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tests, started, original = tmp_path / "tests" / "gpu", tmp_path / "started", gpu_check._command
    tests.mkdir(parents=True)
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers = gpu\n")
    for name in ("slow", "quick", "new"):
        (tests / f"test_{name}.py").write_text(TEST)

    def command(paths: Sequence[Path], *arguments: str) -> list[str]:
        runs = "--collect-only" not in arguments
        is_slow = runs and paths[0].name == "test_slow.py"
        return [sys.executable, "-c", SLEEPS, str(started)] if is_slow else original(paths, *arguments)

    monkeypatch.setattr(gpu_check, "_command", command)
    stages = gpu_check.Stage("first", ("test_slow.py",), 4), gpu_check.Stage("second", ("test_quick.py", "test_gone.py"), 99)
    monkeypatch.setattr(gpu_check, "STAGES", stages)
    status, outcomes = gpu_check.run_stages(tests, ["-p", "no:cacheprovider"])
    assert status == 2
    assert [(each["test"].rpartition("/")[2], each["outcome"]) for each in outcomes] == [
        ("test_slow.py::test_it", "error"),
        ("test_quick.py::test_it", "passed"),
        ("test_new.py::test_it", "passed"),
    ]
    assert outcomes[0]["reason"] == "the stage 'first' was ended after 4 s; run its files alone"
    command_line = Path("/proc") / started.read_text() / "cmdline"
    assert not command_line.exists() or not command_line.read_bytes(), "what it started is ended too"


def test_every_file_of_gpu_tests_has_a_stage_and_every_stage_has_its_files() -> None:
    tests = Path(__file__).parents[3] / "gpu"
    named = [name for stage in gpu_check.STAGES for name in stage.files]
    assert sorted(named) == sorted(path.name for path in tests.glob("test_*.py"))
    assert [stage.name for stage in gpu_check.stages_of(tests)] == [stage.name for stage in gpu_check.STAGES]


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ("", {"outcome": "passed", "seconds": 1.5}),
        ('<skipped message="why"/>', {"outcome": "skipped", "seconds": 1.5, "reason": "why"}),
        ('<failure message="odd">text</failure>', {"outcome": "failed", "seconds": 1.5, "reason": "odd", "details": "text"}),
        ("<error/>", {"outcome": "error", "seconds": 1.5, "reason": "", "details": ""}),
        (
            '<properties><property name="a" value="1"/><property name="b" value="2"/></properties>',
            {"outcome": "passed", "seconds": 1.5, "measured": {"a": "1", "b": "2"}},
        ),
    ],
)
def test_a_case_of_the_report_says_what_came_of_it(body: str, expected: dict[str, Any]) -> None:
    case = ElementTree.fromstring(f'<testcase file="t.py" name="one" time="1.5">{body}</testcase>')
    assert gpu_check._outcome(case) == {"test": "t.py::one", **expected}


def test_the_end_of_a_long_traceback_is_kept() -> None:
    case = ElementTree.fromstring(f'<testcase file="t.py" name="one"><failure>{"a" * 10}{"b" * 4000}</failure></testcase>')
    found = gpu_check._outcome(case)
    assert found["details"] == "b" * 4000 and found["seconds"] == 0.0
