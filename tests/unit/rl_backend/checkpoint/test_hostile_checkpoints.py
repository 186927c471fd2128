"""Checkpoints of strangers: nothing in one is run, and no name in one leads out of its folder."""

from __future__ import annotations

import os
import pickle
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from actors.folder.checkpoints import DRAWN_SAMPLES, RUN_FILE, RunCheckpoints, RunManifest, load_drawn, read_run_checkpoint
from rl_backend.checkpoint.hf_export import TrainingWeights
from rl_backend.checkpoint.hf_reader import HFReader, other_files
from rl_backend.checkpoint.manifest import MANIFEST_NAME, TrainingManifest, read_manifest
from rl_backend.cli.main import main
from rl_backend.contracts import CheckpointError
from tests.support.hostile import FALSE, FOUND_WHILE_READING, HOSTILE, Command, hostile_source, reseal, with_files
from tests.support.models import write_tiny_qwen3
from tests.support.native import assert_equal_tensors, open_runtime, train, weights


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run's checkpoint of one policy."""
    folder = tmp_path_factory.mktemp("run")
    checkpoints = RunCheckpoints(folder / "checkpoints")
    with open_runtime(write_tiny_qwen3(folder / "model")) as runtime:
        policy = runtime.build_model()
        train(runtime, policy, 1)
        runtime.save_checkpoint(policy, checkpoints.draft(1) / "policy")
    return checkpoints.commit(1, {}).path


@pytest.fixture
def step(saved: Path, tmp_path: Path) -> Path:
    """A copy to change."""
    return shutil.copytree(saved, tmp_path / "run" / "checkpoints" / "step-00000001")


@pytest.mark.shows("checkpoints: a checkpoint that would run a command is refused by name wherever it is read")
@pytest.mark.parametrize("attack", HOSTILE, ids=lambda attack: attack.__name__)
def test_a_checkpoint_that_would_run_a_command_is_refused_by_name(
    saved: Path, step: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], attack: Callable[[Path, Path], str]
) -> None:
    mark, policy = tmp_path / "mark", step / "policy"
    reason = attack(policy, mark)
    reseal(policy)
    assert_refused(saved, step, tmp_path / "out", capsys, reason, keeps_weights=attack not in FOUND_WHILE_READING)
    assert not mark.exists(), "the command has run"


@pytest.mark.shows("checkpoints: a checkpoint whose list of pieces omits, repeats or mislabels weights is refused by name")
@pytest.mark.parametrize("attack", FALSE, ids=lambda attack: attack.__name__)
def test_a_checkpoint_that_has_other_tensors_than_it_says_is_refused_by_name(
    saved: Path, step: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], attack: Callable[[Path], str]
) -> None:
    reason = attack(step / "policy")
    reseal(step / "policy")
    assert_refused(saved, step, tmp_path / "out", capsys, reason, keeps_weights=attack not in FOUND_WHILE_READING)


def assert_refused(
    saved: Path, step: Path, out: Path, capsys: pytest.CaptureFixture[str], reason: str, *, keeps_weights: bool
) -> None:
    """By every path that reads the policy of ``step``, with ``reason`` and before weights change."""
    policy = step / "policy"
    read_run_checkpoint(step)  # its seals are right
    with open_runtime(saved.parent.parent / "model") as runtime:
        for forward_only in (False, True):
            handle = runtime.build_model(forward_only=forward_only)
            held = weights(handle)
            with pytest.raises(CheckpointError, match=reason):
                runtime.load_checkpoint(handle, policy)
            if keeps_weights:
                assert_equal_tensors(weights(handle), held)
    with pytest.raises(CheckpointError, match=reason):
        dict(TrainingWeights(policy).tensors(torch.float32))
    for given in (step, policy):
        assert main(["export", "--checkpoint", str(given), "--out", str(out)]) == 2
        assert str(policy) in capsys.readouterr().err
    assert not out.exists()


def test_what_is_refused_does_run_where_nobody_looks(step: Path, tmp_path: Path) -> None:
    pickle.loads(pickle.dumps(Command(tmp_path / "mark")))
    assert (tmp_path / "mark").exists()


def test_samples_that_would_run_a_command_are_refused_by_name(tmp_path: Path) -> None:
    torch.save([Command(tmp_path / "mark")], tmp_path / DRAWN_SAMPLES)
    with pytest.raises(CheckpointError, match=rf"{DRAWN_SAMPLES} cannot be read: it asks for (posix|os)\.system"):
        load_drawn(tmp_path)
    assert not (tmp_path / "mark").exists()


# Registry credentials; a model's without sizes; and of another size.
STOLEN_CONFIGS = {
    "credentials": '{"auths": {"registry": "TOKEN"}}',
    "no sizes": '{"model_type": "qwen3"}',
    "no layers": '{"model_type": "qwen3", "vocab_size": 128, "hidden_size": 64}',
    "another size": '{"model_type": "qwen3", "vocab_size": 128, "hidden_size": 65, "num_hidden_layers": 2}',
}

NAMES = {
    "../../../../../../../../../../etc/passwd": "leads out of the folder",
    "/etc/passwd": "is an absolute name",
    "policy/../../secret": "leads out of the folder",
    "a/b/c": "is no name of a file|has more than 2 levels",
    "": "is no name of a file",
    ".": "is no name of a file",
    "a\0b": "is no name of a file",
    "./a": "must be written 'a'",
    "a//b": "is no name of a file|must be written 'a/b'",
}


