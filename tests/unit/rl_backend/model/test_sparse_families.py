"""DeepSeek-V3.2 and GLM-5: equal to their reference, dense where k covers, and indexers that learn and do not disturb."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from rl_backend.checkpoint.hf_reader import HFReader, read_hf_config
from rl_backend.contracts import ConfigError, PackedBatch, ParallelConfig, UnsupportedError
from rl_backend.contracts.lora import LoRAConfig
from rl_backend.model import BuildSettings, ModelStage, find_model
from rl_backend.model.options import DecoderOptions
from tests.support.families import random_sequences
from tests.support.native import open_runtime
from tests.support.sparse_models import TOP_K, reference, reference_log_probs, write_sparse
from tests.support.tenants import LENGTHS as TENANT_LENGTHS
from tests.support.tenants import tenants_job
from tests.unit.rl_backend.model.test_multi_token import mean_nll

LENGTHS = (21, 1, 5, 13)
FAMILIES = (pytest.param("deepseek_v32", marks=pytest.mark.long), "glm_moe_dsa")


@pytest.fixture(scope="module", params=FAMILIES)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_sparse(tmp_path_factory.mktemp("sparse") / request.param, request.param)


def batch(lengths: tuple[int, ...] = LENGTHS) -> PackedBatch:
    return PackedBatch(torch.cat(random_sequences(lengths)), torch.tensor(lengths))


def pass_over(model: Path, data: PackedBatch, **options: Any) -> tuple[list[Tensor], dict[str, Tensor]]:
    """Log-probs of each sequence, and gradients of the mean."""
    settings = {"model": read_hf_config(model)["model_type"], "model_cfg": options} if options else {}
    with open_runtime(model, **settings) as runtime:
        policy = runtime.build_model()
        result = runtime.forward_backward(policy, [data], mean_nll)
        gradients = {name: value.clone() for name, value in runtime.export_gradients(policy)}
        return [each[:-1] for each in result.output("log_probs")], gradients


@pytest.mark.shows(
    "sparse attention: DeepSeek-V3.2 and GLM-5 (shared indices too) equal a corrected transformers to 1e-5, gradients too"
)
def test_log_probs_and_gradients_equal_the_reference(model: Path) -> None:
    assert max(LENGTHS) > 2 * TOP_K
    found, gradients = pass_over(model, batch())
    sequences = random_sequences(LENGTHS)
    with reference(model) as transformers:
        expected = reference_log_probs(transformers, sequences)
        (-torch.cat(expected).sum() / (sum(LENGTHS) - len(LENGTHS))).backward()
        wanted = {name: value.grad for name, value in transformers.named_parameters() if value.grad is not None}
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other.detach(), atol=1e-5, rtol=0)
    for name, gradient in wanted.items():
        if ".experts." in name:
            continue
        torch.testing.assert_close(gradients.pop(name), gradient, atol=1e-5, rtol=0)
    packed = {name: gradient for name, gradient in wanted.items() if ".experts." in name}
    for name, gradient in packed.items():
        block, _, kind = name.rpartition(".")
        parts = ("gate_proj", "up_proj") if kind == "gate_up_proj" else ("down_proj",)
        for expert, whole in enumerate(gradient):
            for part, rows in zip(parts, whole.chunk(len(parts)), strict=True):
                torch.testing.assert_close(gradients.pop(f"{block}.{expert}.{part}.weight"), rows, atol=1e-5, rtol=0)
    assert not gradients, "indexers are frozen"


@pytest.mark.shows("sparse attention: GLM-5's norms of latents have the epsilon that transformers gives them")
def test_norms_of_latents_have_the_epsilon_that_transformers_gives_them(tmp_path: Path) -> None:
    glm, sequences = write_sparse(tmp_path / "glm", "glm_moe_dsa", rms_norm_eps=0.1), random_sequences(LENGTHS)
    with reference(glm) as transformers, torch.no_grad():
        expected = reference_log_probs(transformers, sequences)
    for one, other in zip(pass_over(glm, batch())[0], expected, strict=True):
        torch.testing.assert_close(one, other, atol=1e-5, rtol=0)


def test_layers_may_have_the_names_that_newer_transformers_gives_them(model: Path) -> None:
    fields = {name: value for name, value in read_hf_config(model).items() if name != "layer_types"}

    def parse(**changes: Any) -> Any:
        changed = {**fields, **changes}
        return find_model("auto", changed).parse_config(changed)

    for name in ("indexed_attention", "deepseek_sparse_attention", "full_attention"):
        assert parse(layer_types=[name] * 4) == parse()
    for other in ({"layer_types": ["sliding_attention"] * 4}, {"layer_types": ["indexed_attention"] * 3}):
        with pytest.raises(UnsupportedError, match="layer_types="):
            parse(**other)
    with pytest.raises(UnsupportedError, match="only 'full_attention' is implemented here"):
        parse(layer_types=["indexed_attention"] * 4, model_type="deepseek_v3")


@pytest.mark.shows("sparse attention: a model whose k covers the sequence equals the dense model without indexers")
def test_it_is_the_dense_model_where_k_covers_the_sequence(tmp_path: Path) -> None:
    sparse = write_sparse(tmp_path / "sparse", "deepseek_v32", index_topk=max(LENGTHS))
    dense = tmp_path / "dense"
    dense.mkdir()
    tensors = load_file(sparse / "model.safetensors")
    save_file({name: each for name, each in tensors.items() if ".indexer." not in name}, dense / "model.safetensors")
    (dense / "config.json").write_text(json.dumps({**read_hf_config(sparse), "model_type": "deepseek_v3"}))
    (one, gradients), (other, expected) = pass_over(sparse, batch()), pass_over(dense, batch())
    assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))
    assert gradients.keys() == expected.keys()
    assert all(torch.equal(gradients[name], expected[name]) for name in expected)


@pytest.mark.shows("sparse attention: an indexer learns without changing the model's gradients; its warm-up moves it alone")
def test_indexers_learn_beside_the_model_and_alone(model: Path) -> None:
    frozen = pass_over(model, batch())[1]
    log_probs, sparse = pass_over(model, batch(), indexer="sparse")
    assert all(torch.equal(sparse[name], gradient) for name, gradient in frozen.items())
    own = sparse.keys() - frozen.keys()
    assert own and all(".indexer." in name for name in own)
    # ``k_norm``'s bias moves scores of all keys alike in some heads, but none is without a gradient.
    assert all(bool(sparse[name].any()) for name in own)
    twice = pass_over(model, batch(), indexer="sparse", indexer_loss_weight=2.0)[1]
    assert all(torch.allclose(twice[name], 2.0 * sparse[name], rtol=1e-5, atol=1e-9) for name in own)
    dense, alone = pass_over(model, batch(), indexer="warm_up")
    assert alone.keys() == own
    assert any(not torch.equal(a, b) for a, b in zip(dense, log_probs, strict=True)), "the warm-up attends to all keys"


@pytest.mark.shows("sparse attention: steps of the warm-up bring an indexer nearer to the attention")
def test_the_warm_up_makes_its_loss_fall(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from rl_backend.model.mixers import mla

    seen: list[float] = []
    loss = mla.indexer_loss

    def record(*args: Any, **kwargs: Any) -> Tensor:
        found = loss(*args, **kwargs)
        seen.append(found.item())
        return found

    monkeypatch.setattr(mla, "indexer_loss", record)
    family = read_hf_config(model)["model_type"]
    with open_runtime(model, model=family, model_cfg={"indexer": "warm_up"}) as runtime:
        policy = runtime.build_model()
        before = {name: value.clone() for name, value in runtime.export_weights(policy)}
        for _ in range(12):
            runtime.zero_grad(policy)
            runtime.forward_backward(policy, [batch()], mean_nll)
            assert runtime.optimizer_step(policy).ok
        after = {name: value.clone() for name, value in runtime.export_weights(policy)}
    layers = len(seen) // 12
    assert sum(seen[-layers:]) < 0.9 * sum(seen[:layers])
    assert {name for name in before if not torch.equal(before[name], after[name])} == {
        name for name in before if ".indexer." in name
    }


@pytest.mark.parametrize("family", FAMILIES)
def test_the_layer_for_multi_token_prediction_is_trained_too(tmp_path: Path, family: str) -> None:
    source = write_sparse(tmp_path / "source", family, mtp=True)
    gradients = pass_over(source, batch(), mtp="joint", indexer="sparse")[1]
    own = {name for name in HFReader(source).infos if name.startswith("model.layers.4.")}
    buffers = {name for name in own if name.endswith("e_score_correction_bias")}
    assert own - buffers <= gradients.keys()
    with open_runtime(source) as runtime:
        kept = runtime.build_model().kept
    assert set(kept) == own


def test_names_are_those_of_the_directory_and_what_follows_has_no_indexer(model: Path, tmp_path: Path) -> None:
    with open_runtime(model) as runtime:
        runtime.save_checkpoint(runtime.build_model(), tmp_path / "out", hf=True)
    before, after = HFReader(model), HFReader(tmp_path / "out")
    assert before.infos == after.infos
    assert all(torch.equal(before.read(name), after.read(name)) for name in before.infos)
    with_indexer = {name.split(".")[2] for name in before.infos if ".indexer." in name}
    assert with_indexer == ({"0", "2"} if read_hf_config(model)["model_type"] == "glm_moe_dsa" else {"0", "1", "2", "3"})


def test_what_cannot_be_is_refused_by_name(tmp_path: Path, model: Path) -> None:
    config = read_hf_config(model)
    family = find_model("auto", config)
    decoder = family.parse_config(config)
    taught = family.architecture(config, DecoderOptions(indexer="sparse"))
    for layout in ({"tp": 2}, {"cp": 2}):
        decoder.check_layout(ParallelConfig(**layout))
        with pytest.raises(ConfigError, match=rf"ParallelConfig\.{next(iter(layout))}=2.*indexer='sparse' needs all heads"):
            taught.check_layout(ParallelConfig(**layout))
    for options in ({"expert_bias_rate": 0.01}, {"mtp": "joint"}, {"mtp": "detached"}):
        drafting = {**config, "num_nextn_predict_layers": 1}
        with pytest.raises(ConfigError, match=rf"model_cfg\.{next(iter(options))}=.*trains indexers alone"):
            family.architecture(drafting, DecoderOptions(indexer="warm_up", **options))
    if family.name == "glm_moe_dsa":
        settings = BuildSettings(DecoderOptions(), "log_probs", 16, ModelStage(False, range(1, 4), True))
        with pytest.raises(ConfigError, match=r"pipeline_layers=1: .*begin with layers of \[0, 2\]"):
            family.build(decoder, settings)
        for field, value in (("indexer_types", ["shared"] * 4), ("indexer_types", ["full"]), ("index_head_dim", 4)):
            with pytest.raises(UnsupportedError, match=field):
                family.parse_config({**config, field: value})
        without = {name: value for name, value in config.items() if name != "indexer_types"}
        with pytest.raises(UnsupportedError, match="index_topk_freq"):
            family.parse_config({**without, "index_topk_freq": 4})
    with pytest.raises(UnsupportedError, match="q_lora_rank"):
        family.parse_config({**config, "q_lora_rank": None})


def test_tenants_have_no_adapters_in_an_indexer(model: Path) -> None:
    with open_runtime(model) as runtime:
        base = runtime.build_model(trainable=False)
        runtime.create_lora_adapter(base, LoRAConfig(targets=("attention",)))
        assert base.adaptable is not None
        names = list(base.adaptable.kinds)
    assert names and not any("indexer" in name for name in names)


@pytest.mark.shows("sparse attention: a LoRA tenant has the same bits alone and beside sequences that k does not cover")
def test_a_tenant_has_the_same_bits_alone_and_beside_longer_sequences(tmp_path: Path) -> None:
    model = str(write_sparse(tmp_path / "model", "deepseek_v32", index_topk=20))
    assert max(TENANT_LENGTHS["narrow"][2:]) < 20 < min(TENANT_LENGTHS["middle"][2:]), "of the second micro-batch"
    changes = {"middle": {"targets": ("attention",)}}
    beside = tenants_job(model, ("narrow", "middle"), {}, 1, of_each=changes)["narrow"]
    alone = tenants_job(model, ("narrow",), {}, 1)["narrow"]
    assert beside.losses == alone.losses
    assert all(torch.equal(beside.gradients[name], gradient) for name, gradient in alone.gradients.items())
