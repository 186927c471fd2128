"""Training with shared prefixes computed once is training without."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten

from rl_backend.contracts import (
    SAMPLING_MASK,
    TARGET_IDS,
    BatchError,
    ForwardResult,
    MetricValue,
    ModelOutput,
    NativeConfig,
    PackedBatch,
    SamplingCuts,
    TokenSequence,
)
from rl_backend.contracts.lora import LORA_FIELD
from rl_backend.data import MicroBatchPlan, pack, plan_micro_batches, plan_shared, prefixes, restore_order
from rl_backend.model.input import each_prediction_once
from rl_backend.model.options import DecoderOptions
from rl_backend.runtime.native.forward_backward import _rank_batch
from rl_backend.runtime.native.handle import NativeHandle
from rl_backend.runtime.native.layout import describe_model, why_unshared
from rl_backend.runtime.passes import PassRequest
from tests.support.deepseek import write_latent
from tests.support.drafting import write_drafting
from tests.support.indexed_keys import first_keys, with_keys
from tests.support.models import write_tiny
from tests.support.moe import write_moe
from tests.support.native import (
    VOCAB_SIZE,
    assert_near,
    gradients,
    open_in_float64,
    open_runtime,
    relative_difference,
    weights,
)
from tests.support.qwen3_5 import write_qwen3_5, write_qwen3_next
from tests.support.random_trees import distinct_beginnings, sequences_of_a_tree
from tests.support.sparse_models import write_sparse
from tests.support.tenants import LOSSES, copied, create, nll
from tests.support.variants import write_variant


def weighted_loss(
    model_output: ModelOutput, data: PackedBatch, dp_group: Any = None
) -> tuple[Tensor, Mapping[str, MetricValue]]:
    """Every token has weights of its own, those of shared prefixes too."""
    total = torch.zeros((), dtype=torch.float64)
    for name in ("log_probs", "entropy", "values"):
        output = getattr(model_output, name)
        if output is not None:
            total = total + (output * data.token_field(f"{name}_weight").view_as(output)).sum()
    return total, {}


def batch_of(
    sequences: Sequence[Tensor], seed: int = 0, *, targets: int = 0, masked: bool = False, **meta: Any
) -> PackedBatch:
    generator = torch.Generator().manual_seed(seed)
    rows = []
    for ids in sequences:
        width = (len(ids), targets) if targets else (len(ids),)
        fields = {"log_probs_weight": torch.randn(width, generator=generator, dtype=torch.float64)}
        for name in ("entropy", "values"):
            fields[f"{name}_weight"] = torch.randn(len(ids), generator=generator, dtype=torch.float64)
        if targets:
            fields[TARGET_IDS] = torch.randint(0, 4, width, generator=generator)
            fields[TARGET_IDS][0] = -100
        if masked:
            # Words of its own at each token, also where several begin alike.
            drawn = torch.rand(len(ids), VOCAB_SIZE, generator=generator).scatter(1, ids.roll(-1)[:, None], 2.0)
            fields[SAMPLING_MASK] = drawn.topk(6).indices.sort(1).values
        temperature = torch.tensor([0.7, 1.3])[int(torch.randint(0, 2, (), generator=generator))]
        rows.append(TokenSequence(ids, fields, {"temperature": temperature}))
    return pack(rows, {"calculate_entropy": True, **meta})


class Computed(NamedTuple):
    result: ForwardResult
    gradients: Mapping[str, Tensor]


def compute(
    path: Path,
    batches: Sequence[PackedBatch],
    /,
    head: Any = "log_probs",
    share_prefixes: str = "off",
    **settings: Any,
) -> list[Computed]:
    """Each batch by itself, forward and backward, in float64."""
    found = []
    with open_in_float64(path, share_prefixes=share_prefixes, **settings) as runtime:
        handle = runtime.build_model(head=head)
        for batch in batches:
            runtime.zero_grad(handle)
            found.append(Computed(runtime.forward_backward(handle, [batch], weighted_loss), gradients(handle)))
    return found


def assert_same(found: Sequence[Computed], expected: Sequence[Computed], batches: Sequence[PackedBatch]) -> None:
    for shared, alone, batch in zip(found, expected, batches, strict=True):
        assert shared.result.outputs.keys() == alone.result.outputs.keys()
        for name, values in shared.result.outputs.items():
            torch.testing.assert_close(values, alone.result.outputs[name], rtol=0.0, atol=1e-10, msg=name)
        assert shared.result.losses == pytest.approx(alone.result.losses, rel=1e-10, abs=1e-10)
        assert_near(shared.gradients, alone.gradients, 1e-10)
        rows, tokens = shared.result.metrics["tokens_computed"]
        assert (rows, tokens) == (distinct_beginnings(batch.split(batch.input_ids)), batch.num_tokens)
        assert rows < tokens and "tokens_computed" not in alone.result.metrics


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, Path]:
    folder = tmp_path_factory.mktemp("models")
    return {
        "qwen3": write_tiny("qwen3", folder / "qwen3"),
        "starcoder2": write_variant("starcoder2", folder / "starcoder2", sliding_window=6),
        "gpt_oss": write_moe("gpt_oss", folder / "gpt_oss", sliding_window=6),
        "qwen3_next": write_qwen3_next(folder / "qwen3_next"),
        "qwen3_5": write_qwen3_5(folder / "qwen3_5"),
        "deepseek_v3": write_latent("deepseek_v3", folder / "deepseek_v3"),
        "deepseek_v32": write_sparse(folder / "deepseek_v32", "deepseek_v32"),
        "glm_moe_dsa": write_sparse(folder / "glm_moe_dsa", "glm_moe_dsa"),
        "drafting": write_drafting(folder / "drafting", tied=True),
        "drafting_sparse": write_sparse(folder / "drafting_sparse", "deepseek_v32", mtp=True),
        "glm4_moe": write_drafting(folder / "glm4_moe", "glm4_moe", num_hidden_layers=2),
    }


@pytest.fixture
def every_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs of one token are shared too."""
    monkeypatch.setattr(prefixes, "SHORTEST_RUN", 1)


