"""Writing Hugging Face directories: what transformers loads, and all or nothing."""

from __future__ import annotations

import errno
import json
import os
import resource
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import Qwen3ForCausalLM

from rl_backend.checkpoint.hf_reader import WEIGHTS_INDEX, HFReader
from rl_backend.checkpoint.hf_writer import write_hf_directory
from rl_backend.contracts import CheckpointError, TensorInfo


def stored_tensors(path: Path, dtype: torch.dtype = torch.float32) -> Iterator[tuple[str, Tensor]]:
    """As an export yields them: one buffer, valid until the next tensor is taken."""
    reader = HFReader(path)
    buffer = torch.empty(max(torch.Size(info.shape).numel() for info in reader.infos.values()), dtype=dtype)
    for name, info in reader.infos.items():
        tensor = buffer[: torch.Size(info.shape).numel()].view(info.shape)
        yield name, tensor.copy_(reader.read(name))
        buffer.fill_(torch.nan)


def write(out: Path, path: Path, source: Path, dtype: torch.dtype = torch.float32, max_shard_bytes: int = 10**9) -> None:
    """The tensors of ``path``."""
    infos = [described(name, tensor) for name, tensor in stored_tensors(path, dtype)]
    write_hf_directory(out, infos, stored_tensors(path, dtype), source, max_shard_bytes=max_shard_bytes)


def described(name: str, tensor: Tensor) -> TensorInfo:
    return TensorInfo.of(name, tensor.shape, tensor.dtype)