@pytest.mark.shows("checkpoints: a name in a manifest that leads out of its folder is refused by name")
@pytest.mark.parametrize("name", NAMES)
def test_a_name_that_leads_out_of_the_folder_is_refused_unread(step: Path, name: str) -> None:
    with_files(step / "policy", MANIFEST_NAME, TrainingManifest, {name: Path("/etc/passwd")})
    with_files(step, RUN_FILE, RunManifest, {name: Path("/etc/passwd")})
    for read in (lambda: read_manifest(step / "policy"), lambda: read_run_checkpoint(step)):
        with pytest.raises(CheckpointError, match=NAMES[name]) as caught:
            read()
        assert repr(name) in str(caught.value)


@pytest.mark.shows("export: a checkpoint that names another folder than its model's has none of its files copied")
@pytest.mark.parametrize("content", STOLEN_CONFIGS)
def test_a_checkpoint_chooses_no_folder_whose_files_are_exported(
    step: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], content: str
) -> None:
    private = tmp_path / "private"
    private.mkdir()
    (private / "config.json").write_text(STOLEN_CONFIGS[content])
    (private / "id_key").write_text("PRIVATE")
    hostile_source(step / "policy", private)
    TrainingWeights(step / "policy").verify()  # its seals are right
    assert main(["export", "--checkpoint", str(step / "policy"), "--out", str(tmp_path / "out")]) == 2
    assert re.search(rf"{private} is (refused|of another model): its config\.json has", capsys.readouterr().err)
    assert not (tmp_path / "out").exists()


def test_what_lies_beside_the_files_of_a_model_is_not_exported(
    saved: Path, step: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    mine = shutil.copytree(saved.parent.parent / "model", tmp_path / "mine")
    (mine / "tokenizer.json").write_text("{}")
    (mine / "id_key").write_text("PRIVATE")
    (mine / "train.py").write_text("PRIVATE")
    hostile_source(step / "policy", mine)
    out = tmp_path / "out"
    assert main(["export", "--checkpoint", str(step / "policy"), "--out", str(out)]) == 0
    assert f"configuration and tokenizer from {mine}" in capsys.readouterr().out
    assert {file.name for file in out.iterdir()} == {
        *("config.json", "generation_config.json", "model.safetensors", "tokenizer.json")
    }


def test_a_source_with_a_link_out_of_it_is_refused_by_name(
    saved: Path, step: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    theirs = shutil.copytree(saved.parent.parent / "model", tmp_path / "theirs")
    (tmp_path / "secret").write_text("PRIVATE")
    (theirs / "tokenizer.json").symlink_to(tmp_path / "secret")
    hostile_source(step / "policy", theirs)
    assert main(["export", "--checkpoint", str(step / "policy"), "--out", str(tmp_path / "out")]) == 2
    assert "tokenizer.json is a link out of it" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    "name", ["policy/.metadata", "policy/__0_0.distcp", "policy/manifest.json", "run.json", "notes.txt"]
)
def test_a_link_out_of_the_folder_is_refused_by_name(step: Path, tmp_path: Path, name: str) -> None:
    (step / "notes.txt").write_text("mine")
    with_files(step, RUN_FILE, RunManifest, {"notes.txt": step / "notes.txt"})
    file, elsewhere = step / name, tmp_path / "elsewhere"
    file.rename(elsewhere)
    file.symlink_to(elsewhere)
    read = TrainingWeights if file.parent.name == "policy" else read_run_checkpoint
    with pytest.raises(CheckpointError, match=f"{file.name} is a link out of it, to {elsewhere}"):
        read(file.parent)


def test_links_that_lead_to_each_other_are_refused_by_name(step: Path) -> None:
    file = step / "policy" / "__0_0.distcp"
    file.unlink()
    file.symlink_to("other")
    (step / "policy" / "other").symlink_to(file.name)
    with pytest.raises(CheckpointError, match=r"__0_0\.distcp cannot be followed to a file"):
        TrainingWeights(step / "policy")


def test_a_link_inside_of_the_folder_and_one_to_the_folder_are_followed(step: Path) -> None:
    file = step / "policy" / "__0_0.distcp"
    file.rename(step / "policy" / "data")
    file.symlink_to("data")
    (step.parent / "latest").symlink_to(step.name)
    TrainingWeights(read_run_checkpoint(step.parent / "latest").model("policy")).verify()


def test_an_index_that_leads_out_of_a_hugging_face_directory_is_refused_by_name(untied_model: Path, tmp_path: Path) -> None:
    path = shutil.copytree(untied_model, tmp_path / "model")
    index, shard = path / "model.safetensors.index.json", sorted(path.glob("*.safetensors"))[0]
    told = index.read_text()
    for name in ("../secret.safetensors", "/secret.safetensors", "..", "", "folder/x.safetensors"):
        index.write_text(told.replace(shard.name, name))
        with pytest.raises(CheckpointError, match="expected the name of a file beside it") as caught:
            HFReader(path)
        assert repr(name) in str(caught.value)
    index.write_text(told)
    shard.rename(tmp_path / "secret")
    shard.symlink_to(tmp_path / "secret")
    with pytest.raises(CheckpointError, match=f"{shard.name} is a link out of it"):
        HFReader(path)


def test_the_links_of_the_hub_s_cache_are_followed(untied_model: Path, tmp_path: Path) -> None:
    repository = tmp_path / "models--a--b"
    snapshot = shutil.copytree(untied_model, repository / "snapshots" / "0123")
    (repository / "blobs").mkdir()
    for file in list(snapshot.iterdir()):
        blob = repository / "blobs" / file.name.replace(".", "")
        file.rename(blob)
        file.symlink_to(Path("../../blobs") / blob.name)
    (tmp_path / "link").symlink_to(snapshot)
    for path in (snapshot, Path(os.path.relpath(snapshot)), tmp_path / "link"):
        assert HFReader(path).infos == HFReader(untied_model).infos
        assert {"generation_config.json"} <= other_files(path).keys()
