"""GRPO and its relatives on a local Hugging Face model: training in Ray actors, rollouts in vLLM, weights synced in memory.

    python -m examples.grpo --model DIR --dataset train.jsonl --reward my_reward.py:compute_score --steps 200

Every option is a field of ``GRPOConfig``; ``--config examples/recipes/dapo.json`` sets those of a published recipe. With
``--max-staleness 1`` the next batch is sampled while this one is trained on. With ``RAY_ADDRESS`` set it runs on that
cluster, else on this machine.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import Any, Literal, Self

from pydantic import Field, model_validator

from actors import Loss, RolloutGroup, TrainGroup, WeightSync
from adapters.verl.reward import load_reward_function
from examples.common.clock import Clock
from examples.common.cluster import ray_session, require_paths, share_cluster
from examples.common.collect import Collector
from examples.common.command_line import parse_config, run_command
from examples.common.models import Model
from examples.common.progress import print_start, print_step
from examples.common.prompts import endless_batches, load_prompts, load_tokenizer
from examples.common.result import RunResult
from examples.common.rl_config import RLConfig
from examples.common.run_folder import RunFolder, require_new_run
from examples.common.sample_stream import SampleStream
from examples.common.scoring import HeldOut, describe
from examples.common.sequences import Advantage, to_sequences, with_advantages, with_field
from rl_backend.algorithm import LossAggMode
from rl_backend.contracts import ConfigError, RLBackendError, merge_metrics


class GRPOConfig(RLConfig):
    """All options of a run."""

    run_dir: str = Field(default="runs/grpo", description="new folder for metrics, samples and the trained model")
    advantage: Advantage = Field(
        default="grpo", description="grpo, dr_grpo, rloo, reinforce_plus_plus or reinforce_plus_plus_baseline"
    )
    loss: Literal["grpo", "gspo", "cispo"] = Field(default="grpo", description="surrogate: grpo (PPO's), gspo or cispo")
    clip_ratio_low: float | None = Field(default=None, ge=0, description="clip range below 1; none: as the loss has it")
    clip_ratio_high: float | None = Field(default=None, ge=0, description="clip range above 1; none: as the loss has it")
    loss_agg_mode: LossAggMode | None = Field(
        default=None, description="how token losses are averaged; none: as the loss has it"
    )
    loss_scale_factor: float | None = Field(
        default=None, gt=0, description="divisor of seq-mean-token-sum-norm; none: max_response_tokens"
    )
    kl_coef: float = Field(default=0.0, ge=0, description="weight of the KL to the initial policy; 0 builds no reference")
    dynamic_sampling: bool = Field(default=False, description="sample more prompts in place of equally rewarded groups")
    max_batches_per_step: int = Field(default=4, ge=1, description="most batches that dynamic sampling takes for a step")

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.samples_per_prompt < 2 and self.advantage != "reinforce_plus_plus":
            raise ConfigError.of(
                "GRPOConfig.samples_per_prompt", self.samples_per_prompt, f"advantage={self.advantage!r} compares at least 2"
            )
        if self.loss_scale_factor is not None and self.loss_agg_mode != "seq-mean-token-sum-norm":
            raise ConfigError.of(
                "GRPOConfig.loss_scale_factor",
                self.loss_scale_factor,
                "only loss_agg_mode='seq-mean-token-sum-norm' divides",
            )
        return self

    def loss_function(self) -> Loss:
        """What the ranks minimise; options that are None keep the loss's own defaults."""
        chosen: dict[str, Any] = {
            "clip_ratio_low": self.clip_ratio_low,
            "clip_ratio_high": self.clip_ratio_high,
            "loss_agg_mode": self.loss_agg_mode,
        }
        if self.loss_agg_mode == "seq-mean-token-sum-norm":
            chosen["loss_scale_factor"] = self.loss_scale_factor or float(self.max_response_tokens)
        given = {name: value for name, value in chosen.items() if value is not None}
        name = f"rl_backend.algorithm:{self.loss}_loss"
        return Loss(name, kl_coef=self.kl_coef, **given, **self.importance_options())


