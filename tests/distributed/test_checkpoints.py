"""Training state on disk: complete or not there at all, and the same on any number of ranks."""

from __future__ import annotations

import shutil
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from rl_backend.checkpoint import hf_writer
from rl_backend.checkpoint.manifest import read_manifest
from rl_backend.checkpoint.training_state import HostBuffers
from rl_backend.contracts import CheckpointError, ConfigError, OptimizerConfig
from rl_backend.runtime import checkpoints
from rl_backend.runtime.native.engine import native_runtime
from tests.support.bridge_runs import open_bridge
from tests.support.disk import full_disk
from tests.support.matrix import sampled
from tests.support.memory import peak_memory, reset_peak_memory
from tests.support.models import write_tiny_qwen3
from tests.support.native import (
    assert_equal_tensors,
    make_config,
    micro_batches,
    open_runtime,
    optimizer_state,
    token_loss,
    train,
    weights,
)
from tests.support.rank_pool import RankPool

OPTIMIZER = OptimizerConfig(lr=1e-3, lr_warmup_steps=3, lr_decay_style="cosine", total_training_steps=20)


def save_job(model: str, path: str, asynchronous: bool) -> tuple[dict[str, Tensor], list[tuple[float, float]]]:
    """State when saved, and the curve of two more steps, which an asynchronous save must not notice."""
    with open_runtime(model, optimizer=OPTIMIZER) as runtime:
        handle = runtime.build_model()
        train(runtime, handle, 2)
        state = {**weights(handle), **optimizer_state(handle)}
        runtime.save_checkpoint(handle, path, asynchronous=asynchronous)
        curve = train(runtime, handle, 3, first_seed=2)
        runtime.wait_for_checkpoint(handle)
    return state, curve


def load_job(model: str, path: str) -> tuple[dict[str, Tensor], list[tuple[float, float]], int]:
    with open_runtime(model, optimizer=OPTIMIZER, seed=7) as runtime:
        handle = runtime.build_model()
        train(runtime, handle, 1, first_seed=9)
        with runtime.train_mode(handle):
            runtime.forward_backward(handle, micro_batches(((0, 1), (2, 3)), seed=9), token_loss)
        runtime.load_checkpoint(handle, path)
        assert all(parameter.grad is None for parameter in handle.parameters.values())
        state = {**weights(handle), **optimizer_state(handle)}
        version = handle.weight_version
        curve = train(runtime, handle, 3, first_seed=2)
    return state, curve, version


@pytest.mark.shows("runtime: checkpoints, synchronous or not, load on another number of ranks")
@pytest.mark.parametrize(
    ("saved_by", "loaded_by", "asynchronous"),
    sampled([(2, 2, False), (2, 2, True), (4, 2, True)], (2, 2, True), (4, 2, True)),
)
def test_training_goes_on_exactly_where_it_was_on_any_number_of_ranks(
    ranks: RankPool, tmp_path: Path, saved_by: int, loaded_by: int, asynchronous: bool
) -> None:
    model, path = str(write_tiny_qwen3(tmp_path / "model", vocab_size=129)), str(tmp_path / "step-2")
    saved, curve = ranks.run(save_job, model, path, asynchronous, world_size=saved_by)[0]
    results = ranks.run(load_job, model, path, world_size=loaded_by)
    for state, continued, version in results:
        assert_equal_tensors(state, saved)
        assert version == 2
        if saved_by == loaded_by:
            assert continued == curve
        else:
            torch.testing.assert_close(torch.tensor(continued), torch.tensor(curve), rtol=1e-4, atol=0)
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["model", "step-2"]


def reference_job(model: str, path: str) -> tuple[dict[str, Tensor], int]:
    with open_runtime(model, param_dtype="bfloat16") as runtime:
        reference = runtime.build_model(forward_only=True)
        runtime.load_checkpoint(reference, path)
        return weights(reference), reference.weight_version


