"""The loops of the documentation, run as they stand."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch

from actors import Sample
from rl_backend import TokenSequence
from rl_backend.data.prompts import endless_batches, load_prompts, load_tokenizer
from tests.support.models import write_tiny_qwen3

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "writing_a_loop.md"


def python_of(page: Path) -> str:
    return "\n".join(re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL))


@pytest.mark.long
def test_the_loop_of_the_readme_runs_as_it_stands(ray_cluster: None, tmp_path: Path) -> None:
    page = ROOT / "README.md"
    # As many positions as an engine has by default.
    model = write_tiny_qwen3(tmp_path / "model", max_position_embeddings=4096)
    seen: list[int] = []

    def with_advantages(samples: list[Sample]) -> list[TokenSequence]:
        seen.extend(min(each.weight_versions) for each in samples)
        return [
            TokenSequence.from_prompt_and_response(
                each.prompt_ids,
                each.response_ids,
                response_fields={"old_log_probs": each.log_probs},
                sequence_fields={"advantages": torch.tensor(1.0 if index % 2 else -1.0)},
            )
            for index, each in enumerate(samples)
        ]

    names: dict[str, Any] = {
        "model": str(model),
        "prompts": lambda step: [[5, 6, 7 + step], [20, 21]],
        "eos": 1,
        "steps": 2,
        "with_advantages": with_advantages,
    }
    exec(compile(python_of(page), page.name, "exec"), names)
    assert names["ok"] and names["grad_norm"] > 0
    assert seen == [0] * 16 + [1] * 16


@pytest.mark.long
def test_the_loop_of_the_page_learns(task: Path, warm_model: Path) -> None:
    tokenizer = load_tokenizer(str(warm_model))
    prompts = load_prompts(task / "train.jsonl", tokenizer, 8)
    answers = {tuple(prompt.token_ids): prompt.example.ground_truth for prompt in prompts}
    names: dict[str, Any] = {
        "model_dir": str(warm_model),
        "batches": ([prompt.token_ids for prompt in batch] for batch in endless_batches(prompts, 32, seed=0)),
        "reward": lambda prompt, response: float(
            tokenizer.decode(response, skip_special_tokens=True) == answers[tuple(prompt)]
        ),
        "eos": tokenizer.eos_token_id,
        "steps": 8,
    }
    exec(compile(python_of(PAGE), PAGE.name, "exec"), names)
    rewards = names["mean_rewards"]
    assert len(rewards) == 16
    assert sum(rewards[-4:]) > sum(rewards[:4]) + 0.1
    assert names["gap"] <= 1e-5
    assert names["behind"] == 1
    assert names["value_losses"][-1] < names["value_losses"][0]
