"""Weights that a directory has beside those that are trained: left unread, and in every saved model byte for byte."""

from __future__ import annotations

import json
import logging
import multiprocessing
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from rl_backend.checkpoint.hf_reader import HFReader
from rl_backend.checkpoint.hf_writer import write_hf_directory
from rl_backend.checkpoint.kept_weights import describe_kept
from rl_backend.contracts import CheckpointError, TensorInfo
from rl_backend.runtime import check_weights
from tests.support.kept_family import TRAINED, require_index, stored_bytes, write_towered
from tests.support.memory import peak_memory, reset_peak_memory
from tests.support.native import make_config, micro_batches, open_runtime, train


def save(source: Path, out: Path, steps: int = 0) -> None:
    with open_runtime(source) as runtime:
        handle = runtime.build_model()
        train(runtime, handle, steps)
        runtime.save_checkpoint(handle, out, hf=True)


@pytest.mark.shows("model: what a released model has beside the trained weights is saved with them, byte for byte")
@pytest.mark.parametrize("sharded", [False, True])
def test_a_model_that_is_saved_before_it_is_trained_is_its_source_byte_for_byte(tmp_path: Path, sharded: bool) -> None:
    source = write_towered(tmp_path / "source", sharded=sharded)
    save(source, tmp_path / "out")
    assert stored_bytes(tmp_path / "out") == stored_bytes(source)
    require_index(tmp_path / "out")
    for name in ("config.json", "tokenizer.json", "preprocessor_config.json"):
        assert (tmp_path / "out" / name).read_bytes() == (source / name).read_bytes()


def test_training_changes_the_trained_weights_alone_and_a_saved_model_is_a_source_itself(tmp_path: Path) -> None:
    source, data = write_towered(tmp_path / "source", sharded=True), micro_batches([[0], [1]])
    with open_runtime(source) as runtime:
        handle = runtime.build_model()
        train(runtime, handle, 2)
        runtime.save_checkpoint(handle, tmp_path / "out", hf=True)
        expected = runtime.forward_backward(handle, data, None, forward_only=True).output("log_probs")
    before, after = stored_bytes(source), stored_bytes(tmp_path / "out")
    assert before.keys() == after.keys()
    assert {name for name in before if before[name] != after[name]} == set(TRAINED)
    shutil.rmtree(source)
    with open_runtime(tmp_path / "out") as runtime:
        handle = runtime.build_model()
        found = runtime.forward_backward(handle, data, None, forward_only=True).output("log_probs")
        runtime.save_checkpoint(handle, tmp_path / "again", hf=True)
    assert all(torch.equal(one, other) for one, other in zip(expected, found, strict=True))
    assert stored_bytes(tmp_path / "again") == after


def test_a_run_that_continues_from_its_own_checkpoint_saves_what_it_would_have_saved(tmp_path: Path) -> None:
    source = write_towered(tmp_path / "source")
    with open_runtime(source) as runtime:
        handle = runtime.build_model()
        train(runtime, handle, 2)
        runtime.save_checkpoint(handle, tmp_path / "state")
        runtime.save_checkpoint(handle, tmp_path / "out", hf=True)
    with open_runtime(source) as runtime:
        handle = runtime.build_model()
        runtime.load_checkpoint(handle, tmp_path / "state")
        runtime.save_checkpoint(handle, tmp_path / "again", hf=True)
    assert stored_bytes(tmp_path / "again") == stored_bytes(tmp_path / "out")


def test_of_config_json_only_the_dtype_of_the_language_model_changes(tmp_path: Path) -> None:
    source = write_towered(tmp_path / "source", dtype=torch.bfloat16)
    save(source, tmp_path / "out")
    before, after = (json.loads((path / "config.json").read_text()) for path in (source, tmp_path / "out"))
    assert before["text_config"].pop("dtype") == "bfloat16" and after["text_config"].pop("dtype") == "float32"
    assert after == before
    assert list(after) == list(before) and after["tower_config"]["dtype"] == "bfloat16"


def test_pushes_announce_and_send_the_trained_weights_by_the_directorys_names(tmp_path: Path) -> None:
    with open_runtime(write_towered(tmp_path / "source")) as runtime:
        handle = runtime.build_model()
        assert tuple(info.name for info in runtime.weight_infos(handle)) == TRAINED
        assert tuple(name for name, _ in runtime.export_weights(handle)) == TRAINED


@pytest.mark.shows("model: a tensor that a family neither trains nor keeps is refused before anything is read")
def test_tensors_that_the_family_does_not_keep_are_still_refused(tmp_path: Path) -> None:
    source = write_towered(tmp_path / "source")
    tensors = load_file(source / "model.safetensors")
    save_file({**tensors, "towers.weight": torch.ones(2)}, source / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"the model has no parameter for towers\.weight"):
        check_weights(make_config(source))
    with (
        open_runtime(source) as runtime,
        pytest.raises(CheckpointError, match=r"the model has no parameter for towers\.weight"),
    ):
        runtime.build_model()


