"""Multi-token prediction: its loss and gradients, what it moves, and what is saved of it."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from rl_backend.checkpoint.hf_reader import HFReader
from rl_backend.contracts import ConfigError, ModelOutput, PackedBatch, UnsupportedError
from rl_backend.contracts.lora import LoRAConfig
from rl_backend.model.decoder import MultiTokenPrediction
from rl_backend.primitive.norm import NormSpec
from rl_backend.runtime.native.engine import native_runtime
from rl_backend.runtime.native.layout import check_weights
from tests.support.drafting import COPIES as ORIGINALS
from tests.support.drafting import PlainDrafting, write_drafting
from tests.support.families import random_sequences
from tests.support.native import make_config, open_runtime

LENGTHS = (9, 1, 2, 14, 3, 6)
MODULE = "model.layers.2."
COPIES = {MODULE + copy: original for copy, original in ORIGINALS.items()}
KINDS: Mapping[str, Mapping[str, Any]] = {
    "drafting": {},
    "drafting_moe": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32},
    "glm4_moe": {"num_hidden_layers": 2},
}
"""Family -> fields of a model of two layers."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_drafting(tmp_path_factory.mktemp("drafting") / "model")


@pytest.mark.parametrize("norm", [NormSpec(1e-2), NormSpec(1e-2, kind="layer", bias=True), NormSpec(1e-2, from_one=True)])
def test_all_three_norms_are_those_of_the_model(norm: NormSpec) -> None:
    torch.manual_seed(0)
    module = MultiTokenPrediction(6, norm, torch.nn.Tanh())
    for each in module.parameters():
        torch.nn.init.normal_(each)

    def normed(x: Tensor, weights: torch.nn.Module) -> Tensor:
        if norm.kind == "layer":
            return torch.nn.functional.layer_norm(x, (6,), weights.weight, weights.bias, 1e-2)
        weight = weights.weight + 1 if norm.from_one else weights.weight
        return x / (x.square().mean(-1, keepdim=True) + 1e-2).sqrt() * weight

    hidden, embedding = torch.randn(5, 6) / 10, torch.randn(5, 6) / 10
    both = torch.cat((normed(embedding, module.embedding_norm), normed(hidden, module.hidden_norm)), -1)
    expected = normed(torch.tanh(both @ module.projection.weight.t()), module.norm)
    torch.testing.assert_close(module(hidden, embedding), expected)


def mean_nll(output: ModelOutput, data: PackedBatch, dp_group: Any = None) -> tuple[Tensor, Mapping[str, Any]]:
    assert output.log_probs is not None
    return -output.log_probs.sum() / (data.num_tokens - data.num_sequences), {}


def batches(*parts: tuple[int, ...]) -> list[PackedBatch]:
    sequences = random_sequences(LENGTHS)
    return [PackedBatch(torch.cat([sequences[i] for i in part]), torch.tensor([LENGTHS[i] for i in part])) for part in parts]


def gradients(
    model: Path, data: list[PackedBatch], kind: str = "drafting", **options: Any
) -> tuple[float, dict[str, Tensor]]:
    with open_runtime(model, model=kind, model_cfg=options) as runtime:
        policy = runtime.build_model()
        runtime.zero_grad(policy)
        loss = runtime.forward_backward(policy, data, mean_nll).loss
        return loss, {name: value.clone() for name, value in runtime.export_gradients(policy)}


@pytest.mark.shows(
    "multi-token prediction: the loss and all gradients equal a plain version to 1e-5, joint and detached, of GLM-4.5 too"
)
@pytest.mark.parametrize("mtp", ["joint", "detached"])
@pytest.mark.parametrize("kind", ["drafting", "glm4_moe"])
def test_gradients_equal_those_of_a_plain_version(tmp_path: Path, kind: str, mtp: str) -> None:
    weight, model = 0.3, write_drafting(tmp_path / "model", kind, **KINDS[kind])
    loss, found = gradients(model, batches((0, 1, 2, 3, 4, 5)), kind, mtp=mtp, mtp_loss_weight=weight)
    plain = PlainDrafting(model)
    expected, of_second = plain.losses(random_sequences(LENGTHS), detached=mtp == "detached")
    assert loss == pytest.approx(expected.item(), abs=1e-5), "the loss that is reported is the caller's"
    (expected + weight * of_second).backward()
    for name, gradient in plain.gradients().items():
        torch.testing.assert_close(found.pop(name), gradient, atol=1e-5, rtol=0)
    # Copies are exported with the gradient of what they are copies of.
    assert {name for name in found if not name.endswith("e_score_correction_bias")} == COPIES.keys()


