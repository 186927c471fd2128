"""Supervised fine-tuning of a Hugging Face model on prompts and answers, or on the assistant's turns of conversations.

    rl-backend sft --model DIR --dataset train.jsonl --epochs 2

Every option is a field of ``SFTConfig``. With ``RAY_ADDRESS`` set it runs on that cluster. Copy the file to begin a loop of
your own.
"""

import math
import statistics
from collections.abc import Sequence
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Annotated, ClassVar, Literal, Self

from actors.run import announce

announce(__name__)  # the first line, before imports that take seconds

from pydantic import Field, model_validator

from actors import Loss, Run, Session
from actors.run import (
    GroupModel,
    OnStep,
    OptionSet,
    Phases,
    TrainingConfig,
    positions_of,
    run_command,
    update_metrics,
)
from rl_backend import TokenSequence
from rl_backend.contracts import MAY_CHANGE, SAME_CONTENTS, ConfigError
from rl_backend.data import Examples, load_sft_examples, load_tokenizer, local_model
from rl_backend.data.prompts import batches_per_epoch, endless_batches, epoch_batches


class SFTConfig(TrainingConfig):
    option_set: ClassVar[OptionSet] = TrainingConfig.option_set | OptionSet(
        preset={"run_dir": "runs/sft", "max_prompt_tokens": 2048, "train.backend_cfg.optimizer.lr": 1e-5},
        groups={"data": ("train_on",), "evaluation": ("eval_every",)},
        example="--model models/Qwen3-0.6B --dataset train.jsonl --steps 500 --run-dir runs/mine",
    )

    batch_size: int = Field(default=64, ge=1, description="examples in each step, packed without padding")
    epochs: int = Field(default=0, ge=0, description="passes over all examples, in place of steps; 0: as steps says")
    train_on: Literal["all", "last"] = Field(
        default="all", description="of rows of messages: all turns of the assistant, or the last"
    )
    eval_dataset: Annotated[str | None, SAME_CONTENTS] = Field(default=None, description="held-out rows, named likewise")
    eval_every: Annotated[int, MAY_CHANGE] = Field(default=50, ge=1, description="steps between evaluations")

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.batch_size < self.data_parallel_size:
            problem = f"each of {self.data_parallel_size} data-parallel ranks needs one"
            raise ConfigError.of("SFTConfig.batch_size", self.batch_size, problem)
        return self

    @property
    def chooses_steps(self) -> bool:
        """False while the epochs are to be counted."""
        return not self.epochs or self.is_set("steps")

    def with_known_steps(self) -> Self:
        return self if self.chooses_steps else self.with_epochs(len(load_data(self)[0]))

    def with_epochs(self, examples: int) -> Self:
        if not self.epochs:
            return self
        steps = self.epochs * batches_per_epoch(examples, self.batch_size)
        if self.chooses_steps and self.steps != steps:
            problem = f"epochs={self.epochs} of {examples} examples are {steps} steps; leave out one of the two"
            raise ConfigError.of("SFTConfig.steps", self.steps, problem)
        return self.replace(steps=steps)

    def read_data(self) -> str:
        examples, held_out = load_data(self)
        self.with_epochs(len(examples))
        return f"{len(examples)} examples, {sum(map(len, held_out or ()))} sequences held out"


def train(config: SFTConfig, session: Session | None = None, on_step: OnStep | None = None) -> Path:
    """Runs SFT; returns the Hugging Face directory of the trained model, ``run_dir/model``.

    Args:
        session: an open training group; None opens one for this run.
        on_step: sees each step's number and metrics.
    """
    with Phases().phase("data", f"reading {config.dataset}"):
        examples, of_held_out = load_data(config)
        held_out = list(chain(*of_held_out or ()))
    config = config.with_epochs(len(examples))
    run = Run(config, session, on_step)
    in_order = epoch_batches if config.epochs else endless_batches
    batches = in_order(examples, config.batch_size, config.seed, start=run.start.step)
    loss = Loss("rl_backend.algorithm:sft_loss")
    with run:
        model = run.build_model("sft")
        facts = [f"{len(examples)} examples", *filter(None, [examples.note]), f"{config.batch_size} a step"]
        if of_held_out and of_held_out.note:
            facts.append(f"held out: {of_held_out.note}")
        run.begin("SFT", {"sft": model}, [*facts, config.describe_ranks()])
        for step in run.steps():
            metrics = update_metrics([model.update(list(chain(*next(batches))), loss)])
            run.lap("train")
            if held_out and (step % config.eval_every == 0 or step == config.steps):
                metrics |= held_out_metrics(model, held_out)
                run.lap("evaluate")
            run.end_step(metrics)
        run.write_summary(run.last_metrics)  # of the checkpoint, where no step was left
        return run.save_model(model)


def load_data(config: SFTConfig) -> tuple[Examples[list[TokenSequence]], Examples[list[TokenSequence]] | None]:
    model = local_model(config.model, field="SFTConfig.model")
    load = partial(
        load_sft_examples,
        tokenizer=load_tokenizer(model),
        max_prompt_tokens=config.max_prompt_tokens,
        max_tokens=config.train.max_tokens_per_micro_batch,
        positions=positions_of(model),
        data=config.data,
        train_on=config.train_on,
    )
    examples = load(config.dataset)
    if len(examples) < config.batch_size and not config.epochs:
        problem = f"{config.dataset} has {len(examples)} examples; use at most that"
        raise ConfigError.of("SFTConfig.batch_size", config.batch_size, problem)
    return examples, load(config.eval_dataset, held_out=True) if config.eval_dataset else None


def held_out_metrics(model: GroupModel, sequences: Sequence[TokenSequence]) -> dict[str, float]:
    """``held_out_nll``, mean over tokens in nats; ``answer_probability``, the mean chance of sampling an answer."""
    log_probs = model.outputs({"log_probs": "log_probs"}, sequences, {})["log_probs"]
    masks = [sequence.token_fields["loss_mask"] for sequence in sequences]
    answers = [float((row * mask).sum()) for row, mask in zip(log_probs, masks, strict=True)]
    return {
        "held_out_nll": -sum(answers) / sum(float(mask.sum()) for mask in masks),
        "answer_probability": statistics.fmean(math.exp(answer) for answer in answers),
    }


def main(config: SFTConfig) -> None:
    print(f"run folder: {config.run_dir} (report.html, summary.json, trained model in {train(config)})")


if __name__ == "__main__":
    run_command(main, SFTConfig, "Supervised fine-tuning of a Hugging Face model.")
