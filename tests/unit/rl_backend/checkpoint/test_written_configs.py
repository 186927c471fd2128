"""What ``config.json`` of a written model says, and how its files are laid out."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from rl_backend.checkpoint.hf_writer import critic_config, lay_out_files, write_hf_directory, write_tensors
from rl_backend.contracts import CheckpointError, TensorInfo


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({}, {}),
        ({"architectures": None}, {"architectures": None}),
        ({"architectures": ["LlamaForCausalLM"]}, {"architectures": ["LlamaForTokenClassification"]}),
        ({"architectures": ["Qwen3Model"]}, {"architectures": ["Qwen3ForTokenClassification"]}),
        ({"architectures": ["GPT2LMHeadModel"]}, {"architectures": ["GPT2ForTokenClassification"]}),
        (
            {"architectures": ["AForCausalLM", "ForB"], "num_labels": 3, "problem_type": "x", "vocab_size": 5},
            {"architectures": ["AForTokenClassification", "ForBForTokenClassification"], "vocab_size": 5},
        ),
        ({"classifier_dropout": 0.5, "id2label": {"0": "a", "1": "b"}}, {}),
    ],
)
def test_a_critics_configuration_has_one_label_and_no_dropout(given: dict[str, Any], expected: dict[str, Any]) -> None:
    before = json.dumps(given)
    head = {"id2label": {"0": "LABEL_0"}, "label2id": {"LABEL_0": 0}, "classifier_dropout": 0.0}
    assert critic_config(given) == {**expected, **head}
    assert json.dumps(given) == before


def written(path: Path, source: dict[str, Any], tensors: dict[str, Tensor], **options: Any) -> dict[str, Any]:
    (path / "source").mkdir(parents=True, exist_ok=True)
    (path / "source" / "config.json").write_text(json.dumps(source))
    infos = [TensorInfo.of(name, tensor.shape, tensor.dtype) for name, tensor in tensors.items()]
    write_hf_directory(path / "out", infos, iter(tensors.items()), path / "source", **options)
    found: dict[str, Any] = json.loads((path / "out" / "config.json").read_text())
    return found


BF16, F32 = torch.bfloat16, torch.float32


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ({"a": 1}, {"a": 1, "dtype": "bfloat16"}),
        ({"dtype": "float32"}, {"dtype": "bfloat16"}),
        ({"torch_dtype": "float32", "dtype": None}, {"torch_dtype": "bfloat16", "dtype": "bfloat16"}),
        (
            {"text_config": {"dtype": "float16"}, "tower": {"dtype": "float16"}},
            {"text_config": {"dtype": "bfloat16"}, "tower": {"dtype": "float16"}},
        ),
        (
            {"torch_dtype": "float32", "text_config": {"b": 2}},
            {"torch_dtype": "bfloat16", "text_config": {"b": 2}},
        ),
        ({"text_config": {"b": 2}}, {"text_config": {"b": 2}, "dtype": "bfloat16"}),
    ],
)
def test_the_configuration_says_the_dtype_of_most_floating_elements(
    tmp_path: Path, source: dict[str, Any], expected: dict[str, Any]
) -> None:
    tensors = {
        "ids": torch.zeros(90, dtype=torch.int64),
        "a": torch.zeros(3, dtype=F32),
        "b": torch.zeros(2, dtype=F32),
        "c": torch.zeros(3, 2, dtype=BF16),
    }
    assert written(tmp_path, source, tensors) == expected


def test_a_configuration_that_does_not_change_is_copied_byte_for_byte(tmp_path: Path) -> None:
    source = {"dtype": "float32", "name": "Zoë"}
    tensors = {"a": torch.ones(2)}
    written(tmp_path, source, tensors)
    assert (tmp_path / "out" / "config.json").read_text() == json.dumps(source)
    written(tmp_path / "again", source, {"a": torch.ones(2, dtype=BF16)})
    text = (tmp_path / "again" / "out" / "config.json").read_text()
    assert text == '{\n  "dtype": "bfloat16",\n  "name": "Zoë"\n}\n'


@pytest.mark.parametrize("mxfp4", [False, True])
def test_what_says_how_weights_are_quantised_stays_only_where_they_are(tmp_path: Path, mxfp4: bool) -> None:
    described = {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}
    tensors = {"a": torch.ones(2, dtype=BF16), "a_blocks": torch.zeros(64, dtype=torch.uint8)}
    source = {"dtype": "bfloat16", "quantization_config": described}
    found = written(tmp_path, source, tensors, mxfp4=mxfp4)
    assert found.get("quantization_config") == (described if mxfp4 else None)


def test_kept_tensors_are_written_behind_the_others_and_counted(tmp_path: Path) -> None:
    (tmp_path / "source").mkdir()
    kept = {"mtp.b": torch.arange(6), "mtp.a": torch.ones(3)}
    save_file(kept, tmp_path / "source" / "model.safetensors")
    tensors = {"w": torch.randn(4), "v": torch.randn(2)}
    written(tmp_path, {"dtype": "float32"}, tensors, kept={"mtp.b": (6,), "mtp.a": (3,)}, max_shard_bytes=24)
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    files = [f"model-0000{number}-of-00003.safetensors" for number in (1, 2, 3)]
    assert index == {
        "metadata": {"total_size": 24 + 48 + 12},
        "weight_map": {"w": files[0], "v": files[0], "mtp.b": files[1], "mtp.a": files[2]},
    }
    with safe_open(tmp_path / "out" / files[1], framework="pt") as opened:
        assert torch.equal(opened.get_tensor("mtp.b"), kept["mtp.b"]) and opened.metadata() == {"format": "pt"}


def test_a_source_that_is_gone_or_lacks_what_is_kept_is_named(tmp_path: Path) -> None:
    infos = [TensorInfo.of("a", (2,), F32)]
    with pytest.raises(CheckpointError, match=rf"{tmp_path}/gone/config.json cannot be read.* give the local directory"):
        write_hf_directory(tmp_path / "out", infos, iter([("a", torch.ones(2))]), tmp_path / "gone")
    (tmp_path / "source").mkdir()
    save_file({"a": torch.ones(2)}, tmp_path / "source" / "model.safetensors")
    with pytest.raises(CheckpointError, match="lacks b, or has another shape"):
        written(tmp_path, {}, {"a": torch.ones(2)}, kept={"b": (1,)})
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("limit", "expected"),
    [
        (10**6, [["a", "b", "c", "d"]]),
        (24, [["a", "b"], ["c"], ["d"]]),
        (23, [["a"], ["b"], ["c"], ["d"]]),
        (16, [["a"], ["b"], ["c"], ["d"]]),
        (56, [["a", "b", "c"], ["d"]]),
        (1, [["a"], ["b"], ["c"], ["d"]]),
    ],
)
def test_files_are_filled_in_order_up_to_the_limit(tmp_path: Path, limit: int, expected: list[list[str]]) -> None:
    shapes: dict[str, tuple[tuple[int, ...], torch.dtype]] = {
        "a": ((4,), F32),
        "b": ((2, 2), BF16),
        "c": ((4,), torch.float64),
        "d": ((3,), torch.uint8),
    }
    places = lay_out_files(tmp_path, [TensorInfo.of(name, *given) for name, given in shapes.items()], limit)
    files: dict[str, list[str]] = {}
    for name, place in places.items():
        files.setdefault(place.file.name, []).append(name)
    assert list(files.values()) == expected and list(files) == sorted(files)
    for name, place in places.items():
        assert place.info.name == name and place.start % shapes[name][1].itemsize == 0
        with place.file.open("rb") as stream:
            size = int.from_bytes(stream.read(8), "little")
            header = json.loads(stream.read(size))
        first, end = header[name]["data_offsets"]
        assert size % 8 == 0 and place.start == 8 + size + first and end - first == place.info.nbytes
    assert sum(place.info.nbytes for place in places.values()) == 59


def test_a_large_tensor_is_written_in_parts_that_follow_each_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rl_backend.checkpoint.hf_writer._PART", 8)
    tensors = {"a": torch.randn(7), "b": torch.randn(3, 5).t()}
    places = lay_out_files(tmp_path, [TensorInfo.of(name, each.shape, each.dtype) for name, each in tensors.items()], 10**6)
    write_tensors(places, iter(tensors.items()))
    with safe_open(tmp_path / "model.safetensors", framework="pt") as opened:
        assert all(torch.equal(opened.get_tensor(name), tensor) for name, tensor in tensors.items())


def test_every_file_is_filled_to_the_last_byte(tmp_path: Path) -> None:
    places = lay_out_files(tmp_path, [TensorInfo.of(name, (2,), F32) for name in "abcdef"], 16)
    files = [place.file.name for place in places.values()]
    assert files == [f"model-{number:05d}-of-00003.safetensors" for number in (1, 1, 2, 2, 3, 3)]