@pytest.mark.usefixtures("every_run")
@pytest.mark.shows(
    "runtime: with shared prefixes computed once, log-probs, losses and gradients equal those without to 1e-10 in float64"
)
@pytest.mark.parametrize(
    ("family", "trees"),
    [
        pytest.param("qwen3", 12, id="qwen3"),
        pytest.param("starcoder2", 6, id="starcoder2"),
        pytest.param("gpt_oss", 6, id="gpt_oss"),
        pytest.param("gpt_oss", 30, id="gpt_oss-30", marks=pytest.mark.long),
        pytest.param("qwen3", 30, id="qwen3-30", marks=pytest.mark.long),
    ],
)
def test_shared_prefixes_train_as_whole_sequences(models: Mapping[str, Path], family: str, trees: int) -> None:
    """Full attention; windows that end in the prefix; those with sinks, and experts."""
    batches = [batch_of(sequences_of_a_tree(seed), seed) for seed in range(trees)]
    expected = compute(models[family], batches)
    assert_same(compute(models[family], batches, share_prefixes="auto"), expected, batches)


@pytest.mark.usefixtures("every_run")
@pytest.mark.shows("runtime: so they do in Qwen3-Next, Qwen3.5, DeepSeek-V3, -V3.2 with an indexer that learns, and GLM-5")
@pytest.mark.parametrize(
    ("family", "options"),
    [
        ("qwen3_next", {}),
        ("qwen3_5", {"activation_checkpointing": "full"}),
        ("deepseek_v3", {}),
        ("deepseek_v32", {"model": "deepseek_v32", "model_cfg": {"indexer": "sparse"}}),
        ("glm_moe_dsa", {"activation_checkpointing": "full"}),
    ],
)
def test_states_latents_and_chosen_keys_are_those_of_whole_sequences(
    models: Mapping[str, Path], family: str, options: Mapping[str, Any]
) -> None:
    batches = [batch_of(sequences_of_a_tree(seed), seed) for seed in range(3)]
    expected = compute(models[family], batches, **options)
    assert_same(compute(models[family], batches, share_prefixes="auto", **options), expected, batches)


