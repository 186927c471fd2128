"""Runs on episodes with Ray and vLLM: critic, reference, adapters, routes, the bridge, resume, and Ctrl-C."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import ray

from actors.run.session import Session, open_session
from benchmarks.environment_tasks import bpe_tokenizer, write_jsonl, write_task
from examples import episodes
from rl_backend.cli.main import main
from tests.support import hanging_game
from tests.support.clusters import ROOT
from tests.support.models import write_tiny
from tests.support.runs import of_the_run

pytestmark = pytest.mark.long

OPTIONS: dict[str, dict[str, Any]] = {
    "ppo": {"algorithm": "ppo", "critic_lr": 1e-3, "kl_coef": 1e-3, "loss": {"loss_agg_mode": "seq-mean-token-mean"}},
    "lora": {"lora": {"rank": 4, "push": "adapter"}, "max_staleness": 1, "push_during_episodes": True},
    "bridge": {"backend": "bridge", "kl_coef": 1e-3},
    "R2": {"router_replay": "R2"},
    "R3": {"router_replay": "R3"},
}
SECONDS = 180.0
OF_THE_MACHINE = frozenset({"environment_share", "prompt_tokens_cached", "metrics"})
"""What depends on times and on what an engine has served; ``metrics`` are those of a line of samples.jsonl."""


@pytest.fixture(scope="module")
def task(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_task(tmp_path_factory.mktemp("calculator"), "calculator")


@pytest.fixture(scope="module")
def mixture(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A mixture of experts with the task's tokenizer."""
    folder, tokenizer = tmp_path_factory.mktemp("mixture"), bpe_tokenizer()
    write_tiny(
        "qwen3_moe", folder, vocab_size=len(tokenizer), num_experts=4, num_experts_per_tok=2, moe_intermediate_size=48
    )
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def session(task: Path, tmp_path_factory: pytest.TempPathFactory, ray_cluster: None) -> Iterator[Session]:
    """A rank and an engine of the task's model, for runs one after the other."""
    with open_session(settings(task, tmp_path_factory.mktemp("session"))) as opened:
        yield opened


def fields(task: Path, run_dir: Path, **options: Any) -> dict[str, Any]:
    given = {
        "model": str(task / "model"),
        "dataset": str(task / "train.jsonl"),
        "environment": f"{episodes.__file__}:Calculator",
        "run_dir": str(run_dir),
        "dtype": "float32",
        "steps": 2,
        "prompts_per_step": 4,
        "samples_per_prompt": 4,
        "max_response_tokens": 12,
        "max_episode_tokens": 64,
        "max_turns": 3,
        "lr": 1e-4,
        "metrics_to": None,
    }
    return given | options


def settings(task: Path, run_dir: Path, **options: Any) -> episodes.EpisodesConfig:
    return episodes.EpisodesConfig(**fields(task, run_dir, **options))


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.mark.shows(
    "episodes: PPO with a reference, LoRA with pushes in mid-episode, the bridge with a reference, and a mixture with R2 "
    "and R3 train on what vLLM samples"
)
@pytest.mark.parametrize("name", OPTIONS)
def test_episodes_train_with_adapters_critics_routes_and_on_the_bridge(
    task: Path, mixture: Path, session: Session, tmp_path: Path, name: str
) -> None:
    options = OPTIONS[name] | ({"model": str(mixture)} if name in ("R2", "R3") else {})
    config = settings(task, tmp_path / "run", **options)
    result = episodes.train(config, session if name == "ppo" else None)
    steps = lines(tmp_path / "run" / "metrics.jsonl")
    assert len(steps) == 2 and all(step["step_ok"] == 1 for step in steps)
    # Samples ahead are of weights one step older.
    assert result.max_log_prob_gap < (1e-5 if name != "lora" else 0.1)
    assert ("kl" in steps[-1]) == bool(config.kl_coef)
    samples = lines(tmp_path / "run" / "samples.jsonl")
    assert len(samples) == 32
    assert all([trained for _, trained in segment][:2] == [False, True] for each in samples for segment in each["segments"])
    assert "Calculator" in (tmp_path / "run" / "report.html").read_text()


