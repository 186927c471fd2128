"""GRPO and its relatives on a local Hugging Face model: training in Ray actors, rollouts in vLLM, weights synced in memory.

    python -m examples.grpo --model DIR --dataset train.jsonl --reward my_reward.py:compute_score --steps 200

Every option is a field of ``GRPOConfig``; ``--config examples/recipes/dapo.json`` sets those in which DAPO differs. With
``--max-staleness 1`` the next batch is sampled while this one is trained on. With ``RAY_ADDRESS`` set it runs on that
cluster, else on this machine.
"""

from __future__ import annotations

from typing import Any, Literal, Self

from pydantic import Field, model_validator

from actors import Loss, RolloutGroup, TrainGroup, WeightSync
from examples.common.clock import Clock
from examples.common.cluster import ray_session, require_paths, share_cluster
from examples.common.collect import Collector, TrainingBatch
from examples.common.command_line import parse_config, run_command
from examples.common.inputs import load_inputs
from examples.common.models import Model, update_metrics
from examples.common.result import RunResult
from examples.common.rl_config import RLConfig
from examples.common.run_folder import RunFolder
from examples.common.run_lock import RunLock
from examples.common.run_log import OnStep, RunLog
from examples.common.run_saver import RunSaver, stream_position
from examples.common.run_start import find_start
from examples.common.sample_stream import SampleStream
from examples.common.sequences import Advantage, to_sequences, with_advantages, with_outputs
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


def train(config: GRPOConfig, on_step: OnStep | None = None) -> RunResult:
    """Runs GRPO and leaves the trained model in ``run_dir/model``; ``on_step`` sees each step's number and metrics."""
    start = find_start(config)
    inputs = load_inputs(config)
    loss = config.loss_function()
    meta = config.meta()
    with (
        RunLock(config.run_dir) as lock,
        ray_session(config.ranks, config.engines),
        TrainGroup(
            config.runtime_config(),
            config.ranks,
            (share := share_cluster(config.ranks, config.engines, take_turns=not config.batches_ahead)).cores_per_rank,
            share.gpus,
            placement=config.placement,
        ) as trainer,
        RolloutGroup(config.rollout_config(share)) as rollout,
        RunFolder(
            config.run_dir, config, start=start, trace=(trainer, rollout) if config.trace else (), lock=lock
        ) as folder,
    ):
        require_paths(trainer, config.model, folder.path)
        policy = Model(trainer, trainer.build_model(name="policy"), config.router_replay)
        if config.kl_coef:
            reference = Model(trainer, trainer.build_model(forward_only=True, name="reference"))
        log = RunLog(config, inputs, rollout, folder, on_step, start)
        with (
            RunSaver(config, folder, {"policy": policy}, start) as saver,
            WeightSync(trainer, rollout, policy.handle, transport=config.transport) as sync,
            SampleStream(
                rollout,
                inputs.batches,
                inputs.sampling,
                seed=config.seed,
                ahead=config.batches_ahead,
                start=stream_position(start),
            ) as stream,
        ):
            batches_with_signal = config.max_batches_per_step if config.dynamic_sampling else None
            collector = Collector(config, stream, inputs, batches_with_signal=batches_with_signal, start=start)
            pushed = sync.push()
            collector.pushed(pushed.version, start.step)
            log.start("GRPO", [f"weights by {pushed.transport}"])

            for step in range(start.step + 1, config.steps + 1):
                clock = Clock()
                batch = collector.collect(step, clock)

                sequences = to_sequences(batch.samples, routes=config.router_replay == "R3")
                sequences = with_outputs(sequences, policy.submit_old_policy(sequences, meta)())
                if config.kl_coef:
                    ref_log_probs = reference.submit_output("log_probs", sequences, meta)()
                    sequences = with_outputs(sequences, {"ref_log_probs": ref_log_probs})
                clock.lap("old_log_probs")

                rewards = config.shaped_rewards(batch)
                sequences = with_advantages(
                    sequences, rewards, config.advantage, config.samples_per_prompt, kl_coef=config.kl_in_reward
                )
                updates = []
                for first in range(0, len(sequences), config.sequences_per_update):
                    update = sequences[first : first + config.sequences_per_update]
                    updates.append(policy.submit_update(update, loss, meta)())
                clock.lap("train")
                with stream.between_batches():
                    if config.batches_ahead:
                        clock.lap("wait_for_samples")
                    pushed = sync.push()
                    collector.pushed(pushed.version, step)
                clock.lap("sync")
                saver.save(step, clock)
                log.step(step, batch.metrics | update_metrics(updates), batch, pushed.version, clock)
                saver.commit(step, log.state | collector.state, stream.position)

            saver.finish()
            trainer.save_checkpoint(policy.handle, folder.place("model"), hf=True)
            return log.finish()


def main() -> None:
    config = parse_config(GRPOConfig, "GRPO on a local Hugging Face model.")
    result = train(config)
    if result.accuracy_after is not None:
        print(f"held-out accuracy: {result.accuracy_before:.3f} before, {result.accuracy_after:.3f} after")
    print(f"run folder: {config.run_dir} (report.html, trained model in {config.run_dir}/model)")


if __name__ == "__main__":
    run_command(main)
