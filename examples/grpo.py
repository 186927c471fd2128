"""GRPO on a local Hugging Face model: training in Ray actors, rollouts in vLLM, weights synced in memory.

    python -m examples.grpo --model DIR --dataset train.jsonl --reward my_reward.py:compute_score --steps 200

Every option is a field of ``GRPOConfig``. With ``RAY_ADDRESS`` set it runs on that cluster, else on this machine.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Self

import torch
from pydantic import Field, model_validator

from actors import Loss, RolloutConfig, RolloutGroup, Sample, SamplingConfig, TrainGroup, WeightSync, sample_seeds
from actors.weight_sync import TransportName
from adapters.verl.reward import RewardFunction, load_reward_function, score_value
from examples.common.cluster import cores_each, gpus_each, ray_session, resolve_dtype
from examples.common.command_line import parse_config, run_command
from examples.common.prompts import Prompt, endless_batches, load_prompts, load_tokenizer
from examples.common.run_folder import RunFolder, require_new_run
from rl_backend import OptimizerConfig, RuntimeConfig, TokenSequence
from rl_backend.algorithm import grpo_advantages
from rl_backend.contracts import BaseConfig, ConfigError, RLBackendError, merge_metrics


class GRPOConfig(BaseConfig):
    """All options of a run."""

    model: str = Field(description="local Hugging Face directory with config, safetensors and tokenizer")
    dataset: str = Field(description="training prompts: .jsonl (prompt, answer) or verl-style .parquet")
    eval_dataset: str | None = Field(default=None, description="held-out prompts, answered greedily before and after")
    reward: str = Field(description="verl-style compute_score as package.module:function or path/file.py:function")
    run_dir: str = Field(default="runs/grpo", description="new folder for metrics, samples and the trained model")
    steps: int = Field(default=100, ge=1, description="GRPO steps")
    prompts_per_step: int = Field(default=32, ge=1, description="prompts sampled in each step")
    samples_per_prompt: int = Field(default=8, ge=2, description="responses per prompt: the group")
    updates_per_step: int = Field(default=1, ge=1, description="optimizer steps in each GRPO step")
    max_prompt_tokens: int = Field(default=512, ge=1, description="longest prompt")
    max_response_tokens: int = Field(default=512, ge=1, description="longest response")
    temperature: float = Field(default=1.0, gt=0, description="sampling temperature")
    lr: float = Field(default=1e-6, gt=0, description="peak learning rate")
    lr_warmup_steps: int = Field(default=0, ge=0, description="optimizer steps of linear warm-up")
    lr_decay_style: Literal["constant", "linear", "cosine"] = Field(default="constant", description="after the warm-up")
    weight_decay: float = Field(default=0.01, ge=0, description="AdamW weight decay")
    clip_ratio: float = Field(default=0.2, gt=0, lt=1, description="clipping range of the policy ratio")
    kl_coef: float = Field(default=0.0, ge=0, description="weight of the KL to the initial policy; 0 builds no reference")
    tis_cap: float | None = Field(default=None, gt=0, description="cap of importance weights for rollout mismatch")
    backend: str = Field(default="native", description="registered runtime that trains")
    ranks: int = Field(default=1, ge=1, description="training ranks (data parallel)")
    engines: int = Field(default=1, ge=1, description="vLLM engines")
    transport: TransportName = Field(default="auto", description="auto, shared_memory, gloo, nccl or cuda_ipc")
    max_tokens_per_micro_batch: int = Field(default=16384, ge=1, description="token budget of one micro-batch")
    dtype: Literal["auto", "float32", "bfloat16"] = Field(default="auto", description="auto: bfloat16 with GPUs")
    seed: int = Field(default=0, ge=0, description="fixes data order, samples and training")
    eval_every: int = Field(default=0, ge=0, description="also evaluate every so many steps; 0: only before and after")
    shuffle_rewards: bool = Field(default=False, description="control experiment: rewards go to the wrong responses")

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.prompts_per_step % self.updates_per_step:
            raise ConfigError.of(
                "GRPOConfig.updates_per_step", self.updates_per_step, f"must divide prompts_per_step={self.prompts_per_step}"
            )
        if self.sequences_per_update < self.ranks:
            raise ConfigError.of(
                "GRPOConfig.ranks", self.ranks, f"an update has {self.sequences_per_update} responses; each rank needs one"
            )
        longest = self.max_prompt_tokens + self.max_response_tokens
        if longest > self.max_tokens_per_micro_batch:
            raise ConfigError.of(
                "GRPOConfig.max_tokens_per_micro_batch",
                self.max_tokens_per_micro_batch,
                f"must hold one sequence: max_prompt_tokens + max_response_tokens = {longest}",
            )
        return self

    @property
    def sequences_per_update(self) -> int:
        return self.prompts_per_step * self.samples_per_prompt // self.updates_per_step


@dataclass(frozen=True)
class GRPOResult:
    """Accuracies are mean rewards of greedy responses on ``eval_dataset``; None without one."""

    accuracy_before: float | None
    accuracy_after: float | None
    max_log_prob_gap: float
    seconds: float


def train(config: GRPOConfig, on_step: Callable[[int, dict[str, float]], None] | None = None) -> GRPOResult:
    """Runs GRPO and leaves the trained model in ``run_dir/model``; ``on_step`` sees each step's number and metrics."""
    started = time.perf_counter()
    require_new_run(config.run_dir)
    tokenizer = load_tokenizer(config.model)
    reward = load_reward_function(config.reward)
    prompts = load_prompts(config.dataset, tokenizer, config.max_prompt_tokens)
    held_out = load_prompts(config.eval_dataset, tokenizer, config.max_prompt_tokens) if config.eval_dataset else []
    batches = endless_batches(prompts, config.prompts_per_step, config.seed)
    train_cores, engine_cores = cores_each(config.ranks), cores_each(config.engines)

    with (
        ray_session(config.ranks * train_cores + config.engines * engine_cores),
        TrainGroup(
            runtime_config(config), config.ranks, train_cores, gpus := gpus_each(config.ranks, config.engines)
        ) as trainer,
        RolloutGroup(rollout_config(config, gpus)) as rollout,
        RunFolder(config.run_dir, config) as folder,
        WeightSync(trainer, rollout, policy := trainer.build_model(name="policy"), transport=config.transport) as sync,
    ):
        reference = trainer.build_model(forward_only=True, name="reference") if config.kl_coef else None
        transport = sync.push().transport
        sampling = SamplingConfig(
            n=config.samples_per_prompt,
            temperature=config.temperature,
            max_new_tokens=config.max_response_tokens,
            stop_token_ids=(tokenizer.eos_token_id,),
        )
        loss = Loss(
            "rl_backend.algorithm:grpo_loss",
            clip_ratio_low=config.clip_ratio,
            clip_ratio_high=config.clip_ratio,
            kl_coef=config.kl_coef,
            tis_cap=config.tis_cap,
        )

        def accuracy() -> float | None:
            if not held_out:
                return None
            greedy = sampling.replace(n=1, temperature=0.0)
            samples = rollout.generate([prompt.token_ids for prompt in held_out], greedy)
            return statistics.fmean(score(samples, held_out, tokenizer, reward))

        accuracy_before = accuracy()
        print_start(config, prompts, held_out, transport, accuracy_before)
        max_gap = 0.0

        for step in range(1, config.steps + 1):
            clock = Clock()
            batch = next(batches)
            samples = rollout.generate(
                [prompt.token_ids for prompt in batch],
                sampling,
                seeds=sample_seeds(config.seed, step, len(batch), config.samples_per_prompt),
                require_version=trainer.weight_version(policy),
            )
            clock.lap("sample")

            asked = [batch[sample.prompt_index] for sample in samples]
            rewards = score(samples, asked, tokenizer, reward)
            if config.shuffle_rewards:
                order = torch.randperm(len(rewards), generator=torch.Generator().manual_seed(config.seed + step))
                rewards = [rewards[index] for index in order.tolist()]
            advantages = grpo_advantages(torch.tensor(rewards), group_size=config.samples_per_prompt)
            sequences = [
                TokenSequence.from_prompt_and_response(
                    sample.prompt_ids,
                    sample.response_ids,
                    response_fields={"rollout_log_probs": sample.log_probs},
                    sequence_fields={"advantages": advantage},
                )
                for sample, advantage in zip(samples, advantages, strict=True)
            ]
            clock.lap("reward")

            meta = {"temperature": config.temperature}
            old = trainer.forward(policy, sequences, meta=meta).output("log_probs")
            sequences = with_field(sequences, "old_log_probs", old)
            if reference:
                ref = trainer.forward(reference, sequences, meta=meta).output("log_probs")
                sequences = with_field(sequences, "ref_log_probs", ref)
            clock.lap("old_log_probs")

            updates, steps_ok = [], []
            for start in range(0, len(sequences), config.sequences_per_update):
                update = sequences[start : start + config.sequences_per_update]
                trainer.zero_grad(policy)
                updates.append(trainer.forward_backward(policy, update, loss, meta=meta).metrics)
                ok, grad_norm, _ = trainer.optimizer_step(policy)
                steps_ok.append(ok)
                next_lr = trainer.lr_scheduler_step(policy)
            metrics = {name: metric.mean for name, metric in merge_metrics(updates).items()}
            metrics |= {"grad_norm": grad_norm, "step_ok": float(all(steps_ok)), "next_lr": next_lr}
            metrics |= {"reward": statistics.fmean(rewards)}
            clock.lap("train")
            sync.push()
            clock.lap("sync")

            if not math.isfinite(metrics["log_prob_gap"]):
                raise RLBackendError(f"step {step}: the log-prob gap between trainer and vLLM is {metrics['log_prob_gap']}")
            max_gap = max(max_gap, metrics["log_prob_gap"])
            metrics |= {"response_tokens": statistics.fmean(len(sample.response_ids) for sample in samples)}
            if config.eval_every and step % config.eval_every == 0 and held_out:
                metrics["accuracy"] = accuracy() or 0.0
            folder.log(step, metrics | clock.seconds | {"weight_version": trainer.weight_version(policy)})
            folder.log_samples(step, describe(samples, asked, rewards, tokenizer))
            print_step(config, step, metrics, clock)
            if on_step:
                on_step(step, metrics)

        result = GRPOResult(accuracy_before, accuracy(), max_gap, time.perf_counter() - started)
        trainer.save_checkpoint(policy, folder.path / "model", hf=True)
        folder.write_summary(vars(result))
    return result