@pytest.mark.shows("model: a Hugging Face directory is written in shards, complete or not at all")
@pytest.mark.parametrize("max_shard_bytes", [10**9, 100_000, 1])
def test_transformers_loads_what_was_written(untied_model: Path, tmp_path: Path, max_shard_bytes: int) -> None:
    out = tmp_path / "out"
    write(out, untied_model, untied_model, max_shard_bytes=max_shard_bytes)
    expected = Qwen3ForCausalLM.from_pretrained(untied_model, dtype="auto").state_dict()
    written, info = Qwen3ForCausalLM.from_pretrained(out, dtype="auto", output_loading_info=True)
    assert not any(info[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    for name, value in written.state_dict().items():
        assert torch.equal(value, expected[name])
    assert [entry.name for entry in tmp_path.iterdir()] == ["out"]


def test_shards_keep_to_their_size_and_the_index_covers_them(untied_model: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    write(out, untied_model, untied_model, max_shard_bytes=100_000)
    files = sorted(out.glob("*.safetensors"))
    assert len(files) > 2
    assert files[0].name == f"model-00001-of-{len(files):05d}.safetensors"
    assert all(file.stat().st_size < 110_000 for file in files)
    index = json.loads((out / WEIGHTS_INDEX).read_text())
    assert set(index["weight_map"]) == set(HFReader(untied_model).infos)
    assert index["metadata"]["total_size"] == sum(value.nbytes for _, value in stored_tensors(untied_model))


def test_a_single_shard_has_the_usual_name_and_no_index(tied_model: Path, tmp_path: Path) -> None:
    write(tmp_path / "out", tied_model, tied_model)
    assert (tmp_path / "out" / "model.safetensors").is_file()
    assert not (tmp_path / "out" / WEIGHTS_INDEX).exists()


def test_each_tensor_is_on_the_disk_before_the_next_is_taken(tied_model: Path, tmp_path: Path) -> None:
    taken: list[tuple[str, Tensor]] = []

    def watched() -> Iterator[tuple[str, Tensor]]:
        for name, tensor in stored_tensors(tied_model):
            on_disk = {
                key: value
                for file in tmp_path.glob(".out.incomplete-*/*.safetensors")
                for key, value in load_file(file).items()
            }
            assert all(torch.equal(on_disk[before], whole) for before, whole in taken)
            taken.append((name, tensor.clone()))
            yield name, tensor

    infos = [described(name, tensor) for name, tensor in stored_tensors(tied_model)]
    write_hf_directory(tmp_path / "out", infos, watched(), tied_model, max_shard_bytes=80_000)
    assert len(taken) == len(infos)


def test_tensors_may_come_in_any_order_and_with_odd_shapes(tied_model: Path, tmp_path: Path) -> None:
    tensors = {
        "a": torch.arange(3, dtype=torch.uint8),
        "b": torch.randn(3, 5).t(),
        "c": torch.tensor(2.5, dtype=torch.bfloat16),
        "d": torch.empty(0, 4),
        "e": torch.randn(7, dtype=torch.float64),
        "f": torch.randn(5, dtype=torch.bfloat16),
    }
    infos = [described(name, tensor) for name, tensor in tensors.items()]
    for size in (10**6, 30):
        out = tmp_path / f"out-{size}"
        write_hf_directory(out, infos, reversed(tensors.items()), tied_model, max_shard_bytes=size)  # type: ignore[arg-type]
        found = {name: value for file in out.glob("*.safetensors") for name, value in load_file(file).items()}
        assert found.keys() == tensors.keys()
        assert all(torch.equal(found[name], tensors[name]) for name in tensors)


@pytest.mark.parametrize("field", ["dtype", "torch_dtype"])
def test_config_says_the_dtype_that_was_written(tied_model: Path, tmp_path: Path, field: str) -> None:
    source = tmp_path / "source"
    source.mkdir()
    config = json.loads((tied_model / "config.json").read_text())
    del config["dtype"]
    (source / "config.json").write_text(json.dumps({**config, field: "float32"}))
    write(tmp_path / "out", tied_model, source, dtype=torch.bfloat16)
    written = json.loads((tmp_path / "out" / "config.json").read_text())
    assert written == {**config, field: "bfloat16"}
    assert {info.dtype for info in HFReader(tmp_path / "out").infos.values()} == {torch.bfloat16}


@pytest.mark.parametrize("coded", [True, False])
def test_the_model_s_other_files_are_copied_and_everything_else_is_not(
    tied_model: Path, tmp_path: Path, coded: bool
) -> None:
    source = tmp_path / "source"
    source.mkdir()
    config = json.loads((tied_model / "config.json").read_text())
    code = {"auto_map": {"AutoModelForCausalLM": "modeling_mine.Mine"}} if coded else {}
    (source / "config.json").write_text(json.dumps({**config, **code}))
    kept = ["tokenizer.json", "tokenizer_config.json", "generation_config.json", "merges.txt", "chat_template.jinja"]
    kept += ["README.md", "LICENSE", "preprocessor_config.json", "additional_chat_templates/tools.jinja"]
    dropped = ["old.safetensors", "pytorch_model.bin", "rust_model.ot", WEIGHTS_INDEX, ".gitattributes"]
    dropped += ["id_rsa", "notes.txt", "credentials.json", "additional_chat_templates/notes.txt"]
    (kept if coded else dropped).append("modeling_mine.py")
    for name in (*kept, *dropped, "original/consolidated.00.pth", "original/params.json"):
        (source / name).parent.mkdir(exist_ok=True)
        (source / name).write_text(name)
    write(tmp_path / "out", tied_model, source)
    written = {str(file.relative_to(tmp_path / "out")) for file in (tmp_path / "out").rglob("*") if file.is_file()}
    assert written == {*kept, "config.json", "model.safetensors"}


def test_a_link_out_of_the_source_is_refused_before_anything_is_written(tied_model: Path, tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.mkdir()
    (source / "config.json").write_text((tied_model / "config.json").read_text())
    (tmp_path / "secret").write_text("secret")
    (source / "merges.txt").symlink_to("../secret")
    with pytest.raises(CheckpointError, match=r"merges\.txt is a link out of it, to .*secret"):
        write(tmp_path / "out", tied_model, source)
    (source / "merges.txt").unlink()
    (source / "additional_chat_templates").symlink_to(tmp_path)
    (tmp_path / "secret.jinja").write_text("secret")
    with pytest.raises(CheckpointError, match=r"additional_chat_templates/secret\.jinja is a link out of it"):
        write(tmp_path / "out", tied_model, source)
    (source / "additional_chat_templates").unlink()
    (source / "vocab.json").write_text("{}")
    (source / "tokenizer.json").symlink_to("vocab.json")
    os.mkfifo(source / "vocab.txt")
    write(tmp_path / "out", tied_model, source)
    assert (tmp_path / "out" / "tokenizer.json").read_text() == "{}"
    assert not (tmp_path / "out" / "tokenizer.json").is_symlink()
    assert not (tmp_path / "out" / "vocab.txt").exists()


def test_an_existing_path_is_refused_and_left_alone(tied_model: Path, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    with pytest.raises(CheckpointError, match="out exists already; choose a new directory"):
        write(tmp_path / "out", tied_model, tied_model)
    assert list((tmp_path / "out").iterdir()) == []


def test_a_missing_parent_is_refused(tied_model: Path, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="absent is not a directory; create it first"):
        write(tmp_path / "absent" / "out", tied_model, tied_model)


def test_a_source_without_config_is_refused(tied_model: Path, tmp_path: Path) -> None:
    (tmp_path / "source").mkdir()
    with pytest.raises(CheckpointError, match=r"config\.json cannot be read .*No such file"):
        write(tmp_path / "out", tied_model, tmp_path / "source")
    assert not (tmp_path / "out").exists()


ONES = torch.ones(2)


@pytest.mark.parametrize(
    ("announced", "came", "problem"),
    [
        ([("a", ONES)], [("a", ONES), ("a", ONES)], "'a' came as .*, nothing more of this name was announced"),
        ([("a", ONES)], [("b", ONES)], "'b' came as .*, nothing more of this name was announced"),
        ([("a", ONES), ("b", ONES)], [("a", ONES)], "1 of 2 tensors did not come, 'b' for one"),
        ([("a", ONES)], [("a", ONES.view(2, 1))], r"'a' came as float32 \(2, 1\), float32 \(2,\) was announced"),
        ([("a", ONES)], [("a", ONES.bfloat16())], r"'a' came as bfloat16 \(2,\), float32 \(2,\) was announced"),
    ],
)
def test_tensors_that_are_not_those_announced_are_refused(
    tied_model: Path, tmp_path: Path, announced: list[tuple[str, Tensor]], came: list[tuple[str, Tensor]], problem: str
) -> None:
    infos = [described(name, tensor) for name, tensor in announced]
    with pytest.raises(CheckpointError, match=problem):
        write_hf_directory(tmp_path / "out", infos, iter(came), tied_model)
    assert list(tmp_path.iterdir()) == []


def test_a_failure_in_the_middle_leaves_nothing_behind(tied_model: Path, tmp_path: Path) -> None:
    def failing() -> Iterator[tuple[str, Tensor]]:
        yield "a", torch.ones(1000)
        yield "b", torch.ones(1000)
        raise KeyboardInterrupt

    infos = [described(name, torch.ones(1000)) for name in "abc"]
    with pytest.raises(KeyboardInterrupt):
        write_hf_directory(tmp_path / "out", infos, failing(), tied_model, max_shard_bytes=1)
    assert list(tmp_path.iterdir()) == []


def test_shards_that_do_not_fit_are_one_clear_error_and_leave_nothing_behind(tied_model: Path, tmp_path: Path) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, hard))
    try:
        with pytest.raises(CheckpointError, match="nothing was left there"):
            write(tmp_path / "out", tied_model, tied_model)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert list(tmp_path.iterdir()) == []


def test_a_full_disk_is_one_clear_error_and_leaves_nothing_behind(
    tied_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(CheckpointError, match="No space left on device"):
        write(tmp_path / "out", tied_model, tied_model)
    assert list(tmp_path.iterdir()) == []


def test_memory_of_what_was_written_can_be_released(untied_model: Path, tmp_path: Path) -> None:
    reader = HFReader(untied_model)
    tensors = {name: reader.read(name).clone() for name in reader.infos}
    infos = [described(name, tensor) for name, tensor in tensors.items()]
    write_hf_directory(tmp_path / "out", infos, iter(tensors.items()), untied_model)
    assert all(tensor.untyped_storage().resizable() for tensor in tensors.values())


def test_a_configuration_that_is_given_is_written_in_place_of_the_sources(untied_model: Path, tmp_path: Path) -> None:
    source = json.loads((untied_model / "config.json").read_text())
    given = {**source, "architectures": ["Qwen3ForTokenClassification"], "num_labels": 1}
    infos = [described(name, tensor) for name, tensor in stored_tensors(untied_model)]
    for name, config in (("critic", given), ("model", None)):
        write_hf_directory(tmp_path / name, infos, stored_tensors(untied_model), untied_model, config=config)
        assert json.loads((tmp_path / name / "config.json").read_text()) == (config or source)
    quantised = {**given, "quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]}}
    write_hf_directory(tmp_path / "plain", infos, stored_tensors(untied_model), untied_model, config=quantised)
    assert json.loads((tmp_path / "plain" / "config.json").read_text()) == given
