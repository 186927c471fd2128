"""Options of every run that samples: sampling, staleness, engines, and where rewards come from: functions, or episodes."""

import math
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import BaseModel, Field, model_validator

from actors.cluster.placement import ClusterShare
from actors.options.config import TRAINING, HeldOutSets, TrainingConfig, TrainingOptions, resolve_dtype
from actors.options.eval_sets import sets_by_name
from actors.options.policy_options import PolicyLoRA
from actors.rollout.config import RolloutConfig, SamplingConfig, fitting_lengths, positions_of, require_bounded
from actors.rollout.placement import resolve_device, with_share
from actors.sync.staged_transports import TransportName
from actors.train.model import RouterReplayMode
from rl_backend.algorithm.sequences import Truncated
from rl_backend.contracts import MAY_CHANGE, SAME_CONTENTS, BaseConfig, ConfigError, HasEffect
from rl_backend.data.examples import DataConfig
from rl_backend.data.rewards import OnFailure, RewardConfig, WeightedReward
from rl_backend.environment import Limits
from rl_backend.environment.conversation import OtherEnd
from rl_backend.environment.rendering import History
from rl_backend.model.blocks import divisors, nearest
from rl_backend.options.option_set import Follows, OptionSet, filled, get, has, options_of

_EVALUATES = HasEffect(lambda config: config.eval_dataset, "needs an eval_dataset")
_STALE = HasEffect(lambda config: config.max_staleness, "max_staleness=0 makes no stale samples; raise it")
_WEIGHTS = HasEffect(
    lambda config: config.importance_options(),
    "importance={0.importance!r} and max_staleness={0.max_staleness} has no weights to cap; leave it out, or set importance "
    "to truncate or mask",
)


def fitted_lengths(kind: type[BaseModel], given: Mapping[str, Any], model_path: str) -> dict[str, int]:
    """Lengths of prompts and responses that are not given and whose defaults are too much for the model's positions.

    Args:
        model_path: place of the model's directory.
    """
    prompt, response = "max_prompt_tokens", "sampling.max_new_tokens"
    defaults = {prompt: kind.model_fields[prompt].default, **options_of(kind).preset}
    asked = {path: get(given, path) if has(given, path) else defaults[path] for path in (prompt, response)}
    positions = _positions(given, model_path)
    if positions is None or not all(isinstance(tokens, int) for tokens in asked.values()):
        return {}
    return fitting_lengths(asked, [path for path in asked if not has(given, path)], positions)


def _positions(given: Mapping[str, Any], model_path: str) -> int | None:
    model = get(given, model_path) if has(given, model_path) else None
    return positions_of(model) if isinstance(model, str) and model else None


SAMPLED = OptionSet(
    short={
        "engines": "rollout.num_engines",
        "samples_per_prompt": "sampling.n",
        "max_response_tokens": "sampling.max_new_tokens",
        **{name: f"sampling.{name}" for name in ("temperature", "top_p", "top_k", "min_p", "stop_strings")},
    },
    preset={"sampling.n": 8, "sampling.max_new_tokens": 512},
    follows={
        # Stand-ins are the least that RolloutConfig takes.
        "rollout.model_path": Follows(lambda config: config.model, "engines sample from the trained model", until="-"),
        "rollout.dtype": Follows(lambda config: resolve_dtype(config.dtype), shown=lambda config: config.dtype),
        "rollout.placement": Follows(lambda config: config.placement),
        "rollout.max_model_len": Follows(lambda config: config.longest_sampled, until=2),
        "rollout.seed": Follows(lambda config: config.seed),
        "rollout.require_push": Follows(lambda config: True, "a run pushes before it samples"),
        "rollout.sleep_mode": Follows(lambda config: config.colocate, "follows from colocate; set that"),
        "rollout.return_routed_experts": Follows(
            lambda config: config.router_replay == "R3", "follows from router_replay; set that to R3"
        ),
        "rollout.load_tokenizer": Follows(lambda config: config.stops_at_strings, "follows from stop_strings; leave it out"),
        "rollout.max_adapters": Follows(
            lambda config: int(config.pushes_adapters), "follows from lora.rank and lora.push; leave it out"
        ),
        "rollout.max_adapter_rank": Follows(
            lambda config: config.lora.rank if config.pushes_adapters else 16, "follows from lora.rank; leave it out"
        ),
        "sampling.log_probs": Follows(lambda config: True, "training compares them with its own; leave it out"),
    },
    fitted=lambda kind, given: fitted_lengths(kind, given, "train.hf_path"),
    repeated=("sampling.stop_strings", "eval_dataset"),
    groups={
        "sampling": (
            *("sampling.", "samples_per_prompt", "max_response_tokens", "temperature", "prompts_per_step", "engines"),
            *("max_staleness", "sample_ahead", "stale_samples", "importance", "importance_cap", "transport", "colocate"),
        ),
        "evaluation": ("eval_every",),
        "training": ("updates_per_step", "entropy_coef", "router_replay", "loss."),
        "logging": ("samples_logged",),
    },
)


