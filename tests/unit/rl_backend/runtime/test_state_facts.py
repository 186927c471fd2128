"""Facts of models and their states: norms, random state, manifests, and weights that an adapter brings along."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from rl_backend.contracts import BatchError, NativeConfig, PackedWeight, RoutedLayers, TensorInfo, UnsupportedError
from rl_backend.parallel.shards import ShardLayout
from rl_backend.runtime.checkpoints import random_state, restore_random_state, training_manifest
from rl_backend.runtime.guarded import GuardedRuntime
from rl_backend.runtime.native.forward_backward import record_activations
from rl_backend.runtime.native.handle import NativeHandle
from rl_backend.runtime.native.layout import TensorLayout
from rl_backend.runtime.optimizer import rank_statistics, step_result
from tests.support.rank_threads import run_ranks

CPU = torch.device("cpu")


def test_a_ranks_statistics_are_its_squares_and_its_zeros() -> None:
    gradients = [torch.tensor([[3.0, 0.0], [0.0, -4.0]]), torch.zeros(0), torch.tensor([0.0, 12.0])]
    assert rank_statistics(iter(gradients), CPU, count_zeros=True).tolist() == [[169.0, 3.0]]
    assert rank_statistics(gradients, CPU, count_zeros=False).tolist() == [[169.0, 0.0]]
    nothing = rank_statistics([torch.zeros(0)], CPU, count_zeros=True)
    assert nothing.tolist() == [[0.0, 0.0]] and nothing.dtype == torch.float64


def test_a_step_is_judged_by_the_sums_of_all_ranks() -> None:
    rows = torch.tensor([[9.0, 2.0], [16.0, 0.0], [0.0, 5.0]], dtype=torch.float64)
    assert step_result(rows, count_zeros=True) == (True, 5.0, 7)
    assert step_result(rows, count_zeros=False) == (True, 5.0, None)
    assert step_result(rows.flip(0), count_zeros=True) == (True, 5.0, 7)
    for bad in (math.inf, math.nan):
        spoiled = rows.clone()
        spoiled[1, 0] = bad
        result = step_result(spoiled, count_zeros=True)
        assert not result.ok and not math.isfinite(result.grad_norm) and result.num_zeros == 7


def test_random_state_comes_back_under_the_name_of_the_rank_and_not_from_anothers() -> None:
    def of_rank(group: dist.ProcessGroup) -> tuple[list[str], Tensor]:
        states = random_state(CPU)
        return list(states), states[f"random.cpu.{group.rank()}"]

    before = torch.get_rng_state()
    assert [names for names, _ in run_ranks(of_rank)] == [["random.cpu.0"], ["random.cpu.1"]]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dist, "get_rank", lambda: 3)
        mine = {name: state.clone() for name, state in random_state(CPU).items()}
        expected = torch.rand(4)
        restore_random_state({"random.cpu.2": before, "model.x": before}, CPU)
        assert not torch.equal(torch.rand(4), expected)
        restore_random_state(mine, CPU)
        assert torch.equal(torch.rand(4), expected)
    torch.set_rng_state(before)


def test_a_manifest_has_what_a_handle_is_and_how_far_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dist, "get_world_size", lambda: 6)
    handle: Any = SimpleNamespace(
        hf_config={"model_type": "qwen3"},
        saved_shapes={"b": (2,), "a": (3, 4)},
        kept={"tower": (5,)},
        in_float32=frozenset(["z", "b", "y"]),
        head="values",
        weight_version=9,
        config=SimpleNamespace(model_dump=lambda mode: {"backend": "native", "mode": mode}),
    )
    found = training_manifest(handle, schedule_steps=4, optimizer_steps=3, fewer_steps={"a": 2}, private=("b",))
    assert (found.model_type, found.head, found.weight_version, found.world_size) == ("qwen3", "values", 9, 6)
    assert (found.parameters, found.kept, found.in_float32) == ({"b": (2,), "a": (3, 4)}, {"tower": (5,)}, ("b", "y", "z"))
    assert (found.schedule_steps, found.optimizer_steps, found.fewer_steps, found.private) == (4, 3, {"a": 2}, ("b",))
    assert found.runtime_config == {"backend": "native", "mode": "json"} and found.lora is None and found.extra == {}


def test_an_adapter_that_brings_along_other_weights_than_the_bases_is_refused_by_the_first_of_them() -> None:
    held = {"a": torch.ones(2), "b": torch.arange(3.0), "c": torch.zeros(1)}
    asked: list[set[str]] = []

    def export(model: Any, *, names: Collection[str]) -> Iterator[tuple[str, Tensor]]:
        asked.append(set(names))
        return ((name, held[name]) for name in held if name in names)

    atoms: Any = SimpleNamespace(export_weights=export)
    model: Any = SimpleNamespace(
        name="base", weights=[TensorInfo.of(name, value.shape, value.dtype) for name, value in held.items()]
    )

    def check(**weights: Tensor) -> str:
        try:
            GuardedRuntime._require_same_weights(atoms, model, weights, "there")
        except UnsupportedError as error:
            return str(error.details["name"]) if "there: " in str(error) and "that of 'base'" in str(error) else str(error)
        return ""

    assert check(b=held["b"].to(torch.bfloat16), a=held["a"].clone()) == "" and asked == [{"a", "b"}]
    assert check(a=held["a"], b=held["b"] + 1) == "b"
    assert check(c=held["c"] + 1, b=held["b"] + 1) == "b", "in the order of the base"
    assert check(c=held["c"] + 1, y=torch.ones(1), x=torch.ones(1)) == "x" and asked[-1] == {"c"}


def native_handle(**facts: Any) -> Any:
    handle: Any = object.__new__(NativeHandle)
    for name, value in facts.items():
        setattr(handle, name, value)
    return handle


def test_weights_of_a_handle_are_the_tensors_that_its_directory_has() -> None:
    packed = PackedWeight((2,), ("e.0", "e.1"))
    layouts = {
        "experts": TensorLayout(ShardLayout((2, 3, 4), (), (0,), ()), torch.bfloat16, in_float32=True),
        "norm": TensorLayout(ShardLayout((5,), (), (0,), ()), torch.float32),
    }
    family = SimpleNamespace(routed_layers=None, indexed_layers=None)
    handle = native_handle(layouts=layouts, weight_names={"experts": packed, "norm": "n.weight"}, family=family)
    found = [(info.name, info.shape, info.dtype) for info in handle.weights]
    assert found == [("e.0", (3, 4), "bfloat16"), ("e.1", (3, 4), "bfloat16"), ("n.weight", (5,), "float32")]
    assert handle.in_float32 == {"e.0", "e.1"} and handle.routed_layers is None and handle.indexed_layers is None
    assert handle.saved_shapes == {"e.0": (3, 4), "e.1": (3, 4), "n.weight": (5,)}
    routed = RoutedLayers(2, 1, (True,))
    handle.family = SimpleNamespace(routed_layers=lambda layers: (routed, layers), indexed_layers=lambda layers: layers)
    handle.architecture = "three layers"
    assert handle.routed_layers == (routed, "three layers") and handle.indexed_layers == "three layers"


def test_parts_of_a_handle_are_its_own_tensors_and_gradients_that_there_are() -> None:
    first, second = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(3))
    second.grad = torch.full((3,), 2.0)
    moments = [torch.zeros(2), torch.zeros(3)]
    handle = native_handle(parameters={"a": first, "b": second}, optimizer=None)
    assert list(handle.part_tensors()) == ["model"]
    handle.optimizer = SimpleNamespace(moments=lambda: moments, balance=None)
    found = handle.part_tensors()
    assert {part: [tensor.data_ptr() for tensor in tensors] for part, tensors in found.items()} == {
        "model": [first.data_ptr(), second.data_ptr()],
        "optimizer": [each.data_ptr() for each in moments],
        "grad": [second.grad.data_ptr()],
    }


@pytest.mark.parametrize("facts", [{}, {"hidden_size": "64"}, {"hidden_size": None}], ids=str)
def test_activations_of_a_model_without_a_hidden_size_are_refused(facts: dict[str, Any]) -> None:
    request: Any = SimpleNamespace(data=[])
    with pytest.raises(
        UnsupportedError, match=r"activations of 'policy': config\.json has hidden_size=.*; it must be a whole"
    ):
        record_activations(native_handle(name="policy", hf_config=facts), request)


@pytest.mark.parametrize(
    ("kinds", "head", "stored", "equal", "refused"),
    [
        # peft saves a head that is the embedding by its own name.
        ({"embed": "embedding", "q": "attention"}, "log_probs", ("embed.weight",), True, ""),
        ({"embed": "embedding"}, "log_probs", ("embed.weight",), False, "lm_head.weight"),
        ({"embed": "embedding"}, "values", ("embed.weight",), True, "lm_head.weight"),
        ({"q": "attention"}, "log_probs", ("embed.weight",), True, "lm_head.weight"),
        (None, "log_probs", ("embed.weight",), True, "lm_head.weight"),
        ({"embed": "embedding"}, "log_probs", ("embed.weight", "lm_head.weight"), True, "lm_head.weight"),
    ],
    ids=str,
)
def test_a_head_that_an_adapter_brings_along_is_compared_with_the_embedding_that_it_is(
    kinds: dict[str, str] | None, head: str, stored: tuple[str, ...], equal: bool, refused: str
) -> None:
    values = {"embed.weight": torch.arange(6.0), "lm_head.weight": torch.zeros(6)}
    held = {name: values[name] for name in stored}
    export: Any = SimpleNamespace(
        export_weights=lambda model, *, names: ((name, held[name]) for name in held if name in names)
    )
    model: Any = SimpleNamespace(
        name="base",
        head=head,
        adaptable=None if kinds is None else SimpleNamespace(kinds=kinds),
        weights=[TensorInfo.of(name, value.shape, value.dtype) for name, value in held.items()],
    )
    given = {"lm_head.weight": torch.arange(6.0) + (not equal)}
    if refused:
        with pytest.raises(UnsupportedError) as failure:
            GuardedRuntime._require_same_weights(export, model, given, "there")
        assert failure.value.details["name"] == refused
    else:
        GuardedRuntime._require_same_weights(export, model, given, "there")
    # What of the two is asked for is asked by the names of the base.
    both = {**given, "embed.weight": torch.arange(6.0)}
    found = refused or ("" if equal else "lm_head.weight")
    if found:
        with pytest.raises(UnsupportedError) as failure:
            GuardedRuntime._require_same_weights(export, model, both, "there")
        assert failure.value.details["name"] == found
    else:
        GuardedRuntime._require_same_weights(export, model, both, "there")


def test_a_pipeline_says_how_many_micro_batches_it_takes_where_this_rank_has_stages_of_one() -> None:
    def of(schedule: str, **parallel: int) -> Any:
        options = NativeConfig(device="cpu", pipeline_schedule=schedule, parallel=parallel)
        return native_handle(config=SimpleNamespace(options=lambda kind: options), stages={0: "a stage"})

    dualpipev, interleaved, plain = of("dualpipev", pp=2, vpp=2), of("interleaved-1f1b", pp=3, vpp=2), of("auto", pp=2)
    for handle, taken, refused in (
        (dualpipev, (4, 5), (1, 3)),
        (interleaved, (3, 6), (2, 4)),
        (plain, (1, 3), ()),
    ):
        for count in taken:
            handle.require_schedulable(count, forward_only=False)
        for count in refused:
            with pytest.raises(BatchError, match=f"^{count} micro-batches: "):
                handle.require_schedulable(count, forward_only=False)
            handle.require_schedulable(count, forward_only=True)
            handle.stages = {}
            handle.require_schedulable(count, forward_only=False)
            handle.stages = {0: "a stage"}
    of("auto").require_schedulable(1, forward_only=False)
