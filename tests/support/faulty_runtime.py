"""Native runtimes with one fault each, registered as a third party would: what a comparison has to find."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, Literal

import torch
from torch import Tensor

from rl_backend import LossFn, NativeConfig, PackedBatch, RuntimeConfig, register_runtime
from rl_backend.contracts import ForwardResult, HandleError, MetricValue, ModelOutput
from rl_backend.runtime.guarded import GuardedRuntime
from rl_backend.runtime.native.engine import NativeEngine
from rl_backend.runtime.native.handle import NativeHandle

type Fault = Literal[
    "none",
    "norm eps",
    "loaded weight",
    "loss",
    "log-probs",
    "gradient",
    "missing gradient",
    "missing layer",
    "decay groups",
    "betas",
    "late",
    "refusal",
    "crash",
    "death",
]
LAYER = "model.layers.1"


class FaultyConfig(NativeConfig):
    """Options of :class:`FaultyRuntime`; faults of a rank are those of the last one."""

    fault: Fault = "none"


class FaultyRuntime(GuardedRuntime[NativeHandle]):
    """The native runtime, wrong in one place."""

    def __init__(self, config: RuntimeConfig) -> None:
        assert isinstance(config.backend_cfg, FaultyConfig)
        self.fault = config.backend_cfg.fault
        self.steps = 0
        super().__init__(config, NativeEngine(config))
        if self.engine.groups.dp_rank == self.engine.groups.dp_size - 1:
            self._fail_alone()

    def _fail_alone(self) -> None:
        if self.fault == "refusal":
            raise HandleError("this runtime refuses to work")
        if self.fault == "crash":
            raise ZeroDivisionError("a bug")
        if self.fault == "death":
            os._exit(9)

    def build_model(self, **settings: Any) -> NativeHandle:
        handle = super().build_model(**settings)
        model: Any = handle.model
        layer = model.layers["1"]
        if self.fault == "norm eps":
            layer.post_attention_layernorm.eps *= 10
        elif self.fault == "loaded weight":
            with torch.no_grad():
                layer.input_layernorm.weight[3] += 1e-3
        elif self.fault == "gradient":
            layer.self_attn.o_proj.weight.register_hook(lambda gradient: gradient * 1.01)
        elif self.fault in ("decay groups", "betas"):
            assert handle.optimizer is not None
            groups = handle.optimizer.adamw.param_groups
            if self.fault == "decay groups":
                groups[1]["weight_decay"] = groups[0]["weight_decay"]
            else:
                groups[0]["betas"] = groups[1]["betas"] = (0.9, 0.99)
        return handle

    def forward_backward(
        self, handle: NativeHandle, data: Sequence[PackedBatch], loss_fn: LossFn | None, **settings: Any
    ) -> ForwardResult:
        return super().forward_backward(handle, data, None if loss_fn is None else self._faulty(loss_fn), **settings)

    def _faulty(self, loss_fn: LossFn) -> LossFn:
        def loss(
            model_output: ModelOutput, data: PackedBatch, dp_group: Any = None
        ) -> tuple[Tensor | None, Mapping[str, MetricValue]]:
            if self.fault == "log-probs":
                assert model_output.log_probs is not None
                model_output = model_output._replace(log_probs=model_output.log_probs.roll(1))
            value, metrics = loss_fn(model_output, data, dp_group)
            assert value is not None
            wrong = self.fault == "loss" or (self.fault == "late" and self.steps == 2)
            return value * 1.001 if wrong else value, metrics

        return loss

    def export_gradients(
        self, handle: NativeHandle, *, names: Collection[str] | None = None
    ) -> Iterator[tuple[str, Tensor]]:
        for name, gradient in super().export_gradients(handle, names=names):
            if not (self.fault == "missing gradient" and name == f"{LAYER}.mlp.up_proj.weight"):
                yield name, gradient

    def activations(self, handle: NativeHandle, data: Sequence[PackedBatch]) -> list[Mapping[str, Tensor]]:
        recorded = super().activations(handle, data)
        if self.fault != "missing layer":
            return recorded
        return [{path: output for path, output in one.items() if path != LAYER} for one in recorded]

    def optimizer_step(self, handle: NativeHandle) -> Any:
        self.steps += 1
        return super().optimizer_step(handle)


register_runtime("faulty", FaultyConfig, FaultyRuntime)
