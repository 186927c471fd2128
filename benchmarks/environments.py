"""The environments of ``examples/episodes.py``, learned by small models with real engines after a careless warm start.

Each run is a separate process. It also compares what is trained with what the engines returned: every turn of a training
sequence must be a generation for exactly that prompt, and none is trained twice. Held-out episodes are sampled as in
training, because the likeliest first token of the warm start calls the tool. ``python -m benchmarks.environments`` writes
the part ``examples`` of ``results/environments.json``; the other parts are records.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import closing
from itertools import groupby
from pathlib import Path
from typing import Any

from actors.rollout.tokens import RolloutTokens
from actors.run import parse_config
from benchmarks.environment_tasks import Task, write_task
from benchmarks.report import machine, read_result, update_result
from examples import episodes
from rl_backend.algorithm import episode_sequences, sft_loss
from rl_backend.contracts import OptimizerConfig, RuntimeConfig, TokenSequence
from rl_backend.data import prepare_micro_batches
from rl_backend.data.prompts import endless_batches, load_tokenizer
from rl_backend.data.sft import load_sft_examples
from rl_backend.environment import Generation
from rl_backend.runtime import create_runtime

RESULT, PART = "environments", "examples"
SECONDS = 3600.0
WARM_STEPS: Mapping[Task, int] = {"calculator": 1500, "guess": 500}
RUNS: Mapping[str, tuple[Task, tuple[str, ...]]] = {
    "calculator": ("calculator", ("--steps", "30", "--lr", "3e-4")),
    "calculator_ppo": ("calculator", ("--steps", "40", "--lr", "3e-4", "--algorithm", "ppo", "--critic-lr", "1e-3")),
    "calculator_shuffled": ("calculator", ("--steps", "30", "--lr", "3e-4", "--shuffle-rewards")),
    "guess": ("guess", ("--steps", "24", "--lr", "6e-4")),
    "guess_shuffled": ("guess", ("--steps", "24", "--lr", "6e-4", "--shuffle-rewards")),
}
ENVIRONMENTS: Mapping[Task, str] = {"calculator": "Calculator", "guess": "GuessingGame"}


def options(task: Task, folder: Path, name: str, given: Sequence[str]) -> list[str]:
    """Of ``examples.episodes``."""
    shared = folder / task
    held_out = {"path": str(shared / "held_out.jsonl"), "n": 2, "temperature": 1.0}
    return [
        *("--model", str(shared / "warm"), "--dataset", str(shared / "train.jsonl")),
        *("--eval-dataset", json.dumps({task: held_out}), "--run-dir", str(folder / "runs" / name)),
        *("--environment", f"{episodes.__file__}:{ENVIRONMENTS[task]}", "--dtype", "float32"),
        *("--prompts-per-step", "16", "--samples-per-prompt", "16", "--max-response-tokens", "16"),
        *("--max-episode-tokens", "96", "--max-turns", "4", "--lr-warmup-steps", "5", *given),
    ]


class Trained:
    """What is trained against what was sampled, in the process of the run.

    Attributes:
        equal: whether every trained turn was a generation after the same prompt, each used once.
        turns: that were compared.
        respelt: of them, those whose text encodes to other tokens.
    """

    def __init__(self, model: str) -> None:
        self.equal, self.turns, self.respelt = True, 0, 0
        self._tokenizer = load_tokenizer(model)
        self._sampled: Counter[tuple[tuple[int, ...], tuple[int, ...]]] = Counter()
        self._generate, self._sequences = RolloutTokens.generate, episode_sequences
        RolloutTokens.generate = self.generate  # type: ignore[method-assign]
        setattr(episodes, "episode_sequences", self.sequences)  # noqa: B010, the name as the loop looks it up

    @property
    def generate(self) -> Any:
        """In place of the source's method."""

        async def recorded(source: RolloutTokens, token_ids: Sequence[int], **asked: Any) -> Generation:
            found = await self._generate(source, token_ids, **asked)
            self._sampled[tuple(token_ids), tuple(found.token_ids)] += 1
            return found

        return recorded

    def sequences(self, played: Any, **given: Any) -> list[TokenSequence]:
        """In place of the loop's function."""
        made = self._sequences(played, **given)
        for sequence in made:
            ids, mask = sequence.input_ids.tolist(), [0.0, *sequence.token_fields["loss_mask"][:-1].tolist()]
            start = 0
            for trained, run in groupby(mask):
                stop = start + len(list(run))
                if trained:
                    self._compare(tuple(ids[:start]), tuple(ids[start:stop]))
                start = stop
        return made

    def _compare(self, prompt: tuple[int, ...], turn: tuple[int, ...]) -> None:
        self.turns += 1
        self.equal &= self._sampled[prompt, turn] > 0
        self._sampled[prompt, turn] -= 1
        self.respelt += self._tokenizer.encode(self._tokenizer.decode(turn), add_special_tokens=False) != list(turn)