def test_packed_sequences_and_micro_batches_are_those_of_sequences_alone(model: Path) -> None:
    together = gradients(model, batches((0, 3)), mtp="joint")[1]
    # Means of parts are weighed as the whole's: by their tokens.
    alone = [gradients(model, batches((i,)), mtp="joint", mtp_loss_weight=0.1)[1] for i in (0, 3)]
    sizes = {0: (8, 7), 3: (13, 12)}
    name = f"{MODULE}eh_proj.weight"
    expected = sum(sizes[i][1] / 19 * each[name] for i, each in zip((0, 3), alone, strict=True))
    torch.testing.assert_close(together[name], expected, atol=1e-6, rtol=0)
    twice = gradients(model, batches((0, 3), (0, 3)), mtp="joint")[1]
    torch.testing.assert_close(twice[name], together[name], atol=1e-6, rtol=0)


@pytest.mark.shows("multi-token prediction: detached, it moves nothing but its own weights")
def test_detached_it_leaves_the_models_gradients_as_they_are_without_it(model: Path) -> None:
    data = batches((0, 1), (2, 3))
    without, detached = gradients(model, data)[1], gradients(model, data, mtp="detached")[1]
    assert all(torch.equal(detached[name], gradient) for name, gradient in without.items())
    own = detached.keys() - without.keys() - COPIES.keys()
    assert own and all(name.startswith(MODULE) and bool(detached[name].any()) for name in own)


@pytest.mark.shows("multi-token prediction: copies of embeddings and head are saved equal to the trained ones")
@pytest.mark.parametrize("kind", KINDS)
def test_it_is_trained_and_saved_under_the_names_of_the_directory(tmp_path: Path, kind: str) -> None:
    source = write_drafting(tmp_path / "source", kind, **KINDS[kind])
    with open_runtime(source, model=kind, model_cfg={"mtp": "joint"}) as runtime:
        policy = runtime.build_model()
        assert not policy.kept
        runtime.forward_backward(policy, batches((0, 3)), mean_nll)
        assert runtime.optimizer_step(policy).ok
        runtime.save_checkpoint(policy, tmp_path / "out", hf=True)
        pushed = {name: value.clone() for name, value in runtime.export_weights(policy)}
        runtime.save_checkpoint(policy, tmp_path / "state")
    before, after = HFReader(source), HFReader(tmp_path / "out")
    assert {name: info.shape for name, info in before.infos.items()} == {name: i.shape for name, i in after.infos.items()}
    assert pushed.keys() == after.infos.keys()
    for name in after.infos:
        assert torch.equal(after.read(name), pushed[name])
        moves = not name.endswith("e_score_correction_bias")
        assert torch.equal(after.read(name), before.read(name)) != moves, f"{name} is trained, but for biases in a choice"
    for copy, original in COPIES.items():
        assert torch.equal(after.read(copy), after.read(original))
    with open_runtime(source, model=kind, model_cfg={"mtp": "joint"}) as runtime:
        policy = runtime.build_model()
        runtime.load_checkpoint(policy, tmp_path / "state")
        assert all(torch.equal(value, pushed[name]) for name, value in runtime.export_weights(policy))


@pytest.mark.shows("multi-token prediction: by default it is carried along untouched")
def test_by_default_it_is_kept_as_it_is(model: Path, tmp_path: Path) -> None:
    with open_runtime(model) as runtime:
        policy = runtime.build_model()
        runtime.forward_backward(policy, batches((0, 3)), mean_nll)
        runtime.optimizer_step(policy)
        runtime.save_checkpoint(policy, tmp_path / "out", hf=True)
        assert not any(name.startswith(MODULE) for name, _ in runtime.export_weights(policy))
    before, after = load_file(model / "model.safetensors"), HFReader(tmp_path / "out")
    own = [name for name in before if name.startswith(MODULE)]
    assert own and all(torch.equal(after.read(name), before[name]) for name in own)


