"""PPO with a critic on a local Hugging Face model: actor, critic and reference in Ray actors, rollouts in vLLM.

    rl-backend ppo --model DIR --dataset train.jsonl --reward my_reward.py:compute_score --steps 200

The models are handles on one training group, or with ``--groups each`` on a group each, and then they work at the same
time. Every option is a field of ``PPOConfig``. With ``RAY_ADDRESS`` set it runs on that cluster. Copy the file to begin a
loop of your own.
"""

import math
from collections.abc import Sequence
from typing import Annotated, ClassVar, Literal, Self

from actors.run import announce

announce(__name__)  # the first line, before imports that take seconds

from pydantic import Field, model_validator

from actors import Loss, RLRun, Session
from actors.run import (
    OnStep,
    OptionSet,
    PolicyLoss,
    RLConfig,
    RunModel,
    RunResult,
    kl_metrics,
    rewards_of_tokens,
    run_command,
    to_sequences,
    update_metrics,
    update_parts,
    with_outputs,
)
from rl_backend import OptimizerConfig, TokenSequence
from rl_backend.algorithm import explained_variance, gae_advantages, masked_whiten
from rl_backend.contracts import MAY_CHANGE, SAME_CONTENTS, ConfigError, HasEffect
from rl_backend.data import local_model, pack


class PPOConfig(RLConfig):
    option_set: ClassVar[OptionSet] = RLConfig.option_set | OptionSet(
        preset={"run_dir": "runs/ppo", "prompts_per_step": 256, "sampling.n": 1},
        groups={"model": ("critic_model",), "layout": ("groups",)},
        metavars={"critic_model": "DIR"},
    )

    epochs: int = Field(
        default=1, ge=1, description="passes over a step's samples, each of updates_per_step optimizer steps"
    )
    groups: Annotated[Literal["one", "each"], MAY_CHANGE] = Field(
        default="one", description="one training group for all models, or one of `ranks` ranks for each"
    )
    critic_model: Annotated[str | None, SAME_CONTENTS] = Field(
        default=None, description="directory, or name on the Hub, that the critic starts from; none: model"
    )
    critic_lr: float = Field(default=1e-5, gt=0, description="peak learning rate of the critic")
    critic_warmup_steps: int = Field(default=0, ge=0, description="first steps, in which only the critic is trained")
    gamma: float = Field(default=1.0, ge=0, le=1, description="discount of later rewards")
    lam: float = Field(default=1.0, ge=0, le=1, description="lambda of generalised advantage estimation")
    loss: PolicyLoss = Field(default=PolicyLoss(), description="what the actor minimises")
    cliprange_value: float | None = Field(default=0.5, gt=0, description="clip range of values; none: no clip")
    kl_coef: float = Field(default=0.0, ge=0, description="weight of the KL to the initial policy; 0 builds no reference")
    kl_place: Annotated[Literal["reward", "loss"], HasEffect(lambda c: c.kl_coef, "kl_coef=0 has no KL to place")] = Field(
        default="reward", description="KL taken off the rewards, or in the loss"
    )

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.critic_warmup_steps >= self.steps:
            problem = f"leaves none of steps={self.steps} to the actor"
            raise ConfigError.of("PPOConfig.critic_warmup_steps", self.critic_warmup_steps, problem)
        # Made here, so that a rate which does not fit is refused before Ray starts.
        self.critic_optimizer()
        return self

    def models(self) -> tuple[RunModel, ...]:
        option = "critic_model" if self.critic_model else "model"
        path = local_model(self.critic_model or self.model, field=f"PPOConfig.{option}")
        critic = RunModel(option, path, "values", group=1)
        reference = RunModel("model", self.model, forward_only=True, group=2)
        return (*super().models(), critic, *([reference] if self.kl_coef else []))

    @property
    def kl_in_reward(self) -> float:
        return self.kl_coef if self.kl_place == "reward" else 0.0

    @property
    def on_policy(self) -> bool:
        return super().on_policy and self.epochs == 1 and not self.kl_in_reward

    @property
    def optimizer_steps(self) -> int:
        return (self.steps - self.critic_warmup_steps) * self.updates_per_step * self.epochs

    @property
    def training_groups(self) -> int:
        return 1 if self.groups == "one" else 3 if self.kl_coef and not self.lora.rank else 2

    def actor_loss(self) -> Loss:
        options = {"kl_coef": self.kl_coef - self.kl_in_reward, "entropy_coef": self.entropy_coef}
        options |= {"on_policy": self.on_policy, **self.importance_options()}
        return self.loss.function(self.sampling.max_new_tokens, **options)

    def critic_loss(self) -> Loss:
        return Loss("rl_backend.algorithm:value_loss", cliprange_value=self.cliprange_value)

    def critic_optimizer(self) -> OptimizerConfig:
        steps = self.steps * self.updates_per_step * self.epochs
        return self.other_optimizer("critic_lr", total_training_steps=steps)


