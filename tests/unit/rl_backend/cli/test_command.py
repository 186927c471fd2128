"""The ``rl-backend`` command as a user meets it."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from rl_backend.cli import gpu_check
from rl_backend.cli.main import main
from rl_backend.contracts import ConfigError
from rl_backend.options.parser import CommandError

ROOT = Path(__file__).resolve().parents[4]


def run_command(*arguments: str, path: Path | None = None) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, **({"PYTHONPATH": str(path)} if path else {})}
    command = [sys.executable, "-m", "rl_backend.cli", *arguments]
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)


def test_without_arguments_the_commands_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 2
    output = capsys.readouterr().out
    assert "doctor" in output
    assert "gpu-check" in output


def test_a_command_that_is_not_there_is_refused_with_the_one_that_was_meant(capsys: pytest.CaptureFixture[str]) -> None:
    assert [main(["grop", "--model", "m"]), main(["train"])] == [2, 2]
    meant, unknown = capsys.readouterr().err.splitlines()
    assert meant == "error: grop: there is no such command; did you mean grpo?"
    assert unknown == "error: train: there is no such command; see rl-backend --help"


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("plan --modle m --ranks 1", "--modle: there is no such flag; did you mean --model?"),
        ("export --ckeckpoint=c", "--ckeckpoint: there is no such flag; did you mean --checkpoint?"),
        ("schedule --xyz 3", "--xyz: there is no such flag; see rl-backend schedule --help"),
        ("parity --referance native", "--referance: there is no such flag; did you mean --reference?"),
        ("plan --model m", "the following arguments are required: --ranks; see rl-backend plan --help"),
        ("plan --model m --ranks two", "argument --ranks: invalid int value: 'two'; see rl-backend plan --help"),
        (
            "plan --model m --ranks 1 --backend brigde",
            "argument --backend: invalid choice: 'brigde' (choose from 'native', 'bridge'); see rl-backend plan --help",
        ),
        ("export --checkpoint c --out", "argument --out: expected one argument; see rl-backend export --help"),
        ("report a b", "unrecognized arguments: b; see rl-backend --help"),
    ],
)
def test_what_a_command_does_not_take_is_refused_in_a_sentence(
    given: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(given.split()) == 2
    assert capsys.readouterr() == ("", f"error: {message}\n")


@pytest.mark.parametrize("error", [ConfigError.of("tp", 3, "must divide 8"), CommandError("pytest is not installed")])
def test_an_expected_error_is_one_message_and_its_traceback_is_for_debugging(
    error: Exception, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(_: object) -> int:
        raise error

    monkeypatch.setattr(gpu_check, "run", fail)
    assert main(["gpu-check"]) == 2
    captured = capsys.readouterr()
    assert captured.err == f"error: {error}\n"
    assert captured.out == ""
    with pytest.raises(type(error)):
        main(["gpu-check", "--debug"])


def test_an_unexpected_error_keeps_its_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(_: object) -> int:
        raise ZeroDivisionError

    monkeypatch.setattr(gpu_check, "run", fail)
    with pytest.raises(ZeroDivisionError):
        main(["gpu-check"])


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_gpu_check_without_a_gpu_says_so_and_lists_every_test_that_would_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "tests" / "gpu"
    folder.mkdir(parents=True)
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers = gpu\n")
    for name in ("test_one.py", "test_other.py"):
        (folder / name).write_text(GPU_TESTS)
    monkeypatch.setattr(gpu_check, "ROOT", tmp_path)
    assert main(["gpu-check", "--json", str(tmp_path / "result.json")]) == gpu_check.EXIT_NO_GPU
    printed = capsys.readouterr().out
    assert printed.startswith("No GPU: ")
    assert re.findall(r"tests/gpu/test_(\w+).py::test_passes", printed) == ["one", "other"]
    assert not (tmp_path / "result.json").exists()


GPU_TESTS = """
import pytest

pytestmark = pytest.mark.gpu

