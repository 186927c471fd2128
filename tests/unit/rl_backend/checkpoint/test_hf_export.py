"""Weights of a training checkpoint without a runtime: what is read, in which dtype, and which directory is its source."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from rl_backend.checkpoint.hf_export import TrainingWeights, export_checkpoint, source_of
from rl_backend.checkpoint.manifest import TenantFacts
from rl_backend.contracts import CheckpointError
from tests.support.written_checkpoints import write_checkpoint

CONFIG: dict[str, Any] = {
    "model_type": "qwen3",
    "vocab_size": 7,
    "hidden_size": 6,
    "num_hidden_layers": 2,
    "dtype": "float32",
    "architectures": ["Qwen3ForCausalLM"],
}
WEIGHTS: dict[str, Tensor] = {
    "model.norm.weight": torch.arange(6.0) + 0.3,
    "model.layers.0.router.bias": torch.tensor([1.0001, 2.0002]),
    "model.layers.1.proj.weight": torch.randn(3, 6),
    "model.embed_tokens.weight": torch.randn(7, 6),
    "model.layers.1.scale": torch.tensor(0.7),
}


def write_source(path: Path, **changes: Any) -> Path:
    path.mkdir(parents=True)
    config = {name: value for name, value in {**CONFIG, **changes}.items() if value is not None}
    (path / "config.json").write_text(json.dumps(config))
    return path


@pytest.fixture
def weights(tmp_path: Path) -> TrainingWeights:
    return TrainingWeights(write_checkpoint(tmp_path / "state", WEIGHTS, in_float32=("model.layers.0.router.bias",)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_weights_come_in_the_order_of_the_manifest_in_the_dtype_of_their_infos(
    weights: TrainingWeights, dtype: torch.dtype
) -> None:
    assert weights.shapes == {name: tuple(tensor.shape) for name, tensor in WEIGHTS.items()}
    infos = weights.infos(dtype)
    kept = torch.float64 if dtype == torch.float64 else torch.float32
    expected = {name: kept if "router" in name else dtype for name in WEIGHTS}
    assert [(info.name, f"torch.{info.dtype}", info.shape) for info in infos] == [
        (name, str(expected[name]), tuple(tensor.shape)) for name, tensor in WEIGHTS.items()
    ]
    found, memory = {}, set()
    for name, tensor in weights.tensors(dtype):
        memory.add(tensor.data_ptr())
        found[name] = tensor.clone()
    assert list(found) == list(WEIGHTS) and len(memory) == 1
    assert all(torch.equal(found[name], WEIGHTS[name].to(expected[name])) for name in WEIGHTS)
    assert all(found[name].dtype == expected[name] for name in WEIGHTS)


def test_every_file_is_verified_and_progress_is_told_its_size(weights: TrainingWeights) -> None:
    told: list[int] = []
    weights.verify(told.append)
    sizes = [(weights.path / name).stat().st_size for name in weights.manifest.files]
    assert told == sizes and len(told) == 2
    weights.verify()
    last = list(weights.manifest.files)[-1]
    data = bytearray((weights.path / last).read_bytes())
    data[-1] ^= 1
    (weights.path / last).write_bytes(data)
    with pytest.raises(CheckpointError, match=f"is damaged: {last} has other bytes than were written"):
        weights.verify()


def test_a_file_that_has_gone_meanwhile_is_named_with_the_weight(weights: TrainingWeights) -> None:
    (weights.path / "__0_0.distcp").unlink()
    with pytest.raises(
        CheckpointError, match=rf"^model\.norm\.weight cannot be read from {weights.path}: .*__0_0\.distcp is refused"
    ):
        next(iter(weights.tensors(torch.float32)))


@pytest.mark.parametrize(
    ("fields", "problem"),
    [
        ({"lora": TenantFacts(config={}, base="x", num_draws=0)}, "holds a LoRA tenant, not a model; load it into a tenant"),
        (
            {"private": ("one", "two"), "runtime_config": {"backend": "bridge"}},
            r"has 2 weights in an order that only the bridge runtime reads, one for one; load it there and use",
        ),
        ({"parameters": {"other": (1,)}}, r"its \.metadata does not have it, model\.other was expected in shape \(1,\)"),
        (
            {"parameters": {name: (2, 1) if "scale" in name else tuple(each.shape) for name, each in WEIGHTS.items()}},
            r"has it in shape \(\), model\.model\.layers\.1\.scale was expected in shape \(2, 1\)",
        ),
    ],
)
def test_what_holds_no_model_that_can_be_named_is_refused(tmp_path: Path, fields: dict[str, Any], problem: str) -> None:
    path = write_checkpoint(tmp_path / "state", WEIGHTS, **fields)
    with pytest.raises(CheckpointError, match=f"{path} .*{problem}") as caught:
        TrainingWeights(str(path))
    assert caught.value.details["path"] == str(path)


def test_a_metadata_with_other_bytes_than_were_written_is_refused(weights: TrainingWeights) -> None:
    data = (weights.path / ".metadata").read_bytes()
    # It still unpickles: what follows the end of a pickle is not read.
    (weights.path / ".metadata").write_bytes(data[:-1] + b"0")
    with pytest.raises(CheckpointError, match=r"is damaged: \.metadata has other bytes than were written"):
        TrainingWeights(weights.path)


def test_the_source_is_the_directory_of_the_run_or_the_one_that_is_given(tmp_path: Path) -> None:
    began, other = write_source(tmp_path / "began"), write_source(tmp_path / "other")
    config = {"backend": "native", "hf_path": str(began)}
    weights = TrainingWeights(write_checkpoint(tmp_path / "state", WEIGHTS, runtime_config=config, kept={}))
    assert source_of(weights) == began and source_of(weights, str(other)) == other
    (began / "config.json").unlink()
    with pytest.raises(CheckpointError, match=r"config\.json cannot be read .*No such file"):
        source_of(weights)
    began.rmdir()
    run = rf"{began}, which the run of {weights.path} began from, is not a directory; .* \(weights are not needed\)"
    with pytest.raises(CheckpointError, match=run) as caught:
        source_of(weights)
    assert caught.value.details == {"path": str(began)}
    with pytest.raises(CheckpointError, match=rf"{tmp_path}/gone, given as source, is not a directory"):
        source_of(weights, tmp_path / "gone")


def test_a_source_needs_the_weights_that_are_kept(tmp_path: Path) -> None:
    source = write_source(tmp_path / "source")
    kept = {"mtp.fc.weight": (2, 3), "mtp.norm.weight": (2,)}
    weights = TrainingWeights(write_checkpoint(tmp_path / "state", WEIGHTS, kept=kept))
    with pytest.raises(CheckpointError, match=r"\(of its weights mtp \(2\) are needed, which were not trained\)"):
        source_of(weights)
    tensors = {"mtp.fc.weight": torch.ones(2, 3), "mtp.norm.weight": torch.ones(3)}
    save_file(tensors, source / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"lacks mtp\.norm\.weight, or has another shape"):
        source_of(weights, source)
    save_file({**tensors, "mtp.norm.weight": torch.ones(2)}, source / "model.safetensors")
    assert source_of(weights, source) == source


def test_a_source_with_a_link_out_of_it_is_refused(tmp_path: Path) -> None:
    source = write_source(tmp_path / "source")
    weights = TrainingWeights(write_checkpoint(tmp_path / "state", WEIGHTS))
    (tmp_path / "secret").touch()
    (source / "tokenizer.json").symlink_to(tmp_path / "secret")
    with pytest.raises(CheckpointError, match=r"tokenizer\.json is a link out of it"):
        source_of(weights, source)


DRAFTING = {"model.layers.2.eh_proj.weight": torch.ones(2, 2), "model.layers.2.norm.weight": torch.ones(2)}
OF_ANOTHER = "is of another model: its config.json has"


@pytest.mark.parametrize(
    ("config", "more", "field", "problem"),
    [
        ({}, {}, None, ""),
        ({"model_type": "vl", "text_config": {**CONFIG, "model_type": "vl_text"}}, {}, None, ""),
        ({}, DRAFTING, None, ""),
        (
            {"num_hidden_layers": 3},
            DRAFTING,
            "num_hidden_layers",
            f"{OF_ANOTHER} num_hidden_layers=3, the model in .* has 2",
        ),
        ({}, {"model.layers.10.norm.weight": torch.ones(1)}, "num_hidden_layers", "num_hidden_layers=2, .* has 11"),
        ({"model_type": "llama"}, {}, "model_type", f"{OF_ANOTHER} model_type='llama', the model in .* has 'qwen3'"),
        ({"vocab_size": 6}, {}, "vocab_size", f"{OF_ANOTHER} vocab_size=6, the model in .* has 7"),
        ({"hidden_size": 7}, {}, "hidden_size", f"{OF_ANOTHER} hidden_size=7, the model in .* has 6"),
        *(
            ({name: None}, {}, name, f"is refused: its config.json has no {name}, so it is not known to be of the model in")
            for name in ("model_type", "vocab_size", "hidden_size", "num_hidden_layers")
        ),
    ],
)
def test_a_source_must_be_of_the_model_by_every_field(
    tmp_path: Path, config: dict[str, Any], more: dict[str, Tensor], field: str | None, problem: str
) -> None:
    source = write_source(tmp_path / "source", **config)
    model_type = "vl" if "text_config" in config else "qwen3"
    weights = TrainingWeights(write_checkpoint(tmp_path / "state", {**WEIGHTS, **more}, model_type=model_type))
    if field is None:
        assert source_of(weights, source) == source
        return
    with pytest.raises(
        CheckpointError, match=f"{source} .*{problem}.*; give the directory that the run began from"
    ) as caught:
        source_of(weights, source)
    assert caught.value.details == {"path": str(source), "field": field}


def test_a_model_without_embeddings_by_that_name_must_have_a_weight_of_the_sizes(tmp_path: Path) -> None:
    others = {name: tensor for name, tensor in WEIGHTS.items() if "embed" not in name}
    source = write_source(tmp_path / "source")
    weights = TrainingWeights(write_checkpoint(tmp_path / "state", {**others, "model.embed.weight": torch.ones(6, 7)}))
    with pytest.raises(CheckpointError, match=r"has vocab_size=7 and hidden_size=6, the model in .* has no such weight"):
        source_of(weights, source)
    named = TrainingWeights(write_checkpoint(tmp_path / "named", {**others, "model.embed.weight": torch.ones(7, 6)}))
    assert source_of(named, source) == source
    # Embeddings of another kind say nothing of the vocabulary.
    (tmp_path / "more").mkdir()
    flat = {"tower.embed_tokens.weight": torch.ones(5), "model.embed.weight": torch.ones(7, 6)}
    assert source_of(TrainingWeights(write_checkpoint(tmp_path / "more" / "state", {**others, **flat})), source) == source


@pytest.mark.parametrize("head", ["log_probs", "values"])
def test_an_export_has_trained_and_kept_weights_and_tells_its_progress(tmp_path: Path, head: str) -> None:
    source = write_source(tmp_path / "source")
    kept = {"mtp.fc.weight": torch.randn(2, 3, dtype=torch.float16)}
    save_file({**kept, "other.weight": torch.ones(2)}, source / "model.safetensors")
    weights = TrainingWeights(
        write_checkpoint(
            tmp_path / "state",
            WEIGHTS,
            head=head,
            kept={"mtp.fc.weight": (2, 3)},
            in_float32=("model.layers.0.router.bias",),
        )
    )
    told: list[int] = []
    out = tmp_path / "out"
    export_checkpoint(weights, out, source, dtype=torch.bfloat16, max_shard_bytes=60, progress=told.append)
    assert told == [tensor.numel() * (4 if "router" in name else 2) for name, tensor in WEIGHTS.items()]
    files = sorted(out.glob("*.safetensors"))
    found = {name: tensor for file in files for name, tensor in load_file(file).items()}
    assert len(files) > 2 and found.keys() == {*WEIGHTS, *kept}
    assert all(torch.equal(found[name], tensor.to(found[name].dtype)) for name, tensor in {**WEIGHTS, **kept}.items())
    assert found["model.layers.0.router.bias"].dtype == torch.float32
    assert found["model.norm.weight"].dtype == torch.bfloat16 and found["mtp.fc.weight"].dtype == torch.float16
    written = json.loads((out / "config.json").read_text())
    assert written["dtype"] == "bfloat16"
    assert written["architectures"] == (["Qwen3ForTokenClassification"] if head == "values" else ["Qwen3ForCausalLM"])
    assert ("id2label" in written) is (head == "values")


def test_experts_are_exported_in_mxfp4_beside_plain_weights(tmp_path: Path) -> None:
    source = write_source(tmp_path / "source")
    experts = {"model.layers.1.mlp.experts.down_proj": torch.randn(2, 32, 3)}
    weights = TrainingWeights(write_checkpoint(tmp_path / "state", {**WEIGHTS, **experts}))
    export_checkpoint(weights, tmp_path / "out", source, dtype=torch.bfloat16, mxfp4=True)
    found = load_file(tmp_path / "out" / "model.safetensors")
    assert found["model.layers.1.mlp.experts.down_proj_blocks"].shape == (2, 3, 1, 16)
    assert found["model.norm.weight"].dtype == torch.bfloat16
    assert json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]["quant_method"] == "mxfp4"
