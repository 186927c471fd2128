"""Released directories of Qwen3.5: the language model is trained, vision tower and MTP weights are saved as they were."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, AutoModelForTokenClassification

from rl_backend.checkpoint.hf_reader import HFReader
from rl_backend.cli.main import main
from rl_backend.contracts.lora import LoRAConfig
from tests.support.families import pack, random_sequences
from tests.support.kept_family import require_index, stored_bytes
from tests.support.native import open_runtime, train
from tests.support.qwen3_5 import save_text_model, write_qwen3_5

KEPT = ("model.visual.", "mtp.")


@pytest.fixture(scope="module", params=["qwen3_5", "qwen3_5_moe"])
def source(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_qwen3_5(tmp_path_factory.mktemp("released") / "source", moe=request.param == "qwen3_5_moe", released=True)


@pytest.fixture(params=["sharded", "one file"])
def stored(request: pytest.FixtureRequest, source: Path, tmp_path: Path) -> Path:
    """The directory with its weights in several files, or in one."""
    path = tmp_path / "stored"
    shutil.copytree(source, path)
    if request.param == "one file":
        from safetensors.torch import load_file, save_file

        tensors = {name: tensor for file in path.glob("*.safetensors") for name, tensor in load_file(file).items()}
        for file in [*path.glob("*.safetensors"), path / "model.safetensors.index.json"]:
            file.unlink()
        save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    return path


@pytest.mark.shows("model: a released Qwen3.5 that is saved untrained is its source: every tensor's bytes, and config.json")
def test_a_released_model_that_is_saved_before_training_is_its_source_byte_for_byte(stored: Path, tmp_path: Path) -> None:
    with open_runtime(stored) as runtime:
        handle = runtime.build_model()
        names = [info.name for info in runtime.weight_infos(handle)]
        runtime.save_checkpoint(handle, tmp_path / "out", hf=True)
    before, after = stored_bytes(stored), stored_bytes(tmp_path / "out")
    assert after == before
    assert sorted(names) == sorted(name for name in before if not name.startswith(KEPT))
    assert all(any(name.startswith(prefix) for name in before) for prefix in KEPT)
    assert any(name.startswith("model.language_model.layers.0.") for name in names)
    require_index(tmp_path / "out")
    assert (tmp_path / "out" / "config.json").read_bytes() == (stored / "config.json").read_bytes()


def test_packed_experts_are_saved_one_by_one_and_those_of_the_mtp_layer_as_they_are(tmp_path: Path) -> None:
    source = write_qwen3_5(tmp_path / "source", moe=True, released=True, packed=True)
    with open_runtime(source) as runtime:
        runtime.save_checkpoint(runtime.build_model(), tmp_path / "out", hf=True)
    before, after = HFReader(source), HFReader(tmp_path / "out")
    assert before.infos.keys() == after.infos.keys()
    for name in before.infos:
        assert torch.equal(before.read(name), after.read(name)), name
    stored = stored_bytes(tmp_path / "out")
    kept = {name: tensor for name, tensor in stored_bytes(source).items() if name.startswith(KEPT)}
    assert kept and kept == {name: tensor for name, tensor in stored.items() if name.startswith(KEPT)}
    assert "model.language_model.layers.0.mlp.experts.0.up_proj.weight" in stored


def test_transformers_and_the_native_runtime_load_a_trained_released_model(source: Path, tmp_path: Path) -> None:
    # Without the tokens that stand for images.
    sequences = random_sequences((7, 1, 33, 64, 65), vocab_size=120)
    with open_runtime(source) as runtime:
        handle = runtime.build_model()
        train(runtime, handle, 2)
        runtime.save_checkpoint(handle, tmp_path / "state")
        runtime.save_checkpoint(handle, tmp_path / "out", hf=True)
        found = list(runtime.forward_backward(handle, [pack(sequences)], None, forward_only=True).output("log_probs"))
    before, after = stored_bytes(source), stored_bytes(tmp_path / "out")
    assert before.keys() == after.keys()
    changed = {name for name in before if before[name] != after[name]}
    assert changed and not any(name.startswith(KEPT) for name in changed)
    # Fields that transformers does not know among them.
    assert json.loads((tmp_path / "out" / "config.json").read_text())["text_config"]["mtp_num_hidden_layers"] == 1
    for kind in (AutoModelForImageTextToText, AutoModelForCausalLM):
        model, report = kind.from_pretrained(tmp_path / "out", dtype=torch.float32, output_loading_info=True)
        assert not report["missing_keys"] and not report["unexpected_keys"] and not report["mismatched_keys"], report
        for sequence, log_probs in zip(sequences, found, strict=True):
            with torch.no_grad():
                expected = model(sequence[None]).logits[0].log_softmax(-1)
            expected = expected[:-1].gather(1, sequence[1:, None])[:, 0]
            torch.testing.assert_close(log_probs[:-1], expected, atol=1e-5, rtol=0)
    # Again from its own checkpoint, from what it saved, and by the command.
    with open_runtime(source) as runtime:
        handle = runtime.build_model()
        runtime.load_checkpoint(handle, tmp_path / "state")
        runtime.save_checkpoint(handle, tmp_path / "resumed", hf=True)
    with open_runtime(tmp_path / "out") as runtime:
        runtime.save_checkpoint(runtime.build_model(), tmp_path / "again", hf=True)
    assert main(["export", "--checkpoint", str(tmp_path / "state"), "--out", str(tmp_path / "exported")]) == 0
    assert stored_bytes(tmp_path / "resumed") == stored_bytes(tmp_path / "again") == after
    assert stored_bytes(tmp_path / "exported") == after


def test_a_critic_of_a_released_model_is_one_for_transformers_with_what_is_kept(source: Path, tmp_path: Path) -> None:
    with open_runtime(source) as runtime:
        runtime.save_checkpoint(runtime.build_model(head="values"), tmp_path / "out", hf=True)
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["architectures"][0].endswith("ForTokenClassification") and "text_config" in config
    before, after = stored_bytes(source), stored_bytes(tmp_path / "out")
    assert {name: after[name] for name in before if name.startswith(KEPT)} == {
        name: tensor for name, tensor in before.items() if name.startswith(KEPT)
    }
    if "moe" not in config["model_type"]:
        _, report = AutoModelForTokenClassification.from_pretrained(
            tmp_path / "out", dtype=torch.float32, output_loading_info=True
        )
        assert not report["missing_keys"] and not report["unexpected_keys"], report


def test_a_tenant_that_is_added_up_with_its_base_has_what_the_base_keeps(source: Path, tmp_path: Path) -> None:
    with open_runtime(source) as runtime:
        base = runtime.build_model(trainable=False)
        tenant = runtime.create_lora_adapter(base, LoRAConfig(rank=2, alpha=4.0, targets=("q_proj",)))
        runtime.save_checkpoint(tenant, tmp_path / "out", hf=True)
    assert stored_bytes(tmp_path / "out").keys() == stored_bytes(source).keys()


def test_a_text_model_keeps_nothing_and_needs_no_weights_of_its_source(tmp_path: Path) -> None:
    path = write_qwen3_5(tmp_path / "source")
    with open_runtime(path) as runtime:
        handle = runtime.build_model()
        assert not handle.kept
        runtime.save_checkpoint(handle, tmp_path / "out", hf=True)
    assert stored_bytes(tmp_path / "out") == stored_bytes(path)


@pytest.mark.shows("model: a text model that transformers saved under the names of a released Qwen3.5 is trained and saved")
def test_a_text_model_that_transformers_took_out_is_trained_and_saved(source: Path, tmp_path: Path) -> None:
    path = save_text_model(source, tmp_path / "taken")
    assert json.loads((path / "config.json").read_text())["model_type"].endswith("_text")
    nested = sorted(stored_bytes(path))
    # Where transformers gives text models their own names, checkpoint/nested_names.py is not needed for new directories.
    assert any(name.startswith("model.language_model.") for name in nested)
    sequence = random_sequences((33,), vocab_size=120)[0]
    with open_runtime(path) as runtime:
        handle = runtime.build_model()
        assert not handle.kept
        runtime.save_checkpoint(handle, tmp_path / "out", hf=True)
        (found,) = runtime.forward_backward(handle, [pack([sequence])], None, forward_only=True).output("log_probs")
    assert sorted(stored_bytes(tmp_path / "out")) == [name.replace("model.language_model.", "model.") for name in nested]
    for folder in (path, tmp_path / "out"):
        model, report = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, output_loading_info=True)
        assert not report["missing_keys"] and not report["unexpected_keys"] and not report["mismatched_keys"], report
        with torch.no_grad():
            expected = model(sequence[None]).logits[0].log_softmax(-1)
        expected = expected[:-1].gather(1, sequence[1:, None])[:, 0]
        torch.testing.assert_close(found[:-1], expected, atol=1e-5, rtol=0)
