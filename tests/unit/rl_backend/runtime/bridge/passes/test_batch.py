"""Micro-batches as Megatron takes them, and its outputs as a loss takes them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from rl_backend.contracts import PackedBatch
from rl_backend.primitive.adapters import AdapterRun, OwnHead
from rl_backend.runtime.bridge.model import output_heads
from rl_backend.runtime.bridge.model.output_heads import CriticOutputLayer, OutputProcessor, as_model_output
from rl_backend.runtime.bridge.passes.batch import LaidOut, lay_out_packed, lay_out_padded

LENGTHS = (3, 1, 4)


def packed(**meta: Any) -> PackedBatch:
    return PackedBatch(torch.arange(10, 18), torch.tensor(LENGTHS), meta=meta)


@pytest.mark.parametrize(("multiple", "columns"), [(1, 4), (3, 6), (4, 4)])
@pytest.mark.parametrize("mark", [True, False])
def test_a_padded_batch_has_a_row_for_each_sequence(multiple: int, columns: int, mark: bool) -> None:
    laid_out = lay_out_padded(packed(), multiple, mark_padding=mark)
    pad = [0] * (columns - 4)
    ids = [[10, 11, 12, 0, *pad], [13, 0, 0, 0, *pad], [14, 15, 16, 17, *pad]]
    assert laid_out.shape == (3, columns) and laid_out.inputs["input_ids"].tolist() == ids
    assert laid_out.inputs["position_ids"].tolist() == [list(range(columns))] * 3
    assert laid_out.inputs["attention_mask"] is None
    assert ("padding_mask" in laid_out.inputs) is mark and "packed_seq_params" not in laid_out.inputs
    if mark:
        assert laid_out.inputs["padding_mask"].tolist() == [[each == 0 for each in row] for row in ids]
    # Hidden states are columns by rows.
    hidden = laid_out.inputs["input_ids"].t()[..., None].float()
    assert laid_out.pack(hidden).flatten().tolist() == list(range(10, 18))
    assert torch.equal(laid_out.unpack(laid_out.pack(hidden)), hidden)
    assert laid_out.heads == () and laid_out.adapters == () and laid_out.segments is None


def test_laying_out_keeps_places_alone_for_the_backward_pass() -> None:
    """Outputs of adapted layers are as large as activations."""
    laid_out, kept = lay_out_padded(packed(), 1, mark_padding=False), list[Tensor]()
    hidden = torch.randn(8, 5, dtype=torch.float64, requires_grad=True)

    def there_and_back(x: Tensor) -> Tensor:
        return laid_out.pack(laid_out.unpack(x) * 2)

    with torch.autograd.graph.saved_tensors_hooks(lambda x: kept.append(x) or x, lambda x: x):
        there_and_back(hidden)
    assert kept and not any(tensor.is_floating_point() for tensor in kept)
    assert torch.autograd.gradcheck(there_and_back, hidden)


@pytest.mark.parametrize(
    ("multiple", "total", "boundaries", "longest"),
    [
        (1, 8, [0, 3, 4, 8], 4),
        (4, 8, [0, 3, 4, 8], 4),
        (7, 14, [0, 3, 4, 8, 14], 6),
        (5, 10, [0, 3, 4, 8, 10], 4),
    ],
)
@pytest.mark.parametrize("mark", [True, False])
def test_a_packed_batch_is_one_row_with_boundaries_and_padding_as_a_last_sequence(
    multiple: int, total: int, boundaries: list[int], longest: int, mark: bool
) -> None:
    laid_out = lay_out_packed(packed(), multiple, mark_padding=mark)
    extra = total - 8
    assert laid_out.shape == (1, total)
    assert laid_out.inputs["input_ids"].tolist() == [[*range(10, 18), *[0] * extra]]
    assert laid_out.inputs["position_ids"].tolist() == [[0, 1, 2, 0, 0, 1, 2, 3, *range(extra)]]
    assert laid_out.inputs["attention_mask"] is None and laid_out.places.tolist() == list(range(8))
    parameters = laid_out.inputs["packed_seq_params"]
    assert parameters.qkv_format == "thd"
    assert parameters.cu_seqlens_q.tolist() == parameters.cu_seqlens_kv.tolist() == boundaries
    assert parameters.max_seqlen_q == parameters.max_seqlen_kv == longest
    assert ("padding_mask" in laid_out.inputs) is mark
    if mark:
        assert laid_out.inputs["padding_mask"].tolist() == [[False] * 8 + [True] * extra]


def test_outputs_are_named_by_the_heads_of_the_pass() -> None:
    rows = torch.arange(6.0).view(3, 2)

    def named(heads: tuple[str, ...], **meta: Any) -> list[Any]:
        laid_out = LaidOut(packed(**meta), {}, (1, 8), torch.arange(8), heads)  # type: ignore[arg-type]
        return [None if each is None else each.tolist() for each in as_model_output(rows[: len(heads) + 1], laid_out)]

    assert named(("log_probs",)) == [[0, 1], None, None, None, None, None]
    assert named(("log_probs",), calculate_entropy=True) == [[0, 1], [2, 3], None, None, None, None]
    assert named(("log_probs", "values"), calculate_entropy=True) == [[0, 1], [2, 3], [4, 5], None, None, None]
    assert named(("log_probs", "values")) == [[0, 1], None, [4, 5], None, None, None]
    values = LaidOut(packed(), {}, (1, 8), torch.arange(8), ("values",))
    assert [each is None for each in as_model_output(rows[:1], values)] == [True, True, False, True, True, True]
    rows = torch.arange(16.0).view(8, 2)
    everything = named(("log_probs", *["values"] * 6), calculate_entropy=True, top_log_probs=2, top_k=1)
    assert everything == [[0, 1], [2, 3], [14, 15], [[6, 8], [7, 9]], [[10, 12], [11, 13]], [4, 5]]


def groups(rank: int = 0, size: int = 1) -> Any:
    return SimpleNamespace(pg=SimpleNamespace(tp=SimpleNamespace(rank=lambda: rank, size=lambda: size)))


@pytest.mark.parametrize("calculate_entropy", [True, False])
@pytest.mark.parametrize(("padded_rows", "tied"), [(0, False), (3, True)])
def test_log_probs_are_of_the_models_words_alone(calculate_entropy: bool, padded_rows: int, tied: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    batch = packed(calculate_entropy=calculate_entropy, temperature=0.7)
    laid_out = lay_out_padded(batch, 1, mark_padding=False)
    laid_out = LaidOut(batch, laid_out.inputs, laid_out.shape, laid_out.places, ("log_probs",))
    weight = torch.randn(20 + padded_rows, 5, generator=generator)
    hidden = torch.randn(4, 3, 5, generator=generator)
    layer = nn.Linear(5, 20 + padded_rows, bias=False)
    waited: list[Any] = []
    layer.register_forward_pre_hook(lambda module, args: waited.append((module, args)))
    with torch.no_grad():
        layer.weight.copy_(torch.zeros_like(weight) if tied else weight)
    process = OutputProcessor(groups(), 20, 3)
    found = process(
        hidden_states=hidden, output_layer=layer, output_weight=weight if tied else None, context=laid_out, other="ignored"
    )
    rows = torch.stack([hidden[column, row] for row, length in enumerate(LENGTHS) for column in range(length)])
    log_probs = (rows @ weight[:20].t() / 0.7).log_softmax(-1)
    expected = torch.zeros(8)
    real = batch.labels >= 0
    expected[real] = log_probs[real, batch.labels[real]]
    torch.testing.assert_close(found[0][real], expected[real])
    entropy = -(log_probs.exp() * log_probs).sum(-1) if calculate_entropy else torch.zeros(8)
    torch.testing.assert_close(found[1], entropy * real)
    assert len(found) == 2 and waited == [(layer, ())]


@pytest.mark.parametrize("rank", [0, 1])
def test_values_are_those_of_the_critic_or_of_each_tenants_own_head(monkeypatch: pytest.MonkeyPatch, rank: int) -> None:
    asked: list[bool] = []

    def gather(x: Tensor, group: Any, *, sum_gradients: bool) -> Tensor:
        asked.append(sum_gradients)
        return torch.cat((x, x + 1))

    monkeypatch.setattr(output_heads, "all_gather", gather)
    head = OwnHead(torch.full((1, 2), 2.0), torch.tensor([0.5]), torch.zeros(1, 2), torch.zeros(1))
    batch = packed()
    laid_out = lay_out_padded(batch, 1, mark_padding=False)
    runs = (AdapterRun(0, 3, {}), AdapterRun(4, 8, {}, head=head))
    laid_out = LaidOut(batch, laid_out.inputs, laid_out.shape, laid_out.places, ("values",), runs)
    hidden = torch.arange(12.0).view(2, 3, 2).requires_grad_()
    whole = torch.cat((hidden, hidden + 1)).detach()
    rows = laid_out.pack(whole)
    process = OutputProcessor(groups(rank, 2), 20, 3)
    critic = CriticOutputLayer(2, "config")
    assert critic.config == "config" and critic.value_head.in_features == 2
    for layer, others in ((critic, critic.value_head(rows).detach()), (nn.Linear(2, 2), torch.zeros(8))):
        found = process(hidden_states=hidden, output_layer=layer, output_weight=None, context=laid_out)
        expected = torch.cat((others[:4], (rows[4:] * 2).sum(1) + 0.5))
        assert found.shape == (1, 8)
        torch.testing.assert_close(found[0].detach(), expected)
    # All ranks compute the same; the gradients of a tenant's head are in the buffers of one.
    found.sum().backward()
    assert asked == [False, False]
    assert head.grad_bias.tolist() == [4.0 * (rank == 0)]
    assert torch.equal(head.grad_weight[0], rows[4:].sum(0) * (rank == 0))
