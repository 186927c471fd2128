"""Conversations as training data: SFT on the assistant's turns, then GRPO on the same rows as prompts."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from actors import Session
from examples import grpo, sft
from examples.demo.__main__ import DemoConfig, demo_settings
from examples.demo.task import right_answer

TEMPLATE = "{% for message in messages %}{{ message.content }}{{ eos_token if message.role == 'assistant' }}{% endfor %}"


@pytest.fixture(scope="module")
def chats(warm_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The demo's model with a chat template, and conversations of two sums each."""
    folder = tmp_path_factory.mktemp("chats")
    shutil.copytree(warm_model, folder / "model")
    (folder / "model" / "chat_template.jinja").write_text(TEMPLATE)
    with (folder / "two.jsonl").open("w") as two, (folder / "one.jsonl").open("w") as one:
        for first in range(10, 50):
            turns = [
                {"role": role, "content": content}
                for second in (11, 12)
                for role, content in (("user", f"{first}+{second}="), ("assistant", right_answer(first, second)))
            ]
            two.write(json.dumps({"messages": turns}) + "\n")
            one.write(json.dumps({"messages": turns[:2]}) + "\n")
    return folder


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.mark.shows("examples: SFT trains on all turns of conversations, in epochs")
@pytest.mark.long
def test_sft_learns_the_turns_of_conversations_in_epochs(chats: Path, ray_cluster: None, tmp_path: Path) -> None:
    options = {"model": str(chats / "model"), "dataset": str(chats / "two.jsonl"), "run_dir": str(tmp_path / "sft")}
    config = sft.SFTConfig(**options, epochs=3, batch_size=16, lr=1e-3, dtype="float32")
    sft.train(config)
    metrics = lines(tmp_path / "sft" / "metrics.jsonl")
    assert [line["step"] for line in metrics] == list(range(1, 10))
    assert metrics[-1]["nll"] < metrics[0]["nll"]


@pytest.mark.long
@pytest.mark.shows("examples: GRPO takes rows of messages, and the assistant's last message as their answer")
def test_grpo_samples_answers_to_conversations(
    chats: Path, task: Path, warm_model: Path, demo_session: Session, tmp_path: Path
) -> None:
    settings = demo_settings(DemoConfig(engines=2), task, warm_model, tmp_path)
    changes = {"model": str(chats / "model"), "dataset": str(chats / "one.jsonl"), "steps": 1, "lr_warmup_steps": 0}
    grpo.train(grpo.GRPOConfig(**{**settings, **changes, "eval_dataset": None}), demo_session)
    samples = lines(tmp_path / "grpo" / "samples.jsonl")
    for sample in samples:
        first, second = sample["prompt"].rstrip("=").split("+")
        assert sample["ground_truth"] == right_answer(int(first), int(second))
    assert any(sample["reward"] > 0 for sample in samples)