def runtime_config(config: GRPOConfig) -> RuntimeConfig:
    total_steps = config.steps * config.updates_per_step
    optimizer = OptimizerConfig(
        lr=config.lr,
        lr_warmup_steps=config.lr_warmup_steps,
        lr_decay_style=config.lr_decay_style,
        total_training_steps=total_steps,
        weight_decay=config.weight_decay,
    )
    return RuntimeConfig(
        backend=config.backend,
        hf_path=config.model,
        seed=config.seed,
        max_tokens_per_micro_batch=config.max_tokens_per_micro_batch,
        backend_cfg={"optimizer": optimizer, "param_dtype": resolve_dtype(config.dtype)},
    )


def rollout_config(config: GRPOConfig, gpus: float) -> RolloutConfig:
    return RolloutConfig(
        model_path=config.model,
        num_engines=config.engines,
        dtype=resolve_dtype(config.dtype),
        max_model_len=config.max_prompt_tokens + config.max_response_tokens,
        seed=config.seed,
        require_push=True,
        gpus_per_worker=gpus or 1.0,
        gpu_memory_utilization=0.4 if 0 < gpus < 1 else 0.9,
    )


def score(samples: Sequence[Sample], prompts: Sequence[Prompt], tokenizer: Any, reward: RewardFunction) -> list[float]:
    """The reward of each sample; ``prompts`` is the one it answers."""
    texts = tokenizer.batch_decode([sample.response_ids for sample in samples], skip_special_tokens=True)
    return [
        score_value(
            reward(
                data_source=prompt.example.data_source,
                solution_str=text,
                ground_truth=prompt.example.ground_truth,
                extra_info=prompt.example.extra_info,
            )
        )
        for text, prompt in zip(texts, prompts, strict=True)
    ]