def test_passes(record_property) -> None:
    record_property("returned_bytes", 1024)

def test_fails() -> None:
    assert 1 == 2

@pytest.mark.skip(reason="ray is not installed")
def test_is_skipped() -> None: ...
"""


def test_gpu_check_reports_every_outcome_with_its_reason(tmp_path: Path) -> None:
    folder = tmp_path / "tests" / "gpu"
    folder.mkdir(parents=True)
    (folder / "test_some.py").write_text(GPU_TESTS)
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers = gpu\n")
    status, outcomes = gpu_check.run_stages(folder, [])
    assert status == 1
    assert {outcome["test"].rpartition("::")[2]: outcome["outcome"] for outcome in outcomes} == {
        "test_passes": "passed",
        "test_fails": "failed",
        "test_is_skipped": "skipped",
    }
    assert [outcome.get("measured") for outcome in outcomes] == [{"returned_bytes": "1024"}, None, None]
    reasons = {outcome["outcome"]: outcome.get("reason", "") for outcome in outcomes}
    assert "assert 1 == 2" in reasons["failed"]
    assert reasons["skipped"] == "ray is not installed"


def test_tests_marked_gpu_are_where_gpu_check_looks() -> None:
    marks = re.compile(r"^\s*(@|pytestmark\b.*)pytest\.mark\.gpu", re.MULTILINE)
    marked = [file for file in (ROOT / "tests").rglob("test_*.py") if marks.search(file.read_text())]
    assert marked
    assert [file for file in marked if file.parent.name != "gpu" and file != Path(__file__).resolve()] == []


def test_doctor_prints_json_that_says_what_the_text_says(capsys: pytest.CaptureFixture[str]) -> None:
    result = run_command("doctor", "--json", "--quick")
    assert result.stderr == "importing torch (about 5 s) ...\n"
    report = json.loads(result.stdout)
    assert result.returncode == (1 if report["problems"] else 0)
    assert main(["doctor", "--quick"]) == result.returncode
    text = capsys.readouterr().out
    assert all(capability["name"] in text for capability in report["capabilities"])
    torch_package = next(package for package in report["packages"] if package["tested"]["name"] == "torch")
    assert torch_package["installed"] == torch.__version__.partition("+")[0]
    assert report["machine"]["cores"] <= (os.cpu_count() or 1)
    assert 0 < report["machine"]["free_memory_gib"] <= report["machine"]["memory_gib"]


def test_doctor_finds_foreign_packages_of_the_same_names(tmp_path: Path) -> None:
    script = (
        "import sys; sys.path.insert(0, sys.argv[1]); from rl_backend.cli.main import main; sys.exit(main(sys.argv[2:]))"
    )
    for name in ("actors", "adapters"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").touch()
    command = [sys.executable, "-c", script, str(tmp_path), "doctor", "--quick"]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert result.returncode == 1
    assert result.stdout.startswith("Something is broken")
    for name in ("actors", "adapters"):
        assert f"'import {name}' takes a package of another project, {tmp_path / name / '__init__.py'}" in result.stdout


def test_doctor_finds_another_distribution_that_claims_a_name(tmp_path: Path) -> None:
    metadata = tmp_path / "actors-1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: theatre\nVersion: 1.0\n")
    (metadata / "top_level.txt").write_text("actors\n")
    result = run_command("doctor", "--quick", path=tmp_path)
    assert result.returncode == 1
    assert "the distribution theatre also installs a package 'actors'" in result.stdout


def test_doctor_without_torch_is_a_report_and_not_a_traceback(tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text("raise ImportError('libcudart.so.13: cannot open shared object file')\n")
    result = run_command("doctor", "--quick", path=tmp_path)
    assert result.returncode == 1
    assert "torch is installed but does not import: ImportError: libcudart.so.13" in result.stdout
    assert "no   native training on CPU" in result.stdout
    assert result.stderr == "importing torch (about 5 s) ...\n"