@pytest.mark.usefixtures("every_run")
@pytest.mark.shows(
    "runtime: beside multi-token prediction the other layers share prefixes, and all train as with whole sequences"
)
@pytest.mark.parametrize(
    ("name", "family", "options"),
    [
        ("drafting", "drafting", {"mtp": "joint"}),
        ("drafting", "drafting", {"mtp": "detached"}),
        ("glm4_moe", "glm4_moe", {"mtp": "joint", "router_aux_loss_coef": 3.0, "router_sequence_loss_coef": 3.0}),
        ("drafting_sparse", "deepseek_v32", {"mtp": "joint", "indexer": "sparse"}),
    ],
    ids=["joint", "detached", "mixture", "sparse"],
)
def test_multi_token_prediction_is_trained_on_whole_sequences(
    models: Mapping[str, Path], name: str, family: str, options: Mapping[str, Any]
) -> None:
    batches = [batch_of(sequences_of_a_tree(seed), seed) for seed in range(3)]
    settings = {"model": family, "model_cfg": {"mtp_loss_weight": 3.0, **options}}
    expected = compute(models[name], batches, **settings)
    assert_same(compute(models[name], batches, share_prefixes="auto", **settings), expected, batches)
    recomputed = {**settings, "activation_checkpointing": "full", "share_prefixes": "auto"}
    assert_same(compute(models[name], batches[:1], **recomputed), expected[:1], batches[:1])
    assert float(expected[0].gradients["mtp.projection.weight"].norm()) > 0


@pytest.mark.usefixtures("every_run")
@pytest.mark.parametrize(
    ("head", "settings", "given"),
    [
        ("values", {}, {}),
        ("log_probs", {"activation_checkpointing": "full"}, {}),
        ("log_probs", {}, {"targets": 1}),
        ("log_probs", {}, {"targets": 2}),
        ("log_probs", {}, {"top_log_probs": 3, "top_k": 5}),
        ("log_probs", {}, {"masked": True, "top_k": 5}),
    ],
)
def test_every_head_and_whatever_is_asked_of_it_is_the_same(
    models: Mapping[str, Path], head: str, settings: Mapping[str, Any], given: Mapping[str, Any]
) -> None:
    batches = [batch_of(sequences_of_a_tree(seed), seed, **given) for seed in range(4)]
    expected = compute(models["qwen3"], batches, head)
    assert_same(compute(models["qwen3"], batches, head, share_prefixes="auto", **settings), expected, batches)


@pytest.mark.usefixtures("every_run")
def test_old_log_probs_and_the_update_are_the_same_bits(models: Mapping[str, Path]) -> None:
    sequences = [ids for seed in range(6) for ids in sequences_of_a_tree(seed)]
    batches = [batch_of(sequences[::2]), batch_of(sequences[1::2])]
    with open_runtime(models["qwen3"], share_prefixes="auto") as runtime:
        handle = runtime.build_model()
        before = runtime.forward_backward(handle, batches, None, forward_only=True)
        trained = runtime.forward_backward(handle, batches, weighted_loss)
        activations = runtime.activations(handle, batches)
    for old, new in zip(before.output("log_probs"), trained.output("log_probs"), strict=True):
        assert torch.equal(old, new)
    assert before.metrics == trained.metrics
    for batch, recorded in zip(batches, activations, strict=True):
        assert recorded and {len(rows) for rows in recorded.values()} == {batch.num_tokens}


