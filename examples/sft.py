"""Supervised fine-tuning of a local Hugging Face model on prompts and answers.

    python -m examples.sft --model DIR --dataset train.jsonl --steps 500

Every option is a field of ``SFTConfig``. With ``RAY_ADDRESS`` set it runs on that cluster, else on this machine.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from itertools import islice
from pathlib import Path
from typing import Any, ClassVar, Self

from pydantic import Field, model_validator

from actors import HandleRef, Loss, TrainGroup
from examples.common.clock import Clock
from examples.common.cluster import ray_session, require_paths, share_cluster
from examples.common.command_line import parse_config, run_command
from examples.common.models import Model
from examples.common.prompts import endless_batches, load_prompts, load_tokenizer
from examples.common.run_folder import RunFolder
from examples.common.run_lock import RunLock
from examples.common.run_log import OnStep
from examples.common.run_saver import RunSaver
from examples.common.run_start import find_start
from examples.common.training_config import TrainingConfig
from rl_backend import TokenSequence
from rl_backend.contracts import BatchError, ConfigError


class SFTConfig(TrainingConfig):
    """All options of a run."""

    may_change: ClassVar[frozenset[str]] = TrainingConfig.may_change | {"eval_every"}

    dataset: str = Field(description="training examples: .jsonl (prompt, answer) or verl-style .parquet")
    eval_dataset: str | None = Field(default=None, description="held-out examples")
    run_dir: str = Field(default="runs/sft", description="new folder for metrics and the trained model")
    steps: int = Field(default=100, ge=1, description="optimizer steps")
    batch_size: int = Field(default=64, ge=1, description="examples in each step")
    max_prompt_tokens: int = Field(default=2048, ge=1, description="longest prompt")
    lr: float = Field(default=1e-5, gt=0, description="peak learning rate")
    eval_every: int = Field(default=50, ge=1, description="steps between evaluations, and between printed lines")

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.batch_size < self.data_parallel_size:
            raise ConfigError.of(
                "SFTConfig.batch_size", self.batch_size, f"each of {self.data_parallel_size} data-parallel ranks needs one"
            )
        return self


def train(config: SFTConfig, on_step: OnStep | None = None) -> Path:
    """Runs SFT; returns the Hugging Face directory of the trained model, ``run_dir/model``.

    ``on_step`` sees each step's number and metrics.
    """
    start = find_start(config)
    tokenizer = load_tokenizer(config.model)
    limits = config.max_prompt_tokens, config.max_tokens_per_micro_batch
    sequences = load_sequences(config.dataset, tokenizer, *limits)
    held_out = load_sequences(config.eval_dataset, tokenizer, *limits) if config.eval_dataset else []
    batches = islice(endless_batches(sequences, config.batch_size, config.seed), start.step, None)
    with (
        RunLock(config.run_dir) as lock,
        ray_session(config.ranks),
        TrainGroup(
            config.runtime_config(),
            config.ranks,
            (share := share_cluster(config.ranks)).cores_per_rank,
            share.gpus,
            placement=config.placement,
        ) as trainer,
        RunFolder(config.run_dir, config, start=start, lock=lock) as folder,
    ):
        require_paths(trainer, config.model, folder.path)
        model = trainer.build_model(name="sft")
        loss = Loss("rl_backend.algorithm:sft_loss")
        facts = [f"{len(sequences)} examples", f"{config.batch_size} a step", config.describe_ranks(), *start.describe()]
        print(f"SFT: {', '.join(facts)}")
        with RunSaver(config, folder, {"sft": Model(trainer, model)}, start) as saver:
            for step in range(start.step + 1, config.steps + 1):
                clock = Clock()
                trainer.zero_grad(model)
                result = trainer.forward_backward(model, next(batches), loss)
                ok, grad_norm, _ = trainer.optimizer_step(model)
                next_lr = trainer.lr_scheduler_step(model)
                metrics = {**result.means, "grad_norm": grad_norm, "step_ok": float(ok), "next_lr": next_lr}
                clock.lap("train")
                saver.save(step, clock)
                evaluate = step % config.eval_every == 0 or step == config.steps
                if evaluate and held_out:
                    metrics |= held_out_metrics(trainer, model, held_out)
                folder.log(step, metrics | clock.seconds)
                saver.commit(step, {})
                if evaluate:
                    shown = ("nll", "grad_norm", "held_out_nll", "answer_probability")
                    texts = [f"{name.replace('_', ' ')} {metrics[name]:.3f}" for name in shown if name in metrics]
                    print(f"step {step:4d}/{config.steps}  {'  '.join(texts)}", flush=True)
                if on_step:
                    on_step(step, metrics)
        trainer.save_checkpoint(model, folder.place("model"), hf=True)
    return folder.path / "model"


def load_sequences(path: str, tokenizer: Any, max_prompt_tokens: int, max_tokens: int) -> list[TokenSequence]:
    """Prompt, answer and end-of-text token, with the loss on the last two."""
    sequences = []
    for index, prompt in enumerate(load_prompts(path, tokenizer, max_prompt_tokens)):
        answer = prompt.example.ground_truth
        if not isinstance(answer, str):
            raise BatchError(f"{path}, example {index}: the answer is {answer!r}; SFT needs text")
        response_ids = [*tokenizer.encode(answer, add_special_tokens=False), tokenizer.eos_token_id]
        length = len(prompt.token_ids) + len(response_ids)
        if length > max_tokens:
            raise BatchError(
                f"{path}, example {index}: {length} tokens; max_tokens_per_micro_batch={max_tokens} must hold it"
            )
        sequences.append(TokenSequence.from_prompt_and_response(prompt.token_ids, response_ids))
    return sequences


def held_out_metrics(trainer: TrainGroup, model: HandleRef, sequences: Sequence[TokenSequence]) -> dict[str, float]:
    """``held_out_nll``, mean over tokens in nats; ``answer_probability``, the mean chance of sampling an answer."""
    log_probs = trainer.forward(model, sequences).output("log_probs")
    masks = [sequence.token_fields["loss_mask"] for sequence in sequences]
    answers = [float((row * mask).sum()) for row, mask in zip(log_probs, masks, strict=True)]
    return {
        "held_out_nll": -sum(answers) / sum(float(mask.sum()) for mask in masks),
        "answer_probability": statistics.fmean(math.exp(answer) for answer in answers),
    }


def main() -> None:
    config = parse_config(SFTConfig, "Supervised fine-tuning of a local Hugging Face model.")
    print(f"trained model: {train(config)}")


if __name__ == "__main__":
    run_command(main)
