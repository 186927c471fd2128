"""Adapters in peft's format, part by part: what is written, what is read, and what is refused by name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from rl_backend.checkpoint.peft_files import fitted_to, read_peft_directory, write_peft_directory
from rl_backend.contracts import CheckpointError, UnsupportedError
from rl_backend.contracts.lora import LoRAConfig
from tests.support.disk import full_disk

PREFIX = "base_model.model."
Q, UP, EMBED = "model.layers.0.q_proj", "model.layers.11.mlp.up_proj", "model.embed_tokens"


def factors(module: str, rank: int, inputs: int = 5, outputs: int = 7) -> dict[str, Tensor]:
    return {
        f"{PREFIX}{module}.lora_A.weight": torch.randn(rank, inputs),
        f"{PREFIX}{module}.lora_B.weight": torch.randn(outputs, rank),
    }


def write(path: Path, tensors: dict[str, Tensor], **config: Any) -> Path:
    path.mkdir(parents=True, exist_ok=True)
    save_file(tensors, path / "adapter_model.safetensors")
    given = {"peft_type": "LORA", "r": 2, "lora_alpha": 6, **config}
    (path / "adapter_config.json").write_text(json.dumps(given))
    return path


def test_what_is_written_names_each_module_once_and_says_how_it_was_trained(tmp_path: Path) -> None:
    config = LoRAConfig(rank=2, alpha=3.0, dropout=0.25, use_rslora=True, use_dora=True)
    tensors = {
        **factors(UP, 2),
        **factors(Q, 2),
        f"{PREFIX}{Q}.lora_magnitude_vector": torch.ones(7),
        f"{PREFIX}{EMBED}.lora_embedding_A": torch.randn(2, 9),
        f"{PREFIX}{EMBED}.lora_embedding_B": torch.randn(6, 2).t().contiguous().t(),
    }
    given = {name: tensor.requires_grad_() for name, tensor in tensors.items()}
    write_peft_directory(tmp_path / "deep" / "adapter", iter(given.items()), config, "/models/base")
    found = json.loads((tmp_path / "deep" / "adapter" / "adapter_config.json").read_text())
    assert found == {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "modules_to_save": None,
        "base_model_name_or_path": "/models/base",
        "r": 2,
        "lora_alpha": 3.0,
        "use_rslora": True,
        "use_dora": True,
        "lora_dropout": 0.25,
        "target_modules": [EMBED, Q, UP],
        "bias": "none",
        "inference_mode": True,
    }
    stored = load_file(tmp_path / "deep" / "adapter" / "adapter_model.safetensors")
    assert stored.keys() == tensors.keys() and all(torch.equal(stored[name], tensors[name]) for name in tensors)
    assert [entry.name for entry in (tmp_path / "deep").iterdir()] == ["adapter"]
    with pytest.raises(CheckpointError, match="adapter exists; a checkpoint is written to a new directory"):
        write_peft_directory(tmp_path / "deep" / "adapter", [], config, "")


def test_a_critics_head_is_saved_whole_and_read_again_with_its_bias_or_without(tmp_path: Path) -> None:
    for bias in (False, True):
        head = {f"{PREFIX}score.weight": torch.randn(1, 5), **({f"{PREFIX}score.bias": torch.randn(1)} if bias else {})}
        path = tmp_path / str(bias)
        write_peft_directory(path, [*factors(Q, 3).items(), *head.items()], LoRAConfig(rank=3, alpha=6), "base")
        written = json.loads((path / "adapter_config.json").read_text())
        assert (written["task_type"], written["modules_to_save"], written["target_modules"]) == ("TOKEN_CLS", ["score"], [Q])
        found = read_peft_directory(path)
        assert {f"{PREFIX}{name}" for name in found.head} == head.keys()
        assert all(torch.equal(found.head[name.removeprefix(PREFIX)], tensor) for name, tensor in head.items())
        assert found.scales == {Q: 2.0} and found.parts.keys() == {Q}


def test_a_full_disk_leaves_nothing_and_is_one_error(tmp_path: Path) -> None:
    tensors = [(f"{PREFIX}{Q}.lora_A.weight", torch.zeros(2, 5000))]
    with full_disk(True), pytest.raises(CheckpointError, match=rf"{tmp_path}/adapter could not be written: "):
        write_peft_directory(tmp_path / "adapter", tensors, LoRAConfig(), "base")
    assert list(tmp_path.iterdir()) == []


def test_each_module_has_the_rank_scale_and_kind_of_its_own(tmp_path: Path) -> None:
    other = "model.layers.1.q_proj"
    tensors = {
        **factors(Q, 2),
        **factors(other, 4),
        **factors(UP, 3),
        f"{PREFIX}{EMBED}.lora_embedding_A": torch.randn(2, 9, dtype=torch.float16),
        f"{PREFIX}{EMBED}.lora_embedding_B": torch.randn(6, 2),
        f"{PREFIX}{EMBED}.base_layer.weight": torch.ones(9, 6),
        f"{PREFIX}lm_head.weight": torch.zeros(9, 6, dtype=torch.bfloat16),
    }
    patterns = {
        "rank_pattern": {"layers.1.q_proj": 4, "up_proj": 3, "q_proj": 2, "proj": 9},
        "alpha_pattern": {r"layers\.1\..*": 12, "embed_tokens": 1},
    }
    found = read_peft_directory(write(tmp_path, tensors, **patterns))
    # The first pattern that matches a whole end of the name decides: `proj` is the end of none.
    assert found.scales == {Q: 3.0, other: 3.0, UP: 2.0, EMBED: 0.5}
    assert found.kinds == {Q: "attention", other: "attention", UP: "attention", EMBED: "embedding"}
    assert found.frozen.keys() == {f"{EMBED}.weight", "lm_head.weight"}
    assert torch.equal(found.frozen[f"{EMBED}.weight"], torch.ones(9, 6)) and found.head == {}
    assert found.parts[EMBED]["A"].dtype == torch.float32 and found.parts[EMBED].keys() == {"A", "B"}
    assert torch.equal(found.parts[UP]["B"], tensors[f"{PREFIX}{UP}.lora_B.weight"])
    rooted = read_peft_directory(write(tmp_path, factors(UP, 4), r=4, use_rslora=True))
    assert rooted.scales == {UP: 3.0}


@pytest.mark.parametrize(
    ("config", "error", "problem"),
    [
        ({"peft_type": "IA3"}, UnsupportedError, "peft_type='IA3'; only LORA is read"),
        ({"bias": "all"}, UnsupportedError, "bias='all' is not read; train without it"),
        ({"lora_bias": True}, UnsupportedError, "lora_bias=True is not read"),
        ({"of_the_future": {"a": 1}}, UnsupportedError, r"of_the_future=\{'a': 1\} is not read"),
        ({"modules_to_save": ["score", "lm_head", "embed"]}, UnsupportedError, "modules_to_save has 'embed'; only the head"),
        ({"init_lora_weights": "pissa_niter_4"}, UnsupportedError, r"init_lora_weights='pissa_niter_4' is not read, only"),
        (
            {"target_parameters": ["w1"]},
            UnsupportedError,
            r"target_parameters=\['w1'\] is not read, only mlp\.experts\.gate",
        ),
        (
            {"target_parameters": ["experts.down_proj", "w1"]},
            UnsupportedError,
            r"target_parameters=\['w1'\] is not read",
        ),
        ({"r": 3}, CheckpointError, rf"is damaged: {Q} has A of shape \(2, .*; expected A, B of rank 3"),
        ({"use_dora": True}, CheckpointError, f"is damaged: {Q} has A of .*; expected A, B, magnitude of"),
    ],
)
def test_what_makes_more_of_an_adapter_than_its_factors_is_refused(
    tmp_path: Path, config: dict[str, Any], error: type[Exception], problem: str
) -> None:
    with pytest.raises(error, match=problem):
        read_peft_directory(write(tmp_path, factors(Q, 2), **config))


@pytest.mark.parametrize(
    "config",
    [
        {"bias": "none", "lora_bias": False, "of_the_future": None, "other": [], "layer_replication": {}},
        {"init_lora_weights": False},
        {"init_lora_weights": "Gaussian"},
        {"modules_to_save": ["classifier", "score"]},
        {"target_modules": ["q_proj"], "lora_dropout": 0.1, "task_type": "CAUSAL_LM", "rank_pattern": {}},
        {"target_parameters": []},
    ],
)
def test_what_changes_nothing_is_taken(tmp_path: Path, config: dict[str, Any]) -> None:
    assert read_peft_directory(write(tmp_path, factors(Q, 2), **config)).scales == {Q: 3.0}


@pytest.mark.parametrize(
    ("tensors", "error", "problem"),
    [
        ({f"{PREFIX}{Q}.bias": torch.ones(2)}, UnsupportedError, f"{Q}.bias is no factor of a linear layer or embedding"),
        ({f"{PREFIX}{Q}.lora_A.weight": torch.ones(2, 3, 1)}, UnsupportedError, "lora_A.weight is no factor"),
        ({f"{PREFIX}{Q}.lora_magnitude_vector": torch.ones(2, 1)}, UnsupportedError, "magnitude_vector is no factor"),
        ({f"{PREFIX}{UP}.lora_A.weight": torch.ones(2, 3)}, CheckpointError, f"is damaged: {UP} has A of "),
        ({f"{PREFIX}{UP}.lora_B.weight": torch.ones(3, 2)}, CheckpointError, f"is damaged: {UP} has B of "),
        (
            {f"{PREFIX}{UP}.lora_A.weight": torch.ones(2, 3), f"{PREFIX}{UP}.lora_B.weight": torch.ones(2, 3)},
            CheckpointError,
            f"is damaged: {UP} has A of .*, B of ",
        ),
        (
            {f"{PREFIX}{Q}.lora_magnitude_vector": torch.ones(7)},
            CheckpointError,
            f"is damaged: {Q} has .*magnitude of .*; expected A, B of",
        ),
    ],
)
def test_tensors_that_are_no_whole_adapter_are_refused(
    tmp_path: Path, tensors: dict[str, Tensor], error: type[Exception], problem: str
) -> None:
    with pytest.raises(error, match=problem):
        read_peft_directory(write(tmp_path, {**factors(Q, 2), **tensors}))


def test_a_directory_without_one_of_the_files_or_with_a_broken_one_is_named(tmp_path: Path) -> None:
    path = write(tmp_path / "adapter", factors(Q, 2))
    (path / "adapter_config.json").write_text("{")
    with pytest.raises(CheckpointError, match=rf"{path} is no adapter in peft's format: Expecting property name"):
        read_peft_directory(path)
    write(path, factors(Q, 2))
    (path / "adapter_model.safetensors").write_bytes(b"short")
    with pytest.raises(CheckpointError, match=rf"{path} is no adapter in peft's format: "):
        read_peft_directory(path)
    (path / "adapter_model.safetensors").unlink()
    with pytest.raises(CheckpointError, match=rf"{path} is no adapter in peft's format: .*No such file"):
        read_peft_directory(path)


def test_factors_get_the_tenants_rank_and_scale(tmp_path: Path) -> None:
    tensors = {
        **factors(Q, 2),
        f"{PREFIX}{EMBED}.lora_embedding_A": torch.randn(2, 9),
        f"{PREFIX}{EMBED}.lora_embedding_B": torch.randn(6, 2),
        f"{PREFIX}score.weight": torch.randn(1, 5),
    }
    adapter = read_peft_directory(write(tmp_path, tensors, alpha_pattern={"embed_tokens": 1}))
    config = LoRAConfig(rank=5, alpha=10.0)  # a scale of 2, beside 3 and 0.5
    first = {
        **factors(Q, 5),
        f"{PREFIX}{EMBED}.lora_embedding_A": torch.zeros(5, 9),
        f"{PREFIX}{EMBED}.lora_embedding_B": torch.randn(6, 5),
    }
    first[f"{PREFIX}{Q}.lora_B.weight"].zero_()
    found = fitted_to(adapter, config, tmp_path, first.get)
    assert found.keys() == tensors.keys()
    for module, kind, scale in ((Q, ".lora_{}.weight", 1.5), (EMBED, ".lora_embedding_{}", 0.25)):
        a, b = (found[PREFIX + module + kind.format(part)] for part in "AB")
        old_a, old_b = (tensors[PREFIX + module + kind.format(part)] for part in "AB")
        assert a.shape == (5, old_a.shape[1]) and b.shape == (old_b.shape[0], 5)
        torch.testing.assert_close(config.scale * b @ a, adapter.scales[module] * old_b @ old_a)
        assert torch.equal(a[:2], old_a) and torch.equal(b[:, :2], scale * old_b)
        new_a, new_b = (first[PREFIX + module + kind.format(part)] for part in "AB")
        assert torch.equal(a[2:], new_a[2:]) and torch.equal(b[:, 2:], new_b[:, 2:])
    # Of another module, or of a layer of another size: the caller refuses these by their names or shapes.
    for others in ({}, {name: value.repeat(1, 2) for name, value in first.items()}):
        fitted = fitted_to(adapter, config, tmp_path, others.get)
        assert torch.equal(fitted[f"{PREFIX}{Q}.lora_A.weight"], tensors[f"{PREFIX}{Q}.lora_A.weight"])
    same = fitted_to(adapter, LoRAConfig(rank=2, alpha=6), tmp_path, {}.get)
    assert torch.equal(same[f"{PREFIX}{Q}.lora_B.weight"], tensors[f"{PREFIX}{Q}.lora_B.weight"])
    with pytest.raises(UnsupportedError, match=rf"({Q}|{EMBED}) has rank 2 .* LoRAConfig\.rank=1 .* at least this rank"):
        fitted_to(adapter, LoRAConfig(rank=1), tmp_path, {}.get)
    with pytest.raises(UnsupportedError, match=r"use_dora=False, the tenant has LoRAConfig\.rank=2 and use_dora=True"):
        fitted_to(adapter, LoRAConfig(rank=2, use_dora=True), tmp_path, {}.get)
    magnitude = {f"{PREFIX}{Q}.lora_magnitude_vector": torch.arange(7.0)}
    dora = read_peft_directory(write(tmp_path, {**factors(Q, 2), **magnitude}, use_dora=True))
    fitted = fitted_to(dora, LoRAConfig(rank=3, use_dora=True), tmp_path, {}.get)
    assert torch.equal(fitted[f"{PREFIX}{Q}.lora_magnitude_vector"], torch.arange(7.0)) and len(fitted) == 3


def test_packed_experts_become_modules_with_the_experts_fastest_in_b(tmp_path: Path) -> None:
    experts, gate_rank, down_rank = 3, 2, 4
    block = "model.layers.5.mlp.experts"
    gate_a, gate_b = torch.randn(experts * gate_rank, 5), torch.randn(6, gate_rank * experts)
    down_a, down_b = torch.randn(experts * down_rank, 3), torch.randn(5, down_rank * experts)
    tensors = {
        f"{PREFIX}{block}.base_layer.lora_A.weight": gate_a,
        f"{PREFIX}{block}.base_layer.lora_B.weight": gate_b,
        f"{PREFIX}{block}.lora_A.weight": down_a,
        f"{PREFIX}{block}.lora_B.weight": down_b,
        **factors(Q, 2),
    }
    targets = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
    path = write(tmp_path, tensors, target_parameters=targets, rank_pattern={"down_proj": 4}, alpha_pattern={"down_proj": 2})
    found = read_peft_directory(path)
    modules = {f"{block}.{expert}.{name}_proj" for expert in range(experts) for name in ("gate", "up", "down")}
    assert found.parts.keys() == {*modules, Q}
    assert found.scales == {each: 0.5 if "down" in each else 3.0 for each in found.parts}
    for expert in range(experts):
        rows = gate_a[expert * gate_rank : (expert + 1) * gate_rank]
        product = gate_b[:, expert::experts] @ rows
        for name, expected in (("gate", product[:3]), ("up", product[3:])):
            parts = found.parts[f"{block}.{expert}.{name}_proj"]
            torch.testing.assert_close(parts["B"] @ parts["A"], expected)
        parts = found.parts[f"{block}.{expert}.down_proj"]
        rows = down_a[expert * down_rank : (expert + 1) * down_rank]
        torch.testing.assert_close(parts["B"] @ parts["A"], down_b[:, expert::experts] @ rows)
    alone = {name: tensor for name, tensor in tensors.items() if "base_layer" not in name}
    one = read_peft_directory(write(tmp_path, alone, target_parameters=["down_proj"], rank_pattern={"down_proj": 4}))
    assert {name for name in one.parts if "experts" in name} == {name for name in modules if "down" in name}


def test_a_rooted_scale_is_of_each_modules_own_rank_and_alpha(tmp_path: Path) -> None:
    patterns = {"rank_pattern": {"up_proj": 4}, "alpha_pattern": {"up_proj": 8}}
    path = write(tmp_path, {**factors(Q, 9), **factors(UP, 4)}, r=9, use_rslora=True, **patterns)
    assert read_peft_directory(path).scales == {Q: 2.0, UP: 4.0}


def test_gates_and_ups_of_packed_experts_may_be_adapted_alone(tmp_path: Path) -> None:
    block, experts, rank = "model.layers.5.mlp.experts", 3, 2
    a, b = torch.randn(experts * rank, 5), torch.randn(8, rank * experts)
    tensors = {f"{PREFIX}{block}.lora_A.weight": a, f"{PREFIX}{block}.lora_B.weight": b, **factors(Q, 2)}
    found = read_peft_directory(write(tmp_path, tensors, target_parameters=["experts.gate_up_proj"]))
    assert found.parts.keys() == {Q, *(f"{block}.{each}.{name}_proj" for each in range(experts) for name in ("gate", "up"))}
    for expert in range(experts):
        product = b[:, expert::experts] @ a[expert * rank : (expert + 1) * rank]
        for name, expected in (("gate", product[:4]), ("up", product[4:])):
            parts = found.parts[f"{block}.{expert}.{name}_proj"]
            torch.testing.assert_close(parts["B"] @ parts["A"], expected)
