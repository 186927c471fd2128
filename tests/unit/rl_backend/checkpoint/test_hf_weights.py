"""Filling parameters from a directory: packed, absent, copied and tied ones, and what is refused before anything is read."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from rl_backend.checkpoint import hf_weights
from rl_backend.checkpoint.hf_reader import HFReader, require_float_weights
from rl_backend.checkpoint.hf_weights import check_tensors, load_weights, require_same_head, with_stored_copies
from rl_backend.contracts import CheckpointError, CopiedWeight, PackedWeight, UnsupportedError, WeightName

EMBEDDINGS = "model.embed_tokens.weight"


def write(path: Path, tensors: dict[str, Tensor], **config: Any) -> Path:
    path.mkdir(exist_ok=True)
    save_file(tensors, path / "model.safetensors")
    (path / "config.json").write_text(json.dumps({"model_type": "qwen3", **config}))
    return path


def parameter(*shape: int, dtype: torch.dtype = torch.float32) -> nn.Parameter:
    return nn.Parameter(torch.full(shape, 777.0, dtype=dtype))


def test_packed_absent_and_copied_parameters_are_filled_each_from_its_own_tensor(tmp_path: Path) -> None:
    stored = {
        "e.0.up": torch.randn(3, 2),
        "e.1.up": torch.randn(3, 2).bfloat16(),
        EMBEDDINGS: torch.randn(5, 2),
        "mtp.embed.weight": torch.randn(5, 2),
        "mtp.head.weight": torch.randn(2),
        "rotary_emb.inv_freq": torch.ones(1),
        "a.position_ids": torch.arange(3),
        "other.rank.weight": torch.ones(2),
    }
    parameters = {"up": parameter(2, 3, 2), "down": parameter(2, 2), "embed": parameter(5, 2, dtype=torch.bfloat16)}
    names: dict[str, WeightName] = {
        "up": PackedWeight((2,), ("e.0.up", "e.1.up")),
        "down": PackedWeight((2,), ("e.0.bias", "e.1.bias")),
        "embed": CopiedWeight(EMBEDDINGS, ("mtp.embed.weight",)),
    }
    kept = load_weights(
        write(tmp_path / "model", stored),
        parameters,
        names,
        zero_if_absent=["e.0.bias", "e.1.bias", "e.0.up"],
        stored_buffers=("position_ids",),
        elsewhere=["other.rank.weight"],
        kept=("mtp.head",),
    )
    assert kept == {"mtp.head.weight": (2,)}
    assert torch.equal(parameters["up"][0], stored["e.0.up"]) and torch.equal(parameters["up"][1], stored["e.1.up"].float())
    assert not parameters["down"].any()
    assert torch.equal(parameters["embed"], stored[EMBEDDINGS].bfloat16())
    stored["e.1.bias"] = torch.ones(2)
    load_weights(
        write(tmp_path / "model", stored),
        {"down": parameters["down"]},
        {"down": names["down"]},
        zero_if_absent=["e.0.bias", "e.1.bias"],
        stored_buffers=("position_ids", "weight", "up"),
    )
    assert parameters["down"].tolist() == [[0, 0], [1, 1]]


def checked(path: Path, shapes: dict[str, tuple[int, ...]], **options: Any) -> dict[str, tuple[int, ...]]:
    return check_tensors(HFReader(path), shapes, {name: name for name in shapes}, **options)


@pytest.mark.parametrize(
    ("stored", "shapes", "options", "problem"),
    [
        ({"a": torch.ones(2)}, {"a": (2,), "b": (1,), "c": (1,)}, {}, "it has no tensor b, c; take both from one model"),
        ({"a": torch.ones(2)}, {"a": (2,), "b": (1,)}, {"absent": ["b"]}, None),
        (
            {"a": torch.ones(2), "b": torch.ones(3)},
            {"a": (2,), "b": (1,)},
            {},
            r"it has tensor b of shape \(3,\), not \(1,\)",
        ),
        (
            {"a": torch.ones(2), "b": torch.arange(2)},
            {"a": (2,), "b": (2,)},
            {},
            "it has tensor b of dtype I64, not F64, F32",
        ),
        (
            {"a": torch.ones(2), "x.rotary_emb.inv_freq": torch.ones(1), "y": torch.ones(1), "z": torch.ones(1)},
            {"a": (2,)},
            {},
            "the model has no parameter for y, z; take both",
        ),
        ({"a": torch.ones(2), "y": torch.ones(1)}, {"a": (2,)}, {"elsewhere": frozenset({"y"})}, None),
        ({"a": torch.ones(2), "y.buffer": torch.ones(1)}, {"a": (2,)}, {"stored_buffers": (".buffer",)}, None),
        ({"a": torch.ones(2), "lm_head.weight": torch.ones(1)}, {"a": (2,)}, {}, None),
        (
            {"a": torch.ones(2), "lm_head.bias": torch.ones(1)},
            {"a": (2,)},
            {},
            r"the model has no parameter for lm_head\.bias",
        ),
        (
            {"score.weight": torch.ones(1, 2), "lm_head.bias": torch.ones(1), "lm_head.weight": torch.ones(1)},
            {"score.weight": (1, 2)},
            {},
            None,
        ),
        (
            {"score.weight": torch.ones(3, 2)},
            {"score.weight": (1, 2)},
            {},
            r"score\.weight of shape \(3, 2\), not \(1, 2\)",
        ),
        (
            {"a": torch.ones(2), "score.weight": torch.ones(1, 2)},
            {"a": (2,)},
            {},
            r"no parameter for score\.weight; it holds a critic or a reward model: build it with head='values'",
        ),
        ({"a": torch.ones(2), "score.weight": torch.ones(1)}, {"a": (2,)}, {"elsewhere": frozenset({"score.weight"})}, None),
        (
            {"a": torch.ones(2), "score.weight": torch.ones(1), "lm_head.weight": torch.ones(1)},
            {"a": (2,)},
            {},
            r"no parameter for score\.weight; take both",
        ),
    ],
)
def test_a_directory_is_checked_by_names_shapes_and_dtypes(
    tmp_path: Path, stored: dict[str, Tensor], shapes: dict[str, tuple[int, ...]], options: Any, problem: str | None
) -> None:
    path = write(tmp_path / "model", stored)
    if problem is None:
        assert checked(path, shapes, **options) == {}
        return
    with pytest.raises(CheckpointError, match=problem):
        checked(path, shapes, **options)


def test_what_is_kept_is_found_and_nothing_trained_is(tmp_path: Path) -> None:
    path = write(tmp_path / "model", {"mtp.a": torch.ones(2), "mtp.b": torch.ones(3), "mtp.c": torch.ones(4)})
    found = checked(path, {"mtp.a": (2,)}, kept=("mtp.",), elsewhere=frozenset({"mtp.c"}))
    assert found == {"mtp.b": (3,)}


def test_a_parameter_has_those_copies_that_the_directory_has(tmp_path: Path) -> None:
    names: dict[str, WeightName] = {
        "a": CopiedWeight("a", ("a1", "a2", "a3")),
        "b": CopiedWeight("b", ("b1",)),
        "c": "c",
        "d": PackedWeight((1,), ("d0",)),
    }
    path = write(tmp_path / "model", {name: torch.ones(1) for name in ("a", "a1", "a3", "b", "c")})
    assert with_stored_copies(path, names) == {**names, "a": CopiedWeight("a", ("a1", "a3")), "b": "b"}
    plain = {"c": names["c"], "d": names["d"]}
    found = with_stored_copies(tmp_path / "nowhere", plain)
    assert found == plain and found is not plain


@pytest.mark.parametrize("rows", [1, 3, 4, 9])
def test_a_tied_head_is_compared_row_by_row_to_the_last(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rows: int) -> None:
    monkeypatch.setattr(hf_weights, "_TIED_ROWS", 4)
    embeddings = torch.randn(rows, 3)
    copies = {"model.mtp.layers.0.embed_tokens.weight": torch.zeros(rows, 3)}
    path = write(tmp_path / "model", {EMBEDDINGS: embeddings, "lm_head.weight": embeddings.clone(), **copies})
    for tied in ({"tie_word_embeddings": True}, {"text_config": {"tie_word_embeddings": True}}):
        write(path, {EMBEDDINGS: embeddings, "lm_head.weight": embeddings.clone(), **copies}, **tied)
        require_same_head(path)
        for row in {0, rows - 1}:
            other = embeddings.clone()
            other[row, 2] += 1
            write(path, {EMBEDDINGS: embeddings, "lm_head.weight": other, **copies}, **tied)
            with pytest.raises(CheckpointError, match=r"but a lm_head\.weight that differs from its embeddings"):
                require_same_head(path)
            parameters = {"embed": parameter(rows, 3)}
            with pytest.raises(CheckpointError, match="differs from its embeddings"):
                load_weights(path, parameters, {"embed": EMBEDDINGS}, stored_buffers=("embed_tokens.weight",))
            assert bool((parameters["embed"] == 777).all())
    write(path, {EMBEDDINGS: embeddings, "lm_head.weight": torch.randn(rows + 1, 3)}, tie_word_embeddings=True)
    with pytest.raises(CheckpointError, match="differs from its embeddings"):
        require_same_head(path)


@pytest.mark.parametrize(
    ("config", "tied"),
    [
        ({"tie_word_embeddings": False}, False),
        ({"tie_word_embeddings": False, "text_config": {"tie_word_embeddings": True}}, True),
        ({"tie_word_embeddings": None, "text_config": {"tie_word_embeddings": False}}, False),
        ({"model_type": "gpt2"}, True),
        ({"model_type": "llama"}, False),
        ({"model_type": "nobody's"}, False),
    ],
)
def test_where_nothing_is_said_of_the_head_it_is_what_transformers_fills_in(
    tmp_path: Path, config: dict[str, Any], tied: bool
) -> None:
    tensors = {EMBEDDINGS: torch.zeros(3, 2), "lm_head.weight": torch.ones(3, 2)}
    path = write(tmp_path / "model", tensors, **config)
    if tied:
        with pytest.raises(CheckpointError, match="differs from its embeddings"):
            require_same_head(path)
    else:
        require_same_head(path)
    for alone in tensors:
        require_same_head(write(tmp_path / "alone", {alone: tensors[alone]}, tie_word_embeddings=True))


@pytest.mark.parametrize(
    ("tensors", "config", "field"),
    [
        ({"a.weight": torch.ones(1), "a.ids": torch.arange(2)}, {}, None),
        ({"a.weight": torch.ones(1)}, {"quantization": None, "compression_config": {}}, None),
        (
            {"a.weight": torch.ones(1)},
            {"quantization": {"bits": 4}},
            r"config\.json has quantization=\{'bits': 4\} \(it is not",
        ),
        ({"a.weight": torch.ones(1)}, {"compression_config": {"x": 1}}, r"config\.json has compression_config=\{'x': 1\}"),
        ({"a.weight": torch.ones(1), "b.weight_packed": torch.arange(2)}, {}, r"tensor 'b\.weight_packed' has dtype I64;"),
        ({"weight.ids": torch.arange(2)}, {}, None),
    ],
)
def test_weights_that_are_quantised_in_a_way_that_is_not_read_are_refused(
    tmp_path: Path, tensors: dict[str, Tensor], config: dict[str, Any], field: str | None
) -> None:
    path = write(tmp_path / "model", tensors, **config)
    if field is None:
        require_float_weights(path)
        return
    with pytest.raises(UnsupportedError, match=rf"{path} is quantised: {field}.*"):
        require_float_weights(str(path))


def test_another_head_beside_a_critics_is_no_matter(tmp_path: Path) -> None:
    stored = {EMBEDDINGS: torch.randn(5, 2), "lm_head.weight": torch.randn(5, 2), "score.weight": torch.randn(1, 2)}
    path = write(tmp_path / "model", stored, tie_word_embeddings=True)
    parameters = {"embed": parameter(5, 2), "score": parameter(1, 2)}
    load_weights(path, parameters, {"embed": EMBEDDINGS, "score": "score.weight"})
    assert torch.equal(parameters["embed"], stored[EMBEDDINGS]) and torch.equal(parameters["score"], stored["score.weight"])
    # Where another rank has the head, as a later stage, it is compared by nobody here.
    load_weights(path, {"embed": parameters["embed"]}, {"embed": EMBEDDINGS}, elsewhere=["lm_head.weight", "score.weight"])
    with pytest.raises(CheckpointError, match="differs from its embeddings"):
        load_weights(path, {"embed": parameters["embed"]}, {"embed": EMBEDDINGS}, stored_buffers=("score.weight",))