def _refuse(config: BaseModel, wrong: Mapping[str, str]) -> None:
    kind = type(config)
    ConfigError.refuse_all(
        [(f"{kind.__name__}.{name}", get(config, options_of(kind).place_of(name)), wrong[name]) for name in wrong]
    )


class SampledOptions(BaseModel):
    """Engines, sampling, staleness: the options that every run has which samples, for a configuration to take in."""

    option_set: ClassVar[OptionSet] = SAMPLED

    lora: PolicyLoRA = Field(default=PolicyLoRA(), description="adapters over a frozen model, see docs/lora.md")
    eval_dataset: HeldOutSets = None
    rollout: RolloutConfig = Field(description="vLLM's engines")
    sampling: SamplingConfig = Field(description="how training responses are sampled")
    prompts_per_step: int = Field(default=32, ge=1, description="prompts sampled in each step")
    updates_per_step: int = Field(default=1, ge=1, description="optimizer steps in each training step")
    entropy_coef: float = Field(default=0.0, ge=0, description="weight of the entropy bonus")
    max_staleness: int = Field(
        default=0, ge=0, description="training steps by which a sample's weights may be behind; 0: strictly on-policy"
    )
    sample_ahead: int | None = Field(
        default=None, ge=0, description="batches sampled while earlier ones are trained on; none: max_staleness"
    )
    stale_samples: Annotated[Literal["drop", "correct"], _STALE] = Field(
        default="drop", description="samples older than max_staleness: leave out, or train on with importance weights"
    )
    importance: Literal["auto", "off", "truncate", "mask"] = Field(
        default="auto",
        description="weights for tokens that other weights or kernels sampled: cap them, or leave out those outside "
        "[1 / importance_cap, importance_cap]; auto: truncate when sampling ahead, else off",
    )
    importance_cap: Annotated[float, _WEIGHTS] = Field(default=2.0, gt=1, description="largest importance weight")
    router_replay: RouterReplayMode = Field(
        default="off",
        description="for mixtures of experts: updates send tokens to the experts of the pass for the old log-probs (R2), or "
        "both send them to vLLM's (R3)",
    )
    transport: Annotated[TransportName, MAY_CHANGE] = Field(
        default="auto", description="of weights: auto, shared_memory, gloo, nccl or cuda_ipc"
    )
    colocate: Annotated[bool, MAY_CHANGE] = Field(
        default=False,
        description="ranks and engines have memory in turn, on the same GPUs: engines sleep while ranks train, and ranks "
        "move to host memory while engines sample, see docs/cluster.md",
    )
    samples_logged: Annotated[int, MAY_CHANGE] = Field(
        default=256, ge=0, description="samples of each step that samples.jsonl has"
    )
    eval_every: Annotated[int, MAY_CHANGE, _EVALUATES] = Field(
        default=0, ge=0, description="also evaluate every so many steps; 0: only before and after"
    )
    shuffle_rewards: bool = Field(default=False, description="control experiment: rewards go to the wrong responses")

    @model_validator(mode="after")
    def _check_sampling(self) -> Self:
        prompts, updates = self.prompts_per_step, self.updates_per_step
        wrong: dict[str, str] = {}
        if prompts % updates:
            wrong["updates_per_step"] = f"must divide prompts_per_step={prompts}; {nearest(updates, divisors(prompts))}"
        if not 0 < self.sampling.temperature < math.inf:
            wrong["temperature"] = "must be above 0 and finite"
        if self.sample_ahead is not None and bool(self.sample_ahead) != bool(self.max_staleness):
            wrong["sample_ahead"] = f"max_staleness={self.max_staleness}: set both to 0, strictly on-policy, or neither"
        if self.importance == "off" and self.stale_samples == "correct":
            wrong["importance"] = "stale_samples='correct' needs importance weights; use truncate or mask"
        _refuse(self, wrong)
        if self.rollout.returns_masks:
            require_bounded(self.rollout, self.sampling)
            for name, each in self.eval_sampling.items():
                require_bounded(self.rollout, each, f"eval_dataset[{name!r}]")
        return self

    @property
    def sequences_per_update(self) -> int:
        return self.prompts_per_step * self.sampling.n // self.updates_per_step

    @property
    def eval_sampling(self) -> dict[str, SamplingConfig]:
        return {name: each.sampling(self.sampling) for name, each in sets_by_name(self.eval_dataset).items()}

    @property
    def stops_at_strings(self) -> bool:
        """Whether engines look for texts that end a response, in training or of a held-out set."""
        return any(each.stop_strings for each in (self.sampling, *self.eval_sampling.values()))

    @property
    def num_engines(self) -> int:
        return self.rollout.num_engines

    @property
    def pushes_adapters(self) -> bool:
        # Engines that sleep forget the model below an adapter.
        return self.lora.may_be_served and not (self.colocate and self.lora.push == "auto")

    @property
    def batches_ahead(self) -> int:
        """``sample_ahead`` with its default filled in."""
        return self.max_staleness if self.sample_ahead is None else self.sample_ahead

    @property
    def colocates(self) -> bool:
        return self.colocate

    @property
    def on_policy(self) -> bool:
        """Whether a step's only update gives its own old log-probs: nothing asks for them, or for its routes, before, and it
        drops nothing, as engines do.
        """
        return self.updates_per_step == 1 and self.router_replay != "R2" and not self.lora.dropout

    def meta(self) -> dict[str, Any]:
        entropy = self.entropy_coef > 0 or self.on_policy
        meta = {"temperature": self.sampling.temperature, "calculate_entropy": entropy}
        # Log-probs are of the distribution that was sampled from.
        meta |= {name: getattr(self.sampling, name) for name in self.sampling.cuts}
        # Routes of runtimes and of samples are for the layers with experts alone.
        return meta if self.router_replay == "off" else meta | {"routed_experts_layers": "moe"}

    def importance_options(self) -> dict[str, Any]:
        if self.importance == "mask":
            return {"mis_bounds": (1 / self.importance_cap, self.importance_cap)}
        if self.importance == "truncate" or (self.importance == "auto" and self.batches_ahead):
            return {"tis_cap": self.importance_cap}
        return {}

    def rollout_config(self, share: ClusterShare) -> RolloutConfig:
        engines = with_share(filled(self, "rollout"), share)
        if self.lora.push != "auto" or not self.pushes_adapters or self.lora.at_one_end:
            return engines
        # In bfloat16 small changes of an adapter would be lost in the rounding of the weights.
        merges = resolve_device(engines) == "cpu" and engines.dtype == "float32"
        return engines.replace(max_adapters=0) if merges else engines

    def sampling_facts(self) -> list[str]:
        facts = [f"{self.num_engines} vLLM engine(s)"]
        if self.lora.rank:
            facts.append(f"LoRA of rank {self.lora.rank}")
        if self.batches_ahead:
            facts.append(f"sampling {self.batches_ahead} batch(es) ahead")
        if self.router_replay != "off":
            facts.append(f"router replay {self.router_replay}")
        return facts


