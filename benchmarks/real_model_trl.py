"""The run of :mod:`benchmarks.real_model` by TRL's GRPOTrainer. Between the two marks is what a user of TRL writes."""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer

from rl_backend.data.gym import open_gym, score_last_number


class Trainer(GRPOTrainer):
    """GRPOTrainer with a clock around its generation."""

    generation_seconds = 0.0

    def _generate(self, prompts: list[Any]) -> Any:
        started = time.perf_counter()
        answers = super()._generate(prompts)
        self.generation_seconds += time.perf_counter() - started
        return answers


class StepLog(TrainerCallback):
    """One line a step: its seconds by phase, and TRL's own metrics."""

    trainer: Trainer

    def __init__(self, path: Path) -> None:
        self.path = path

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        self.started = time.perf_counter()
        self.trainer.generation_seconds = 0.0

    def on_log(self, _: Any, state: Any, __: Any, logs: dict[str, Any], **___: Any) -> None:
        if "reward" not in logs:
            return
        step, sample = time.perf_counter() - self.started, self.trainer.generation_seconds
        line = {"step": state.global_step, "reward": logs["reward"], "seconds/sample": sample, "seconds/step": step}
        with self.path.open("a") as file:
            file.write(json.dumps(line) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--run", type=Path, required=True)
    parser.add_argument("--settings", type=json.loads, required=True)
    arguments = parser.parse_args()
    settings, log = arguments.settings, StepLog(arguments.run / "metrics.jsonl")
    responses = settings["prompts_per_step"] * settings["samples_per_prompt"]
    # What a user writes: from here
    rows = open_gym(settings["dataset"])
    data = Dataset.from_list([rows.read(index) for index in range(len(rows))])

    def reward(completions: list[Any], answer: list[str], extra_info: list[Any], **_: Any) -> list[float]:
        texts = [completion[0]["content"] for completion in completions]
        return [score_last_number(rows.name, *each) for each in zip(texts, answer, extra_info, strict=True)]

    tokenizer = AutoTokenizer.from_pretrained(settings["model"])
    model = AutoModelForCausalLM.from_pretrained(settings["model"], dtype=getattr(torch, settings["dtype"]))
    config = GRPOConfig(
        output_dir=str(arguments.run),
        per_device_train_batch_size=settings["per_device"],
        gradient_accumulation_steps=responses // settings["per_device"],
        num_generations=settings["samples_per_prompt"],
        max_completion_length=settings["max_response_tokens"],
        max_steps=settings["steps"],
        learning_rate=settings["lr"],
        lr_scheduler_type="constant",
        use_cpu=True,
        bf16=settings["dtype"] == "bfloat16",
        gradient_checkpointing=False,
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        seed=settings["seed"],
    )
    trainer = Trainer(model, reward, args=config, train_dataset=data, processing_class=tokenizer, callbacks=[log])
    # to here
    log.trainer = trainer
    trainer.train()


if __name__ == "__main__":
    main()
