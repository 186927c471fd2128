"""Targets of their own in every layout: log-probs as transformers gives them, and sums that no split changes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from rl_backend.algorithm import tinker_losses
from rl_backend.contracts import (
    SAMPLING_MASK,
    TARGET_IDS,
    MetricValue,
    ModelOutput,
    PackedBatch,
    SamplingCuts,
    TokenSequence,
)
from rl_backend.contracts.lora import LORA_FIELD, LoRAConfig
from rl_backend.data import pack_plan, plan_tenants
from tests.support.families import load_transformers
from tests.support.matrix import sampled
from tests.support.models import write_tiny
from tests.support.native import VOCAB_SIZE
from tests.support.rank_pool import RankPool
from tests.support.tenant_layouts import BRIDGE, NATIVE, cases
from tests.support.tenants import copied
from tests.support.token_cuts import mask_beside, of_kept

LENGTHS = (9, 4, 17, 6, 12)
TEMPERATURES = (1.0, 0.7, 1.3, 0.5, 1.0)
K, TOP = 3, 5
LAYOUTS = ("one rank", "dp2", "tp2", "cp2", "pp2", "pp2 zbv", "dp2 tp2")


def sequences(lora_id: int) -> list[TokenSequence]:
    """K targets for each position, the last included, of which some ask for nothing; weights of both signs."""
    generator = torch.Generator().manual_seed(0)
    found: list[TokenSequence] = []
    for length, temperature in zip(LENGTHS, TEMPERATURES, strict=True):
        ids, targets = (torch.randint(0, VOCAB_SIZE, shape, generator=generator) for shape in ((length,), (length, K)))
        targets[0], targets[1, 1:] = -100, -100
        fields = {TARGET_IDS: targets, "weights": torch.randn(length, K, generator=generator)}
        whose = {LORA_FIELD: torch.tensor(lora_id), "temperature": torch.tensor(temperature)}
        found.append(TokenSequence(ids, fields, whose))
    return found


type Outputs = tuple[Tensor, Tensor, Tensor]
"""Log-probs of the targets, ids and log-probs of the likeliest tokens."""


def targets_job(model: str, backend: str, layout: str) -> tuple[dict[int, Outputs], float, float, dict[str, Tensor]]:
    """(outputs by sequence, loss and ``loss:sum`` of this rank, gradients of the tenant)"""
    from rl_backend.contracts import OptimizerConfig
    from tests.support.bridge_runs import open_bridge
    from tests.support.native import open_runtime

    settings = (BRIDGE if backend == "bridge" else NATIVE)[layout][1]
    with (open_bridge if backend == "bridge" else open_runtime)(model, **settings) as runtime:
        base = runtime.build_model(trainable=False)
        lora = LoRAConfig(rank=4, alpha=8.0, targets=("attention", "head"))
        tenant = runtime.create_lora_adapter(base, lora, OptimizerConfig(), name="own")
        rows, rank, size = sequences(tenant.lora_id), base.data_parallel_rank, base.data_parallel_size
        plan = plan_tenants(LENGTHS, [0] * len(rows), size, 20, multiple_of=base.micro_batch_multiple, fill=True)
        data = pack_plan(rows, plan, {"top_log_probs": TOP})[rank]
        result = runtime.forward_backward(base, data, {"own": tinker_losses.cross_entropy}).tenants["own"]
        assert not result.error, result.error
        gradients = copied(runtime.export_gradients(tenant))
    mine = plan.rank_indices(rank)
    names = ("log_probs", "top_ids", "top_log_probs")
    found = zip(*(result.outputs[name] for name in names), strict=True) if result.outputs else ()
    outputs = dict(zip(mine, found, strict=bool(result.outputs)))
    own = {index: value for index, value in outputs.items() if index < len(rows)}
    total = result.metrics["loss:sum"].sum if result.metrics else 0.0
    return own, result.loss / size, total, gradients


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("models") / "qwen3"
    return str(write_tiny("qwen3", folder, num_hidden_layers=4, tie_word_embeddings=False))


@pytest.fixture(scope="module")
def on_one_rank(ranks: RankPool, model: str) -> dict[str, Tensor]:
    return ranks.run(targets_job, model, "native", "one rank", world_size=1)[0][3]


@pytest.mark.shows("model: log-probs of given targets, several for each token, are those of transformers in every layout")
@pytest.mark.shows(
    "model: the likeliest tokens after each token and their log-probs are those of transformers in every layout"
)
@pytest.mark.parametrize(
    ("backend", "layout"),
    sampled(
        cases(LAYOUTS, ("one rank", "dp2", "tp2", "pp2")),
        *(("native", "tp2"), ("native", "one rank"), ("bridge", "one rank")),
    ),
)
def test_log_probs_are_those_of_transformers_and_losses_exact_sums(
    ranks: RankPool, model: str, on_one_rank: dict[str, Tensor], backend: str, layout: str
) -> None:
    expected, likeliest, total = [], [], 0.0
    reference = load_transformers(Path(model)).double()
    for row, temperature in zip(sequences(0), TEMPERATURES, strict=True):
        with torch.no_grad():
            distribution = (reference(row.input_ids[None]).logits[0] / temperature).log_softmax(-1)
        targets = row.token_fields[TARGET_IDS]
        log_probs = distribution.gather(1, targets.clamp(min=0)).where(targets != -100, 0.0)
        expected.append(log_probs)
        likeliest.append(distribution.topk(TOP))
        total -= float((log_probs * row.token_fields["weights"]).sum())
    world_size = (BRIDGE if backend == "bridge" else NATIVE)[layout][0]
    found = ranks.run(targets_job, model, backend, layout, world_size=world_size)
    outputs_of = {index: value for each in found for index, value in each[0].items()}
    assert sorted(outputs_of) == list(range(len(LENGTHS)))
    for index, (log_probs, top_ids, top_log_probs) in outputs_of.items():
        torch.testing.assert_close(log_probs.double(), expected[index], rtol=1e-5, atol=1e-5)
        assert torch.equal(top_ids, likeliest[index].indices)
        torch.testing.assert_close(top_log_probs.double(), likeliest[index].values, rtol=1e-5, atol=1e-5)
    sources = [each for each in found if each[0]]
    # Of plain torch in float64: the whole model's rounding is in it. Of the log-probs of this pass: the sum's alone.
    summed = -sum(
        float((log_probs.double() * sequences(0)[index].token_fields["weights"]).sum())
        for index, (log_probs, *_) in outputs_of.items()
    )
    for found_total in (sum(loss for _, loss, _, _ in sources), sum(metric for _, _, metric, _ in sources)):
        assert found_total == pytest.approx(total, rel=1e-6)
        assert found_total == pytest.approx(summed, rel=1e-6)
    for *_, gradients in found:
        for name, gradient in gradients.items():
            torch.testing.assert_close(gradient, on_one_rank[name], rtol=1e-4, atol=1e-5)


type Passed = tuple[list[Tensor], float, dict[str, Tensor]]
"""Log-probs, loss and gradients of a tenant."""


def next_tokens_job(model: str, backend: str, layout: str) -> list[Passed]:
    """Of a pass without targets, and of one whose targets are each row's own next tokens."""
    from rl_backend.contracts import OptimizerConfig
    from tests.support.bridge_runs import open_bridge
    from tests.support.native import open_runtime

    def weighted(output: ModelOutput, data: PackedBatch, dp_group: Any = None) -> tuple[Tensor, dict[str, MetricValue]]:
        assert output.log_probs is not None
        return -(data.token_field("weights")[:, 0] * output.log_probs).sum(), {}

    settings, found = (BRIDGE if backend == "bridge" else NATIVE)[layout][1], list[Passed]()
    with (open_bridge if backend == "bridge" else open_runtime)(model, **settings) as runtime:
        base = runtime.build_model(trainable=False)
        lora = LoRAConfig(rank=4, alpha=8.0, targets=("attention", "head"))
        tenant = runtime.create_lora_adapter(base, lora, OptimizerConfig(), name="own")
        rank, size = base.data_parallel_rank, base.data_parallel_size
        plan = plan_tenants(LENGTHS, [0] * len(LENGTHS), size, 20, multiple_of=base.micro_batch_multiple, fill=True)
        for has_targets in (False, True):
            rows = []
            for row in sequences(tenant.lora_id):
                following = torch.cat([row.input_ids[1:], torch.tensor([-100])])
                fields = {"weights": row.token_fields["weights"], **({TARGET_IDS: following} if has_targets else {})}
                rows.append(TokenSequence(row.input_ids, fields, row.sequence_fields))
            result = runtime.forward_backward(base, pack_plan(rows, plan, {})[rank], {"own": weighted}).tenants["own"]
            assert not result.error, result.error
            outputs = [*result.outputs["log_probs"]] if result.outputs else []
            found.append((outputs, result.loss, copied(runtime.export_gradients(tenant))))
            runtime.zero_grad(tenant)
    return found