def test_a_trained_weight_that_is_missing_is_refused_whatever_is_kept(tmp_path: Path) -> None:
    source = write_towered(tmp_path / "source")
    tensors = load_file(source / "model.safetensors")
    del tensors[TRAINED[1]]
    save_file(tensors, source / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"has no tensor model\.language_model\.out\.weight"):
        check_weights(make_config(source))


@pytest.mark.shows("model: a saved model whose source is gone, or lacks kept weights, is refused and leaves nothing")
def test_a_source_that_is_gone_is_named_nothing_is_written_and_training_goes_on(tmp_path: Path) -> None:
    source = write_towered(tmp_path / "source")
    with open_runtime(source) as runtime:
        handle = runtime.build_model()
        source.rename(tmp_path / "elsewhere")
        with pytest.raises(CheckpointError, match=r"source/config.json cannot be read .* give the local directory"):
            runtime.save_checkpoint(handle, tmp_path / "out", hf=True)
        assert [entry.name for entry in tmp_path.iterdir()] == ["elsewhere"]
        train(runtime, handle, 1)
        runtime.save_checkpoint(handle, tmp_path / "state")
        (tmp_path / "elsewhere").rename(source)
        runtime.save_checkpoint(handle, tmp_path / "out", hf=True)
    assert stored_bytes(tmp_path / "out").keys() == stored_bytes(source).keys()


def test_a_source_that_lost_what_is_kept_is_refused_by_the_names(tmp_path: Path) -> None:
    source = write_towered(tmp_path / "source")
    tensors = load_file(source / "model.safetensors")
    with open_runtime(source) as runtime:
        handle = runtime.build_model()
        without = {name: tensor for name, tensor in tensors.items() if name != "drafts.layers.0.codes"}
        for changed in (without, {**tensors, "drafts.layers.0.codes": torch.ones(8, dtype=torch.uint8)}):
            save_file(changed, source / "model.safetensors")
            with pytest.raises(CheckpointError, match=r"source lacks drafts\.layers\.0\.codes, or has another shape of it"):
                runtime.save_checkpoint(handle, tmp_path / "out", hf=True)
            assert [entry.name for entry in tmp_path.iterdir()] == ["source"]


def test_kept_tensors_of_a_dtype_that_is_not_written_are_refused_by_name(tmp_path: Path) -> None:
    source = write_towered(tmp_path / "source")
    content = (source / "model.safetensors").read_bytes()
    start = 8 + int.from_bytes(content[:8], "little")
    header = json.loads(content[8:start])
    header["drafts.layers.0.codes"] |= {"dtype": "F4", "shape": [14]}
    text = json.dumps(header).encode()
    (source / "model.safetensors").write_bytes(len(text).to_bytes(8, "little") + text + content[start:])
    with pytest.raises(CheckpointError, match=r"has drafts\.layers\.0\.codes in F4, which is not copied to a saved model"):
        check_weights(make_config(source))


def test_a_warning_says_what_is_kept_where_it_is_trained_beside_it(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    source = write_towered(tmp_path / "source")
    with open_runtime(source) as runtime, caplog.at_level(logging.WARNING, logger="rl_backend"):
        runtime.build_model(forward_only=True)
        assert not caplog.records
        runtime.build_model()
    (record,) = caplog.records
    said = record.getMessage()
    assert "drafts.layers.0 (4), model.tower (5) of" in said
    assert "less with every step: drafts by MTP weights are accepted less often" in said


def test_what_is_kept_is_told_by_module_and_number() -> None:
    names = [*(f"model.visual.blocks.{index}.weight" for index in range(3)), "model.visual.merger.bias", "mtp.fc.weight"]
    assert describe_kept(names) == "model.visual (4), mtp.fc (1)"
    assert describe_kept(["model.layers.61.enorm.weight", "model.layers.61.eh_proj.weight"]) == "model.layers.61 (2)"


def memory_of_write(source: Path, out: Path) -> int:
    """Of the second write: the first imports what both need."""
    before, kept = 0, {name: info.shape for name, info in HFReader(source).infos.items() if name != "trained"}
    for folder in (out / "first", out / "second"):
        tensors = iter([("trained", torch.ones(4))])
        before = reset_peak_memory()
        write_hf_directory(folder, [TensorInfo.of("trained", (4,), torch.float32)], tensors, source, kept=kept)
    return peak_memory() - before


@pytest.mark.shows("model: kept weights are copied one by one; host memory holds one of them")
def test_kept_weights_are_copied_one_by_one(tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.mkdir()
    (source / "config.json").write_text("{}")
    tensors = {f"kept.{index}": torch.full((1024, 1024), float(index)) for index in range(24)}
    save_file({"trained": torch.zeros(4), **tensors}, source / "model.safetensors")
    # A process of its own: what allocators keep depends on all that a process has done.
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        taken = pool.apply(memory_of_write, (source, tmp_path))
    assert taken < 6 * 2**22, "a tensor, its copy, and what allocators keep"
    assert {name: stored.data for name, stored in stored_bytes(tmp_path / "second").items() if name != "trained"} == {
        name: tensor.numpy().tobytes() for name, tensor in tensors.items()
    }
