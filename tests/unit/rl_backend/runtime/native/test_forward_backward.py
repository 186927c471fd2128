"""What a rank has of a micro-batch under context and tensor parallelism, and the outputs that it gives back."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from rl_backend.contracts import ModelOutput, PackedBatch, RoutedLayers
from rl_backend.primitive.adapters import AdapterRun
from rl_backend.primitive.prefix_tree import PrefixTree
from rl_backend.runtime.native.forward_backward import RankBatch, _at_predictions, lay_out
from tests.support.rank_threads import run_ranks

KEYS = torch.tensor([[[0]], [[1]], [[0]], [[0]], [[1]], [[2]]])


def groups_of(tp: int = 1, cp: int = 1, rank: int = 0) -> Any:
    """Rank ``rank`` of the context-parallel ranks, and the last tensor-parallel one."""

    def ranks(size: int, number: int) -> Any:
        return SimpleNamespace(size=lambda: size, rank=lambda: number)

    return SimpleNamespace(
        token_group=ranks(tp * cp, 0), cp_group=ranks(cp, rank), tp_group=ranks(tp, tp - 1), device=torch.device("cpu")
    )


def batch(**meta: Any) -> PackedBatch:
    routes = torch.tensor([[[1]], [[0]], [[1]], [[1]], [[0]], [[1]]])
    fields = {"routed_experts": routes, "indexed_keys": KEYS}
    facts = {"routed_experts_layers": "moe", **meta}
    return PackedBatch(torch.arange(10, 16), torch.tensor([2, 1, 3]), fields, {}, facts)


def test_a_rank_alone_takes_a_batch_as_it_is() -> None:
    seen: list[Any] = []

    def runs(sequence_rows: Any) -> Any:
        seen.append(tuple(sequence_rows))
        return ("a run",)

    data = batch(temperature=0.5, calculate_entropy=True)
    found = lay_out(data, groups_of(), 4, RoutedLayers(2, 1, (True,)), runs, ("values",), trains_second=True)
    inputs, adapters = found.inputs, list[Any](found.inputs.adapters)
    assert found.layout is None and seen == [(2, 1, 3)] and adapters == ["a run"]
    assert inputs.input_ids.tolist() == [10, 11, 12, 13, 14, 15] and inputs.position_ids.tolist() == [0, 1, 0, 0, 1, 2]
    assert inputs.labels.tolist() == [11, -100, -100, 14, 15, -100]
    assert (inputs.temperature, inputs.calculate_entropy, inputs.longest, inputs.padding) == (0.5, True, 3, None)
    assert (inputs.router_loss_weight, inputs.heads, inputs.keys is KEYS) == (0.25, ("values",), True)
    assert inputs.routes is not None and inputs.routes.flatten().tolist() == [1, 0, 1, 1, 0, 1]
    assert inputs.second is not None and inputs.second.labels.tolist() == [-100, -100, -100, 15, -100, -100]
    assert inputs.second.total == 1, "one token has another after the next"
    assert inputs.sequences is not None and inputs.sequences[1] == 3 and inputs.sequences[0].tolist() == [0, 0, 1, 2, 2, 2]
    output = ModelOutput(log_probs=torch.zeros(6))
    assert found.outputs(output, groups_of()) is output
    plain = lay_out(PackedBatch(torch.arange(2), torch.tensor([2])), groups_of(), 1).inputs
    assert (plain.temperature, plain.calculate_entropy, plain.router_loss_weight) == (1.0, False, 1.0)
    assert (plain.routes, plain.keys, plain.second, plain.adapters, plain.heads) == (None, None, None, (), ())


def test_a_rank_of_several_has_its_tokens_with_fillers_that_count_for_nothing() -> None:
    """The second of two ranks has the second and third quarter of each sequence, padded to a multiple of four."""
    data = PackedBatch(
        torch.arange(10, 16),
        torch.tensor([2, 1, 3]),
        batch().token_fields,
        {"temperature": torch.tensor([0.5, 2.0, 3.0])},
        batch().meta,
    )
    seen: list[Any] = []
    replayed = RoutedLayers(2, 1, (True,))

    def runs(sequence_rows: Any) -> Any:
        seen.append(tuple(sequence_rows))
        return ()

    found = lay_out(data, groups_of(tp=4, cp=2, rank=1), 2, replayed, runs, trains_second=True)
    inputs = found.inputs
    # Six rows of three sequences, and two that fill up to a multiple of four.
    assert found.layout is not None and found.layout.index.tolist() == [1, -1, -1, -1, 4, 5, -1, -1] and seen == [(2, 2, 2)]
    assert inputs.input_ids.tolist() == [11, 0, 0, 0, 14, 15, 0, 0]
    assert inputs.labels.tolist() == [-100, -100, -100, -100, 15, -100, -100, -100]
    assert isinstance(inputs.temperature, Tensor) and inputs.temperature.tolist() == [0.5, 1, 1, 1, 3.0, 3.0, 1, 1]
    assert inputs.keys is not None and inputs.keys.flatten().tolist() == [1, -1, -1, -1, 1, 2, -1, -1]
    # Between blocks each of four ranks has two of the rows, this one the last.
    assert inputs.padding is not None and inputs.padding.tolist() == [True, True]
    assert inputs.routes is not None and inputs.routes.flatten().tolist() == [-1, -1]
    assert inputs.sequences is not None and inputs.sequences[0].tolist() == [0, 0] and inputs.sequences[1] == 3
    assert inputs.second is not None and inputs.second.labels.tolist() == [-100] * 8 and inputs.second.total == 1
    first = lay_out(data, groups_of(tp=4, cp=2, rank=0), 2, replayed, trains_second=True).inputs
    assert first.second is not None and first.second.labels.tolist() == [-100, -100, -100, -100, 15, -100, -100, -100]


def test_of_a_tree_multi_token_prediction_gets_whole_sequences() -> None:
    data, tree = (
        PackedBatch(torch.tensor([7, 8, 1, 7, 8, 2]), torch.tensor([3, 3])),
        PrefixTree((2, 1, 1), (-1, 0, 0), (1, 2)),
    )
    inputs = lay_out(data, groups_of(tp=2), 1, trains_second=True, tree=tree).inputs
    second, whole = inputs.second, lay_out(data, groups_of(tp=2), 1, trains_second=True).inputs.second
    assert inputs.input_ids.tolist() == [7, 8, 1, 2] and second is not None and second.of_rows is not None
    # The last of two ranks has the second sequence between blocks.
    assert second.next_ids.tolist() == [8, 1, -100, 8, 2, -100] and second.of_rows.tolist() == [0, 1, 3]
    assert second.segments.query_lens == second.segments.key_lens == (3, 3) and second.segments.tree is None
    assert second.sequences is not None and second.sequences.of_rows.tolist() == [1, 1, 1] and second.sequences.rows is None
    assert whole is not None and whole.of_rows is None and torch.equal(whole.position_ids, second.position_ids)


def test_outputs_of_ranks_are_those_of_the_batch_in_its_order() -> None:
    data = PackedBatch(torch.arange(6), torch.tensor([2, 1, 3]))

    def of_rank(group: dist.ProcessGroup) -> ModelOutput:
        groups = groups_of(cp=2, rank=group.rank())
        laid: RankBatch = lay_out(data, groups, 1)
        assert laid.layout is not None
        rows = laid.layout.take(torch.arange(6) + 0.5, -7.0)
        return laid.outputs(ModelOutput(log_probs=rows, values=2 * rows), SimpleNamespace(cp_group=group))  # type: ignore[arg-type]

    for output in run_ranks(of_rank):
        assert output.log_probs is not None and output.values is not None and output.entropy is None
        assert output.log_probs.tolist() == [0.5, 1.5, 2.5, 3.5, 4.5, 5.5]
        assert output.values.tolist() == [1.0, 3.0, 5.0, 7.0, 9.0, 11.0]


def test_words_that_tokens_were_sampled_from_are_those_of_a_ranks_own_tokens() -> None:
    mask = torch.tensor([[1, 2], [3, -1], [4, 5], [6, 7], [8, -1], [9, 10]])
    data = PackedBatch(torch.arange(10, 16), torch.tensor([2, 1, 3]), {"sampling_mask": mask}, {}, {"top_k": 2})
    whole = lay_out(data, groups_of(), 1).inputs
    assert whole.cuts is not None and whole.cuts.mask is mask and whole.cuts.top_k == 2
    cuts = lay_out(data, groups_of(cp=2, rank=1), 1).inputs.cuts
    # The second of two ranks has the second and third quarter of each sequence, padded to a multiple of four.
    assert cuts is not None and cuts.mask is not None and cuts.top_k == 2
    assert cuts.mask.tolist() == [[3, -1], [-1, -1], [-1, -1], [-1, -1], [8, -1], [9, 10]]
    unmasked = PackedBatch(data.input_ids, data.seq_lens, {}, {}, {"top_p": 0.5})
    cuts = lay_out(unmasked, groups_of(cp=2, rank=1), 1).inputs.cuts
    assert cuts is not None and (cuts.mask, cuts.top_p) == (None, 0.5)


def test_a_stage_without_the_head_makes_no_predictions_of_a_tree() -> None:
    data = PackedBatch(torch.tensor([7, 8, 1, 7, 8, 2]), torch.tensor([3, 3]))
    tree = PrefixTree((2, 1, 1), (-1, 0, 0), (1, 2))
    last, before = (lay_out(data, groups_of(), 1, tree=tree, predicts=predicts) for predicts in (True, False))
    # The second row predicts two different tokens.
    assert last.inputs.of_rows is not None and last.inputs.of_rows.tolist() == [0, 1, 1, 2, 3]
    assert last.of_tokens is not None and last.inputs.labels[last.of_tokens].tolist() == data.labels.tolist()
    assert before.inputs.of_rows is None and before.of_tokens is None and before.inputs.head_adapters is None
    for found in (last, before):
        assert found.inputs.input_ids.tolist() == [7, 8, 1, 2] and found.computed == 4
    assert lay_out(data, groups_of(), 1).computed == 6


def test_adapters_work_on_the_predictions_of_their_own_rows() -> None:
    runs = [AdapterRun(0, 2, {}, key=4), AdapterRun(2, 2, {}, key=5), AdapterRun(3, 6, {}, key=6)]
    # Rows 1 and 4 predict twice, and row 2 is nobody's.
    found = _at_predictions(runs, torch.tensor([0, 1, 1, 2, 3, 4, 4, 5]))
    assert [(run.key, run.start, run.stop) for run in found] == [(4, 0, 3), (5, 3, 3), (6, 4, 8)]
    assert _at_predictions([], torch.tensor([0, 1])) == ()