def with_field(sequences: Sequence[TokenSequence], name: str, values: Sequence[torch.Tensor]) -> list[TokenSequence]:
    return [sequence.with_fields({name: value}) for sequence, value in zip(sequences, values, strict=True)]


def describe(
    samples: Sequence[Sample], prompts: Sequence[Prompt], rewards: Sequence[float], tokenizer: Any
) -> list[dict[str, Any]]:
    """Lines of ``samples.jsonl``."""
    return [
        {
            "prompt": tokenizer.decode(sample.prompt_ids),
            "response": tokenizer.decode(sample.response_ids),
            "reward": reward,
            "ground_truth": prompt.example.ground_truth,
            "weight_version": sample.version_spans[0].version,
            "finish_reason": sample.finish_reason,
        }
        for sample, prompt, reward in zip(samples, prompts, rewards, strict=True)
    ]


class Clock:
    """Seconds of each phase of a step."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._last = time.perf_counter()

    def lap(self, phase: str) -> None:
        now = time.perf_counter()
        self.seconds[f"seconds/{phase}"] = now - self._last
        self._last = now


def print_start(
    config: GRPOConfig, prompts: Sequence[Prompt], held_out: Sequence[Prompt], transport: str, accuracy: float | None
) -> None:
    print(
        f"GRPO: {len(prompts)} prompts, {config.prompts_per_step} x {config.samples_per_prompt} responses a step, "
        f"{config.ranks} training rank(s), {config.engines} vLLM engine(s), weights by {transport}"
    )
    if accuracy is not None:
        print(f"held-out accuracy before: {accuracy:.3f} ({len(held_out)} prompts, greedy)")


def print_step(config: GRPOConfig, step: int, metrics: dict[str, float], clock: Clock) -> None:
    phases = "  ".join(f"{name.removeprefix('seconds/')} {value:.2f}s" for name, value in clock.seconds.items())
    accuracy = f"  accuracy {metrics['accuracy']:.3f}" if "accuracy" in metrics else ""
    skipped = "" if metrics["step_ok"] else "  STEP SKIPPED: a gradient is not finite"
    print(
        f"step {step:4d}/{config.steps}  reward {metrics['reward']:.3f}  gap {metrics['log_prob_gap']:.1e}  "
        f"grad norm {metrics['grad_norm']:.2f}  next lr {metrics['next_lr']:.1e}  | {phases}{accuracy}{skipped}",
        flush=True,
    )


def main() -> None:
    config = parse_config(GRPOConfig, "GRPO on a local Hugging Face model.")
    result = train(config)
    if result.accuracy_after is not None:
        print(f"held-out accuracy: {result.accuracy_before:.3f} before, {result.accuracy_after:.3f} after")
    print(f"run folder: {config.run_dir} (trained model in {config.run_dir}/model)")


if __name__ == "__main__":
    run_command(main)
