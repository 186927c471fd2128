"""What a backend says of itself: optimizers' states, tenants, and whether rows of products are exact."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from rl_backend.contracts import (
    HandleError,
    NativeConfig,
    OptimizerConfig,
    ParallelConfig,
    RuntimeConfig,
    TensorInfo,
    UnsupportedError,
)
from rl_backend.contracts.lora import PEFT_PREFIX, LoRAConfig
from rl_backend.data.micro_batches import pack
from rl_backend.primitive import adapters
from rl_backend.runtime import backend_info as facts_of_backends
from rl_backend.runtime.native.engine import NativeEngine, NativeRuntime, native_runtime
from tests.support.models import write_tiny
from tests.support.native import VOCAB_SIZE, open_runtime, token_loss
from tests.support.sft_batches import random_token_sequences
from tests.support.sparse_models import write_sparse
from tests.support.tenants import create, rows, train_tenants

OPTIMIZER = OptimizerConfig(lr=1e-2, lr_warmup_steps=4)


@pytest.fixture(autouse=True)
def tried_anew() -> Iterator[None]:
    adapters._tried.cache_clear()
    yield
    adapters._tried.cache_clear()


def test_the_state_of_a_tenants_optimizer_is_named_as_peft_names_its_tensors(runtime: NativeRuntime) -> None:
    base = runtime.build_model(trainable=False, name="base")
    tenants = create(runtime, base, ("narrow", "critic"))
    train_tenants(runtime, base, tenants, 2)
    for name, tenant in tenants.items():
        state = runtime.get_optimizer_state(tenant)
        shapes = {key: tuple(value.shape) for key, value in runtime.export_lora_adapter(tenant)}
        assert state.step == 2 and state.learning_rate == tenant.optimizer.schedule.learning_rate
        for moments, row in ((state.exp_avg, tenant.rows.exp_avg), (state.exp_avg_sq, tenant.rows.exp_avg_sq)):
            assert {key: tuple(value.shape) for key, value in moments.items()} == shapes
            total = sum(float(value.double().abs().sum()) for value in moments.values())
            assert total == pytest.approx(float(row.double().abs().sum())) and total > 0
        assert (PEFT_PREFIX + "score.bias" in state.exp_avg) is (name == "critic")
    listed = runtime.list_optimizer_states(base)
    assert [(each.name, each.step) for each in listed] == [("narrow", 2), ("critic", 2)]
    assert [each.bytes for each in listed] == [2 * tenant.rows.weights.nbytes for tenant in tenants.values()]
    with pytest.raises(HandleError, match="forward-only"):
        runtime.get_optimizer_state(base)


def test_a_trained_model_has_a_state_too(runtime: NativeRuntime) -> None:
    policy = runtime.build_model(name="policy", optimizer=OPTIMIZER)
    batch = pack(random_token_sequences((9, 20), VOCAB_SIZE, 0), {"batch_num_tokens": 29.0, "dp_size": 1})
    runtime.forward_backward(policy, [batch], token_loss)
    runtime.optimizer_step(policy)
    learning_rate = runtime.lr_scheduler_step(policy)
    state = runtime.get_optimizer_state(policy)
    infos = runtime.weight_infos(policy)
    assert {name: tuple(value.shape) for name, value in state.exp_avg.items()} == {info.name: info.shape for info in infos}
    assert (state.step, state.learning_rate) == (1, learning_rate)
    assert any(bool(value.any()) for value in state.exp_avg_sq.values())
    (listed,) = runtime.list_optimizer_states(policy)
    assert (listed.name, listed.step) == ("policy", 1)
    assert listed.bytes >= 2 * sum(info.num_elements for info in infos) * 4


def test_a_backend_tells_what_it_runs_and_for_whom(runtime: NativeRuntime, model: Path) -> None:
    base = runtime.build_model(trainable=False, name="base")
    tenants = create(runtime, base, ("narrow", "critic"))
    info = runtime.get_backend_info(tenants["critic"])
    assert (info.runtime, info.device, info.base, info.hf_path) == ("native", "cpu", "base", str(model))
    assert (info.model_type, info.head) == ("qwen3", "log_probs")
    assert info.layout == {"world": 1, "dp": 1, "tp": 1, "pp": 1, "vpp": 1, "cp": 1, "ep": 1, "etp": 1}
    assert [(each.name, each.head, each.config.rank) for each in info.tenants] == [
        ("narrow", "log_probs", 4),
        ("critic", "values", 8),
    ]
    assert info.bit_exact is True
    assert torch.__version__.startswith(info.installed["torch"])


@pytest.mark.shows(
    "tenants: a matrix library whose rows depend on others is found out before the first tenant trains, and said"
)
def test_products_whose_rows_depend_on_others_are_noticed(
    runtime: NativeRuntime, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def product_of_halves(x: torch.Tensor, matrix: torch.Tensor) -> torch.Tensor:
        """Adds up in another order for few rows, as libraries do."""
        half = x.shape[1] // 2
        return x @ matrix if x.shape[0] > 100 else x[:, :half] @ matrix[:half] + x[:, half:] @ matrix[half:]

    base = runtime.build_model(trainable=False)
    monkeypatch.setattr(adapters, "padded_product", product_of_halves)
    with caplog.at_level(logging.WARNING):
        runtime.create_lora_adapter(base, LoRAConfig())
        runtime.create_lora_adapter(base, LoRAConfig())
    (record,) = (each for each in caplog.records if each.name == adapters.__name__)
    assert record.getMessage().startswith("rows of products of torch.float32")
    assert runtime.get_backend_info(base).bit_exact is False


def test_nothing_is_claimed_of_a_gpu() -> None:
    assert not adapters.rows_are_exact(torch.float32, torch.device("cuda"))


@pytest.mark.parametrize("own_shards", [True, False])
def test_an_atom_of_models_alone_refuses_a_tenant(
    runtime: NativeRuntime, monkeypatch: pytest.MonkeyPatch, own_shards: bool
) -> None:
    if not own_shards:
        monkeypatch.delattr(NativeEngine, "shards")
    base = runtime.build_model(trainable=False, name="base")
    tenant = create(runtime, base, ("narrow",))["narrow"]
    with pytest.raises(HandleError, match="on 'narrow', a LoRA tenant; give 'base'"):
        runtime.export_shards(tenant)
    shards = {each.name: (each.tensor.dtype, each.offset) for each in runtime.export_shards(base, dtype=torch.bfloat16)}
    assert shards == {info.name: (torch.bfloat16, (0,) * len(info.shape)) for info in runtime.weight_infos(base)}
    runtime.close()
    assert tenant.owner is None and not tenant.rows.tensors


@pytest.mark.parametrize("field", ["router_aux_loss_coef", "router_z_loss_coef"])
def test_routers_that_couple_tenants_are_refused(tmp_path: Path, field: str) -> None:
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
    model = write_tiny("qwen3_moe", tmp_path / "moe", **experts)
    with open_runtime(model, model="qwen3_moe", model_cfg={field: 0.01}) as runtime:
        base = runtime.build_model(trainable=False)
        with pytest.raises(UnsupportedError, match=rf"NativeConfig\.model_cfg\.{field}=0\.01: .* leave it out"):
            runtime.create_lora_adapter(base, LoRAConfig(targets=("attention",)))


@pytest.mark.shows("lora: options of a base that would train a part of it are refused beside tenants, not ignored")
@pytest.mark.parametrize("options", [{"indexer": "sparse"}, {"indexer": "warm_up"}, {"expert_bias_rate": 0.01}], ids=str)
def test_options_that_would_train_the_base_are_refused(tmp_path: Path, options: dict[str, Any]) -> None:
    ((field, value),) = options.items()
    model = write_sparse(tmp_path / "model", "deepseek_v32")
    with open_runtime(model, model="deepseek_v32", model_cfg=options) as runtime:
        base = runtime.build_model(trainable=False)
        with pytest.raises(
            UnsupportedError, match=rf"NativeConfig\.model_cfg\.{field}={value!r}: it trains a part of the base"
        ):
            runtime.create_lora_adapter(base, LoRAConfig(targets=("attention",)))


def stored_in(model: Path, name: str) -> tuple[Path, str]:
    """The file of a tensor, and its name."""
    index = json.loads((model / "model.safetensors.index.json").read_text())
    return model / index["weight_map"][name], name


def test_quantised_bases_are_refused_before_anything_is_loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = write_tiny("qwen3", tmp_path / "quantised")
    config = (model / "config.json").read_text()
    runtime = native_runtime(RuntimeConfig(hf_path=str(model), backend_cfg=NativeConfig(device="cpu")))
    monkeypatch.setattr(runtime.engine, "build", lambda *args, **kwargs: pytest.fail("a model is built"))
    try:
        (model / "config.json").write_text(config.replace("{", '{"quantization_config": {"quant_method": "fp8"},', 1))
        with pytest.raises(
            UnsupportedError, match=r"quantization_config=\{'quant_method': 'fp8'\} \(.*; give the directory"
        ):
            runtime.build_model(trainable=False)
        (model / "config.json").write_text(config)
        file, name = stored_in(model, "model.layers.0.mlp.up_proj.weight")
        tensors = load_file(file)
        save_file({**tensors, name: tensors[name].to(torch.int8)}, file)
        with pytest.raises(UnsupportedError, match=rf"{name}' has dtype I8"):
            runtime.build_model(trainable=False)
    finally:
        runtime.close()


def test_a_look_at_the_state_changes_nothing(runtime: NativeRuntime) -> None:
    base = runtime.build_model(trainable=False)
    tenant = create(runtime, base, ("narrow",))["narrow"]
    train_tenants(runtime, base, {"narrow": tenant}, 1)
    before = rows(tenant)
    state = runtime.get_optimizer_state(tenant)
    for value in state.exp_avg.values():
        value.fill_(1.0)
    assert all(torch.equal(*pair) for pair in zip(before, rows(tenant), strict=True))


@pytest.mark.parametrize("exact", [True, False])
def test_a_layout_has_each_of_its_sizes_and_a_model_its_own_facts(monkeypatch: pytest.MonkeyPatch, exact: bool) -> None:
    asked: list[Any] = []

    def rows_are_exact(*given: Any) -> bool:
        asked.append(given)
        return exact

    monkeypatch.setattr(facts_of_backends, "rows_are_exact", rows_are_exact)
    parallel = ParallelConfig(tp=2, pp=3, vpp=4, cp=5, ep=6, etp=7)
    base: Any = SimpleNamespace(
        name="base",
        head="values",
        hf_config={},
        groups=SimpleNamespace(world_size=60, dp_size=8, device=torch.device("cpu")),
        config=SimpleNamespace(backend="bridge", hf_path="there", backend_cfg=SimpleNamespace(parallel=parallel)),
        weights=[TensorInfo.of("w", (2,), torch.bfloat16), TensorInfo.of("x", (2,), torch.float32)],
    )
    tenants: list[Any] = [SimpleNamespace(info=lambda name=name: f"info of {name}") for name in "ba"]
    info: Any = facts_of_backends.backend_info(base, tenants)
    assert info.layout == {"world": 60, "dp": 8, "tp": 2, "pp": 3, "vpp": 4, "cp": 5, "ep": 6, "etp": 7}
    assert (info.runtime, info.base, info.hf_path, info.head, info.model_type) == ("bridge", "base", "there", "values", "")
    assert info.tenants == ("info of b", "info of a") and info.bit_exact is exact
    assert asked == [(torch.bfloat16, torch.device("cpu"))]


def test_an_optimizer_that_holds_nothing_takes_no_memory() -> None:
    held = {"model": [torch.zeros(9)], "optimizer": [torch.zeros(3), torch.zeros(2, dtype=torch.bfloat16)]}
    for parts, size in ((held, 16), ({"model": held["model"]}, 0)):
        handle: Any = SimpleNamespace(
            name="one", part_tensors=lambda parts=parts: parts, trainer=SimpleNamespace(num_steps=4)
        )
        found = facts_of_backends.optimizer_info(handle)
        assert (found.name, found.step, found.bytes) == ("one", 4, size)
