"""Episodes of many turns: GRPO or PPO on an environment, with a guessing game and a calculator tool to begin with.

    rl-backend episodes --model DIR --dataset rows.jsonl --environment episodes.py:GuessingGame

``episodes.py`` is a copy of this file in the working directory; ``rl-backend example`` says where the original is.
``rows.jsonl`` has a line for each task, which the environment reads: ``{"high": 15, "turns": 4}`` for the guessing game,
``{"prompt": "60*17?", "answer": "1020"}`` for the calculator. Every option is a field of ``EpisodesConfig``. With
``RAY_ADDRESS`` set it runs on that cluster. Copy the file to begin an environment, or a loop, of your own.
"""

import random
import re
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal, Self

from actors.run import announce

announce(__name__)  # the first line, before imports that take seconds

from pydantic import Field, model_validator

from actors import EpisodeRun, Loss, Session
from actors.run import (
    Advantage,
    EpisodeConfig,
    OnStep,
    OptionSet,
    PolicyLoss,
    RunModel,
    RunResult,
    run_command,
    update_metrics,
    with_advantages,
    with_episode_gae,
    with_outputs,
)
from rl_backend.algorithm import episode_parts, episode_sequences
from rl_backend.contracts import ConfigError, HasEffect, OptimizerConfig
from rl_backend.environment import Step, ToolPool, Turn


class GuessingGame:
    """The model guesses a number from 0 to ``row["high"]``, and is told whether it is higher or lower; 1 for finding it."""

    tools = ()

    def __init__(self, row: Mapping[str, Any], seed: int) -> None:
        # All episodes of a group have the same seed, so they look for the same number.
        self.number = random.Random(seed).randint(0, row["high"])
        self.left = row["turns"]

    def start(self) -> list[dict[str, str]]:
        return [{"role": "user", "content": "?"}]

    def step(self, turn: Turn) -> Step:
        assert turn.message is not None
        self.left -= 1
        text = turn.message["content"].strip()
        if not text.isdecimal():
            return Step(done=True, metrics={"no_number": 1.0})
        if int(text) == self.number:
            return Step(reward=1.0, done=True, metrics={"found": 1.0})
        hint = ">" if self.number > int(text) else "<"
        return Step([{"role": "user", "content": hint}], done=self.left == 0)

    def close(self) -> None:
        """Nothing is open."""


def calculate(expression: str) -> str:
    """Multiplies two whole numbers.

    Args:
        expression: for example 60*17.
    """
    found = re.fullmatch(r"(\d{1,9})\*(\d{1,9})", expression)
    if found is None:
        raise ValueError("expected two whole numbers with * between them")
    return str(int(found[1]) * int(found[2]))


# In threads of this process, because the tool does nothing but multiply. Others belong into processes, the default.
CALCULATOR = ToolPool([calculate], where="threads")


class Calculator:
    """The model answers ``row["prompt"]``, with the tool if it likes; 1 for exactly ``row["answer"]``."""

    tools = CALCULATOR.tools

    def __init__(self, row: Mapping[str, Any], seed: int) -> None:
        self.row = row

    def start(self) -> list[dict[str, str]]:
        return [{"role": "user", "content": self.row["prompt"]}]

    def step(self, turn: Turn) -> Step:
        if turn.calls:  # which have been run, and are answered next
            return Step(metrics={"called": 1.0})
        assert turn.message is not None
        return Step(reward=float(turn.message["content"] == self.row["answer"]), done=True)

    def close(self) -> None:
        """Nothing is open."""


_PPO = HasEffect(lambda config: config.algorithm == "ppo", "only algorithm='ppo' has a critic")
_GRPO = HasEffect(lambda config: config.algorithm == "grpo", "algorithm='ppo' has the advantages of its critic")


