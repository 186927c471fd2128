"""Options of a policy: the loss that it minimises, and its adapters."""

from typing import Annotated, Any, Literal, Self

from pydantic import ConfigDict, Field, model_validator

from actors.rollout.config import MAX_ADAPTER_RANK
from actors.train.loss import Loss
from rl_backend.algorithm import LossAggMode
from rl_backend.contracts import MAY_CHANGE, BaseConfig, ConfigError, HasEffect
from rl_backend.contracts.lora import LoRAConfig

_DIVIDES = HasEffect(
    lambda loss: loss.loss_agg_mode == "seq-mean-token-sum-norm", "only loss_agg_mode='seq-mean-token-sum-norm' divides"
)


class PolicyLoss(BaseConfig):
    """A loss of a policy. Options that are None are as the loss has them.

    Attributes:
        name: surrogate: grpo (PPO's), gspo or cispo.
        clip_ratio_low: clip range of the policy ratio below 1.
        clip_ratio_high: clip range of the policy ratio above 1.
        loss_agg_mode: how token losses are averaged.
        loss_scale_factor: divisor of seq-mean-token-sum-norm; None takes the longest response.
    """

    model_config = ConfigDict(allow_inf_nan=False)

    name: Literal["grpo", "gspo", "cispo"] = "grpo"
    clip_ratio_low: float | None = Field(default=None, ge=0)
    clip_ratio_high: float | None = Field(default=None, ge=0)
    loss_agg_mode: LossAggMode | None = None
    loss_scale_factor: Annotated[float | None, Field(gt=0), _DIVIDES] = None

    def function(self, longest_response: int, **options: Any) -> Loss:
        given = {name: value for name, value in self.model_dump(exclude={"name"}).items() if value is not None}
        if self.loss_agg_mode == "seq-mean-token-sum-norm":
            given.setdefault("loss_scale_factor", float(longest_response))
        return Loss(f"rl_backend.algorithm:{self.name}_loss", **given, **options)


def _needs_a_rank[C: LoRAConfig](self: C) -> C:
    given = [name for name in type(self).model_fields if name != "rank" and self.is_set(name)]
    if given and not self.rank:
        because = "has no effect: rank=0 trains whole models; set lora.rank too"
        raise ConfigError.of(f"{type(self).__name__}.{given[0]}", getattr(self, given[0]), because)
    return self


class LoRAOptions(LoRAConfig):
    """Adapters that a run trains in place of its models.

    Attributes:
        rank: of both factors; 0 trains whole models.
        save_merged: at the end also write the model with the adapter added, ``run_dir/<name>_merged``.
    """

    rank: int = Field(default=0, ge=0)
    save_merged: Annotated[bool, MAY_CHANGE] = False

    _has_effect = model_validator(mode="after")(_needs_a_rank)


class PolicyLoRA(LoRAConfig):
    """Adapters of a run that samples.

    Attributes:
        rank: of both factors; 0 trains whole models.
        save_merged: at the end also write the model with the adapter added, ``run_dir/<name>_merged``.
        push: what engines get after each step: the ``adapter`` alone, served beside the weights, or all weights with the
            adapter added (``merged``). ``auto`` is merged where vLLM does not serve the adapter, and in float32 on CPUs,
            where sampling through it takes longer than a push of all weights; else the adapter.
    """

    rank: int = Field(default=0, ge=0)
    save_merged: Annotated[bool, MAY_CHANGE] = False
    push: Annotated[Literal["auto", "adapter", "merged"], MAY_CHANGE] = "auto"

    _has_effect = model_validator(mode="after")(_needs_a_rank)

    @model_validator(mode="after")
    def _can_be_served(self) -> Self:
        if self.push == "adapter" and (why := self._not_served):
            raise ConfigError.of("PolicyLoRA.push", self.push, f"{why}; leave it out, or set it to merged")
        return self

    @property
    def _not_served(self) -> str:
        """Why vLLM serves no such adapter; empty where it does."""
        if self.use_dora:
            return "vLLM serves no adapters with DoRA"
        if self.rank > MAX_ADAPTER_RANK:
            return f"vLLM serves adapters of a rank of at most {MAX_ADAPTER_RANK}, and lora.rank={self.rank}"
        return ""

    @property
    def may_be_served(self) -> bool:
        """Whether engines can be asked to serve it beside the weights."""
        return self.rank > 0 and self.push != "merged" and not self._not_served


def tenant_config(lora: LoRAConfig) -> LoRAConfig:
    return LoRAConfig(**{name: getattr(lora, name) for name in LoRAConfig.model_fields})