REWARDS = OptionSet(
    short={
        "reward": "rewards.functions",
        **{
            f"reward_{name}": f"rewards.{name}"
            for name in ("timeout_seconds", "workers", "processes", "concurrency", "retries")
        },
        "on_reward_failure": "rewards.on_failure",
    },
)


class RLConfig(SampledOptions, TrainingOptions, BaseConfig):
    """Options of a run whose samples are scored by reward functions."""

    option_set: ClassVar[OptionSet] = (
        TRAINING
        | SAMPLED
        | REWARDS
        | OptionSet(
            preset={"rewards.on_failure": "stop"},
            groups={"reward": ("reward", "shuffle_rewards")},
            metavars={"reward": "FILE.py:FUNCTION"},
            example="--model models/Qwen3-0.6B --dataset train.jsonl --reward my_reward.py:compute_score --steps 200 "
            "--run-dir runs/mine",
        )
    )

    rewards: RewardConfig = Field(description="reward functions, see docs/rewards.md")

    @model_validator(mode="after")
    def _check_sizes(self) -> Self:
        _refuse(self, _too_small(self, "max_prompt_tokens + max_response_tokens") | _apart(self))
        return self

    @property
    def reward(self) -> str | dict[str, WeightedReward]:
        return self.rewards.functions

    @property
    def longest_sequence(self) -> int:
        return self.max_prompt_tokens + self.sampling.max_new_tokens

    @property
    def longest_sampled(self) -> int:
        longest = (each.max_new_tokens for each in (self.sampling, *self.eval_sampling.values()))
        return self.max_prompt_tokens + max(longest)

    @property
    def optimizer_steps(self) -> int:
        return self.steps * self.updates_per_step

    def facts(self) -> list[str]:
        return [
            f"{self.prompts_per_step} x {self.sampling.n} responses a step",
            f"up to {self.max_prompt_tokens} + {self.sampling.max_new_tokens} tokens",
            self.describe_ranks(),
            *self.sampling_facts(),
        ]