@pytest.mark.usefixtures("every_run")
def test_replayed_routes_decide_what_is_shared(models: Mapping[str, Path]) -> None:
    batch = batch_of(sequences_of_a_tree(3))
    with open_runtime(models["gpt_oss"], share_prefixes="auto") as runtime:
        handle = runtime.build_model()
        recorded = runtime.forward_backward(handle, [batch], None, forward_only=True, router_replay="record")
        routes = torch.cat(list(recorded.output("routed_experts")))
        assert len(routes) == batch.num_tokens

        def replay(routes: Tensor) -> ForwardResult:
            given = PackedBatch(
                batch.input_ids,
                batch.seq_lens,
                {**batch.token_fields, "routed_experts": routes},
                batch.sequence_fields,
                {**batch.meta, "routed_experts_layers": "moe"},
            )
            return runtime.forward_backward(handle, [given], weighted_loss, router_replay="replay")

        same = replay(routes)
        assert same.metrics["tokens_computed"] == recorded.metrics["tokens_computed"]
        for old, new in zip(recorded.output("log_probs"), same.output("log_probs"), strict=True):
            assert torch.equal(old, new)
        others = routes.clone()
        others[0] = 5 - others[0]
        differing = replay(others).metrics["tokens_computed"]
        assert differing.sum > same.metrics["tokens_computed"].sum


@pytest.mark.usefixtures("every_run")
@pytest.mark.shows("sparse attention: shared prefixes train as whole sequences with recorded keys, where these are equal")
@pytest.mark.parametrize(
    ("family", "options"),
    [("deepseek_v32", {"model": "deepseek_v32", "model_cfg": {"indexer": "sparse"}}), ("glm_moe_dsa", {})],
)
def test_recorded_keys_decide_what_is_shared(models: Mapping[str, Path], family: str, options: Mapping[str, Any]) -> None:
    with open_runtime(models[family]) as runtime:
        indexed = runtime.build_model().indexed_layers
    assert indexed is not None
    batches = []
    for seed in range(3):
        batch = batch_of(sequences_of_a_tree(seed), seed)
        keys = first_keys(batch, len(indexed.layers), indexed.top_k)
        # Some choose for themselves, but none that a sequence begins with.
        keys[(batch.input_ids % 5 == 0) & (batch.position_ids > 0)] = -1
        batches.append(with_keys(batch, keys))
    found = compute(models[family], batches, share_prefixes="auto", **options)
    assert_same(found, compute(models[family], batches, **options), batches)
    others = keys.clone()
    others[0] = -1
    batches = [with_keys(batch, others)]
    (one,), (other,) = (compute(models[family], batches, share_prefixes=share, **options) for share in ("auto", "off"))
    assert_near(one.gradients, other.gradients, 1e-10)
    assert one.result.metrics["tokens_computed"].sum > found[-1].result.metrics["tokens_computed"].sum


def test_only_computed_tokens_count(models: Mapping[str, Path]) -> None:
    prompt = torch.arange(40)
    sequences = [torch.cat((prompt, torch.tensor([index, 3]))) for index in range(4)]
    with open_runtime(models["qwen3"], share_prefixes="auto", max_tokens=48) as runtime:
        handle = runtime.build_model()
        assert handle.shares_prefixes
        result = runtime.forward_backward(handle, [batch_of(sequences)], weighted_loss)
        assert result.metrics["tokens_computed"] == (48, 168)
        with pytest.raises(BatchError, match=r"^micro-batch 0 has 50 tokens; max_tokens_per_micro_batch=48; split it"):
            runtime.forward_backward(handle, [batch_of([*sequences, torch.cat((prompt, prompt[:2]))])], weighted_loss)


