"""AdamW over this rank's shards: clipping, the non-finite check, and weight-decay groups."""

import logging
from collections.abc import Collection, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from rl_backend.contracts import (
    AdamParams,
    OptimizerConfig,
    PackedWeight,
    StepResult,
    WeightName,
    stored_tensors,
)
from rl_backend.parallel.collectives import all_gather
from rl_backend.parallel.groups import ParallelGroups
from rl_backend.parallel.shards import local_tensor, owns
from rl_backend.runtime.balance import ExpertBalance
from rl_backend.runtime.optimizer import ParameterSchedule, clip_factor, rank_statistics, step_result, values_of_step

logger = logging.getLogger(__name__)


def is_decayed(name: WeightName, parameter: Tensor) -> bool:
    """Whether weight decay applies: not to biases and not to tensors of one dimension (Megatron-Core's rule)."""
    packed = len(name.shape) if isinstance(name, PackedWeight) else 0
    return parameter.dim() - packed != 1 and not any(
        stored.endswith((".bias", "_bias")) for _, stored in stored_tensors(name)
    )


class NativeOptimizer:
    """AdamW (Loshchilov and Hutter, arXiv 1711.05101) on float32 masters, with moments sharded as the parameters are.

    Args:
        parameters: name -> parameter of this rank.
        weight_names: name -> Hugging Face name or names.
        copies: names of parameters that are updated here, but counted where their original is.
        balance: moves biases of routers in every step; None leaves them as they are.
    """

    def __init__(
        self,
        config: OptimizerConfig,
        parameters: Mapping[str, nn.Parameter],
        weight_names: Mapping[str, WeightName],
        groups: ParallelGroups,
        *,
        copies: Collection[str] = (),
        balance: ExpertBalance | None = None,
    ) -> None:
        self.balance = balance
        self._config = config
        self._groups = groups
        self.parameters = {name: parameter for name, parameter in parameters.items() if parameter.requires_grad}
        self.schedule = ParameterSchedule(config)
        self._counted = {name for name, parameter in self.parameters.items() if owns(parameter)}.difference(copies)
        param_groups = _param_groups(self.parameters, weight_names)
        self.adamw = torch.optim.AdamW(param_groups, lr=config.lr, betas=config.betas, eps=config.eps, fused=True)
        self._apply_schedule()
        self._allocate_moments()

    def step(self, handle_name: str, adam: AdamParams | None = None) -> StepResult:
        """Global norm, finite check, clipping, step. Nothing changes when a gradient of any rank is not finite."""
        # Every rank's numbers instead of their sum, which would depend on the layout.
        rows = all_gather(self._statistics(), self._groups.world_group, sum_gradients=False)
        result = step_result(rows, count_zeros=self._config.log_num_zeros_in_grad)
        if self.balance is not None:
            self.balance.step(taken=result.ok)
        self._apply(result, handle_name, {} if adam is None else adam.given)
        return result

    def _statistics(self) -> Tensor:
        counted = (self.parameters[name].grad for name in self.parameters if name in self._counted)
        local = (local_tensor(gradient) for gradient in counted if gradient is not None)
        return rank_statistics(local, self._groups.device, count_zeros=self._config.log_num_zeros_in_grad)

    def _apply(self, result: StepResult, handle_name: str, given: Mapping[str, Any]) -> None:
        gradients = {name: local_tensor(p.grad) for name, p in self.parameters.items() if p.grad is not None}
        if not result.ok:
            bad = [name for name, gradient in gradients.items() if not bool(torch.isfinite(gradient).all())]
            logger.warning(
                "optimizer step of %r skipped: the gradient norm is %s; non-finite gradients in this rank's shards: %s",
                handle_name,
                result.grad_norm,
                ", ".join(bad[:4]) + (f" and {len(bad) - 4} more" if len(bad) > 4 else "") if bad else "none",
            )
            return
        clip_grad = given.get("clip_grad", self._config.clip_grad)
        if (factor := clip_factor(clip_grad, result.grad_norm)) < 1:
            torch._foreach_mul_(list(gradients.values()), factor)
        with values_of_step(self.param_groups, given):
            self.adamw.step()

    @property
    def num_steps(self) -> int:
        """Steps taken, of the parameters that had a gradient in each."""
        return int(max((float(state["step"]) for state in self.adamw.state.values()), default=0.0))

    @property
    def learning_rate(self) -> float:
        return self.schedule.learning_rate

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """As ``torch.optim`` has them; :meth:`schedule_step` sets their learning rates and weight decays."""
        return self.adamw.param_groups

    def schedule_step(self) -> float:
        learning_rate = self.schedule.step()
        self._apply_schedule()
        return learning_rate

    def state_tensors(self) -> dict[str, Tensor]:
        """Everything the optimizer holds, by name, sharded as it is: two moments and a step count per parameter."""
        return {
            f"{key}.{name}": self.adamw.state[parameter][key]
            for name, parameter in self.parameters.items()
            for key in ("exp_avg", "exp_avg_sq", "step")
        }

    def moments(self) -> list[Tensor]:
        """What offloading moves."""
        # Step counts stay: they are read wherever the state is.
        return [tensor for name, tensor in self.state_tensors().items() if not name.startswith("step.")]

    def restore_schedule(self, num_steps: int) -> None:
        self.schedule.num_steps = num_steps
        self._apply_schedule()

    def _apply_schedule(self) -> None:
        for group in self.adamw.param_groups:
            group["lr"] = self.schedule.learning_rate
            group["weight_decay"] = self.schedule.weight_decay * group["wd_mult"]

    def _allocate_moments(self) -> None:
        for parameter in self.parameters.values():
            self.adamw.state[parameter] = {
                "step": torch.zeros((), dtype=torch.float32, device=self._groups.device),
                # AdamW would allocate them in its first step; offloading and checkpoints see one layout at all times.
                "exp_avg": torch.zeros_like(parameter, requires_grad=False),
                "exp_avg_sq": torch.zeros_like(parameter, requires_grad=False),
            }


def _param_groups(parameters: Mapping[str, nn.Parameter], weight_names: Mapping[str, WeightName]) -> list[dict[str, Any]]:
    found: dict[tuple[DeviceMesh | None, bool], list[nn.Parameter]] = {}
    for name, parameter in parameters.items():
        # A fused kernel takes DTensors of one mesh only.
        mesh = parameter.device_mesh if isinstance(parameter, DTensor) else None
        found.setdefault((mesh, is_decayed(weight_names[name], parameter)), []).append(parameter)
    return [{"params": members, "wd_mult": float(decayed)} for (_, decayed), members in found.items()]
