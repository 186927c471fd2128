"""GRPO and its relatives on a local Hugging Face model: training in Ray actors, rollouts in vLLM, weights synced in memory.

    rl-backend grpo --model DIR --dataset train.jsonl --reward my_reward.py:compute_score --steps 200

Every option is a field of ``GRPOConfig``, or of the configurations in it: ``--tp 2``, ``--rollout.enforce_eager``.
``--config examples/recipes/dapo.json`` sets those in which DAPO differs. With ``--max-staleness 1`` the next batch is
sampled while this one is trained on. With ``RAY_ADDRESS`` set it runs on that cluster. Copy the file to begin
a loop of your own.
"""

from typing import Annotated, ClassVar, Literal, Self

from actors.run import announce

announce(__name__)  # the first line, before imports that take seconds

from pydantic import Field, model_validator

from actors import Loss, RLRun, Session
from actors.run import (
    Advantage,
    OnStep,
    OptionSet,
    PolicyLoss,
    RLConfig,
    RunModel,
    RunResult,
    TrainingBatch,
    kl_metrics,
    run_command,
    to_sequences,
    update_metrics,
    update_parts,
    with_advantages,
    with_outputs,
)
from rl_backend.algorithm import overlong_penalty
from rl_backend.contracts import ConfigError, HasEffect

_DYNAMIC = HasEffect(lambda config: config.dynamic_sampling, "only dynamic_sampling takes several batches")
_OF_TOKENS = HasEffect(
    lambda config: config.kl_coef and config.advantage == "reinforce_plus_plus",
    "needs advantage='reinforce_plus_plus', which looks at tokens, and kl_coef",
)


class GRPOConfig(RLConfig):
    """All options of a run."""

    option_set: ClassVar[OptionSet] = RLConfig.option_set | OptionSet(
        preset={"run_dir": "runs/grpo"},
        groups={"reward": ("overlong_buffer_tokens",), "sampling": ("dynamic_sampling", "max_batches_per_step")},
    )

    advantage: Advantage = Field(
        default="grpo", description="grpo, dr_grpo, rloo, reinforce_plus_plus or reinforce_plus_plus_baseline"
    )
    loss: PolicyLoss = Field(default=PolicyLoss(), description="what the policy minimises")
    kl_coef: float = Field(default=0.0, ge=0, description="weight of the KL to the initial policy; 0 builds no reference")
    kl_place: Annotated[Literal["loss", "reward"], _OF_TOKENS] = Field(
        default="loss", description="KL in the loss, or taken off the rewards of tokens (reinforce_plus_plus)"
    )
    overlong_buffer_tokens: int = Field(
        default=0, ge=0, description="last tokens before max_response_tokens over which a penalty grows from 0 to 1"
    )
    dynamic_sampling: bool = Field(default=False, description="sample more prompts in place of equally rewarded groups")
    max_batches_per_step: Annotated[int, _DYNAMIC] = Field(
        default=4, ge=1, description="most batches that dynamic sampling takes for a step"
    )

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.sampling.n < 2 and (self.dynamic_sampling or self.advantage != "reinforce_plus_plus"):
            compares = "dynamic_sampling" if self.dynamic_sampling else f"advantage={self.advantage!r}"
            raise ConfigError.of("GRPOConfig.samples_per_prompt", self.sampling.n, f"{compares} compares at least 2")
        if self.overlong_buffer_tokens > self.sampling.max_new_tokens:
            problem = f"is more than max_response_tokens={self.sampling.max_new_tokens}"
            raise ConfigError.of("GRPOConfig.overlong_buffer_tokens", self.overlong_buffer_tokens, problem)
        return self

    def loss_function(self) -> Loss:
        options = {"kl_coef": self.kl_coef - self.kl_in_reward, "entropy_coef": self.entropy_coef}
        options |= {"on_policy": self.on_policy, **self.importance_options()}
        return self.loss.function(self.sampling.max_new_tokens, **options)

    def models(self) -> tuple[RunModel, ...]:
        reference = RunModel("model", self.model, forward_only=True)
        return (*super().models(), *([reference] if self.kl_coef else []))

    @property
    def kl_in_reward(self) -> float:
        return self.kl_coef if self.kl_place == "reward" else 0.0

    @property
    def on_policy(self) -> bool:
        return super().on_policy and not self.kl_in_reward

    def shaped_rewards(self, batch: TrainingBatch) -> list[float]:
        """Rewards with the penalty for responses that come near their limit (DAPO)."""
        if not self.overlong_buffer_tokens:
            return batch.rewards
        penalties = overlong_penalty(
            [len(sample.response_ids) for sample in batch.samples],
            max_response_tokens=self.sampling.max_new_tokens,
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

            # Old log-probs: the policy before its updates, computed by the kernels that train it and not by vLLM's. A step's
            # only update has them itself.
            if not config.on_policy:
                old = policy.outputs({"old_log_probs": "log_probs"}, sequences, meta, before_updates=True)
                sequences = with_outputs(sequences, old)
                run.lap("old_log_probs")
            if reference:
                sequences = with_outputs(sequences, reference.outputs({"ref_log_probs": "log_probs"}, sequences, meta))
                run.lap("ref_log_probs")

            rewards, n = config.shaped_rewards(batch), config.sampling.n
            sequences = with_advantages(sequences, rewards, config.advantage, n, kl_coef=config.kl_in_reward)
            # A KL in the loss is among the loss's own metrics.
            kl = kl_metrics(sequences) if config.kl_in_reward else {}
            parts = update_parts(sequences, n, config.updates_per_step, config.data_parallel_size)
            updates = [policy.update(part, loss, meta) for part in parts]
            run.lap("train")
            run.push()
            run.end_step(batch.metrics | kl | update_metrics(updates))
        run.save_model(policy)
        return run.finish()


def main(config: GRPOConfig) -> None:
    result = train(config)
    if result.held_out_reward_after is not None:
        print(f"held-out reward: {result.held_out_reward_before:.3f} before, {result.held_out_reward_after:.3f} after")
    print(f"run folder: {config.run_dir} (report.html, trained model in {config.run_dir}/model)")


if __name__ == "__main__":
    run_command(main, GRPOConfig, "GRPO on a local Hugging Face model.")
