"""A family of a third party whose directories hold more than is trained, such directories, and the bytes in any of them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import save_file
from torch import Tensor

from rl_backend import register_model
from rl_backend.contracts import Head, text_config
from tests.support.outside_plugin import BIGRAM

VOCAB_SIZE = 128
TRAINED = ("model.language_model.table", "model.language_model.out.weight", "model.language_model.out.bias")


def _parse_config(hf_config: Mapping[str, Any]) -> int:
    return int(text_config(hf_config)["vocab_size"])


def _weight_names(vocab_size: int, head: Head) -> Mapping[str, str]:
    return dict(zip(("table.weight", "out.weight", "out.bias"), TRAINED, strict=True))


def _kept_weights(vocab_size: int) -> tuple[str, ...]:
    return "model.tower.", "drafts."


TOWERED = replace(
    BIGRAM,
    name="towered",
    hf_model_types=("towered",),
    parse_config=_parse_config,
    weight_names=_weight_names,
    kept_weights=_kept_weights,
)
register_model(TOWERED)


def write_towered(path: Path, *, sharded: bool = False, dtype: torch.dtype = torch.float32) -> Path:
    """A directory of the family: bigrams in ``dtype``, and what it keeps in many dtypes, in one file or in three."""
    path.mkdir(parents=True)
    name = str(dtype).removeprefix("torch.")
    config = {
        "architectures": ["ToweredForConditionalGeneration"],
        "model_type": "towered",
        "known_to_nobody": {"scale": 1e-06, "name": "Türme"},
        "text_config": {
            "dtype": name,
            "hidden_size": VOCAB_SIZE,
            "num_hidden_layers": 1,
            "vocab_size": VOCAB_SIZE,
            "also_unknown": [1, 2.5, None],
        },
        "tower_config": {"depth": 2, "dtype": "bfloat16"},
    }
    (path / "config.json").write_text(json.dumps(config, indent=4, ensure_ascii=False), encoding="utf-8")
    (path / "tokenizer.json").write_text("{}")
    (path / "preprocessor_config.json").write_text('{"size": 14}')
    generator = torch.Generator().manual_seed(0)
    shapes = dict(zip(TRAINED, ((VOCAB_SIZE, VOCAB_SIZE), (VOCAB_SIZE, VOCAB_SIZE), (VOCAB_SIZE,)), strict=True))
    trained = {key: (0.1 * torch.randn(shape, generator=generator)).to(dtype) for key, shape in shapes.items()}
    tower, drafts = _kept(generator)
    if not sharded:
        save_file({**tower, **trained, **drafts}, path / "model.safetensors", metadata={"format": "pt"})
        return path
    # Kept tensors in a file of their own, and beside trained ones.
    odd = {key: trained.pop(key) for key in TRAINED[1:]}
    files = {"model-a.safetensors": {**trained, **tower}, "model-b.safetensors": odd, "drafts.safetensors": drafts}
    weight_map = {}
    for file, tensors in files.items():
        save_file(tensors, path / file, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(tensors, file)
    (path / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return path


def _kept(generator: torch.Generator) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    # A NaN with a payload, a negative zero, an infinity and a subnormal: what computing with a tensor may change.
    bits = torch.tensor([0x7FC12345, -0x80000000, 0x7F800000, 1], dtype=torch.int64).to(torch.int32)
    tower = {
        "model.tower.blocks.0.weight": torch.randn(4, 6, generator=generator).bfloat16(),
        "model.tower.blocks.0.bias": bits.view(torch.float32),
        "model.tower.blocks.1.scale": torch.tensor(0.1, dtype=torch.float16),
        "model.tower.position_ids": torch.arange(5)[None],
        "model.tower.mask": torch.tensor([True, False, True]),
    }
    drafts = {
        "drafts.layers.0.weight": torch.randn(3, 5, generator=generator, dtype=torch.float64),
        "drafts.layers.0.codes": torch.arange(7, dtype=torch.uint8),
        "drafts.layers.0.scales": torch.randn(2, 3, generator=generator).to(torch.float8_e4m3fn),
        "drafts.layers.0.empty": torch.empty(0, 4),
    }
    return tower, drafts


class StoredBytes(NamedTuple):
    """A tensor as a file has it.

    Attributes:
        dtype: safetensors' name.
    """

    dtype: str
    shape: tuple[int, ...]
    data: bytes


def stored_bytes(path: Path) -> dict[str, StoredBytes]:
    """Every tensor in the weight files of a directory, read without the project and without safetensors."""
    found: dict[str, StoredBytes] = {}
    for file in sorted(path.glob("*.safetensors")):
        content = file.read_bytes()
        start = 8 + int.from_bytes(content[:8], "little")
        for name, entry in json.loads(content[8:start]).items():
            if name != "__metadata__":
                assert name not in found, f"{name} is in two files"
                begin, end = entry["data_offsets"]
                data = content[start + begin : start + end]
                found[name] = StoredBytes(entry["dtype"], tuple(entry["shape"]), data)
    return found


def require_index(path: Path) -> None:
    """Asserts that a directory has one file without an index, or an index that places each tensor where it is."""
    files = sorted(path.glob("*.safetensors"))
    index = path / "model.safetensors.index.json"
    if len(files) == 1:
        assert files[0].name == "model.safetensors" and not index.exists()
        return
    content = json.loads(index.read_text())
    places, total = {}, 0
    for file in files:
        raw = file.read_bytes()
        header = json.loads(raw[8 : 8 + int.from_bytes(raw[:8], "little")])
        header.pop("__metadata__", None)
        places |= dict.fromkeys(header, file.name)
        total += sum(end - begin for begin, end in (entry["data_offsets"] for entry in header.values()))
    assert content["weight_map"] == places
    assert content["metadata"]["total_size"] == total
