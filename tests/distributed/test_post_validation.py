"""Stepping before the global gradient norm is known gives what waiting for it gives, bit for bit."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from rl_backend.contracts import (
    BatchError,
    ConfigError,
    ModelOutput,
    NativeConfig,
    OptimizerConfig,
    PackedBatch,
    PendingStepResult,
    StepResult,
)
from rl_backend.parallel.shards import local_tensor
from rl_backend.runtime.native import NativeHandle, NativeRuntime
from tests.support.models import write_tiny
from tests.support.moe import write_moe
from tests.support.native import assert_equal_tensors, deal, micro_batches, open_runtime, token_loss
from tests.support.rank_pool import RankPool

CLIP = 1.0
SPLIT = [[0, 1], [2, 3], [4, 5], [6, 7]]
ZBV = {"pipeline_schedule": "zbv"}

# What the gradients of a step call for: the norms that each rank's are scaled to, the first rank's first.
PLAIN = (0.1, 0.1)  # nothing
JOINT = (0.9, 0.9)  # clipping, which no rank knows by itself
ALONE = (0.1, 3.0)  # clipping, which the last rank knows by itself
SPOILED = (0.1, math.nan)  # no step

type Norms = tuple[float, float]


@pytest.fixture(scope="module")
def dense(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Tied embeddings are at both ends."""
    return write_tiny("qwen3", tmp_path_factory.mktemp("dense"), num_hidden_layers=9, hidden_size=32, intermediate_size=64)


