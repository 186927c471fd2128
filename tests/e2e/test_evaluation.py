"""Held-out sets answered by engines, alone and during a run."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from actors.run import EvalConfig, RunResult, evaluate
from rl_backend.contracts import ConfigError

FEWER = 256


@pytest.mark.long
@pytest.mark.shows("model: trainers and engines read the same files; a directory with two versions of a tensor is refused")
@pytest.mark.shows(
    "evaluation: a model directory alone is scored as the run scored it, with stop strings, mean@n and pass@k"
)
def test_a_model_is_evaluated_alone_as_the_run_has_evaluated_it(
    task: Path, warm_model: Path, learned: tuple[RunResult, Path], tmp_path: Path
) -> None:
    held_out, model = str(task / "held_out.jsonl"), shutil.copytree(warm_model, tmp_path / "model")
    stale = {name: torch.zeros_like(tensor) for name, tensor in load_file(model / "model.safetensors").items()}
    for name in ("consolidated", "model_older"):
        # Neither the trainer nor transformers reads them.
        save_file(stale, model / f"{name}.safetensors")
    fewer = tmp_path / "fewer.jsonl"
    fewer.write_text("".join(Path(held_out).read_text().splitlines(keepends=True)[:FEWER]))
    sets = {
        "greedy": held_out,
        "sampled": {"path": str(fewer), "n": 4, "temperature": 0.8, "top_p": 0.9, "pass_at": [1, 2, 4]},
        "stopped": {"path": str(fewer), "stop_strings": ["<end>", "1"], "stop_token_ids": []},
    }
    config = EvalConfig(
        model=str(model),
        eval_dataset=sets,
        reward="examples.demo.task:compute_score",
        max_prompt_tokens=8,
        max_response_tokens=8,
        dtype="float32",
        out=str(tmp_path / "out"),
    )
    results = evaluate(config)
    assert results["greedy"].reward == learned[0].held_out_reward_before
    estimates = results["sampled"].estimates
    assert estimates["mean@4"].mean == estimates["pass@1"].mean <= estimates["pass@2"].mean <= estimates["pass@4"].mean
    assert all(error is not None and 0 < error < 0.05 for _, error in estimates.values())
    lines = [json.loads(line) for line in (tmp_path / "out" / "held_out.jsonl").read_text().splitlines()]
    greedy = [line["response"] for line in lines if line["set"] == "greedy"]
    stopped = [line["response"] for line in lines if line["set"] == "stopped"]
    assert len(lines) == len(greedy) + 5 * FEWER and len(stopped) == FEWER
    for whole, cut in zip(greedy, stopped, strict=False):
        assert cut == (whole[: whole.index("1") + 1] if "1" in whole else whole), "up to the string, which belongs to it"
    assert any("1" in cut for cut in stopped) and all(line["finish_reason"] == "stop" for line in lines)
    metrics = json.loads((tmp_path / "out" / "evaluation.json").read_text())["metrics"]
    assert metrics["eval/greedy/mean@1"] == learned[0].held_out_reward_before
    with pytest.raises(ConfigError, match=r"has evaluation\.json already"):
        evaluate(config)


def test_a_run_says_what_all_its_held_out_sets_come_to(learned: tuple[RunResult, Path]) -> None:
    result, folder = learned
    assert result.held_out_before["eval/held_out/mean@1"] == result.held_out_reward_before
    assert result.held_out_after["eval/held_out/pass@1"] == result.held_out_reward_after
    metrics = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert metrics[0] == {"step": 0, "held_out_reward": result.held_out_reward_before, **result.held_out_before}
    assert set(result.held_out_after) <= metrics[-1].keys()
    assert json.loads((folder / "summary.json").read_text())["held_out_after"] == result.held_out_after