_DROPS = HasEffect(lambda config: config.on_episode_failure == "drop", "only on_episode_failure='drop' leaves episodes out")
_STEPS = HasEffect(lambda config: config.environment, "a player samples by itself; leave it out")
_AHEAD = HasEffect(lambda config: config.batches_ahead, "max_staleness=0 samples nothing ahead; raise it")
_EPISODE_TOKENS = "limits.episode_tokens"


def _fitted_to_episodes(kind: type[BaseModel], given: Mapping[str, Any]) -> dict[str, int]:
    # Lengths that are not given are at most the model's positions.
    positions = _positions(given, "train.hf_path")
    if positions is None:
        return {}
    most = {_EPISODE_TOKENS: positions, "sampling.max_new_tokens": max(positions // 2, 1)}
    preset = options_of(kind).preset
    return {path: min(preset[path], tokens) for path, tokens in most.items() if not has(given, path)}


class EpisodeConfig(SampledOptions, TrainingOptions, BaseConfig):
    """Options of a run whose samples are episodes of many turns."""

    option_set: ClassVar[OptionSet] = (
        TRAINING
        | SAMPLED
        | OptionSet(
            short={"max_turns": "limits.turns", "max_episode_tokens": _EPISODE_TOKENS},
            preset={_EPISODE_TOKENS: 4096},
            follows={
                "limits.turn_tokens": Follows(
                    lambda config: config.sampling.max_new_tokens, "follows from max_response_tokens; set that"
                ),
            },
            fitted=_fitted_to_episodes,
            groups={
                "environment": (
                    *(
                        "environment",
                        "player",
                        "score",
                        "tool_format",
                        "max_turns",
                        "max_episode_tokens",
                        "limits.",
                        "on_cut",
                    ),
                    *("history", "other_end", "on_episode_failure", "least_episodes", "truncated", "push_during_episodes"),
                    "shuffle_rewards",
                )
            },
            metavars={"environment": "FILE.py:NAME"},
            example="--model models/Qwen3-0.6B --dataset train.jsonl --environment my_environment.py:make --max-turns 8",
        )
    )

    environment: Annotated[str | None, SAME_CONTENTS] = Field(
        default=None,
        description="makes an episode's environment from a row and a seed, as path/file.py:name or package.module:name; "
        "see docs/environments.md",
    )
    player: Annotated[str | None, SAME_CONTENTS] = Field(
        default=None, description="in its place: plays an episode by a loop of its own, from a row and a sampler"
    )
    score: Annotated[str | None, SAME_CONTENTS] = Field(
        default=None, description="function of a group's episodes, whose rewards are added to theirs"
    )
    tool_format: Annotated[Literal["hermes", "json", "pythonic"], _STEPS] = Field(
        default="hermes", description="of the calls that the model writes; a player may have another"
    )
    on_cut: Annotated[Literal["continue", "end"], _STEPS] = Field(
        default="continue", description="a turn that is cut by max_response_tokens: continue the episode, or end it"
    )
    limits: Limits = Field(default=Limits(episode_tokens=4096), description="what an episode may come to")
    history: Annotated[History | None, _STEPS] = Field(
        default=None,
        description="where the chat template changes earlier turns: keep them as sampled, or branch into a new sequence; "
        "none: such a template is refused",
    )
    other_end: Annotated[OtherEnd, _STEPS] = Field(
        default="replace",
        description="a turn that ended with another token than the template's: replace it by the template's, or keep it",
    )
    on_episode_failure: Annotated[OnFailure, MAY_CHANGE] = Field(
        default="drop",
        description="an episode that raised or took too long: stop the run, count as zero, or leave it out",
    )
    least_episodes: Annotated[int, MAY_CHANGE, _DROPS] = Field(
        default=2, ge=1, description="episodes that a group needs; one with fewer is left out as a whole"
    )
    push_during_episodes: Annotated[bool, _AHEAD] = Field(
        default=False,
        description="when sampling ahead: pushes do not wait for episodes to end; their tokens then have several versions",
    )
    truncated: Truncated = Field(
        default="keep", description="episodes that a limit cut off: keep them, with a reward of zero, or mask their loss"
    )

    @model_validator(mode="after")
    def _check_episodes(self) -> Self:
        if self.limits.episode_tokens is None:
            problem = "sequences need a bound to be trained on"
            raise ConfigError.of(f"{type(self).__name__}.max_episode_tokens", None, problem)
        wrong = _too_small(self, "max_episode_tokens") | _apart(self)
        if (self.environment is None) == (self.player is None):
            wrong["environment"] = "give either an environment, which is stepped, or a player, which samples by itself"
        if self.is_set("max_prompt_tokens"):
            wrong["max_prompt_tokens"] = "environments make their prompts; set max_episode_tokens"
        for option in ("step_seconds", "tool_calls"):
            if self.player is not None and getattr(self.limits, option) is not None:
                wrong[f"limits.{option}"] = "a player has neither steps nor tools that the run knows of; leave it out"
        for option in DataConfig.model_fields:
            if option != "chat_template_kwargs" and self.data.is_set(option):
                wrong[f"data.{option}"] = "an environment is given the row as it stands; leave it out"
        if self.sampling.max_new_tokens >= self.limits.episode_tokens:
            most = self.limits.episode_tokens
            wrong["max_response_tokens"] = f"max_episode_tokens={most} must hold a prompt and a turn; use less"
        if self.is_set("least_episodes") and self.least_episodes > self.sampling.n:
            wrong["least_episodes"] = f"a group has samples_per_prompt={self.sampling.n} episodes; use at most that"
        _refuse(self, wrong)
        return self

    @property
    def longest_sequence(self) -> int:
        return self.limits.episode_tokens or 4096  # None is refused, after this was asked for

    @property
    def longest_sampled(self) -> int:
        return self.longest_sequence

    @property
    def optimizer_steps(self) -> int:
        return self.steps * self.updates_per_step

    @property
    def task(self) -> str:
        return f"environment {self.environment}" if self.environment else f"player {self.player}"

    def facts(self) -> list[str]:
        turns = "" if self.limits.turns is None else f" of up to {self.limits.turns} turns"
        return [
            f"{self.prompts_per_step} x {self.sampling.n} episodes{turns} a step",
            f"up to {self.longest_sequence} tokens",
            self.describe_ranks(),
            *self.sampling_facts(),
        ]


SampledConfig = RLConfig | EpisodeConfig
RunConfig = TrainingConfig | SampledConfig


def _apart(config: SampledConfig) -> dict[str, str]:
    """Why ranks and engines cannot have memory in turn."""
    if not config.colocate:
        return {}
    wrong: dict[str, str] = {}
    if config.max_staleness:
        wrong["max_staleness"] = "colocate=True: engines sleep while ranks train, so nothing is sampled ahead; use 0"
    if config.pushes_adapters:
        wrong["lora.push"] = "colocate=True: engines that sleep forget the model below an adapter; leave it out"
    if config.min_ranks:
        wrong["min_ranks"] = "colocate=True: ranks that are in host memory cannot get another layout; use 0"
    if config.training_groups > 1:
        wrong["colocate"] = f"engines share the GPUs of one training group, and there are {config.training_groups}"
    return wrong


def _too_small(config: SampledConfig, longest_is: str) -> dict[str, str]:
    """Option -> what does not fit; ``longest_is`` the sum that sequences may come to."""
    wrong = {}
    if config.sequences_per_update < config.data_parallel_size:
        wrong["ranks"] = (
            f"an update has {config.sequences_per_update} responses; each of {config.data_parallel_size} data-parallel "
            "ranks needs one; use fewer ranks, or more prompts_per_step"
        )
    trained = f"must hold one sequence: {longest_is} = {config.longest_sequence}"
    if config.longest_sequence > config.train.max_tokens_per_micro_batch:
        wrong["max_tokens_per_micro_batch"] = trained
    if config.longest_sequence > config.rollout.max_model_len:
        wrong["rollout.max_model_len"] = trained
    elif config.longest_sampled > config.rollout.max_model_len:
        needed = f"a held-out set needs {config.longest_sampled}: max_prompt_tokens and its max_new_tokens"
        wrong["rollout.max_model_len"] = needed
    return wrong
