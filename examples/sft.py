"""Supervised fine-tuning of a local Hugging Face model on prompts and answers.

    python -m examples.sft --model DIR --dataset train.jsonl --steps 500

Every option is a field of ``SFTConfig``. With ``RAY_ADDRESS`` set it runs on that cluster, else on this machine. The file
stands alone: copy it to begin a loop of your own.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Annotated, Any, ClassVar, Self

from actors.run import announce

announce(__name__)  # the first line, before imports that take seconds

from pydantic import Field, model_validator

from actors import Loss, Run, Session
from actors.run import GroupModel, OnStep, TrainingConfig, parse_config, run_command, update_metrics
from rl_backend import TokenSequence
from rl_backend.contracts import MAY_CHANGE, BatchError, ConfigError
from rl_backend.data.prompts import endless_batches, load_prompts, load_tokenizer


class SFTConfig(TrainingConfig):
    """All options of a run."""

    preset: ClassVar[Mapping[str, Any]] = {
        **TrainingConfig.preset,
        "run_dir": "runs/sft",
        "max_prompt_tokens": 2048,
        "train.backend_cfg.optimizer.lr": 1e-5,
    }

    batch_size: int = Field(default=64, ge=1, description="examples in each step")
    eval_every: Annotated[int, MAY_CHANGE] = Field(default=50, ge=1, description="steps between evaluations")

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.batch_size < self.data_parallel_size:
            raise ConfigError.of(
                "SFTConfig.batch_size", self.batch_size, f"each of {self.data_parallel_size} data-parallel ranks needs one"
            )
        return self


def train(config: SFTConfig, session: Session | None = None, on_step: OnStep | None = None) -> Path:
    """Runs SFT; returns the Hugging Face directory of the trained model, ``run_dir/model``.

    Args:
        session: an open training group; None opens one for this run.
        on_step: sees each step's number and metrics.
    """
    run = Run(config, session, on_step)
    tokenizer = load_tokenizer(config.model)
    limits = config.max_prompt_tokens, config.train.max_tokens_per_micro_batch
    sequences = load_sequences(config.dataset, tokenizer, *limits)
    held_out = load_sequences(config.eval_dataset, tokenizer, *limits) if config.eval_dataset else []
    batches = islice(endless_batches(sequences, config.batch_size, config.seed), run.start.step, None)
    loss = Loss("rl_backend.algorithm:sft_loss")
    with run:
        model = run.build_model("sft")
        facts = [f"{len(sequences)} examples", f"{config.batch_size} a step", config.describe_ranks()]
        run.begin("SFT", {"sft": model}, facts)
        for step in run.steps():
            metrics = update_metrics([model.update(next(batches), loss)])
            run.lap("train")
            if held_out and (step % config.eval_every == 0 or step == config.steps):
                metrics |= held_out_metrics(model, held_out)
                run.lap("evaluate")
            run.end_step(metrics)
        return run.save_model(model)


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


def held_out_metrics(model: GroupModel, sequences: Sequence[TokenSequence]) -> dict[str, float]:
    """``held_out_nll``, mean over tokens in nats; ``answer_probability``, the mean chance of sampling an answer."""
    log_probs = model.outputs({"log_probs": "log_probs"}, sequences, {})["log_probs"]
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