def train(config: PPOConfig, session: Session | None = None, on_step: OnStep | None = None) -> RunResult:
    """Runs PPO and leaves the trained models in ``run_dir/model`` and ``run_dir/critic``.

    Args:
        session: open training groups and engines; None opens them for this run.
        on_step: sees each step's number and metrics.
    """
    run = RLRun(config, session, on_step)
    actor_loss, critic_loss, meta = config.actor_loss(), config.critic_loss(), config.meta()
    with run:
        actor = run.build_model("actor", router_replay=config.router_replay)
        critic = run.build_model(
            "critic", group=1, head="values", hf_path=config.critic_model, optimizer=config.critic_optimizer()
        )
        # With adapters the reference is the actor's frozen model itself, where the actor is.
        of_reference = 0 if config.lora.rank else 2
        reference = run.build_model("reference", group=of_reference, forward_only=True) if config.kl_coef else None
        run.begin("PPO", {"actor": actor, "critic": critic}, [f"{len(run.session.groups)} training group(s)"])
        for step in run.steps():
            batch = run.collect()
            sequences = to_sequences(batch.samples, routes=config.router_replay == "R3")

            # Submitted together: models on groups of their own compute at the same time.
            outputs = [critic.submit_outputs({"old_values": "values"}, sequences, meta)]
            if not config.on_policy:  # else a step's only update has them itself
                old = {"old_log_probs": "log_probs"}
                outputs.append(actor.submit_outputs(old, sequences, meta, before_updates=True))
            if reference:
                outputs.append(reference.submit_outputs({"ref_log_probs": "log_probs"}, sequences, meta))
            for output in outputs:
                sequences = with_outputs(sequences, output())
            run.lap("outputs")

            sequences, metrics = with_gae(sequences, batch.rewards, config)
            actor_updates, critic_updates = [], []
            for _ in range(config.epochs):
                for update in update_parts(sequences, config.sampling.n, config.updates_per_step, config.data_parallel_size):
                    critic_update = critic.submit_update(update, critic_loss, meta)
                    if step > config.critic_warmup_steps:
                        actor_updates.append(actor.update(update, actor_loss, meta))
                    critic_updates.append(critic_update())
            of_critic = update_metrics(critic_updates)
            # Names that both updates have are the actor's.
            for name, value in of_critic.items():
                metrics[name if "value" in name or "return" in name else f"critic_{name}"] = value
            metrics |= update_metrics(actor_updates) if actor_updates else {"step_ok": of_critic["step_ok"]}
            run.lap("train")
            run.push()
            run.end_step(batch.metrics | metrics)
        run.save_model(actor)
        run.save_model(critic, "critic")
        return run.finish()


def with_gae(
    sequences: Sequence[TokenSequence], rewards: Sequence[float], config: PPOConfig
) -> tuple[list[TokenSequence], dict[str, float]]:
    """Adds ``advantages``, whitened, and ``returns``; metrics are the critic's ``explained_variance`` and ``kl`` in nats."""
    packed = pack(sequences)
    fields, mask, seq_lens = packed.token_fields, packed.token_fields["loss_mask"], packed.seq_lens
    of_tokens = rewards_of_tokens(fields, seq_lens, rewards, config.kl_in_reward)
    advantages, returns = gae_advantages(of_tokens, fields["old_values"], mask, seq_lens, config.gamma, config.lam)
    added = {"advantages": masked_whiten(advantages, mask), "returns": returns}
    estimated = with_outputs(sequences, {name: packed.split(value.float()) for name, value in added.items()})
    explained = explained_variance(fields["old_values"], returns, mask)
    # Where all returns are equal there is no variance to explain.
    metrics = {"explained_variance": explained} if math.isfinite(explained) else {}
    return estimated, metrics | (kl_metrics(sequences) if config.kl_in_reward else {})


def main(config: PPOConfig) -> None:
    result = train(config)
    if result.held_out_reward_after is not None:
        print(f"held-out reward: {result.held_out_reward_before:.3f} before, {result.held_out_reward_after:.3f} after")
    print(f"run folder: {config.run_dir} (report.html, trained models in {config.run_dir}/model and /critic)")


if __name__ == "__main__":
    run_command(main, PPOConfig, "PPO with a critic on a local Hugging Face model.")
