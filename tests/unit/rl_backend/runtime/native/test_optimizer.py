"""The optimizer on one rank: AdamW's own numbers, clipping, decay groups, skipped steps."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from rl_backend.contracts import OptimizerConfig, PackedWeight, ParallelConfig
from rl_backend.parallel.groups import ParallelGroups, close_groups, open_groups
from rl_backend.runtime.native.optimizer import NativeOptimizer, is_decayed
from tests.support.native import micro_batches, open_runtime, token_loss, weights


@pytest.fixture(scope="module")
def groups() -> Iterator[ParallelGroups]:
    opened = open_groups(ParallelConfig(), torch.device("cpu"))
    yield opened
    close_groups(opened)


def random_parameters(seed: int = 0) -> dict[str, nn.Parameter]:
    generator = torch.Generator().manual_seed(seed)
    shapes = {"layer.weight": (7, 5), "layer.bias": (7,), "norm.weight": (5,), "expert.bias": (2, 3)}
    return {name: nn.Parameter(torch.randn(shape, generator=generator)) for name, shape in shapes.items()}


def open_optimizer(config: OptimizerConfig, parameters: dict[str, nn.Parameter], groups: ParallelGroups) -> NativeOptimizer:
    return NativeOptimizer(config, parameters, {name: name for name in parameters}, groups)


def set_gradients(parameters: dict[str, nn.Parameter], step: int, scale: float = 1.0) -> None:
    generator = torch.Generator().manual_seed(100 + step)
    for parameter in parameters.values():
        parameter.grad = scale * torch.randn(parameter.shape, generator=generator)


@pytest.mark.parametrize("clip_grad", [0.0, 0.7])
def test_steps_equal_torch_adamw_with_clipping(groups: ParallelGroups, clip_grad: float) -> None:
    ours, theirs = random_parameters(), random_parameters()
    config = OptimizerConfig(lr=0.05, betas=(0.8, 0.9), eps=1e-6, weight_decay=0.3, clip_grad=clip_grad)
    optimizer = open_optimizer(config, ours, groups)
    reference = torch.optim.AdamW(
        [
            {"params": [theirs["layer.weight"]], "weight_decay": 0.3},
            {"params": [theirs[name] for name in ("layer.bias", "norm.weight", "expert.bias")], "weight_decay": 0.0},
        ],
        lr=0.05,
        betas=(0.8, 0.9),
        eps=1e-6,
    )
    for step in range(5):
        set_gradients(ours, step)
        set_gradients(theirs, step)
        norm = torch.nn.utils.clip_grad_norm_(theirs.values(), clip_grad or math.inf)
        reference.step()
        result = optimizer.step("model")
        assert result.ok
        assert result.grad_norm == pytest.approx(norm.item(), rel=1e-6)
        for name, parameter in ours.items():
            torch.testing.assert_close(parameter, theirs[name], rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize(
    ("name", "shape", "decayed"),
    [("q.weight", (4, 4), True), ("norm.weight", (4,), False), ("q.bias", (4,), False), ("experts.bias", (2, 4), False)],
)
def test_biases_and_vectors_are_not_decayed(name: str, shape: tuple[int, ...], decayed: bool) -> None:
    assert is_decayed(name, torch.zeros(shape)) is decayed


def test_packed_biases_and_vectors_are_not_decayed_and_packed_matrices_are(groups: ParallelGroups) -> None:
    def packed(name: str, *shape: int) -> PackedWeight:
        return PackedWeight(shape, tuple(f"experts.{index}.{name}" for index in range(math.prod(shape))))

    names = {
        "down_proj": packed("down_proj.weight", 4),
        "gate_up_proj": packed("proj.weight", 4, 2),
        "down_proj_bias": packed("down_proj.bias", 4),
        "gate_up_proj_bias": packed("proj.bias", 4, 2),
        "norms": packed("norm.weight", 4),
    }
    shapes = {"down_proj": (4, 5, 3), "gate_up_proj": (4, 2, 3, 5), "down_proj_bias": (4, 5), "norms": (4, 5)}
    shapes["gate_up_proj_bias"] = (4, 2, 3)
    parameters = {name: nn.Parameter(torch.zeros(shapes[name])) for name in names}
    optimizer = NativeOptimizer(OptimizerConfig(weight_decay=0.1), parameters, names, groups)
    decayed = next(group for group in optimizer.adamw.param_groups if group["weight_decay"] > 0)["params"]
    assert {name for name in names if any(parameters[name] is one for one in decayed)} == {"down_proj", "gate_up_proj"}


def test_schedules_reach_both_parameter_groups(groups: ParallelGroups) -> None:
    config = OptimizerConfig(
        lr=1.0,
        lr_warmup_steps=4,
        lr_decay_style="linear",
        total_training_steps=10,
        weight_decay=0.4,
        weight_decay_start=0.0,
        weight_decay_incr_style="linear",
    )
    optimizer = open_optimizer(config, random_parameters(), groups)
    assert [group["lr"] for group in optimizer.adamw.param_groups] == [0.0, 0.0]
    assert optimizer.schedule_step() == 0.25
    assert [(group["lr"], group["weight_decay"]) for group in optimizer.adamw.param_groups] == [
        (0.25, pytest.approx(0.04)),
        (0.25, 0.0),
    ]


def test_large_finite_gradients_do_not_overflow_the_norm(groups: ParallelGroups) -> None:
    parameters = random_parameters()
    optimizer = open_optimizer(OptimizerConfig(), parameters, groups)
    set_gradients(parameters, 0, scale=1e30)
    result = optimizer.step("model")
    assert result.ok
    assert 1e30 < result.grad_norm < 1e32
    assert all(bool(torch.isfinite(parameter).all()) for parameter in parameters.values())


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_non_finite_gradient_changes_nothing_and_says_which(
    groups: ParallelGroups, value: float, caplog: pytest.LogCaptureFixture
) -> None:
    parameters = random_parameters()
    optimizer = open_optimizer(OptimizerConfig(), parameters, groups)
    set_gradients(parameters, 0)
    assert optimizer.step("model").ok
    before = {name: value.clone() for name, value in {**parameters, **optimizer.state_tensors()}.items()}
    set_gradients(parameters, 1)
    gradient = parameters["norm.weight"].grad
    assert gradient is not None
    gradient[2] = value
    with caplog.at_level(logging.WARNING):
        result = optimizer.step("policy")
    assert not result.ok
    assert not math.isfinite(result.grad_norm)
    assert "'policy' skipped" in caplog.text
    assert "norm.weight" in caplog.text
    assert all(torch.equal(tensor, before[name]) for name, tensor in {**parameters, **optimizer.state_tensors()}.items())


def test_zeros_are_counted_only_on_request(groups: ParallelGroups) -> None:
    for wanted in (True, False):
        parameters = random_parameters()
        optimizer = open_optimizer(OptimizerConfig(log_num_zeros_in_grad=wanted), parameters, groups)
        set_gradients(parameters, 0)
        gradient = parameters["layer.weight"].grad
        assert gradient is not None
        gradient[2] = 0.0
        assert optimizer.step("model").num_zeros == (5 if wanted else None)


def test_training_follows_transformers_with_torch_adamw(untied_model: Path) -> None:
    transformers = pytest.importorskip("transformers")
    reference = transformers.Qwen3ForCausalLM.from_pretrained(untied_model, dtype=torch.float32, attn_implementation="eager")
    reference.train()
    decayed = [parameter for parameter in reference.parameters() if parameter.dim() > 1]
    others = [parameter for parameter in reference.parameters() if parameter.dim() == 1]
    groups: list[dict[str, Any]] = [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    adamw = torch.optim.AdamW(groups, lr=1e-4)
    split = [[0, 1, 2], [3], [4, 5, 6, 7]]
    with open_runtime(untied_model, optimizer=OptimizerConfig(lr=1e-4, weight_decay=0.1)) as runtime:
        handle = runtime.build_model()
        for step in range(4):
            data = micro_batches(split, seed=step)
            runtime.zero_grad(handle)
            loss = runtime.forward_backward(handle, data, token_loss).loss
            norm = runtime.optimizer_step(handle).grad_norm
            adamw.zero_grad()
            expected: Tensor = torch.zeros(())
            for batch in data:
                for ids in batch.split(batch.input_ids):
                    logits = reference(input_ids=ids[None]).logits[0, :-1]
                    nll = torch.nn.functional.cross_entropy(logits, ids[1:], reduction="sum")
                    expected = expected + nll / batch.meta["batch_num_tokens"]
            expected.backward()
            expected_norm = torch.nn.utils.clip_grad_norm_(reference.parameters(), 1.0)
            adamw.step()
            assert loss == pytest.approx(expected.item(), rel=1e-5)
            assert norm == pytest.approx(expected_norm.item(), rel=1e-5)
        held = weights(handle)
        for name, parameter in reference.named_parameters():
            ours = held[{value: key for key, value in handle.weight_names.items()}[name]]
            torch.testing.assert_close(ours, parameter.detach(), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("name", "shape", "decayed"),
    [
        # Of several experts, stored in one tensor.
        ("experts.gate_up_proj_bias", (4, 6), False),
        ("experts.gate_up_proj", (4, 6), True),
        ("unbiased.weight", (4, 6), True),
        ("bias.weight", (4, 6), True),
        ("conv1d.weight", (8, 1, 4), True),
        ("A_log", (4,), False),
    ],
)
def test_what_is_called_a_bias_at_its_end_is_not_decayed_whatever_its_shape(
    name: str, shape: tuple[int, ...], decayed: bool
) -> None:
    assert is_decayed(name, torch.zeros(shape)) is decayed


def test_a_copy_steps_as_its_original_and_counts_once(groups: ParallelGroups) -> None:
    first = nn.Parameter(torch.tensor([[3.0, 4.0]]))
    copy, frozen = nn.Parameter(first.detach().clone()), nn.Parameter(torch.ones(2, 2), requires_grad=False)
    parameters = {"embed": first, "head": copy, "frozen": frozen}
    names = {"embed": "embed.weight", "head": "embed.weight", "frozen": "frozen.weight"}
    config = OptimizerConfig(lr=0.1, clip_grad=0.0, log_num_zeros_in_grad=True)
    optimizer = NativeOptimizer(config, parameters, names, groups, copies={"head": "embed"})
    assert list(optimizer.parameters) == ["embed", "head"] and optimizer.num_steps == 0
    for parameter in (first, copy):
        parameter.grad = torch.tensor([[0.0, 2.0]])
    result = optimizer.step("tied")
    assert (result.grad_norm, result.num_zeros, optimizer.num_steps) == (2.0, 1, 1)
    assert torch.equal(first, copy) and first[0, 1] < 4.0 and frozen.sum() == 4.0
    # One that has no gradient stays, and is not counted as having taken the step.
    first.grad = None
    before = first.detach().clone()
    optimizer.step("tied")
    assert torch.equal(first, before) and not torch.equal(copy, before)
    counts = [optimizer.state_tensors()[f"step.{name}"].item() for name in ("embed", "head")]
    assert counts == [1.0, 2.0] and optimizer.num_steps == 2
    assert len(optimizer.moments()) == 4 and all(each.shape == (1, 2) for each in optimizer.moments())
