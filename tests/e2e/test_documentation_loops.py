"""The loops of the documentation, run as they stand."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from rl_backend.data.prompts import endless_batches, load_prompts, load_tokenizer

PAGE = Path(__file__).parents[2] / "docs" / "writing_a_loop.md"


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
    code = "\n".join(re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL))
    exec(compile(code, PAGE.name, "exec"), names)
    rewards = names["mean_rewards"]
    assert len(rewards) == 16
    assert sum(rewards[-4:]) > sum(rewards[:4]) + 0.1
    assert names["gap"] <= 1e-5
    assert names["behind"] == 1
    assert names["value_losses"][-1] < names["value_losses"][0]