@pytest.mark.shows("runtime: where no sequences begin alike, a model gets the same input bit for bit as without sharing")
@pytest.mark.parametrize("family", ["qwen3", "gpt_oss", "qwen3_5"])
def test_without_shared_beginnings_a_model_gets_the_same_input(models: Mapping[str, Path], family: str) -> None:
    # 31 equal tokens are too few.
    alike = [torch.cat((torch.arange(31), torch.arange(index, index + 9))) for index in range(3)]
    for sequences in (alike, [torch.arange(index, index + 40) for index in range(3)]):
        batch, inputs, found = batch_of(sequences), list[Any](), list[list[Tensor]]()
        for share in ("auto", "off"):
            with open_runtime(models[family], share_prefixes=share) as runtime:
                handle = runtime.build_model()
                inputs.append(_rank_batch(handle, PassRequest([batch], None, True), 0, batch, None).inputs)
                result = runtime.forward_backward(handle, [batch], weighted_loss)
                found.append([*result.output("log_probs"), *gradients(handle).values()])
        (leaves, structure), (others, other) = map(tree_flatten, inputs)
        assert structure == other and sum(isinstance(leaf, Tensor) for leaf in leaves) >= 6
        for one, two in zip(leaves, others, strict=True):
            assert torch.equal(one, two) if isinstance(one, Tensor) else one == two
        assert all(torch.equal(first, second) for first, second in zip(*found, strict=True))


@pytest.mark.shows(
    "runtime: ratios of the first of several updates are 1 but for rounding, where its groups are divided elsewhere"
)
@pytest.mark.parametrize("share", ["auto", "off"])
def test_ratios_begin_at_1_where_an_update_divides_groups_elsewhere(models: Mapping[str, Path], share: str) -> None:
    """Three groups of a step need four micro-batches, so that one of them is divided; the two of its first update do not."""
    drawn = torch.Generator().manual_seed(0)
    prompts = [torch.randint(0, 128, (40,), generator=drawn) for _ in range(3)]
    sequences = [torch.cat((ids, torch.randint(0, 128, (12,), generator=drawn))) for ids in prompts for _ in range(8)]

    def plan(rows: Sequence[Tensor]) -> MicroBatchPlan:
        shared = plan_shared(rows, 1, 136, multiple_of=2) if share == "auto" else None
        return shared or plan_micro_batches([len(ids) for ids in rows], 1, 136, multiple_of=2)

    def log_probs(runtime: Any, handle: Any, rows: Sequence[Tensor]) -> list[Tensor]:
        packed = [batch_of([rows[index] for index in each]) for each in plan(rows).micro_batches[0]]
        packed = [PackedBatch(each.input_ids, each.seq_lens) for each in packed]
        result = runtime.forward_backward(handle, packed, None, forward_only=True)
        return restore_order(plan(rows), [list(result.output("log_probs"))])

    if share == "auto":
        sizes = [sorted(map(len, plan(rows).micro_batches[0])) for rows in (sequences, sequences[:16])]
        assert sizes == [[4, 4, 8, 8], [8, 8]]
    with open_runtime(models["qwen3"], share_prefixes=share) as runtime:
        handle = runtime.build_model()
        old, new = log_probs(runtime, handle, sequences)[:16], log_probs(runtime, handle, sequences[:16])
    ratios = torch.cat([(one - other).exp() for one, other in zip(new, old, strict=True)])
    assert float((ratios - 1).abs().max()) < 1e-5


def test_what_shares_nothing_says_why(models: Mapping[str, Path]) -> None:
    def why(*, takes_trees: bool = True, **options: Any) -> str:
        native = NativeConfig(**options)
        family, architecture, *_ = describe_model(models["qwen3"], native, "log_probs")
        family = family if takes_trees else dataclasses.replace(family, why_unshared=None)
        return why_unshared(family, architecture, native)

    assert why() == "" and why(share_prefixes="off") == "share_prefixes='off'"
    assert why(parallel={"cp": 2}, takes_trees=False) == "cp=2, model='qwen3'"
    spec = describe_model(models["qwen3"], NativeConfig(), "log_probs").architecture
    assert spec.why_unshared(None) == ""
    assert spec.why_unshared(DecoderOptions(delta_kernel="fla")) == "model_cfg.delta_kernel='fla'"