class EpisodesConfig(EpisodeConfig):
    option_set: ClassVar[OptionSet] = EpisodeConfig.option_set | OptionSet(
        preset={"run_dir": "runs/episodes"}, groups={"training": ("algorithm", "advantage", "kl_coef")}
    )

    algorithm: Literal["grpo", "ppo"] = Field(default="grpo", description="compares episodes of a row, or has a critic")
    advantage: Annotated[Advantage, _GRPO] = Field(
        default="grpo", description="grpo, dr_grpo, rloo, reinforce_plus_plus or reinforce_plus_plus_baseline"
    )
    loss: PolicyLoss = Field(default=PolicyLoss(), description="what the policy minimises")
    kl_coef: float = Field(default=0.0, ge=0, description="weight of the KL to the initial policy; 0 builds no reference")
    critic_lr: Annotated[float, _PPO] = Field(default=1e-5, gt=0, description="learning rate of the critic")
    gamma: Annotated[float, _PPO] = Field(default=1.0, ge=0, le=1, description="discount of later rewards")
    lam: Annotated[float, _PPO] = Field(default=1.0, ge=0, le=1, description="lambda of generalised advantage estimation")

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.algorithm == "grpo" and self.advantage != "reinforce_plus_plus" and self.sampling.n < 2:
            problem = f"advantage={self.advantage!r} compares at least 2 episodes"
            raise ConfigError.of("EpisodesConfig.samples_per_prompt", self.sampling.n, problem)
        # Made here, so that a rate which does not fit is refused before Ray starts.
        self.critic_optimizer()
        return self

    def models(self) -> tuple[RunModel, ...]:
        critic, reference = RunModel("model", self.model, "values"), RunModel("model", self.model, forward_only=True)
        others = [critic] * (self.algorithm == "ppo") + [reference] * (self.kl_coef > 0)
        return (*super().models(), *others)

    def critic_optimizer(self) -> OptimizerConfig | None:
        return self.other_optimizer("critic_lr") if self.algorithm == "ppo" else None

    def policy_loss(self) -> Loss:
        options = {"kl_coef": self.kl_coef, "entropy_coef": self.entropy_coef, "on_policy": self.on_policy}
        return self.loss.function(self.longest_sequence, **options, **self.importance_options())


def train(config: EpisodesConfig, session: Session | None = None, on_step: OnStep | None = None) -> RunResult:
    """Trains on episodes and leaves the trained model in ``run_dir/model``.

    Args:
        session: open training groups and engines; None opens them for this run.
        on_step: sees each step's number and metrics.
    """
    run = EpisodeRun(config, session, on_step)
    loss, value_loss, meta = config.policy_loss(), Loss("rl_backend.algorithm:value_loss"), config.meta()
    with run:
        policy = run.build_model("policy", router_replay=config.router_replay)
        optimizer = config.critic_optimizer()
        critic = run.build_model("critic", head="values", optimizer=optimizer) if optimizer else None
        reference = run.build_model("reference", forward_only=True) if config.kl_coef else None
        run.begin(config.algorithm.upper(), {"policy": policy, **({"critic": critic} if critic else {})})
        for _ in run.steps():
            batch = run.collect()
            # One sequence of an episode, or several where its history began anew; other tokens than sampled ones are masked.
            sequences = episode_sequences(batch.episodes, truncated=config.truncated, routes=config.router_replay == "R3")
            if not config.on_policy:  # else a step's only update has them itself
                old = policy.outputs({"old_log_probs": "log_probs"}, sequences, meta, before_updates=True)
                sequences = with_outputs(sequences, old)
            if reference:
                sequences = with_outputs(sequences, reference.outputs({"ref_log_probs": "log_probs"}, sequences, meta))
            if critic:
                sequences = with_outputs(sequences, critic.outputs({"old_values": "values"}, sequences, meta))
            run.lap("outputs")

            if critic:
                sequences = with_episode_gae(sequences, batch.rewards, gamma=config.gamma, lam=config.lam)
            else:
                sequences = with_advantages(sequences, batch.rewards, config.advantage, group_ids=batch.groups)
            critic_updates, updates = [], []
            for part in episode_parts(sequences, batch.groups, config.updates_per_step, config.data_parallel_size):
                if critic:
                    critic_updates.append(critic.update(part, value_loss, meta))
                updates.append(policy.update(part, loss, meta))
            # Names that both updates have are the policy's.
            of_critic = update_metrics(critic_updates) if critic_updates else {}
            values = {name: value for name, value in of_critic.items() if "value" in name or "return" in name}
            run.lap("train")
            run.push()
            run.end_step(batch.metrics | values | update_metrics(updates))
        run.save_model(policy)
        if critic:
            run.save_model(critic, "critic")
        return run.finish()


def main(config: EpisodesConfig) -> None:
    result = train(config)
    if result.held_out_reward_after is not None:
        print(f"held-out reward: {result.held_out_reward_before:.3f} before, {result.held_out_reward_after:.3f} after")
    print(f"run folder: {config.run_dir} (report.html, trained model in {config.run_dir}/model)")


if __name__ == "__main__":
    run_command(main, EpisodesConfig, "Episodes of many turns in an environment: GRPO or PPO.")
