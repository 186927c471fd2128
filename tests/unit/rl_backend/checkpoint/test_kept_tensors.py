"""Which tensors of a directory are kept, how they are described, and what they are when they are copied."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from rl_backend.checkpoint.hf_reader import HFReader, expert_parts, other_files, own_name
from rl_backend.checkpoint.kept_weights import describe_kept, find_kept, open_kept
from rl_backend.contracts import CheckpointError

TENSORS = {
    "model.norm.weight": torch.arange(4.0),
    "mtp.fc.weight": torch.randn(3, 2).to(torch.bfloat16),
    "mtp.ids": torch.arange(5),
    "mtp.scale": torch.tensor(3, dtype=torch.uint8),
    "visual.patch.weight": torch.randn(2, 2, 2),
    "mtp_other": torch.ones(1),
}


def write(path: Path, tensors: dict[str, Tensor]) -> Path:
    path.mkdir(exist_ok=True)
    save_file(tensors, path / "model.safetensors")
    (path / "config.json").write_text(json.dumps({"model_type": "x", "torch_dtype": "float16"}))
    return path


def test_kept_tensors_are_copied_one_by_one_as_they_are_stored(tmp_path: Path) -> None:
    path = write(tmp_path / "model", TENSORS)
    kept = find_kept(HFReader(path), ("mtp.", "visual."), {"mtp.ids", "model.norm.weight"})
    assert kept == {"mtp.fc.weight": (3, 2), "mtp.scale": (), "visual.patch.weight": (2, 2, 2)}
    assert find_kept(HFReader(path), (), ()) == {}
    order = {name: tuple(TENSORS[name].shape) for name in ("visual.patch.weight", "mtp.ids", "mtp.scale", "mtp.fc.weight")}
    infos, tensors = open_kept(path, order)
    assert [(info.name, info.shape, info.dtype) for info in infos] == [
        ("visual.patch.weight", (2, 2, 2), "float32"),
        ("mtp.ids", (5,), "int64"),
        ("mtp.scale", (), "uint8"),
        ("mtp.fc.weight", (3, 2), "bfloat16"),
    ]
    for name, tensor in tensors:
        assert torch.equal(tensor, TENSORS[name]) and tensor.dtype == TENSORS[name].dtype
    nothing = open_kept(tmp_path / "nowhere", {})
    assert nothing.infos == [] and list(nothing.tensors) == []


def test_a_directory_without_the_tensors_or_with_other_shapes_is_refused(tmp_path: Path) -> None:
    path = write(tmp_path / "model", TENSORS)
    wanted = {"mtp.fc.weight": (2, 3), "mtp.ids": (5,), "gone": (1,)}
    with pytest.raises(CheckpointError, match=rf"{path} lacks mtp\.fc\.weight, gone, or has another shape of it"):
        open_kept(path, wanted)
    write(path, {"mtp.complex": torch.ones(2, dtype=torch.complex64)})
    for use in (lambda: find_kept(HFReader(path), ("mtp.",), ()), lambda: open_kept(path, {"mtp.complex": (2,)})):
        with pytest.raises(CheckpointError, match=r"has mtp\.complex in C64, which is not copied to .*; expected F64, F32"):
            use()


@pytest.mark.parametrize(
    ("kept", "text"),
    [
        ((), ""),
        (("mtp.fc.weight",), "mtp.fc (1)"),
        (("mtp.fc.weight", "mtp.fc.bias", "mtp.norm.weight"), "mtp (3)"),
        (
            ("mtp.layers.0.a.weight", "model.visual.b.weight", "model.visual.c.weight", "model.tower.x.y.bias"),
            "model.tower.x.y (1), model.visual (2), mtp.layers.0.a (1)",
        ),
        (("alone",), " (1)"),
        (["b.x.w", "a.x.w", "a.y.w"], "a (2), b.x (1)"),
    ],
)
def test_kept_weights_are_described_by_what_they_belong_to(kept: Iterable[str], text: str) -> None:
    assert describe_kept(list(kept)) == text


@pytest.mark.parametrize(
    ("model_type", "name", "own"),
    [
        ("qwen3_5_text", "model.language_model.norm.weight", "model.norm.weight"),
        ("qwen3_5_moe_text", "model.language_model.model.language_model.x", "model.model.language_model.x"),
        ("qwen3_5_text", "lm_head.weight", "lm_head.weight"),
        ("qwen3_5_text", "x.model.language_model.norm", "x.model.language_model.norm"),
        ("qwen3_5", "model.language_model.norm.weight", "model.language_model.norm.weight"),
        (None, "model.language_model.norm.weight", "model.language_model.norm.weight"),
    ],
)
def test_a_text_models_nested_names_become_its_own(model_type: object, name: str, own: str) -> None:
    assert own_name(model_type, name) == own


def test_a_packed_tensor_is_the_projections_of_each_expert() -> None:
    block = "model.language_model.layers.3.mlp.experts"
    parts = list(expert_parts("qwen3_5_moe", f"{block}.gate_up_proj", (2, 6, 5)))
    assert [(part.name, part.expert, part.rows, part.shape) for part in parts] == [
        (f"{block}.0.gate_proj.weight", 0, range(3), (3, 5)),
        (f"{block}.0.up_proj.weight", 0, range(3, 6), (3, 5)),
        (f"{block}.1.gate_proj.weight", 1, range(3), (3, 5)),
        (f"{block}.1.up_proj.weight", 1, range(3, 6), (3, 5)),
    ]
    assert {part.packed for part in parts} == {f"{block}.gate_up_proj"}
    up = parts[3]
    assert up.place(()) == (slice(1, 2), slice(3, 6))
    assert up.place((slice(1, 2),)) == (slice(1, 2), slice(4, 5))
    assert up.place((slice(0, 3), slice(2, 4))) == (slice(1, 2), slice(3, 6), slice(2, 4))
    down = list(expert_parts("qwen3_5_moe_text", "model.layers.0.mlp.experts.down_proj", (3, 5, 4)))
    assert [(part.expert, part.rows, part.columns) for part in down] == [(each, range(5), 4) for each in range(3)]
    for model_type, name, shape in (
        ("qwen3_moe", f"{block}.gate_up_proj", (2, 6, 5)),
        ("qwen3_5_moe", f"{block}.gate_up_proj", (6, 5)),
        ("qwen3_5_moe", f"{block}.other_proj", (2, 6, 5)),
        ("qwen3_5_moe", "mtp.layers.0.mlp.experts.gate_up_proj", (2, 6, 5)),
        ("qwen3_5_moe", "model.layers.0.experts.gate_up_proj", (2, 6, 5)),
    ):
        assert list(expert_parts(model_type, name, shape)) == []


@pytest.mark.parametrize("coded", ["config.json", "tokenizer_config.json", "processor_config.json", None])
def test_code_goes_along_where_any_configuration_names_it(tmp_path: Path, coded: str | None) -> None:
    names = ("config.json", "tokenizer_config.json", "processor_config.json", "modeling_x.py", "ranks.tiktoken", "notes.txt")
    for name in names:
        (tmp_path / name).write_text('{"auto_map": {}}' if name == coded else "{}")
    (tmp_path / "vocab.json").mkdir()
    (tmp_path / "additional_chat_templates").mkdir()
    for name in ("tools.jinja", "rag.jinja", "other.txt"):
        (tmp_path / "additional_chat_templates" / name).touch()
    expected = ["additional_chat_templates/rag.jinja", "additional_chat_templates/tools.jinja"]
    expected += [*(["modeling_x.py"] if coded else []), "processor_config.json", "ranks.tiktoken", "tokenizer_config.json"]
    found = other_files(tmp_path)
    assert list(found) == expected
    assert all(file == tmp_path / name for name, file in found.items())
