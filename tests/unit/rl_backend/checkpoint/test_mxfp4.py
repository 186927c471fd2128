"""Experts in MXFP4: read as transformers reads them, in any part, and written with the same numbers again."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from actors.rollout.config import RolloutConfig
from actors.rollout.vllm.capabilities import check_served
from rl_backend.checkpoint.hf_export import TrainingWeights, export_checkpoint, source_of
from rl_backend.checkpoint.hf_reader import HFReader
from rl_backend.checkpoint.quantisation import dequantised, quantised
from rl_backend.cli.main import main
from rl_backend.contracts import CheckpointError, UnsupportedError
from rl_backend.model import find_model
from tests.support.families import load_native, random_sequences, run_native
from tests.support.moe import write_moe
from tests.support.native import open_runtime

EXPERTS = "model.layers.1.mlp.experts.gate_up_proj"


def write_mxfp4(path: Path) -> tuple[Path, Path]:
    """A gpt-oss as OpenAI publishes it, and the same model in plain numbers."""
    plain, packed = write_moe("gpt_oss", path / "plain", intermediate_size=96, max_shard_size="1GB"), path / "packed"
    tensors = load_file(plain / "model.safetensors")
    stored: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        if name.endswith(("gate_up_proj", "down_proj")):
            blocks, scales = quantised(tensor)
            stored |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
            # Transposed by transformers after it has read it.
            tensors[name] = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32).contiguous()
        else:
            stored[name] = tensor
    save_file(tensors, plain / "model.safetensors", metadata={"format": "pt"})
    packed.mkdir()
    save_file(stored, packed / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((plain / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}
    (packed / "config.json").write_text(json.dumps(config))
    return packed, plain


@pytest.fixture(scope="module")
def directories(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return write_mxfp4(tmp_path_factory.mktemp("mxfp4"))


@pytest.mark.shows("checkpoint: gpt-oss in MXFP4 is read as transformers dequantises it, each rank only its part")
def test_mxfp4_is_read_as_transformers_reads_it(directories: tuple[Path, Path]) -> None:
    packed, plain = (HFReader(path) for path in directories)
    assert packed.infos == plain.infos
    assert all(torch.equal(packed.read(name), plain.read(name)) for name in plain.infos)
    for region in ((slice(2, 5),), (slice(1, 2), slice(5, 40)), (slice(0, 3), slice(33, 64), slice(7, 9))):
        assert torch.equal(packed.read(EXPERTS, region), plain.read(EXPERTS, region))


def test_a_model_in_mxfp4_computes_what_its_plain_numbers_do(directories: tuple[Path, Path]) -> None:
    with torch.no_grad():
        packed, plain = (run_native(load_native(path), random_sequences((30, 1, 9))).log_probs for path in directories)
    assert torch.equal(packed, plain)


@pytest.mark.shows(
    "checkpoint: gpt-oss that was read from MXFP4 is saved as plain numbers, or as MXFP4 with the same numbers"
)
def test_what_was_read_from_mxfp4_is_written_plain_or_in_mxfp4_again(
    directories: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    packed, plain = directories
    with open_runtime(packed) as runtime:
        handle = runtime.build_model()
        runtime.save_checkpoint(handle, tmp_path / "saved", hf=True)
        runtime.save_checkpoint(handle, tmp_path / "state")
    assert "quantization_config" not in json.loads((tmp_path / "saved" / "config.json").read_text())
    arguments = ["--checkpoint", str(tmp_path / "state"), "--out", str(tmp_path / "again"), "--dtype", "mxfp4", "--json"]
    assert main(["export", *arguments]) == 0
    assert json.loads(capsys.readouterr().out)["tensors"] == len(load_file(packed / "model.safetensors"))
    assert json.loads((tmp_path / "again" / "config.json").read_text())["quantization_config"]["quant_method"] == "mxfp4"
    expected = HFReader(plain)
    for name in ("saved", "again"):
        found = HFReader(tmp_path / name)
        assert found.infos.keys() == expected.infos.keys()
        # What is not in MXFP4 is bfloat16 beside it.
        compared = [tensor for tensor in expected.infos if name == "saved" or tensor in found.dequantised]
        assert compared and all(torch.equal(found.read(tensor), expected.read(tensor)) for tensor in compared)
    stored = HFReader(tmp_path / "again").path / "model.safetensors"
    assert load_file(stored)[f"{EXPERTS}_blocks"].dtype == torch.uint8


def test_numbers_are_rounded_to_the_nearest_and_ties_to_even() -> None:
    """Of a block whose largest number is 6, in units of its power of two."""
    given = (6.0, 0.25, 0.26, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 5.1, -2.5, -0.74, 7.9, 0.0)
    expected = (6.0, 0.0, 0.5, 1.0, 1.0, 2.0, 2.0, 4.0, 4.0, 6.0, -2.0, -0.5, 6.0, 0.0)
    for power in (2.0**-9, 1.0, 2.0**20):
        weight = power * torch.tensor([*given, *[1.0] * 18])[None, :, None]
        found = dequantised(*quantised(weight))[0, : len(given), 0] / power
        assert found.tolist() == list(expected)
    assert not dequantised(*quantised(torch.zeros(1, 32, 2))).any()


def test_what_does_not_fit_together_is_refused(directories: tuple[Path, Path], tmp_path: Path) -> None:
    packed, _ = directories
    tensors, config = load_file(packed / "model.safetensors"), json.loads((packed / "config.json").read_text())
    blocks = f"{EXPERTS}_blocks"
    for change in ({blocks: None}, {blocks: tensors[blocks][..., :8].contiguous()}, {blocks: tensors[blocks].float()}):
        broken = {name: tensor for name, tensor in {**tensors, **change}.items() if tensor is not None}
        save_file(broken, tmp_path / "model.safetensors", metadata={"format": "pt"})
        (tmp_path / "config.json").write_text(json.dumps(config))
        with pytest.raises(CheckpointError, match="gate_up_proj_scales; expected U8 of shape"):
            HFReader(tmp_path)
    config["quantization_config"]["group_size"] = 16
    with pytest.raises(UnsupportedError, match="group_size is not known in MXFP4"):
        find_model("auto", config).parse_config(config)


def test_an_engine_does_not_compute_in_mxfp4(directories: tuple[Path, Path]) -> None:
    with pytest.raises(UnsupportedError, match=r"has weights in MXFP4.*save_checkpoint\(hf=True\)"):
        check_served(RolloutConfig(model_path=str(directories[0]), dtype="bfloat16"), "cpu")


def test_only_experts_of_gpt_oss_are_written_in_mxfp4(tmp_path: Path) -> None:
    for model, message in (
        ("minimax_m2", "no experts in the layout of gpt-oss"),
        ("gpt_oss", "48 inputs, which do not come"),
    ):
        path = write_moe(model, tmp_path / model)
        with open_runtime(path) as runtime:
            runtime.save_checkpoint(runtime.build_model(), tmp_path / f"{model} state")
        weights = TrainingWeights(tmp_path / f"{model} state")
        with pytest.raises(CheckpointError, match=message):
            export_checkpoint(weights, tmp_path / "out", source_of(weights), dtype=torch.float32, mxfp4=True)
        assert not (tmp_path / "out").exists()


def test_every_block_has_a_power_of_its_own_down_to_the_smallest() -> None:
    """Two experts, two blocks of inputs, three outputs; the largest number of a block is 6, or 4, in units of its power."""
    units = torch.tensor([0.0, 0.5, -1.0, 1.5, -2.0, 3.0, 4.0, -6.0])
    generator = torch.Generator().manual_seed(0)
    drawn = units[torch.randint(0, 8, (2, 2, 32, 3), generator=generator)]
    drawn[:, :, 5] = -6.0
    drawn[0, 1] = drawn[0, 1].clamp(-4.0, 4.0)
    powers = torch.arange(-48, 48, 8).view(2, 2, 1, 3)
    weight = torch.ldexp(drawn, powers).flatten(1, 2)
    blocks, scales = quantised(weight)
    assert torch.equal(dequantised(blocks, scales), weight)
    assert scales.view(2, 3, 2).transpose(1, 2)[0, 1].tolist() == (powers[0, 1, 0] + 127).tolist()
    smallest = torch.zeros(1, 64, 1)
    # The second block has numbers below 4 in units of the smallest power that there is.
    smallest[0, 0], smallest[0, 32:34, 0] = 1.0, torch.tensor([3.0, -0.5]) * 2.0**-127
    assert torch.equal(dequantised(*quantised(smallest)), smallest)
    beyond = torch.zeros(1, 32, 1).index_fill(1, torch.tensor([3]), 2.0**127)
    assert torch.equal(dequantised(*quantised(beyond)), beyond)
