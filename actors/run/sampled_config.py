"""Options of every run that samples: sampling, staleness, engines, and the configurations that follow from them.

Where rewards come from is in :class:`~actors.run.rl_config.RLConfig` and :class:`~actors.run.episode_config.EpisodeConfig`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import Field, model_validator

from actors.cluster.placement import ClusterShare
from actors.rollout.config import RolloutConfig, SamplingConfig
from actors.rollout.placement import with_share
from actors.run.config import TrainingConfig
from actors.run.dtype import resolve_dtype
from actors.run.lengths import fitted_lengths
from actors.run.options import Follows
from actors.run.policy_options import PolicyLoRA, PolicyLoss
from actors.sync.transport.base import TransportName
from actors.train.model import RouterReplayMode
from rl_backend.contracts import MAY_CHANGE, ConfigError, HasEffect
from rl_backend.model.blocks import divisors, nearest

_EVALUATES = HasEffect(lambda config: config.eval_dataset, "needs an eval_dataset")
_WEIGHTS = HasEffect(
    lambda config: config.importance_options(),
    "importance={0.importance!r} and max_staleness={0.max_staleness} has no weights to cap; leave it out, or set importance "
    "to truncate or mask",
)


class SampledConfig(TrainingConfig):
    """Those of every training, sampling, and what lies between."""

    short: ClassVar[Mapping[str, str]] = {
        **TrainingConfig.short,
        "engines": "rollout.num_engines",
        "samples_per_prompt": "sampling.n",
        "max_response_tokens": "sampling.max_new_tokens",
        **{name: f"sampling.{name}" for name in ("temperature", "top_p", "top_k", "min_p", "stop_strings")},
    }
    renamed: ClassVar[Mapping[str, str]] = {
        **TrainingConfig.renamed,
        "loss": "loss.name",
        **{name: f"loss.{name}" for name in PolicyLoss.model_fields if name != "name"},
    }
    preset: ClassVar[Mapping[str, Any]] = {
        **TrainingConfig.preset,
        "sampling.n": 8,
        "sampling.max_new_tokens": 512,
    }
    follows: ClassVar[Mapping[str, Follows]] = {
        **TrainingConfig.follows,
        "rollout.model_path": Follows(lambda config: config.model, "engines sample from the trained model", until="-"),
        "rollout.dtype": Follows(lambda config: resolve_dtype(config.dtype), shown=lambda config: config.dtype),
        "rollout.placement": Follows(lambda config: config.placement),
        "rollout.max_model_len": Follows(lambda config: config.longest_sampled, until=2),
        "rollout.seed": Follows(lambda config: config.seed),
        "rollout.require_push": Follows(lambda config: True, "a run pushes before it samples"),
        "rollout.sleep_mode": Follows(lambda config: False, "a run's engines never sleep; leave it out"),
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
    }
    help_groups: ClassVar[Mapping[str, Sequence[str]]] = {
        "sampling": (
            *("sampling.", "samples_per_prompt", "max_response_tokens", "temperature", "prompts_per_step", "engines"),
            *("max_staleness", "sample_ahead", "stale_samples", "importance", "importance_cap", "transport"),
        ),
        "evaluation": ("eval_every",),
        "training": ("updates_per_step", "entropy_coef", "router_replay", "loss."),
        "logging": ("samples_logged",),
    }
    longest_is: ClassVar[str] = "max_prompt_tokens + max_response_tokens"
    """What ``longest_sequence`` is made of."""

    repeated: ClassVar[tuple[str, ...]] = ("sampling.stop_strings", "eval_dataset")

    lora: PolicyLoRA = Field(default=PolicyLoRA(), description="adapters over a frozen model, see docs/lora.md")
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
    stale_samples: Literal["drop", "correct"] = Field(
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
    samples_logged: Annotated[int, MAY_CHANGE] = Field(
        default=256, ge=0, description="samples of each step that samples.jsonl has"
    )
    eval_every: Annotated[int, MAY_CHANGE, _EVALUATES] = Field(
        default=0, ge=0, description="also evaluate every so many steps; 0: only before and after"
    )
    shuffle_rewards: bool = Field(default=False, description="control experiment: rewards go to the wrong responses")

    @classmethod
    def fitted(cls, given: Mapping[str, Any]) -> dict[str, Any]:
        """Lengths that are not given are what the model has positions for, where that is less than their defaults."""
        return fitted_lengths(cls, given, "train.hf_path")

    @model_validator(mode="after")
    def _check_sizes(self) -> Self:
        name = type(self).__name__
        prompts, updates = self.prompts_per_step, self.updates_per_step
        if prompts % updates:
            problem = f"must divide prompts_per_step={prompts}; {nearest(updates, divisors(prompts))}"
            raise ConfigError.of(f"{name}.updates_per_step", updates, problem)
        if self.sequences_per_update < self.data_parallel_size:
            raise ConfigError.of(
                f"{name}.ranks",
                self.ranks,
                f"an update has {self.sequences_per_update} responses; each of {self.data_parallel_size} data-parallel "
                "ranks needs one; use fewer ranks, or more prompts_per_step",
            )
        if not 0 < self.sampling.temperature < math.inf:
            raise ConfigError.of(f"{name}.temperature", self.sampling.temperature, "must be above 0 and finite")
        for field, tokens in (
            ("max_tokens_per_micro_batch", self.train.max_tokens_per_micro_batch),
            ("rollout.max_model_len", self.rollout.max_model_len),
        ):
            if self.longest_sequence > tokens:
                raise ConfigError.of(
                    f"{name}.{field}",
                    tokens,
                    f"must hold one sequence: {self.longest_is} = {self.longest_sequence}",
                )
        if self.longest_sampled > self.rollout.max_model_len:
            raise ConfigError.of(
                f"{name}.rollout.max_model_len",
                self.rollout.max_model_len,
                f"a held-out set needs {self.longest_sampled}: max_prompt_tokens and its max_new_tokens",
            )
        if self.max_staleness == 0 and self.sample_ahead:
            raise ConfigError.of(
                f"{name}.sample_ahead",
                self.sample_ahead,
                "max_staleness=0 is strictly on-policy, and nothing can be sampled ahead; raise max_staleness",
            )
        if self.max_staleness and self.sample_ahead == 0:
            raise ConfigError.of(
                f"{name}.sample_ahead", 0, "sampling and training would take turns; use max_staleness=0 for that"
            )
        if self.stale_samples == "correct" and not self.max_staleness:
            raise ConfigError.of(f"{name}.stale_samples", "correct", "max_staleness=0 makes no stale samples; raise it")
        for cut in self.sampling.cuts if self.importance_options() else ():
            raise ConfigError.of(
                f"{name}.{cut}",
                getattr(self.sampling, cut),
                f"importance={self.importance!r} with max_staleness={self.max_staleness} weighs tokens by the trainer's "
                "probability over the engine's, and cannot make up for tokens that are never sampled; leave it out, or set "
                "importance to off",
            )
        if self.importance == "off" and self.stale_samples == "correct":
            raise ConfigError.of(
                f"{name}.importance", "off", "stale_samples='correct' needs importance weights; use truncate or mask"
            )
        return self

    @property
    def sequences_per_update(self) -> int:
        return self.prompts_per_step * self.sampling.n // self.updates_per_step

    @property
    def longest_sequence(self) -> int:
        """Tokens of the longest prompt with the longest response."""
        return self.max_prompt_tokens + self.sampling.max_new_tokens

    @property
    def eval_sampling(self) -> dict[str, SamplingConfig]:
        """How each held-out set is answered: greedily, or as it says; several responses of a prompt as in training."""
        return {name: each.sampling(self.sampling) for name, each in self.eval_sets.items()}

    @property
    def longest_sampled(self) -> int:
        """Tokens of the longest prompt with the longest response, in training or to a held-out set."""
        longest = (each.max_new_tokens for each in (self.sampling, *self.eval_sampling.values()))
        return self.max_prompt_tokens + max(longest)

    @property
    def stops_at_strings(self) -> bool:
        """Whether responses, in training or to a held-out set, end at a text, which engines look for."""
        return any(each.stop_strings for each in (self.sampling, *self.eval_sampling.values()))

    @property
    def optimizer_steps(self) -> int:
        return self.steps * self.updates_per_step

    @property
    def num_engines(self) -> int:
        return self.rollout.num_engines

    @property
    def pushes_adapters(self) -> bool:
        return bool(self.lora.rank) and self.lora.push == "adapter"

    @property
    def batches_ahead(self) -> int:
        """``sample_ahead`` with its default filled in."""
        return self.max_staleness if self.sample_ahead is None else self.sample_ahead

    def meta(self) -> dict[str, Any]:
        """Facts of every batch."""
        meta = {"temperature": self.sampling.temperature, "calculate_entropy": self.entropy_coef > 0}
        # Routes of runtimes and of samples are for the layers with experts alone.
        return meta if self.router_replay == "off" else meta | {"routed_experts_layers": "moe"}

    def importance_options(self) -> dict[str, Any]:
        """Options of a policy loss."""
        if self.importance == "mask":
            return {"mis_bounds": (1 / self.importance_cap, self.importance_cap)}
        if self.importance == "truncate" or (self.importance == "auto" and self.batches_ahead):
            return {"tis_cap": self.importance_cap}
        return {}

    def rollout_config(self, share: ClusterShare) -> RolloutConfig:
        """Of the engines, with their share of the cluster."""
        return with_share(self.filled("rollout"), share)

    def facts(self) -> list[str]:
        """For the first line that a run prints."""
        facts = [
            f"{self.prompts_per_step} x {self.sampling.n} responses a step",
            f"up to {self.max_prompt_tokens} + {self.sampling.max_new_tokens} tokens",
            self.describe_ranks(),
            f"{self.num_engines} vLLM engine(s)",
        ]
        if self.lora.rank:
            facts.append(f"LoRA of rank {self.lora.rank}")
        if self.batches_ahead:
            facts.append(f"sampling {self.batches_ahead} batch(es) ahead")
        if self.router_replay != "off":
            facts.append(f"router replay {self.router_replay}")
        return facts