def train(config: GRPOConfig, on_step: Callable[[int, dict[str, float]], None] | None = None) -> RunResult:
    """Runs GRPO and leaves the trained model in ``run_dir/model``; ``on_step`` sees each step's number and metrics."""
    started = time.perf_counter()
    require_new_run(config.run_dir)
    tokenizer = load_tokenizer(config.model)
    reward = load_reward_function(config.reward)
    prompts = load_prompts(config.dataset, tokenizer, config.max_prompt_tokens)
    eval_prompts = load_prompts(config.eval_dataset, tokenizer, config.max_prompt_tokens) if config.eval_dataset else []
    batches = endless_batches(prompts, config.prompts_per_step, config.seed)
    sampling = config.sampling_config(tokenizer.eos_token_id)
    loss = config.loss_function()
    meta = {"temperature": config.temperature}

    with (
        ray_session(config.ranks, config.engines),
        TrainGroup(
            config.runtime_config(),
            config.ranks,
            (share := share_cluster(config.ranks, config.engines, take_turns=not config.batches_ahead)).cores_per_rank,
            share.gpus,
            placement=config.placement,
        ) as trainer,
        RolloutGroup(config.rollout_config(share)) as rollout,
        RunFolder(config.run_dir, config, trace=(trainer, rollout) if config.trace else ()) as folder,
    ):
        require_paths(trainer, config.model, folder.path)
        policy = Model(trainer, trainer.build_model(name="policy"))
        if config.kl_coef:
            reference = Model(trainer, trainer.build_model(forward_only=True, name="reference"))
        with (
            WeightSync(trainer, rollout, policy.handle, transport=config.transport) as sync,
            SampleStream(rollout, batches, sampling, seed=config.seed, ahead=config.batches_ahead) as stream,
        ):
            batches_with_signal = config.max_batches_per_step if config.dynamic_sampling else None
            collector = Collector(config, stream, tokenizer, reward, batches_with_signal=batches_with_signal)
            pushed = sync.push()
            collector.pushed(pushed.version, 0)
            held_out = HeldOut(eval_prompts, rollout, sampling, tokenizer, reward, folder)
            accuracy_before = held_out.accuracy(0)
            facts = [f"{len(prompts)} prompts", *config.facts(), f"weights by {pushed.transport}"]
            print_start("GRPO", facts, accuracy_before, len(eval_prompts))
            max_gap, steps_started = 0.0, time.perf_counter()

            for step in range(1, config.steps + 1):
                clock = Clock()
                batch = collector.collect(step, clock)

                sequences = to_sequences(batch.samples)
                sequences = with_field(sequences, "old_log_probs", policy.submit_output("log_probs", sequences, meta)())
                if config.kl_coef:
                    sequences = with_field(
                        sequences, "ref_log_probs", reference.submit_output("log_probs", sequences, meta)()
                    )
                clock.lap("old_log_probs")

                sequences = with_advantages(sequences, batch.rewards, config.advantage, config.samples_per_prompt)
                updates = []
                for start in range(0, len(sequences), config.sequences_per_update):
                    update = sequences[start : start + config.sequences_per_update]
                    updates.append(policy.submit_update(update, loss, meta)())
                metrics = batch.metrics | {
                    name: metric.mean for name, metric in merge_metrics([update.metrics for update in updates]).items()
                }
                metrics |= {"step_ok": float(all(update.ok for update in updates))}
                metrics |= {"grad_norm": updates[-1].grad_norm, "next_lr": updates[-1].next_lr}
                clock.lap("train")
                with stream.between_batches():
                    if config.batches_ahead:
                        clock.lap("wait_for_samples")
                    collector.pushed(sync.push().version, step)
                clock.lap("sync")

                if not math.isfinite(metrics["log_prob_gap"]):
                    raise RLBackendError(
                        f"step {step}: the log-prob gap between trainer and vLLM is {metrics['log_prob_gap']}"
                    )
                max_gap = max(max_gap, metrics["log_prob_gap"])
                step_seconds = time.perf_counter() - steps_started
                accuracy = held_out.accuracy(step) if config.evaluates_after(step) else None
                if accuracy is not None:
                    metrics["accuracy"] = accuracy
                folder.log(step, metrics | clock.seconds | {"weight_version": trainer.weight_version(policy.handle)})
                folder.log_samples(step, describe(batch.samples, batch.prompts, batch.rewards, tokenizer))
                print_step(step, config.steps, metrics, clock.seconds)
                if on_step:
                    on_step(step, metrics)

            result = RunResult(accuracy_before, accuracy, max_gap, time.perf_counter() - started, step_seconds)
            trainer.save_checkpoint(policy.handle, folder.path / "model", hf=True)
            folder.write_summary(vars(result))
    return result


def main() -> None:
    config = parse_config(GRPOConfig, "GRPO on a local Hugging Face model.")
    result = train(config)
    if result.accuracy_after is not None:
        print(f"held-out accuracy: {result.accuracy_before:.3f} before, {result.accuracy_after:.3f} after")
    print(f"run folder: {config.run_dir} (report.html, trained model in {config.run_dir}/model)")


if __name__ == "__main__":
    run_command(main)