@pytest.mark.usefixtures("every_run")
@pytest.mark.parametrize("loss", ["router_aux_loss_coef", "router_z_loss_coef", "router_sequence_loss_coef"])
def test_losses_of_routers_count_every_token(models: Mapping[str, Path], loss: str) -> None:
    batches = [batch_of(sequences_of_a_tree(seed), seed) for seed in range(4)]
    options = {"model": "gpt_oss", "model_cfg": {loss: 3.0}}
    expected, without = compute(models["gpt_oss"], batches, **options), compute(models["gpt_oss"], batches)
    assert_same(compute(models["gpt_oss"], batches, share_prefixes="auto", **options), expected, batches)
    name = "layers.1.mlp.gate.weight"
    assert relative_difference(without[0].gradients[name], expected[0].gradients[name]) > 1e-3


@pytest.mark.usefixtures("every_run")
@pytest.mark.parametrize(("family", "chosen"), [("deepseek_v3", {}), ("glm4_moe", {"mtp": "joint"})])
def test_loads_of_experts_count_every_token(models: Mapping[str, Path], family: str, chosen: Mapping[str, Any]) -> None:
    batch, found = batch_of(sequences_of_a_tree(1)), []
    for share in ("off", "auto"):
        options = {"model": family, "model_cfg": {"expert_bias_rate": 0.1, **chosen}, "share_prefixes": share}
        with open_in_float64(models[family], **options) as runtime:
            handle = runtime.build_model()
            result = runtime.forward_backward(handle, [batch], weighted_loss)
            assert ("tokens_computed" in result.metrics) == handle.shares_prefixes == (share == "auto")
            assert handle.optimizer is not None and handle.optimizer.balance is not None
            found.append([counts.tolist() for counts in handle.optimizer.balance._counts.values()])
    assert found[0] == found[1] and found[0] and all(sum(counts) % batch.num_tokens == 0 for counts in found[0])


def test_a_row_predicts_once_for_each_label_and_temperature() -> None:
    rows = torch.tensor([0, 1, 2, 0, 1, 3, 0, 1])
    labels = torch.tensor([5, 6, -100, 5, 7, -100, 5, 6])
    wanted = each_prediction_once(rows, labels, 0.5)
    assert wanted.of_rows is not None and wanted.of_tokens is not None
    assert (wanted.of_rows.tolist(), wanted.labels.tolist(), wanted.temperature) == (
        [0, 1, 1, 2, 3],
        [5, 6, 7, -100, -100],
        0.5,
    )
    assert wanted.of_tokens.tolist() == [0, 1, 3, 0, 2, 4, 0, 1]
    temperatures = torch.tensor([1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 0.5, 0.5])
    two = each_prediction_once(rows, labels[:, None].expand(-1, 2), temperatures)
    assert two.of_rows is not None and two.of_tokens is not None and isinstance(two.temperature, Tensor)
    assert two.of_rows.tolist() == [0, 0, 1, 1, 1, 2, 3] and two.labels.shape == (7, 2)
    assert torch.equal(two.temperature[two.of_tokens], temperatures) and torch.equal(two.of_rows[two.of_tokens], rows)
    assert torch.equal(two.labels[two.of_tokens][:, 1], labels)


def test_with_masks_a_row_predicts_for_each_token_that_was_sampled() -> None:
    rows = torch.tensor([0, 1, 2, 0, 1, 3, 0, 1])
    labels = torch.tensor([5, 6, -100, 5, -100, -100, 5, -100])
    mask = torch.arange(8)[:, None].expand(-1, 2)
    wanted = each_prediction_once(rows, labels, torch.linspace(0.5, 1.0, 8), SamplingCuts(top_k=2, mask=mask))
    assert wanted.of_rows is not None and wanted.of_tokens is not None and wanted.cuts is not None
    asked = labels != -100
    assert wanted.cuts.mask is not None and wanted.cuts.top_k == 2
    assert torch.equal(wanted.cuts.mask[wanted.of_tokens][asked], mask[asked])
    assert torch.equal(wanted.of_rows[wanted.of_tokens], rows) and torch.equal(wanted.labels[wanted.of_tokens], labels)
    same = each_prediction_once(rows, labels, 0.5, SamplingCuts(top_k=2, mask=mask))
    assert same.of_rows is not None and same.of_rows.tolist() == [0, 0, 0, 1, 1, 2, 3]