@pytest.mark.shows("model: a pass without targets has the bits of one whose targets are the next tokens, in every layout")
@pytest.mark.parametrize(
    ("backend", "layout"),
    sampled(cases(LAYOUTS, ("one rank", "dp2", "tp2", "pp2")), ("native", "cp2"), ("bridge", "tp2")),
)
def test_a_pass_without_targets_has_the_bits_of_one_with_the_next_tokens(
    ranks: RankPool, model: str, backend: str, layout: str
) -> None:
    world_size = (BRIDGE if backend == "bridge" else NATIVE)[layout][0]
    for without, given in ranks.run(next_tokens_job, model, backend, layout, world_size=world_size):
        assert without[1] == given[1]
        assert without[2].keys() == given[2].keys()
        assert all(map(torch.equal, [*without[0], *without[2].values()], [*given[0], *given[2].values()]))
        assert any(bool(each.any()) for each in without[2].values())


CUTS = SamplingCuts(top_p=0.8, top_k=30, min_p=0.001)


def cuts_job(model: str, backend: str, layout: str, masks: list[Tensor]) -> dict[int, tuple[Outputs, Outputs]]:
    """By sequence: log-probs, entropy and what was cut, and those with the masks of an engine."""
    from tests.support.bridge_runs import open_bridge
    from tests.support.native import open_runtime

    settings = (BRIDGE if backend == "bridge" else NATIVE)[layout][1]
    with (open_bridge if backend == "bridge" else open_runtime)(model, **settings) as runtime:
        base = runtime.build_model(trainable=False)
        rank, size, passes = base.data_parallel_rank, base.data_parallel_size, list[list[Outputs]]()
        plan = plan_tenants(LENGTHS, [0] * len(LENGTHS), size, 20, multiple_of=base.micro_batch_multiple, fill=True)
        for masked in (False, True):
            rows = [
                TokenSequence(
                    row.input_ids,
                    {SAMPLING_MASK: mask} if masked else {},
                    {"temperature": row.sequence_fields["temperature"]},
                )
                for row, mask in zip(sequences(0), masks, strict=True)
            ]
            data = pack_plan(rows, plan, {**CUTS._asdict(), "calculate_entropy": True})[rank]
            outputs = runtime.forward_backward(base, data, None, forward_only=True).outputs
            names = ("log_probs", "entropy", "mask_disagreement")
            passes.append(list(zip(*(outputs[name] for name in names), strict=True)) if outputs else [])
    found = zip(plan.rank_indices(rank), zip(*passes, strict=True), strict=bool(passes[0]))
    return {index: each for index, each in found if index < len(LENGTHS)}