def test_a_forward_only_handle_takes_the_weights_in_its_own_dtype(
    ranks: RankPool, untied_model: Path, tmp_path: Path
) -> None:
    path = str(tmp_path / "step-2")
    saved, _ = ranks.run(save_job, str(untied_model), path, False)[0]
    for held, version in ranks.run(reference_job, str(untied_model), path, world_size=4):
        assert version == 2
        assert_equal_tensors(held, {name: saved[name].to(torch.bfloat16) for name in held})


def random_numbers_job(model: str, path: str, load: bool) -> Tensor:
    with open_runtime(model, seed=int(load)) as runtime:
        handle = runtime.build_model()
        if load:
            runtime.load_checkpoint(handle, path)
        else:
            torch.rand(3)
            runtime.save_checkpoint(handle, path)
        return torch.rand(4)


def test_random_state_is_each_ranks_own_and_is_restored(ranks: RankPool, tied_model: Path, tmp_path: Path) -> None:
    path = str(tmp_path / "saved")
    before = ranks.run(random_numbers_job, str(tied_model), path, False)
    after = ranks.run(random_numbers_job, str(tied_model), path, True)
    assert not torch.equal(before[0], before[1])
    assert all(torch.equal(first, second) for first, second in zip(before, after, strict=True))


@pytest.fixture(scope="module")
def saved(ranks: RankPool, tied_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of two ranks, to read or to copy."""
    path = tmp_path_factory.mktemp("whole") / "saved"
    ranks.run(save_job, str(tied_model), str(path), False)
    return path


def refused_loads_job(model: str, paths: Sequence[str]) -> list[str]:
    """Why each is refused; nothing changes, and the model can be trained after each."""
    messages = []
    with open_runtime(model) as runtime:
        handle = runtime.build_model()
        for path in paths:
            held = weights(handle)
            with pytest.raises(CheckpointError) as caught:
                runtime.load_checkpoint(handle, path)
            assert_equal_tensors(weights(handle), held)
            train(runtime, handle, 1)
            messages.append(str(caught.value))
    return messages


def remove_file(checkpoint: Path) -> str:
    (checkpoint / "__1_0.distcp").unlink()
    return "__1_0.distcp is missing"


def cut_file(checkpoint: Path) -> str:
    file = checkpoint / "__1_0.distcp"
    file.write_bytes(file.read_bytes()[:-10])
    return "is damaged: __1_0.distcp has"


def remove_manifest(checkpoint: Path) -> str:
    (checkpoint / "manifest.json").unlink()
    return "has no manifest.json"


def spoil_manifest(checkpoint: Path) -> str:
    (checkpoint / "manifest.json").write_text('{"format": 2, "parameters": {')
    return "manifest.json is damaged: Invalid JSON"


def spoil_metadata(checkpoint: Path) -> str:
    file = checkpoint / ".metadata"
    file.write_bytes(b"x" * file.stat().st_size)
    return "is damaged: .metadata has other bytes"


def flip_byte(file: Path, place: float) -> str:
    data = bytearray(file.read_bytes())
    data[int(place * len(data))] ^= 1
    file.write_bytes(data)
    return file.name


def flip_in_tensors(checkpoint: Path) -> str:
    return f"is damaged: {flip_byte(checkpoint / '__1_0.distcp', 0.5)} has other bytes"


def flip_in_metadata(checkpoint: Path) -> str:
    return f"is damaged: {flip_byte(checkpoint / '.metadata', 0.9)} has other bytes"


def change_manifest(checkpoint: Path) -> str:
    file = checkpoint / "manifest.json"
    text = file.read_text()
    assert '"weight_version": 2' in text
    file.write_text(text.replace('"weight_version": 2', '"weight_version": 3'))
    return "manifest.json is damaged"


def older_format(checkpoint: Path) -> str:
    file = checkpoint / "manifest.json"
    file.write_text(file.read_text().replace('"format": 2', '"format": 1'))
    return "has format 1, this version reads format 2"


DAMAGES = [
    remove_file,
    cut_file,
    flip_in_tensors,
    remove_manifest,
    spoil_manifest,
    change_manifest,
    older_format,
    spoil_metadata,
    flip_in_metadata,
]


@pytest.mark.shows(
    "checkpoints: a missing file, a flipped byte, a changed manifest or another model's checkpoint is refused by name"
)
def test_an_incomplete_checkpoint_is_refused_on_every_rank_before_anything_changes(
    ranks: RankPool, tied_model: Path, saved: Path, tmp_path: Path
) -> None:
    paths = [shutil.copytree(saved, tmp_path / damage.__name__) for damage in DAMAGES]
    reasons = [damage(path) for damage, path in zip(DAMAGES, paths, strict=True)]
    for messages in ranks.run(refused_loads_job, str(tied_model), [str(path) for path in paths]):
        for path, reason, message in zip(paths, reasons, messages, strict=True):
            assert reason in message, path.name


def test_another_models_checkpoint_is_refused_by_name(
    ranks: RankPool, tied_model: Path, untied_model: Path, saved: Path
) -> None:
    for (message,) in ranks.run(refused_loads_job, str(untied_model), [str(saved)]):
        assert "another model: lm_head.weight" in message
        assert str(tied_model) in message


def extra_job(model: str, folder: str) -> None:
    path, kept = Path(folder, "saved"), {"epoch": 1, "order": [3, 1, 2], "name": None}
    with open_runtime(model) as runtime:
        handle = runtime.build_model()
        for extra in ({"path": path}, {1: "a"}, {"pair": (1, 2)}):
            with pytest.raises(CheckpointError, match=r"saved: extra="):
                runtime.save_checkpoint(handle, path, extra=extra)
        with pytest.raises(CheckpointError, match=r"saved: extra="):
            runtime.save_checkpoint(handle, path, extra={"path": path} if dist.get_rank() == 0 else None)
        with pytest.raises(ConfigError, match=r"a Hugging Face directory is .* no place for extra"):
            runtime.save_checkpoint(handle, path, hf=True, extra=kept)
        runtime.save_checkpoint(handle, path, asynchronous=True, extra=kept)
        while runtime.checkpoint_is_pending(handle):
            train(runtime, handle, 1)
        assert read_manifest(path).extra == kept
        assert runtime.load_checkpoint(handle, path) == kept


@pytest.mark.shows("checkpoints: a checkpoint keeps a loop's own state, and a loop can ask whether a save is still running")
def test_extra_is_kept_as_it_is_or_refused(ranks: RankPool, tied_model: Path, tmp_path: Path) -> None:
    ranks.run(extra_job, str(tied_model), str(tmp_path))


def two_models_job(model: str, folder: str) -> None:
    """Two saves in the background of one runtime, while the file system stands still."""
    gate, write = threading.Event(), checkpoints.write_training_state

    def write_later(*args: Any) -> None:
        assert gate.wait(60)
        write(*args)

    with open_runtime(model) as runtime, pytest.MonkeyPatch.context() as patch:
        patch.setattr(checkpoints, "write_training_state", write_later)
        actor, critic = runtime.build_model(), runtime.build_model()
        runtime.save_checkpoint(actor, Path(folder, "actor"), asynchronous=True)
        runtime.save_checkpoint(critic, Path(folder, "critic"), asynchronous=True)
        train(runtime, actor, 1)
        assert runtime.checkpoint_is_pending(actor)
        assert runtime.checkpoint_is_pending(critic)
        gate.set()
        runtime.wait_for_checkpoint(critic)
        assert not runtime.checkpoint_is_pending(actor)
        for name in ("actor", "critic"):
            assert read_manifest(Path(folder, name)).weight_version == 0


def test_a_save_in_the_background_does_not_wait_for_another_models(
    ranks: RankPool, tied_model: Path, tmp_path: Path
) -> None:
    ranks.run(two_models_job, str(tied_model), str(tmp_path))


def out_of_memory_job(model: str, folder: str) -> str:
    path = Path(folder, "saved")
    with open_runtime(model) as runtime, pytest.MonkeyPatch.context() as patch:
        handle = runtime.build_model()
        if dist.get_rank() == 1:
            patch.setattr(HostBuffers, "copy", out_of_memory)
        with pytest.raises(CheckpointError) as caught:
            runtime.save_checkpoint(handle, path, asynchronous=True)
        patch.undo()
        runtime.save_checkpoint(handle, path, asynchronous=True)
    return str(caught.value)


def out_of_memory(*args: object) -> None:
    raise MemoryError("no pinned memory left")


def test_a_rank_that_cannot_copy_its_state_fails_the_save_on_every_rank(
    ranks: RankPool, tied_model: Path, tmp_path: Path
) -> None:
    for message in ranks.run(out_of_memory_job, str(tied_model), str(tmp_path)):
        assert message.endswith("saved could not be saved: MemoryError: no pinned memory left (on rank 1)")
    assert [entry.name for entry in tmp_path.iterdir()] == ["saved"]


def uneven_job(model: str, path: str) -> None:
    """One parameter sits out a step."""
    with open_runtime(model) as runtime:
        handle = runtime.build_model()
        train(runtime, handle, 1)
        runtime.zero_grad(handle)
        runtime.forward_backward(handle, micro_batches([[0, 1]]), token_loss)
        handle.parameters["norm.weight"].grad = None
        assert runtime.optimizer_step(handle).ok
        runtime.save_checkpoint(handle, path)
        assert read_manifest(Path(path)).fewer_steps == {"model.norm.weight": 1}
        saved, curve = optimizer_state(handle), train(runtime, handle, 2)
        runtime.load_checkpoint(handle, path)
        assert_equal_tensors(optimizer_state(handle), saved)
        assert train(runtime, handle, 2) == curve
    with open_bridge(model) as bridge, pytest.raises(CheckpointError, match=r"counts 1 optimizer steps for model\.norm"):
        bridge.load_checkpoint(bridge.build_model(), path)


def test_parameters_that_have_taken_fewer_steps_keep_their_counts(ranks: RankPool, tied_model: Path, tmp_path: Path) -> None:
    ranks.run(uneven_job, str(tied_model), str(tmp_path / "saved"), world_size=1)


def refused_save_job(model: str, paths: list[str], settings: Mapping[str, Any]) -> list[str]:
    messages = []
    with open_runtime(model) as runtime:
        handle = runtime.build_model()
        for path in paths:
            with pytest.raises(CheckpointError) as caught:
                runtime.save_checkpoint(handle, path, **settings)
            messages.append(str(caught.value))
        train(runtime, handle, 1)
    return messages


@pytest.mark.parametrize("settings", [{}, {"asynchronous": True}, {"hf": True}], ids=str)
def test_a_path_that_exists_or_cannot_be_made_is_refused_on_every_rank(
    ranks: RankPool, tied_model: Path, tmp_path: Path, settings: dict[str, Any]
) -> None:
    (tmp_path / "file").write_text("")
    (tmp_path / "folder").mkdir()
    paths = [str(tmp_path / "folder"), str(tmp_path / "file"), str(tmp_path / "file" / "saved")]
    for messages in ranks.run(refused_save_job, str(tied_model), paths, settings):
        assert all("exists" in message for message in messages[:2])
        assert "cannot make" in messages[2]
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["file", "folder"]


def full_disk_job(model: str, parent: str, heard_by: str) -> str:
    """The error of a save that rank 1 cannot write, heard by the call that is named; afterwards saving works again."""
    path, good = Path(parent, "saved"), Path(parent, "good")
    runtime = native_runtime(make_config(model))
    handle = runtime.build_model()
    runtime.save_checkpoint(handle, good)
    with full_disk(dist.get_rank() == 1):
        if heard_by == "itself":
            with pytest.raises(CheckpointError) as caught:
                runtime.save_checkpoint(handle, path)
        else:
            runtime.save_checkpoint(handle, path, asynchronous=True)
            listeners = {
                "wait_for_checkpoint": lambda: runtime.wait_for_checkpoint(handle),
                "save_checkpoint": lambda: runtime.save_checkpoint(handle, Path(parent, "next")),
                "load_checkpoint": lambda: runtime.load_checkpoint(handle, good),
                "close": runtime.close,
            }
            with pytest.raises(CheckpointError) as caught:
                listeners[heard_by]()
    if heard_by != "close":
        runtime.load_checkpoint(handle, good)
        runtime.save_checkpoint(handle, path, asynchronous=True)
    runtime.close()
    return str(caught.value)


@pytest.mark.parametrize("heard_by", ["itself", "wait_for_checkpoint", "save_checkpoint", "load_checkpoint", "close"])
def test_a_rank_that_cannot_write_fails_the_save_on_every_rank_and_nothing_is_left(
    ranks: RankPool, tied_model: Path, tmp_path: Path, heard_by: str
) -> None:
    for message in ranks.run(full_disk_job, str(tied_model), str(tmp_path), heard_by):
        assert "saved could not be written: rank 1: OSError: [Errno 27] File too large: " in message
    left = sorted(entry.name for entry in tmp_path.iterdir())
    assert left == (["good"] if heard_by == "close" else ["good", "saved"])


def broken_hf_save_job(model: str, parent: str, failure: str) -> tuple[str, str]:
    """The error of a Hugging Face save that fails on rank 0, and its cause; afterwards saving works again."""
    path = Path(parent, "saved")
    with open_runtime(model) as runtime, pytest.MonkeyPatch.context() as patch:
        handle = runtime.build_model()
        if failure == "unforeseen":
            patch.setattr(hf_writer, "write_tensors", unforeseen)
        with full_disk(failure == "full disk" and dist.get_rank() == 0), pytest.raises(CheckpointError) as caught:
            runtime.save_checkpoint(handle, path, hf=True)
        patch.undo()
        assert not path.exists()
        dist.barrier()
        runtime.save_checkpoint(handle, path, hf=True)
    return str(caught.value), type(caught.value.__cause__).__name__


def unforeseen(*args: object, **kwargs: object) -> None:
    raise RuntimeError("no such tensor")


@pytest.mark.parametrize(
    ("failure", "reason", "cause"),
    [("full disk", "nothing was left there", "CheckpointError"), ("unforeseen", "RuntimeError: no such", "RuntimeError")],
)
def test_a_hugging_face_save_that_rank_0_cannot_write_fails_on_every_rank_and_nothing_is_left(
    ranks: RankPool, tied_model: Path, tmp_path: Path, failure: str, reason: str, cause: str
) -> None:
    results = ranks.run(broken_hf_save_job, str(tied_model), str(tmp_path), failure)
    assert all(reason in message and "on rank 0" in message for message, _ in results)
    assert [origin for _, origin in results] == [cause, "NoneType"]
    assert [entry.name for entry in tmp_path.iterdir()] == ["saved"]


def hf_memory_job(backend: str, model: str, path: str) -> int:
    """Bytes by which this rank's peak of memory rises in a Hugging Face save."""
    opened = open_bridge(model) if backend == "bridge" else open_runtime(model)
    with opened as runtime:
        handle = runtime.build_model(forward_only=True)
        for _ in runtime.export_weights(handle):
            pass
        before = reset_peak_memory()
        runtime.save_checkpoint(handle, path, hf=True)
        return peak_memory() - before


@pytest.mark.shows("checkpoints: a Hugging Face save holds one tensor beside the model, whatever the size of a file")
@pytest.mark.parametrize("backend", ["native", "bridge"])
def test_a_hugging_face_save_holds_no_whole_file(ranks: RankPool, tmp_path: Path, backend: str) -> None:
    sizes = {"hidden_size": 512, "intermediate_size": 1536, "num_hidden_layers": 10, "vocab_size": 128}
    model = write_tiny_qwen3(tmp_path / "model", max_shard_size="1GB", **sizes)
    whole = (model / "model.safetensors").stat().st_size
    assert whole > 80 * 2**20
    rises = ranks.run(hf_memory_job, backend, str(model), str(tmp_path / "out"))
    assert all(rise < whole / 2 for rise in rises), [rise / whole for rise in rises]