def test_a_directory_with_other_copies_is_read_as_its_originals(model: Path, tmp_path: Path) -> None:
    """What is left of a layer that was kept while the rest was trained."""
    with open_runtime(model) as runtime:
        policy = runtime.build_model()
        runtime.forward_backward(policy, batches((0, 3)), mean_nll)
        runtime.optimizer_step(policy)
        runtime.save_checkpoint(policy, tmp_path / "out", hf=True)
    stale = HFReader(tmp_path / "out")
    with open_runtime(tmp_path / "out", model="drafting", model_cfg={"mtp": "detached"}) as runtime:
        weights = {name: value.clone() for name, value in runtime.export_weights(runtime.build_model())}
    for copy, original in COPIES.items():
        assert torch.equal(weights[copy], stale.read(original)) and not torch.equal(weights[copy], stale.read(copy))


@pytest.mark.shows("multi-token prediction: a model whose directory has no copies, as GLM-4.6, is saved and pushed without")
def test_a_directory_without_copies_is_saved_without_them(tmp_path: Path) -> None:
    with_copies, without = (
        write_drafting(tmp_path / str(copies), "glm4_moe", copies=copies, **KINDS["glm4_moe"]) for copies in (True, False)
    )
    saved = []
    for source in (with_copies, without):
        config = make_config(source, model="glm4_moe", model_cfg={"mtp": "joint"})
        check_weights(config, "log_probs")
        with closing(native_runtime(config)) as runtime:
            policy = runtime.build_model()
            runtime.forward_backward(policy, batches((0, 3)), mean_nll)
            runtime.optimizer_step(policy)
            runtime.save_checkpoint(policy, source / "out", hf=True)
            saved.append(load_file(source / "out" / "model.safetensors"))
            assert {name for name, _ in runtime.export_weights(policy)} == saved[-1].keys()
            assert {info.name for info in runtime.weight_infos(policy)} == HFReader(source).infos.keys()
    assert saved[0].keys() - saved[1].keys() == COPIES.keys()
    assert all(torch.equal(saved[0][name], value) for name, value in saved[1].items())


def test_what_cannot_be_is_refused_by_name(model: Path, untied_model: Path) -> None:
    with (
        open_runtime(model, model="drafting", model_cfg={"mtp": "joint"}) as runtime,
        pytest.raises(UnsupportedError, match=r"NativeConfig\.model_cfg\.mtp='joint'"),
    ):
        runtime.create_lora_adapter(runtime.build_model(trainable=False), LoRAConfig(targets=("attention",)))
    with (
        open_runtime(untied_model, model="drafting", model_cfg={"mtp": "joint"}) as runtime,
        pytest.raises(Exception, match=r"has no tensor.*model\.layers\.2\."),
    ):
        runtime.build_model()


def test_a_value_head_has_no_such_layer(model: Path) -> None:
    with open_runtime(model, model="drafting", model_cfg={"mtp": "joint"}) as runtime:
        critic = runtime.build_model(head="values")
        assert not any(name.startswith(MODULE) for name, _ in runtime.export_weights(critic))
        assert any(name.startswith(MODULE) for name in critic.kept)


def test_a_model_without_the_layer_refuses_to_train_it() -> None:
    from rl_backend.model.families.dense import qwen3
    from rl_backend.model.hf_config import HFConfig
    from rl_backend.model.options import DecoderOptions

    fields = {"vocab_size": 8, "hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "rope_theta": 1e4}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2, "max_position_embeddings": 8}
    decoder = qwen3(HFConfig({**fields, **heads}, "qwen3"))
    with pytest.raises(
        ConfigError,
        match=r"NativeConfig\.model_cfg\.mtp='joint'.*describes no part that takes it",
    ):
        decoder.configured(DecoderOptions(mtp="joint"))
