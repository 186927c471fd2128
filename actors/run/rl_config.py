"""Options of every run that samples: sampling, staleness, engines, and the configurations that follow from them."""

from __future__ import annotations

from typing import Any, ClassVar, Literal, Self

from pydantic import Field, model_validator

from actors.cluster.placement import ClusterShare
from actors.rollout.config import RolloutConfig, SamplingConfig
from actors.run.config import TrainingConfig, resolve_dtype
from actors.sync.push import TransportName
from actors.train.model import RouterReplayMode
from rl_backend.contracts import ConfigError


class RLConfig(TrainingConfig):
    """Those of every training, sampling, and what lies between."""

    may_change: ClassVar[frozenset[str]] = TrainingConfig.may_change | {
        "engines",
        "transport",
        "samples_logged",
        "eval_every",
    }
    contents: ClassVar[tuple[str, ...]] = (*TrainingConfig.contents, "reward")

    dataset: str = Field(description="training prompts: .jsonl (prompt, answer) or verl-style .parquet")
    eval_dataset: str | None = Field(default=None, description="held-out prompts, answered greedily before and after")
    reward: str = Field(description="verl-style compute_score as package.module:function or path/file.py:function")
    run_dir: str = Field(description="new folder for metrics, samples and the trained model")
    prompts_per_step: int = Field(default=32, ge=1, description="prompts sampled in each step")
    samples_per_prompt: int = Field(default=8, ge=1, description="responses per prompt: the group")
    updates_per_step: int = Field(default=1, ge=1, description="optimizer steps in each training step")
    max_response_tokens: int = Field(default=512, ge=1, description="longest response")
    temperature: float = Field(default=1.0, gt=0, description="sampling temperature")
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
    importance_cap: float = Field(default=2.0, gt=1, description="largest importance weight")
    router_replay: RouterReplayMode = Field(
        default="off",
        description="for mixtures of experts: updates send tokens to the experts of the pass for the old log-probs (R2), or "
        "both send them to vLLM's (R3)",
    )
    engines: int = Field(default=1, ge=1, description="vLLM engines")
    placement: Literal["pack", "spread"] = Field(
        default="pack", description="ranks on few nodes of a cluster, or on many; engines likewise"
    )
    transport: TransportName = Field(default="auto", description="auto, shared_memory, gloo, nccl or cuda_ipc")
    samples_logged: int = Field(default=256, ge=0, description="samples of each step that samples.jsonl has")
    eval_every: int = Field(default=0, ge=0, description="also evaluate every so many steps; 0: only before and after")
    shuffle_rewards: bool = Field(default=False, description="control experiment: rewards go to the wrong responses")

    @model_validator(mode="after")
    def _check_sizes(self) -> Self:
        name = type(self).__name__
        if self.prompts_per_step % self.updates_per_step:
            raise ConfigError.of(
                f"{name}.updates_per_step", self.updates_per_step, f"must divide prompts_per_step={self.prompts_per_step}"
            )
        if self.sequences_per_update < self.data_parallel_size:
            raise ConfigError.of(
                f"{name}.ranks",
                self.ranks,
                f"an update has {self.sequences_per_update} responses; each of {self.data_parallel_size} data-parallel "
                "ranks needs one",
            )
        longest = self.max_prompt_tokens + self.max_response_tokens
        if longest > self.max_tokens_per_micro_batch:
            raise ConfigError.of(
                f"{name}.max_tokens_per_micro_batch",
                self.max_tokens_per_micro_batch,
                f"must hold one sequence: max_prompt_tokens + max_response_tokens = {longest}",
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
        if self.importance == "off" and self.stale_samples == "correct":
            raise ConfigError.of(
                f"{name}.importance", "off", "stale_samples='correct' needs importance weights; use truncate or mask"
            )
        if self.is_set("importance_cap") and not self.importance_options():
            where = f"importance={self.importance!r}" + ("" if self.importance == "off" else " and max_staleness=0")
            raise ConfigError.of(
                f"{name}.importance_cap",
                self.importance_cap,
                f"{where} has no weights to cap; leave it out, or set importance to truncate or mask",
            )
        if self.eval_every and not self.eval_dataset:
            raise ConfigError.of(f"{name}.eval_every", self.eval_every, "needs an eval_dataset")
        return self

    @property
    def sequences_per_update(self) -> int:
        return self.prompts_per_step * self.samples_per_prompt // self.updates_per_step

    @property
    def optimizer_steps(self) -> int:
        return self.steps * self.updates_per_step

    @property
    def num_engines(self) -> int:
        return self.engines

    @property
    def batches_ahead(self) -> int:
        """``sample_ahead`` with its default filled in."""
        return self.max_staleness if self.sample_ahead is None else self.sample_ahead

    def meta(self) -> dict[str, Any]:
        """Facts of every batch."""
        meta = {"temperature": self.temperature, "calculate_entropy": self.entropy_coef > 0}
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
        return RolloutConfig(
            model_path=self.model,
            num_engines=self.engines,
            dtype=resolve_dtype(self.dtype),
            max_model_len=self.max_prompt_tokens + self.max_response_tokens,
            seed=self.seed,
            require_push=True,
            cores_per_engine=share.cores_per_engine,
            placement=self.placement,
            gpus_per_worker=share.gpus or 1.0,
            gpu_memory_utilization=0.4 if 0 < share.gpus < 1 else 0.9,
            return_routed_experts=self.router_replay == "R3",
        )

    def facts(self) -> list[str]:
        """For the first line that a run prints."""
        facts = [
            f"{self.prompts_per_step} x {self.samples_per_prompt} responses a step",
            self.describe_ranks(),
            f"{self.engines} vLLM engine(s)",
        ]
        if self.batches_ahead:
            facts.append(f"sampling {self.batches_ahead} batch(es) ahead")
        if self.router_replay != "off":
            facts.append(f"router replay {self.router_replay}")
        return facts

    def sampling_config(self, stop_token_ids: tuple[int, ...]) -> SamplingConfig:
        return SamplingConfig(
            n=self.samples_per_prompt,
            temperature=self.temperature,
            max_new_tokens=self.max_response_tokens,
            stop_token_ids=stop_token_ids,
        )
