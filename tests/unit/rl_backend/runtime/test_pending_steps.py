"""Steps taken before the norm of all ranks' gradients is known are those that waiting for it gives, with moves of biases."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from rl_backend.contracts import HandleError, OptimizerConfig, PendingStepResult
from rl_backend.parallel.groups import ParallelGroups
from rl_backend.primitive.router import Router, RouterSettings, Routing
from rl_backend.runtime.native.balance import BiasMove, ExpertBalance, PassLoads
from rl_backend.runtime.native.handle import NativeHandle
from rl_backend.runtime.native.optimizer import NativeOptimizer, PendingStep
from tests.support.rank_threads import run_ranks

CONFIG = OptimizerConfig(lr=0.1, clip_grad=5.0, weight_decay=0.1, log_num_zeros_in_grad=True, lr_decay_style="constant")
CPU = torch.device("cpu")


class Moves:
    """In the place of counts of experts: one move for each step."""

    def __init__(self) -> None:
        self.bias, self.taken = torch.zeros(2), 0

    def take(self) -> list[BiasMove]:
        self.taken += 1
        return [BiasMove(self.bias, torch.tensor([0.5, -0.5]))]


def groups_of(group: dist.ProcessGroup) -> ParallelGroups:
    groups: Any = SimpleNamespace(world_group=group, device=CPU)
    return groups  # type: ignore[no-any-return]


def built(group: dist.ProcessGroup) -> tuple[NativeOptimizer, dict[str, nn.Parameter], Moves]:
    """Each rank has a matrix of its own, a vector, and a parameter that never has a gradient."""
    rank = group.rank()
    parameters = {
        "w": nn.Parameter(torch.full((2, 3), 1.0 + rank)),
        "b.bias": nn.Parameter(torch.ones(2)),
        "unused": nn.Parameter(torch.ones(4)),
    }
    moves = Moves()
    balance: Any = moves
    names = {name: name for name in parameters}
    return NativeOptimizer(CONFIG, parameters, names, groups_of(group), balance=balance), parameters, moves


def set_gradients(parameters: Mapping[str, nn.Parameter], norm: float) -> None:
    parameters["w"].grad = torch.tensor([[0.0, 1.0, 2.0], [2.0, 0.0, 0.0]]) * (norm / 3)
    parameters["b.bias"].grad = torch.zeros(2)


def state(optimizer: NativeOptimizer, parameters: Mapping[str, nn.Parameter], moves: Moves) -> dict[str, Tensor]:
    held = {**{name: value.detach() for name, value in parameters.items()}, **optimizer.state_tensors(), "bias": moves.bias}
    return {name: value.clone() for name, value in held.items()}


NORMS: Mapping[str, tuple[tuple[float, float], tuple[bool, bool], bool]] = {
    "plain": ((3.0, 3.9), (True, True), True),
    "clipped together": ((3.0, 4.5), (True, True), False),
    "clipped alone": ((3.0, 6.0), (True, False), False),
    "not finite": ((3.0, math.nan), (True, False), False),
}
"""Norms on two ranks, which of them steps at once, and whether it stays so."""


@pytest.mark.parametrize("case", NORMS)
def test_an_early_step_ends_as_one_that_waited_whatever_happens_between(case: str) -> None:
    norms, taken, plain = NORMS[case]

    def of_rank(group: dist.ProcessGroup) -> None:
        rank = group.rank()
        waiting, early = built(group), built(group)
        for optimizer, parameters, _ in (waiting, early):
            set_gradients(parameters, 2.0)
            optimizer.step("policy")
            optimizer.schedule_step()
            set_gradients(parameters, norms[rank])
        begun = state(*early)
        expected = waiting[0].step("policy")
        pending = PendingStep(early[0], "policy", group)
        assert pending.is_taken is taken[rank] and pending.result is None
        unchanged = all(torch.equal(value, begun[name]) for name, value in state(*early).items())
        assert unchanged is not taken[rank]
        # The next pass begins: gradients are dropped and rates move on.
        later = {name: torch.full_like(parameter, 9.0) for name, parameter in early[1].items()}
        for name, parameter in early[1].items():
            parameter.grad = later[name]
        rates = [(0.125, 0.5), (0.25, 0.75)]
        for param_group, (lr, decay) in zip(early[0].param_groups, rates, strict=True):
            param_group["lr"], param_group["weight_decay"] = lr, decay
        result = pending.settle()
        assert pending.settle() is result and pending.was_plain is plain
        assert result.ok is expected.ok is (case != "not finite")
        assert result.grad_norm == expected.grad_norm or case == "not finite"
        assert case == "not finite" or result.grad_norm == pytest.approx(math.hypot(*norms))
        assert result.num_zeros == expected.num_zeros
        assert case == "not finite" or result.num_zeros == 10, "three of the matrix and two of the vector, on each rank"
        after = state(*waiting)
        for name, value in state(*early).items():
            assert torch.equal(value, after[name]), name
        assert all(parameter.grad is later[name] for name, parameter in early[1].items())
        assert [(each["lr"], each["weight_decay"]) for each in early[0].param_groups] == rates
        assert early[2].taken == waiting[2].taken == 2
        assert early[2].bias.tolist() == ([0.5, -0.5] if case == "not finite" else [1.0, -1.0])

    run_ranks(of_rank)


def test_clipping_scales_to_the_limit_and_counts_steps_of_what_has_gradients() -> None:
    def of_rank(group: dist.ProcessGroup) -> None:
        optimizer, parameters, _ = built(group)
        with pytest.raises(HandleError, match="optimizer_step on 'policy' without gradients; call forward_backward first"):
            PendingStep(optimizer, "policy", group)
        assert optimizer.num_steps == 0
        set_gradients(parameters, 8.0)
        result = optimizer.step("policy")
        assert result.grad_norm == pytest.approx(8 * math.sqrt(2)) and optimizer.clips(result)
        assert parameters["w"].grad is not None
        assert float(parameters["w"].grad.norm()) == pytest.approx(5 / math.sqrt(2), rel=1e-5)
        assert optimizer.num_steps == 1 and float(optimizer.state_tensors()["step.unused"]) == 0.0
        moment = optimizer.state_tensors()["exp_avg.w"]
        torch.testing.assert_close(moment, 0.1 * parameters["w"].grad)
        optimizer.restore_schedule(7)
        assert optimizer.schedule.num_steps == 7
        # 0.1 of decay on the matrix alone: 1 - lr * decay, and a step of lr against the gradient's sign.
        start = 1.0 + group.rank()
        assert parameters["w"][0, 0].item() == pytest.approx(start * (1 - 0.01))
        assert parameters["w"][0, 1].item() == pytest.approx(start * (1 - 0.01) - 0.1, rel=1e-4)
        assert parameters["b.bias"].tolist() == [1.0, 1.0] and parameters["unused"].tolist() == [1.0] * 4

    run_ranks(of_rank)


def test_a_skipped_step_names_four_of_the_parameters_and_counts_the_rest(caplog: pytest.LogCaptureFixture) -> None:
    group: Any = SimpleNamespace(size=lambda: 1)
    for bad, text in ((6, "p0, p1, p2, p3 and 2 more"), (4, "p0, p1, p2, p3"), (0, "none")):
        parameters = {f"p{index}": nn.Parameter(torch.ones(2)) for index in range(7)}
        optimizer = NativeOptimizer(CONFIG, parameters, {name: name for name in parameters}, groups_of(group))
        for index, parameter in enumerate(parameters.values()):
            parameter.grad = torch.full((2,), math.inf if index < bad else 1.0)
        caplog.clear()
        with caplog.at_level(logging.WARNING):
            result = optimizer.judge(torch.tensor([[math.inf, 0.0]], dtype=torch.float64))
            optimizer.apply(result, "policy", [])
        (record,) = caplog.records
        said = f"the gradient norm is inf; non-finite gradients in this rank's shards: {text}"
        assert record.getMessage() == f"optimizer step of 'policy' skipped: {said}"
        assert optimizer.num_steps == 0 and all(value.tolist() == [1.0, 1.0] for value in parameters.values())


def handle_of(group: dist.ProcessGroup, *, validates: bool) -> tuple[Any, dict[str, nn.Parameter], Callable[[], int]]:
    """A handle as far as steps need one, and what its version is without settling."""
    optimizer, parameters, _ = built(group)
    handle: Any = object.__new__(NativeHandle)
    handle.name, handle.optimizer, handle.pending = "policy", optimizer, None
    handle.groups = SimpleNamespace(validation=SimpleNamespace(world=group) if validates else None)
    handle._weight_version = 3
    return handle, parameters, lambda: handle._weight_version


@pytest.mark.parametrize("case", NORMS)
def test_a_handle_counts_a_step_once_when_it_is_known(case: str) -> None:
    norms, taken, plain = NORMS[case]
    counts = case != "not finite"

    def of_rank(group: dist.ProcessGroup) -> None:
        rank = group.rank()
        handle, parameters, version = handle_of(group, validates=True)
        assert handle.settle_everywhere() is True and handle.is_settled
        handle.settle()
        set_gradients(parameters, norms[rank])
        result = handle.step()
        assert isinstance(result, PendingStepResult) is taken[rank]
        assert handle.is_settled is not taken[rank] and version() == 3
        # What was not pending is counted by the atom.
        expected = 4 if counts and taken[rank] else 3
        assert handle.weight_version == expected and handle.is_settled
        assert (result.ok, handle.weight_version) == (counts, expected)
        assert handle.settle_everywhere() is plain and handle.pending is None
        assert handle.settle_everywhere() is True and version() == expected
        if not counts:
            return
        set_gradients(parameters, 1.0)
        second = handle.step()
        set_gradients(parameters, 1.0)
        third = handle.step()
        assert not handle.is_settled and version() == expected + 1
        assert third.ok and second.ok and version() == expected + 2

    run_ranks(of_rank)


def test_without_validation_a_step_is_known_at_once() -> None:
    def of_rank(group: dist.ProcessGroup) -> None:
        handle, parameters, version = handle_of(group, validates=False)
        set_gradients(parameters, 2.0)
        assert handle.step() == (True, pytest.approx(2 * math.sqrt(2)), 10) and handle.pending is None and version() == 3

    run_ranks(of_rank)


def routers(bias: bool = True, count: int = 2) -> nn.ModuleList:
    settings = RouterSettings(num_experts=3, top_k=1, score="sigmoid", expert_bias=bias)
    return nn.ModuleList([Router(4, settings) for _ in range(count)])


def chosen(*experts: int) -> Routing:
    return Routing(torch.tensor(experts)[:, None], torch.ones(len(experts), 1), torch.zeros(len(experts), 3))


def test_biases_move_towards_experts_that_all_ranks_chose_less_and_counts_begin_anew() -> None:
    def of_rank(group: dist.ProcessGroup) -> list[Any]:
        alone: Any = SimpleNamespace(size=lambda: 1)
        fsdp = SimpleNamespace(get_group=lambda: group)
        with_alone: Any = SimpleNamespace(device=CPU, fsdp_mesh=fsdp, tp_group=dist.new_group())
        made: list[Any] = [*routers(), *routers(bias=False, count=1)]
        first, second, plain = made
        balance = ExpertBalance({0: nn.ModuleList([first, plain]), 2: nn.ModuleList([second])}, 0.25, with_alone)
        assert balance.routers == {0: [first], 2: [second]} and alone.size() == 1
        # In the first alone on rank 0, twice; the second chose its third expert on rank 1.
        if group.rank() == 0:
            balance.add({first: torch.tensor([4, 0, 2])})
            balance.add({first: torch.tensor([0, 1, 1])})
        else:
            balance.add({second: torch.tensor([0, 0, 3])})
        moves = balance.take()
        assert [move.bias.data_ptr() for move in moves] == [each.expert_bias.values.data_ptr() for each in (first, second)]
        again = balance.take()
        return [[move.step.tolist() for move in each] for each in (moves, again)]

    for moves, again in run_ranks(of_rank):
        assert moves == [[-0.25, 0.25, -0.25], [0.25, 0.25, -0.25]]
        assert again == [[0.0] * 3] * 2
    nothing: Any = SimpleNamespace()
    assert ExpertBalance({0: routers(bias=False)}, 0.1, nothing).take() == ()


def test_a_pass_counts_choices_of_its_stages_without_padding_when_it_has_ended() -> None:
    both: list[Any] = [*routers()]
    first, second = both
    added: list[Mapping[Any, Tensor]] = []
    balance: Any = SimpleNamespace(routers={0: [first], 1: [second]}, add=added.append)
    loads = PassLoads(balance)
    given = {"routing": chosen(0, 2, 2)}
    for router in (first, second):
        router.forward = lambda *_: given["routing"]
    for stage, router, padding in ((0, first, torch.tensor([False, False, True])), (1, second, None), (0, first, None)):
        with loads.forward(stage, padding):
            first(torch.zeros(3, 4))
            second(torch.zeros(3, 4))
        assert not router._forward_hooks
    first(torch.zeros(3, 4))
    with pytest.raises(ValueError, match="in the pass"), loads.forward(1, None):
        raise ValueError("in the pass")
    assert not second._forward_hooks and not added
    loads.commit()
    ((counts,),) = (added,)
    assert {name: counts[each].tolist() for name, each in (("first", first), ("second", second))} == {
        "first": [2, 0, 3],
        "second": [1, 0, 2],
    }
    with (without := PassLoads(None)).forward(0, None):
        assert not first._forward_hooks
    without.commit()