def child(arguments: Sequence[str]) -> None:
    """A run, with ``compared.json`` beside its own files."""
    config = parse_config(episodes.EpisodesConfig, "", arguments)
    compared = Trained(config.model)
    episodes.train(config)
    found = {"tokens_equal": compared.equal, "turns": compared.turns, "turns_respelt": compared.respelt}
    (Path(config.run_dir) / "compared.json").write_text(json.dumps(found))


def run(name: str, folder: Path) -> dict[str, Any]:
    """One of ``RUNS``; its task and warm start are made where they are missing."""
    task, given = RUNS[name]
    if not (folder / task / "warm").exists():
        write_task(folder / task, task)
        imitate(folder / task / "model", folder / task / "demonstrations.jsonl", folder / task / "warm", WARM_STEPS[task])
    command = (sys.executable, "-m", "benchmarks.environments", "--child", *options(task, folder, name, given))
    subprocess.run(command, check=True, timeout=SECONDS, env={**os.environ, "OMP_NUM_THREADS": "1"})
    return {**described(folder / "runs" / name), "options": list(given), "machine": machine()}


def imitate(model: Path, demonstrations: Path, out: Path, steps: int, *, batch_size: int = 64, lr: float = 2e-3) -> Path:
    """A supervised warm start on rows of messages, in this process; writes the model with its tokenizer to ``out``."""
    tokenizer = load_tokenizer(str(model))
    # Rendered once, because that takes longer than a step.
    sequences = [each for example in load_sft_examples(demonstrations, tokenizer, 128, 128) for each in example]
    optimizer = OptimizerConfig(lr=lr, lr_warmup_steps=20, lr_decay_style="linear", total_training_steps=steps)
    config = RuntimeConfig(hf_path=str(model), backend_cfg={"param_dtype": "float32", "optimizer": optimizer})
    batches = endless_batches(sequences, batch_size, 0)
    with closing(create_runtime(config)) as runtime:
        handle = runtime.build_model()
        for _ in range(steps):
            (data,) = prepare_micro_batches(next(batches), 1, 4096)
            runtime.zero_grad(handle)
            with runtime.train_mode(handle):
                runtime.forward_backward(handle, data, sft_loss)
            runtime.optimizer_step(handle)
            runtime.lr_scheduler_step(handle)
        runtime.save_checkpoint(handle, out, hf=True)
    return out


def described(folder: Path) -> dict[str, Any]:
    """What a run's files say."""
    summary = json.loads((folder / "summary.json").read_text())
    lines = [json.loads(line) for line in (folder / "held_out.jsonl").read_text().splitlines()]
    steps = (lines[0]["step"], lines[-1]["step"])
    calls = [
        [call for line in lines if line["step"] == step for turn in line["turns"] for call in turn["calls"]]
        for step in steps
    ]
    episodes_each = sum(line["step"] == steps[0] for line in lines)
    return {
        "before": summary["held_out_reward_before"],
        "after": summary["held_out_reward_after"],
        "max_log_prob_gap": summary["max_log_prob_gap"],
        **json.loads((folder / "compared.json").read_text()),
        "held_out_episodes": episodes_each,
        "calls_executed_before": sum(call["status"] == "ok" for call in calls[0]),
        "calls_executed_after": sum(call["status"] == "ok" for call in calls[1]),
        "step_seconds": summary["step_seconds"],
        "seconds": summary["seconds"],
    }


def record(name: str, found: Mapping[str, Any]) -> None:
    """Adds a run to the part ``examples`` of ``results/environments.json``."""
    runs = {**read_result(RESULT).get(PART, {}).get("runs", {}), name: found}
    update_result(
        RESULT,
        {
            PART: {
                "max_log_prob_gap": max(each["max_log_prob_gap"] for each in runs.values()),
                "tokens_equal": all(each["tokens_equal"] for each in runs.values()),
                "runs": runs,
            }
        },
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", choices=tuple(RUNS), action="append", help="this run (may be given several times)")
    parser.add_argument("--folder", type=Path, help="keep models and runs here")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        for name in arguments.only or RUNS:
            record(name, run(name, arguments.folder or Path(temporary)))


if __name__ == "__main__":
    if sys.argv[1:2] == ["--child"]:
        child(sys.argv[2:])
    else:
        main()
