"""What a step of the bridge comes to, from the shards of all ranks and without the rows that pad a vocabulary, if at all."""

from __future__ import annotations

import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from rl_backend.contracts import HandleError, ModelOutput, OptimizerConfig, PackedBatch
from rl_backend.runtime.bridge import installed
from tests.support.bridge_runs import open_bridge
from tests.support.native import assert_equal_tensors, micro_batches, token_loss

VOCABULARY, ROWS, COLUMNS = 10, 8, 3
"""Two tensor-parallel ranks have 8 rows each; the second's last 6 stand for no word."""


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Module()
        self.embedding.word_embeddings = nn.Embedding(ROWS, COLUMNS)
        self.norm = nn.LayerNorm(ROWS, bias=False)
        self.output_layer = nn.Linear(COLUMNS, ROWS, bias=False)


def gradients(*, shared: bool) -> list[Tensor]:
    """Of this rank's spans: one zero of an embedding's own rows, none of a norm, two of a head; padding is 0."""
    embedding, norm, head = torch.zeros(15), torch.ones(2), torch.zeros(24)
    embedding[1:6], head[:4] = 2.0, 3.0
    return [embedding, norm] if shared else [embedding, norm, head]


@pytest.mark.parametrize(
    ("shared", "count_zeros", "not_finite"),
    [(False, True, False), (True, True, False), (False, False, False), (False, True, True)],
    ids=["untied", "tied", "not counted", "not finite"],
)
def test_norm_and_zeros_are_of_all_ranks_without_the_padding_of_each_matrix(
    monkeypatch: pytest.MonkeyPatch, shared: bool, count_zeros: bool, not_finite: bool
) -> None:
    installed.import_megatron()
    from rl_backend.runtime.bridge.engine import optimizer

    model = Model()
    if shared:
        vars(model.output_layer.weight)["shared"] = True
    spans = {
        model.embedding.word_embeddings.weight: SimpleNamespace(start=0, end=15),
        model.norm.weight: SimpleNamespace(start=0, end=2),
        model.output_layer.weight: SimpleNamespace(start=0, end=24),
    }
    part = SimpleNamespace(
        model_param_group_index_map=spans,
        _get_model_param_range_map=lambda parameter: {"param": spans[parameter]},
        get_grads_for_grad_norm=lambda: gradients(shared=shared),
    )
    # Another tensor-parallel rank, whose row comes from all ranks alone.
    of_others, asked = torch.tensor([[7.0, 4.0 if count_zeros else 0.0]], dtype=torch.float64), []

    def gather(mine: Tensor, group: Any, *, sum_gradients: bool) -> Tensor:
        asked.append(group)
        return torch.cat((of_others, mine)) if group == "all" else mine

    for name, value in {
        "get_megatron_optimizer": lambda *args, **options: "megatron",
        "_megatron_config": lambda options: None,
        "_count_in_adams_order": lambda megatron: None,
        "_allocate_moments": lambda megatron: None,
        "_scheduler": lambda megatron, config: None,
        "distributed_optimizers": lambda megatron: [part],
        "all_gather": gather,
    }.items():
        monkeypatch.setattr(optimizer, name, value)
    groups: Any = SimpleNamespace(
        pg=SimpleNamespace(tp=SimpleNamespace(rank=lambda: 1)),
        device=torch.device("cpu"),
        world_group="all",
        dp_group="data parallel",
        replica_group="replica",
    )
    options: Any = SimpleNamespace(optimizer=OptimizerConfig(log_num_zeros_in_grad=count_zeros))
    made = optimizer.BridgeOptimizer(options, [model], groups, vocab_size=VOCABULARY, balance=None)
    result = made._step_result(found_not_finite=not_finite)
    assert asked == ["all"]
    assert result.ok is not not_finite
    if not not_finite:
        squares = 7 + 5 * 4 + 2 + (0 if shared else 4 * 9)
        assert result.grad_norm == pytest.approx(math.sqrt(squares))
    assert result.num_zeros == ((4 + 1 + (0 if shared else 2)) if count_zeros else None)


class Interrupted(BaseException):
    """No ``Exception``, as ``KeyboardInterrupt``, which pytest would take for itself."""


@pytest.mark.parametrize("error", [ValueError, Interrupted])
def test_gradients_of_a_pass_that_ended_in_its_middle_are_not_stepped_with_on_the_bridge(
    tied_model: Path, error: type[BaseException]
) -> None:
    calls: list[int] = []

    def loss(model_output: ModelOutput, data: PackedBatch, dp_group: Any = None) -> Any:
        calls.append(1)
        if len(calls) == 2:
            raise error("in the second micro-batch")
        return token_loss(model_output, data, dp_group)

    with open_bridge(tied_model) as runtime:
        handle = runtime.build_model()
        data = micro_batches([[0, 1], [2, 3]])
        with pytest.raises(error, match="in the second"):
            runtime.forward_backward(handle, data, loss)
        with pytest.raises(HandleError, match="its gradients are incomplete; call zero_grad first"):
            runtime.optimizer_step(handle)
        runtime.zero_grad(handle)
        runtime.forward_backward(handle, data, token_loss)
        found = {name: value.clone() for name, value in runtime.export_gradients(handle)}
        assert runtime.optimizer_step(handle).ok
        fresh = runtime.build_model(name="fresh")
        runtime.forward_backward(fresh, data, token_loss)
        assert_equal_tensors(found, {name: value.clone() for name, value in runtime.export_gradients(fresh)})