@pytest.fixture(scope="module")
def mixture(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_moe("qwen3_moe, dense layers between", tmp_path_factory.mktemp("mixture"))


def noisy_loss(model_output: ModelOutput, data: PackedBatch, dp_group: Any = None) -> tuple[Tensor, Mapping[str, Any]]:
    """Draws a random number, so that a loss that runs twice changes those after it."""
    loss, metrics = token_loss(model_output, data, dp_group)
    return loss * (1.0 + 0.1 * torch.rand(())), metrics


def scale_gradients(handle: NativeHandle, norms: Norms) -> None:
    """Gives this rank's gradients the norm that ``norms`` has for the last rank, or for the others."""
    assert handle.optimizer is not None
    wanted = norms[dist.get_rank() == dist.get_world_size() - 1]
    own = math.sqrt(handle.optimizer.statistics()[0, 0].item())
    for parameter in handle.parameters.values():
        if parameter.grad is not None:
            local_tensor(parameter.grad).mul_(wanted / own)


@contextmanager
def opened(
    model: str, layout: Mapping[str, int], settings: Mapping[str, Any], validates: bool
) -> Iterator[tuple[NativeRuntime, NativeHandle]]:
    optimizer = OptimizerConfig(lr=1e-2, clip_grad=CLIP, lr_warmup_steps=3, weight_decay=0.1, log_num_zeros_in_grad=True)
    options = {**settings, "post_validation": validates}
    with open_runtime(model, parallel=dict(layout), optimizer=optimizer, **options) as runtime:
        yield runtime, runtime.build_model()


def batches_of(handle: NativeHandle, seed: int) -> list[PackedBatch]:
    size = handle.data_parallel_size
    return micro_batches(deal(SPLIT, size)[handle.data_parallel_rank], dp_size=size, seed=seed)


type Between = Callable[[NativeRuntime, NativeHandle, StepResult, int], dict[str, Tensor]]
"""What a test does between a step and the next pass: (runtime, handle, result, number of the step)."""


def state_of(handle: NativeHandle) -> dict[str, Tensor]:
    """Everything that a step changes on this rank."""
    assert handle.optimizer is not None
    state = {"version": torch.tensor(handle.weight_version), "random": torch.get_rng_state()}
    for name, parameter in handle.parameters.items():
        state[name] = local_tensor(parameter).clone()
        if parameter.grad is not None:
            state[f"grad.{name}"] = local_tensor(parameter.grad).clone()
    return state | {name: local_tensor(tensor).clone() for name, tensor in handle.optimizer.state_tensors().items()}


def train(
    runtime: NativeRuntime, handle: NativeHandle, steps: Sequence[Norms], between: Between
) -> tuple[dict[str, Tensor], list[bool]]:
    """State, losses, log-probs and results of all steps, and of which steps the result was not waited for."""
    found: dict[str, Tensor] = {}
    results = []
    for number, norms in enumerate(steps):
        if number % 3 != 2:  # In every third step, gradients add to what the last one left.
            runtime.zero_grad(handle)
        passed = runtime.forward_backward(handle, batches_of(handle, number), noisy_loss)
        found[f"{number}.loss"] = torch.tensor([*passed.losses, *(metric.mean for metric in passed.metrics.values())])
        found |= {f"{number}.{index}": value for index, value in enumerate(passed.outputs.get("log_probs", ()))}
        scale_gradients(handle, norms)
        results.append(runtime.optimizer_step(handle))
        found[f"{number}.lr"] = torch.tensor(runtime.lr_scheduler_step(handle))
        found |= {f"{number}.{key}": value for key, value in between(runtime, handle, results[-1], number).items()}
    pending = [isinstance(result, PendingStepResult) for result in results]
    for number, (ok, norm, zeros) in enumerate(results):
        found[f"{number}.step"] = torch.nan_to_num(torch.tensor([float(ok), norm, zeros]), nan=-1.0)
    return found | state_of(handle), pending


def nothing(runtime: NativeRuntime, handle: NativeHandle, result: StepResult, number: int) -> dict[str, Tensor]:
    return {}


def first_rank_looks(runtime: NativeRuntime, handle: NativeHandle, result: StepResult, number: int) -> dict[str, Tensor]:
    """At the result, at the version, or at neither."""
    if dist.get_rank() or number % 3 == 2:
        return {}
    return {"seen": torch.tensor([result.ok if number % 3 else handle.weight_version])}


def other_operations(runtime: NativeRuntime, handle: NativeHandle, result: StepResult, number: int) -> dict[str, Tensor]:
    """A different one after each step, all of which need the step as it is in the end."""
    if number % 5 == 0:
        return {name: tensor.clone() for name, tensor in runtime.export_weights(handle)}
    if number % 5 == 1:
        runtime.to(handle, "cpu")
        runtime.to(handle, "device")
    if number % 5 == 2:
        passed = runtime.forward_backward(handle, batches_of(handle, 99), token_loss, forward_only=True)
        return {str(index): value for index, value in enumerate(passed.outputs.get("log_probs", ()))}
    if number % 5 == 3:
        return {name: tensor.clone() for name, tensor in runtime.export_gradients(handle)}
    return {"again": torch.tensor([runtime.optimizer_step(handle).grad_norm])}


def same_job(
    model: str, layout: Mapping[str, int], settings: Mapping[str, Any], steps: Sequence[Norms], between: Between
) -> list[bool]:
    """Trains with and without post-validation; of which steps the result was not waited for."""
    runs = []
    for validates in (False, True):
        with opened(model, layout, settings, validates) as (runtime, handle):
            runs.append(train(runtime, handle, steps, between))
    (expected, waited), (found, pending) = runs
    assert not any(waited)
    assert_equal_tensors(found, expected)
    return pending


NEVER = [PLAIN] * 4
ALWAYS = [JOINT, ALONE, JOINT, JOINT]
SOMETIMES = [PLAIN, JOINT, PLAIN, SPOILED, PLAIN, ALONE, SPOILED, JOINT]


@pytest.mark.shows("runtime: post-validation on pipelines gives the weights, moments and results of waiting, bit for bit")
@pytest.mark.parametrize(
    ("model", "world", "layout", "settings", "steps"),
    [
        ("dense", 2, {"pp": 2}, {}, NEVER),
        ("dense", 2, {"pp": 2}, {}, SOMETIMES),
        ("dense", 2, {"pp": 2, "vpp": 2}, ZBV | {"reshard_after_forward": False}, SOMETIMES),
        ("dense", 2, {"pp": 2, "vpp": 2}, ZBV | {"param_dtype": "bfloat16"}, ALWAYS),
        pytest.param("dense", 4, {"pp": 4, "vpp": 2}, ZBV, SOMETIMES, marks=pytest.mark.long),
        ("dense", 4, {"pp": 2, "vpp": 2}, ZBV, SOMETIMES),
        ("mixture", 4, {"pp": 2, "tp": 2}, {"pipeline_schedule": "zb-h2"}, SOMETIMES),
    ],
    ids=["1f1b never", "1f1b", "zbv", "zbv always", "zbv on four", "zbv with dp2", "mixture with tp2"],
)
def test_steps_that_are_validated_later_are_those_that_wait(
    ranks: RankPool,
    request: pytest.FixtureRequest,
    model: str,
    world: int,
    layout: dict[str, int],
    settings: dict[str, Any],
    steps: list[Norms],
) -> None:
    path = str(request.getfixturevalue(model))
    for rank, pending in enumerate(ranks.run(same_job, path, layout, settings, steps, nothing, world_size=world)):
        knows = [norms in (ALONE, SPOILED) and rank == world - 1 for norms in steps]
        # Four ranks have a norm of 1.8 where each has 0.9, two with the others' 0.1 none to clip.
        assert pending == [not known for known in knows]


@pytest.mark.parametrize("between", [first_rank_looks, other_operations])
def test_looking_at_a_step_and_using_the_model_settle_it(ranks: RankPool, dense: Path, between: Between) -> None:
    steps = [JOINT, PLAIN, JOINT, PLAIN, JOINT, PLAIN]
    ranks.run(same_job, str(dense), {"pp": 2, "vpp": 2}, ZBV, steps, between, world_size=2)


def overlap_job(model: str, validates: bool) -> tuple[float, float]:
    """When the last rank steps, and when this rank begins the next pass."""
    with opened(model, {"pp": 2, "vpp": 2}, ZBV, validates) as (runtime, handle):
        runtime.forward_backward(handle, batches_of(handle, 0), token_loss)
        scale_gradients(handle, JOINT)
        if dist.get_rank() == 1:
            time.sleep(0.5)
        stepped = time.monotonic()
        runtime.optimizer_step(handle)
        runtime.zero_grad(handle)
        begun: list[float] = []
        hook = next(iter(handle.stages.values())).register_forward_pre_hook(lambda *_: begun.append(time.monotonic()))
        runtime.forward_backward(handle, batches_of(handle, 1), token_loss)
        hook.remove()
        last = runtime.optimizer_step(handle)
    assert last.ok, "closing the runtime has waited for it"
    return stepped, begun[0]


@pytest.mark.parametrize("validates", [True, False])
def test_the_first_rank_begins_the_next_pass_before_the_last_has_stepped(
    ranks: RankPool, dense: Path, validates: bool
) -> None:
    (_, begun), (stepped, _) = ranks.run(overlap_job, str(dense), validates, world_size=2)
    assert (begun < stepped) == validates


def refusals_job(
    model: str, layout: Mapping[str, int], refusing: int, validates: bool
) -> tuple[list[str], dict[str, Tensor]]:
    """Messages of passes in which the rank ``refusing`` has other data than the rest, after steps that are pending."""
    odd = dist.get_rank() == refusing
    messages = []
    with opened(model, layout, ZBV, validates) as (runtime, handle):

        def bad_token() -> None:
            batches = batches_of(handle, 1)
            if odd:
                batches[-1].input_ids[0] = 10_000
            runtime.forward_backward(handle, batches, token_loss)

        def fewer() -> None:
            runtime.forward_backward(handle, batches_of(handle, 1)[: 1 if odd else None], token_loss)

        def other() -> None:
            runtime.forward_backward(handle, batches_of(handle, 2 if odd else 1), token_loss)

        def other_kind() -> None:
            runtime.forward_backward(handle, batches_of(handle, 1), token_loss, forward_only=odd)

        for number, attempt in enumerate((bad_token, fewer, other, other_kind)):
            runtime.zero_grad(handle)
            runtime.forward_backward(handle, batches_of(handle, number), token_loss)
            scale_gradients(handle, JOINT)
            runtime.optimizer_step(handle)
            try:
                attempt()
            except BatchError as error:
                messages.append(str(error))
        runtime.forward_backward(handle, batches_of(handle, 5), token_loss)
        runtime.optimizer_step(handle)
        return messages, state_of(handle)


@pytest.mark.parametrize("refusing", [pytest.param(0, marks=pytest.mark.long), 1])
def test_data_that_one_rank_refuses_is_refused_on_all_and_changes_nothing(
    ranks: RankPool, dense: Path, refusing: int
) -> None:
    layout = {"pp": 4, "vpp": 2} if refusing else {"pp": 2, "vpp": 2}
    runs = [ranks.run(refusals_job, str(dense), layout, refusing, validates, world_size=4) for validates in (False, True)]
    for rank, ((expected, waited), (messages, state)) in enumerate(zip(*runs, strict=True)):
        assert len(messages) == len(expected) == 4
        assert ("10000" in messages[0]) == (rank == refusing)
        assert_equal_tensors(state, waited)
    everything = " ".join(message for messages, _ in runs[1] for message in messages)
    for part in (f"rank {refusing} refused", "different micro-batches", "differ between ranks"):
        assert part in everything


def test_without_a_pipeline_there_is_nothing_to_validate_later() -> None:
    with pytest.raises(ConfigError, match=r"NativeConfig\.post_validation=True: with parallel\.pp=1"):
        NativeConfig(post_validation=True)