NAMES = ("narrow", "middle", "critic")


def train_tenants(model: Path, share: str, present: Sequence[str] = NAMES) -> dict[str, Mapping[str, Tensor]]:
    """Factors of each after two steps on sequences of those ``present``, and their outputs before."""
    with open_runtime(model, share_prefixes=share) as runtime:
        base = runtime.build_model(trainable=False)
        tenants = create(runtime, base, NAMES, {"middle": {"dropout": 0.2}})
        found: dict[str, Mapping[str, Tensor]] = {}
        for step in range(2):
            rows, facts = [], {}
            for number, name in enumerate(NAMES):
                if name in present:
                    owner = {LORA_FIELD: torch.tensor(tenants[name].lora_id)}
                    # The same tokens of all tenants, and others of each.
                    for ids in (*sequences_of_a_tree(step), *sequences_of_a_tree(10 + number)):
                        rows.append(TokenSequence(ids, {}, owner))
                    facts[tenants[name].lora_id] = {"batch_num_tokens": 100.0}
            batch = pack(rows, {"tenants": facts, "dp_size": 1})
            result = runtime.forward_backward(base, [batch], {name: LOSSES.get(name, nll) for name in present})
            assert (
                (result.metrics["tokens_computed"].mean < 0.9)
                if share == "auto"
                else "tokens_computed" not in result.metrics
            )
            for name in present:
                outputs = {each: torch.cat(list(values)) for each, values in result.tenants[name].outputs.items()}
                found[name] = {**found.get(name, {}), **{f"{step}.{each}": value for each, value in outputs.items()}}
            runtime.optimizer_step([tenants[name] for name in present])
            runtime.zero_grad([tenants[name] for name in present])
        return {name: {**found[name], **copied(runtime.export_lora_adapter(tenants[name]))} for name in present}


@pytest.mark.usefixtures("every_run")
def test_tenants_share_among_their_own_sequences_and_change_no_bit_of_others(models: Mapping[str, Path]) -> None:
    alone, shared = (train_tenants(models["qwen3"], share) for share in ("off", "auto"))
    for name in NAMES:
        assert_near(shared[name], alone[name], 1e-4)
    # What dropout drops is drawn for whole sequences.
    assert all(torch.equal(value, alone["middle"][each]) for each, value in shared["middle"].items())
    by_itself = train_tenants(models["qwen3"], "auto", ["narrow"])["narrow"]
    assert all(torch.equal(value, shared["narrow"][each]) for each, value in by_itself.items())


@pytest.mark.shows("runtime: with shared prefixes a run that continues from a checkpoint is the same to the last bit")
def test_a_run_that_continues_is_the_same_to_the_last_bit(models: Mapping[str, Path], tmp_path: Path) -> None:
    drawn = torch.Generator().manual_seed(0)
    steps = []
    for seed in range(2):
        prompt = torch.randint(0, 128, (50,), generator=drawn)
        answers = [torch.cat((prompt, torch.randint(0, 128, (9,), generator=drawn))) for _ in range(4)]
        steps.append([batch_of(answers, seed)])
    with open_runtime(models["qwen3_5"]) as runtime:

        def trained(handle: NativeHandle, step: int) -> dict[str, Tensor]:
            runtime.zero_grad(handle)
            result = runtime.forward_backward(handle, steps[step], weighted_loss)
            assert result.metrics["tokens_computed"] == (86, 236) and runtime.optimizer_step(handle).ok
            return weights(handle)

        handle, again = runtime.build_model(), runtime.build_model()
        trained(handle, 0)
        runtime.save_checkpoint(handle, tmp_path / "saved")
        expected = trained(handle, 1)
        runtime.load_checkpoint(again, tmp_path / "saved")
        assert all(torch.equal(value, expected[name]) for name, value in trained(again, 1).items())
