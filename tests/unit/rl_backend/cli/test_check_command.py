"""``rl-backend check`` as a user meets it."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import ray

from actors.folder.folder import RunFolder
from actors.folder.resume import RunStart
from actors.run import parse_config
from examples.demo.task import write_task
from examples.grpo import GRPOConfig
from rl_backend.cli.main import main


@pytest.fixture(scope="module")
def task(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("task")
    write_task(folder, seed=0)
    rows = (folder / "train.jsonl").read_text().splitlines(keepends=True)
    (folder / "train.jsonl").write_text("".join(rows[:64]))
    return folder


def check(capsys: pytest.CaptureFixture[str], task: Path, name: str, *options: str) -> tuple[int, str]:
    files = ["--model", str(task / "model"), "--dataset", str(task / "train.jsonl"), "--run-dir", str(task / "run")]
    status = main(["check", name, *files, *options])
    captured = capsys.readouterr()
    assert not ray.is_initialized()
    assert not (task / "run").exists()
    return status, captured.out + captured.err


@pytest.fixture(autouse=True)
def here(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)


REWARD = ("--reward", "examples.demo.task:compute_score")


def test_a_run_that_can_start_has_a_line_and_the_time_of_each_check(task: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status, text = check(capsys, task, "grpo", *REWARD, "--tp", "2", "--ranks", "2")
    *lines, verdict = text.splitlines()
    assert status == 0 and verdict.startswith("nothing refuses this run (")
    assert [line.split()[0] for line in lines] == ["ok"] * 10
    assert all(" s  " in line for line in lines)


def test_all_that_refuses_a_run_is_said_with_flags(task: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = ("--tp", "3", "--ranks", "3", "--max-response-tokens", "99", "--prompts-per-step", "9000")
    status, text = check(capsys, task, "grpo", *REWARD, *options)
    assert status == 2
    refused = [line for line in text.splitlines() if line.startswith("REFUSED")]
    assert len(refused) == 3
    for line, said in zip(
        refused, ("--tp=3: does not", "--max-response-tokens=99: ", "--prompts-per-step=9000: "), strict=True
    ):
        assert said in line
    assert text.splitlines()[-1].startswith("3 of these refuse the run")
    status, text = check(capsys, task, "sft", "--batch-size", "0")
    assert status == 2 and text.startswith('error: --batch-size="0"')


def test_a_run_that_has_finished_is_not_refused(task: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    files = ["--model", str(task / "model"), "--dataset", str(task / "train.jsonl"), "--run-dir", str(tmp_path / "run")]
    options = [*files, *REWARD, "--resume", "auto", "--steps", "2"]
    config = parse_config(GRPOConfig, "", options)
    with RunFolder(config.run_dir, config, start=RunStart(), report_seconds=0) as folder:
        folder.log(1, {"reward": 0.5})
    assert main(["check", "grpo", *options]) == 0
    (line,) = (line for line in capsys.readouterr().out.splitlines() if "run folder" in line)
    assert line.startswith("done    run folder ") and line.endswith("has finished its 2 steps; raise steps to continue")


def test_a_reward_is_found_in_the_working_directory_as_by_the_run(
    task: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    code = "def score(data_source, solution_str, ground_truth, extra_info=None):\n    return 0.0\n"
    (tmp_path / "reward_of_this_folder.py").write_text(code)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [path for path in sys.path if path])  # as of an installed command
    status, text = check(capsys, task, "grpo", "--reward", "reward_of_this_folder:score")
    assert (status, "REFUSED" in text) == (0, False)


def test_each_user_of_one_model_is_checked(task: Path, capsys: pytest.CaptureFixture[str]) -> None:
    users = '{"ann": {}, "bob": {"dataset": "nowhere.jsonl"}}'
    status, text = check(capsys, task, "tenants", *REWARD, "--users", users)
    ann, bob = text.split("bob:\n")
    assert status == 2
    assert "REFUSED" not in ann
    assert "--dataset='nowhere.jsonl': no such file" in bob


def test_an_evaluation_is_no_run_to_check(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", "eval", "--model", "m"]) == 2
    message = capsys.readouterr().err
    assert "eval" in message and "grpo" in message and "sft" in message
