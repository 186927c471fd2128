"""``rl-backend export`` of models whose directories hold more than is trained."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pytest

from rl_backend.cli.main import main
from tests.support.drafting import write_drafting
from tests.support.kept_family import TRAINED, require_index, stored_bytes, write_towered
from tests.support.native import open_runtime, train


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of a run that began from ``source`` beside it; ``saved`` is what it saved as a Hugging Face directory then."""
    folder = tmp_path_factory.mktemp("kept")
    with open_runtime(write_towered(folder / "source", sharded=True)) as runtime:
        handle = runtime.build_model()
        train(runtime, handle, 2)
        runtime.save_checkpoint(handle, folder / "checkpoint")
        runtime.save_checkpoint(handle, folder / "saved", hf=True)
    return folder / "checkpoint"


def export(checkpoint: Path, out: Path, *options: str) -> int:
    return main(["export", "--checkpoint", str(checkpoint), "--out", str(out), *options])


@pytest.mark.shows("export: what is not trained comes byte for byte from the run's own source, or from a copy of it")
@pytest.mark.parametrize("shard_bytes", ["100000", "1000000000"])
def test_an_exported_model_is_the_one_that_its_run_saves(
    checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], shard_bytes: str
) -> None:
    assert export(checkpoint, tmp_path / "out", "--shard-size", shard_bytes) == 0
    said = capsys.readouterr().out
    assert "also from there, as they are: drafts.layers.0 (4), model.tower (5); they are not trained" in said
    found, source = stored_bytes(tmp_path / "out"), stored_bytes(checkpoint.parent / "source")
    assert found == stored_bytes(checkpoint.parent / "saved")
    assert {name for name in source if found[name] != source[name]} == set(TRAINED)
    require_index(tmp_path / "out")
    assert (tmp_path / "out" / "config.json").read_bytes() == (checkpoint.parent / "source" / "config.json").read_bytes()


def test_another_dtype_is_that_of_the_trained_weights_alone(
    checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert export(checkpoint, tmp_path / "out", "--dtype", "bfloat16", "--json") == 0
    assert json.loads(capsys.readouterr().out)["kept_tensors"] == 9
    found, source = stored_bytes(tmp_path / "out"), stored_bytes(checkpoint.parent / "source")
    assert {found[name].dtype for name in TRAINED} == {"BF16"}
    assert all(found[name] == source[name] for name in source if name not in TRAINED)
    assert json.loads((tmp_path / "out" / "config.json").read_text())["text_config"]["dtype"] == "bfloat16"


def test_a_source_that_is_gone_or_lacks_kept_weights_is_refused_and_a_copy_is_taken(
    checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(checkpoint.parent / "source", copy)
    assert export(checkpoint, tmp_path / "out", "--source", str(tmp_path / "missing")) == 2
    problem = r"missing, given as source, is not a directory; .*of its weights drafts.*, model\.tower \(5\) are needed"
    assert re.search(problem, capsys.readouterr().err, re.DOTALL)
    (copy / "drafts.safetensors").rename(tmp_path / "drafts.safetensors")
    assert export(checkpoint, tmp_path / "out", "--source", str(copy)) == 2
    assert "drafts.safetensors is truncated or corrupt, or cannot be read (No such file" in capsys.readouterr().err
    for name in copy.glob("model*"):
        name.unlink()
    for name in ("model-a.safetensors", "model-b.safetensors"):
        shutil.copy(checkpoint.parent / "source" / name, copy)
    assert export(checkpoint, tmp_path / "out", "--source", str(copy)) == 2
    assert re.search(r"copy lacks drafts\.layers\.0\.\w+.*, or has another shape of it", capsys.readouterr().err)
    assert not (tmp_path / "out").exists()
    (tmp_path / "drafts.safetensors").rename(copy / "drafts.safetensors")
    assert export(checkpoint, tmp_path / "out", "--source", str(copy)) == 0
    assert stored_bytes(tmp_path / "out") == stored_bytes(checkpoint.parent / "saved")


@pytest.mark.shows("export: a layer for multi-token prediction is in it whether it was trained or kept")
@pytest.mark.parametrize("mtp", ["keep", "detached"])
@pytest.mark.parametrize("kind", ["drafting", "glm4_moe"])
def test_a_layer_for_multi_token_prediction_is_not_counted_among_the_others(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], kind: str, mtp: str
) -> None:
    source = write_drafting(tmp_path / "source", kind, num_hidden_layers=2)
    with open_runtime(source, model=kind, model_cfg={"mtp": mtp}) as runtime:
        handle = runtime.build_model()
        runtime.save_checkpoint(handle, tmp_path / "checkpoint")
        runtime.save_checkpoint(handle, tmp_path / "saved", hf=True)
    assert export(tmp_path / "checkpoint", tmp_path / "out") == 0
    assert stored_bytes(tmp_path / "out") == stored_bytes(tmp_path / "saved")
    # A model with as many layers as there are numbers is another one.
    config = json.loads((source / "config.json").read_text())
    (source / "config.json").write_text(json.dumps({**config, "num_hidden_layers": 3}))
    capsys.readouterr()
    assert export(tmp_path / "checkpoint", tmp_path / "other") == 2
    assert re.search(r"has num_hidden_layers=3, the model in .* has 2;", capsys.readouterr().err)
