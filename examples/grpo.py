"""GRPO and its relatives on a local Hugging Face model: training in Ray actors, rollouts in vLLM, weights synced in memory.

    python -m examples.grpo --model DIR --dataset train.jsonl --reward my_reward.py:compute_score --steps 200

Every option is a field of ``GRPOConfig``; ``--config examples/recipes/dapo.json`` sets those in which DAPO differs. With
``--max-staleness 1`` the next batch is sampled while this one is trained on. With ``RAY_ADDRESS`` set it runs on that
cluster, else on this machine. The file stands alone: copy it to begin a loop of your own.
"""

from __future__ import annotations

from typing import Any, Literal, Self

from pydantic import Field, model_validator

from actors import Loss, RLRun, Session
from actors.run import (
    Advantage,
    OnStep,
    RLConfig,
    RunResult,
    TrainingBatch,
    parse_config,
    run_command,
    to_sequences,
    update_metrics,
    with_advantages,
    with_outputs,
)
from rl_backend.algorithm import LossAggMode, overlong_penalty
from rl_backend.contracts import ConfigError


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
    kl_place: Literal["loss", "reward"] = Field(
        default="loss", description="KL in the loss, or taken off the rewards of tokens (reinforce_plus_plus)"
    )
    overlong_buffer_tokens: int = Field(
        default=0, ge=0, description="last tokens before max_response_tokens over which a penalty grows from 0 to 1"
    )
    dynamic_sampling: bool = Field(default=False, description="sample more prompts in place of equally rewarded groups")
    max_batches_per_step: int = Field(default=4, ge=1, description="most batches that dynamic sampling takes for a step")

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.samples_per_prompt < 2 and self.advantage != "reinforce_plus_plus":
            raise ConfigError.of(
                "GRPOConfig.samples_per_prompt", self.samples_per_prompt, f"advantage={self.advantage!r} compares at least 2"
            )
        if self.kl_place == "reward" and (self.advantage != "reinforce_plus_plus" or not self.kl_coef):
            raise ConfigError.of(
                "GRPOConfig.kl_place", "reward", "needs advantage='reinforce_plus_plus', which looks at tokens, and kl_coef"
            )
        if self.overlong_buffer_tokens > self.max_response_tokens:
            raise ConfigError.of(
                "GRPOConfig.overlong_buffer_tokens",
                self.overlong_buffer_tokens,
                f"is more than max_response_tokens={self.max_response_tokens}",
            )
        if self.dynamic_sampling and self.samples_per_prompt < 2:
            raise ConfigError.of("GRPOConfig.dynamic_sampling", True, "compares the rewards of a group; needs 2 samples")
        if not self.dynamic_sampling and self.is_set("max_batches_per_step"):
            raise ConfigError.of(
                "GRPOConfig.max_batches_per_step", self.max_batches_per_step, "only dynamic_sampling takes several batches"
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
        kl_coef = self.kl_coef if self.kl_place == "loss" else 0.0
        return Loss(name, kl_coef=kl_coef, entropy_coef=self.entropy_coef, **given, **self.importance_options())

    @property
    def kl_in_reward(self) -> float:
        """Weight of the KL that is taken off the rewards."""
        return self.kl_coef if self.kl_place == "reward" else 0.0

    def shaped_rewards(self, batch: TrainingBatch) -> list[float]:
        """Rewards with the penalty for responses that come near their limit (DAPO)."""
        if not self.overlong_buffer_tokens:
            return batch.rewards
        penalties = overlong_penalty(
            [len(sample.response_ids) for sample in batch.samples],
            max_response_tokens=self.max_response_tokens,
            buffer_tokens=self.overlong_buffer_tokens,
        )
        return [reward + penalty for reward, penalty in zip(batch.rewards, penalties.tolist(), strict=True)]


def train(config: GRPOConfig, session: Session | None = None, on_step: OnStep | None = None) -> RunResult:
    """Runs GRPO and leaves the trained model in ``run_dir/model``.

    Args:
        session: open training groups and engines; None opens them for this run.
        on_step: sees each step's number and metrics.
    """
    run = RLRun(config, session, on_step)
    loss, meta = config.loss_function(), config.meta()
    with run:
        policy = run.build_model("policy", router_replay=config.router_replay)
        reference = run.build_model("reference", forward_only=True) if config.kl_coef else None
        most_batches = config.max_batches_per_step if config.dynamic_sampling else None
        run.begin("GRPO", {"policy": policy}, batches_with_signal=most_batches)
        for _ in run.steps():
            batch = run.collect()
            sequences = to_sequences(batch.samples, routes=config.router_replay == "R3")

            # Old log-probs: the policy before its updates, computed by the kernels that train it and not by vLLM's.
            old = policy.outputs({"old_log_probs": "log_probs"}, sequences, meta, before_updates=True)
            sequences = with_outputs(sequences, old)
            if reference:
                sequences = with_outputs(sequences, reference.outputs({"ref_log_probs": "log_probs"}, sequences, meta))
            run.lap("old_log_probs")

            sequences = with_advantages(
                sequences,
                config.shaped_rewards(batch),
                config.advantage,
                config.samples_per_prompt,
                kl_coef=config.kl_in_reward,
            )
            updates = []
            for first in range(0, len(sequences), config.sequences_per_update):
                updates.append(policy.update(sequences[first : first + config.sequences_per_update], loss, meta))
            run.lap("train")
            run.push()
            run.end_step(batch.metrics | update_metrics(updates))
        run.save_model(policy)
        return run.finish()


def main() -> None:
    config = parse_config(GRPOConfig, "GRPO on a local Hugging Face model.")
    result = train(config)
    if result.accuracy_after is not None:
        print(f"held-out accuracy: {result.accuracy_before:.3f} before, {result.accuracy_after:.3f} after")
    print(f"run folder: {config.run_dir} (report.html, trained model in {config.run_dir}/model)")


if __name__ == "__main__":
    run_command(main)