class StopEarlyError(Exception):
    """Ends a run from its callback."""


@pytest.mark.shows("episodes: a run that ended early continues from its checkpoint with the episodes of one that did not")
def test_a_run_that_continues_has_the_steps_of_one_that_was_not_ended(task: Path, session: Session, tmp_path: Path) -> None:
    options: dict[str, Any] = {"steps": 3, "save_every": 1, "resume": "auto"}
    episodes.train(settings(task, tmp_path / "whole", **options), session)

    def stop(step: int, metrics: dict[str, float]) -> None:
        if step == 2:
            raise StopEarlyError

    with pytest.raises(StopEarlyError):
        episodes.train(settings(task, tmp_path / "ended", **options), session, stop)
    episodes.train(settings(task, tmp_path / "ended", **options), session)
    for name in ("metrics.jsonl", "samples.jsonl"):
        whole, ended = (
            [
                {field: value for field, value in of_the_run(each).items() if field not in OF_THE_MACHINE}
                for each in lines(tmp_path / folder / name)
            ]
            for folder in ("whole", "ended")
        )
        assert whole == ended and whole[-1]["step"] == 3, name


@pytest.mark.shows("episodes: `rl-backend episode` shows what the model is given, writes and is rewarded with")
def test_an_episode_is_shown_by_a_command(task: Path, ray_cluster: None, capsys: pytest.CaptureFixture[str]) -> None:
    options = ("--max-response-tokens", "12", "--max-episode-tokens", "64", "--max-turns", "3", "--dtype", "float32")
    environment = ("--environment", f"{episodes.__file__}:Calculator")
    given = ("--model", str(task / "model"), "--dataset", str(task / "train.jsonl"))
    assert main(["episode", "2", *given, *environment, *options]) == 0
    output = capsys.readouterr().out
    prompt = lines(task / "train.jsonl")[2]["prompt"]
    assert prompt in output and "trained tokens in brackets:" in output and "ended: " in output


@pytest.mark.shows("episodes: Ctrl-C in the middle of steps that hang ends a run after every environment has been closed")
def test_ctrl_c_closes_every_environment(task: Path, tmp_path: Path, ray_cluster: None) -> None:
    log, rows = tmp_path / "log", tmp_path / "rows.jsonl"
    write_jsonl(rows, [{"log": str(log)}] * 4)
    log.touch()
    game = f"{hanging_game.__file__}:HangingGame"
    options = fields(task, tmp_path / "run", dataset=str(rows), environment=game, max_turns=1)
    (tmp_path / "options.json").write_text(json.dumps(options))
    with (tmp_path / "output").open("w") as output:
        run = subprocess.Popen(
            [sys.executable, "-m", "examples.episodes", "--config", str(tmp_path / "options.json")],
            env=os.environ | {"RAY_ADDRESS": ray.get_runtime_context().gcs_address},
            cwd=ROOT,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            deadline = time.monotonic() + SECONDS
            while log.read_text().count("stepped") < 16:
                assert run.poll() is None and time.monotonic() < deadline, (tmp_path / "output").read_text()
                time.sleep(0.1)
            run.send_signal(signal.SIGINT)
            time.sleep(1.0)
            assert run.poll() is None, "the first waits for the step"
            run.send_signal(signal.SIGINT)
            assert run.wait(SECONDS) == 130
        finally:
            run.kill()
    told = log.read_text().split()
    # One more is made when the run begins, for the check of the chat template with its tools; it is closed, never started.
    assert told.count("opened") == 16 and told.count("closed") == 17
    assert json.loads((tmp_path / "run" / "run.json").read_text())["state"] == "interrupted"