@pytest.mark.shows(
    "model: log-probs of the tokens that top-p, top-k and min-p keep are those of plain torch in every layout"
)
@pytest.mark.shows("model: log-probs over the tokens that an engine says it sampled from are, too")
@pytest.mark.parametrize(
    ("backend", "layout"),
    sampled(
        cases(LAYOUTS, ("one rank", "dp2", "tp2", "pp2")),
        *(("native", "tp2"), ("native", "cp2"), ("native", "pp2"), ("bridge", "tp2")),
    ),
)
def test_log_probs_are_over_the_tokens_that_are_kept(ranks: RankPool, model: str, backend: str, layout: str) -> None:
    reference, expected, masks = load_transformers(Path(model)).double(), [], list[Tensor]()
    for row, temperature in zip(sequences(0), TEMPERATURES, strict=True):
        with torch.no_grad():
            logits = reference(row.input_ids[None]).logits[0] / temperature
        labels = torch.cat([row.input_ids[1:], torch.tensor([-100])])
        masks.append(mask_beside(logits, labels, CUTS))
        expected.append([of_kept(logits, labels, cuts) for cuts in (CUTS, CUTS._replace(mask=masks[-1]))])
    width = max(mask.shape[1] for mask in masks)
    masks = [F.pad(mask, (0, width - mask.shape[1]), value=-1) for mask in masks]
    world_size = (BRIDGE if backend == "bridge" else NATIVE)[layout][0]
    outputs = {
        index: each
        for found in ranks.run(cuts_job, model, backend, layout, masks, world_size=world_size)
        for index, each in found.items()
    }
    assert sorted(outputs) == list(range(len(LENGTHS)))
    for index, passes in outputs.items():
        for found, right in zip(passes, expected[index], strict=True):
            torch.testing.assert_close([each.double() for each in found], list(right), rtol=1e-5, atol=1e-5)
    for number in (0, 1):
        assert 0 < torch.cat([outputs[index][number][2][:-1] for index in outputs]).mean() < 1
