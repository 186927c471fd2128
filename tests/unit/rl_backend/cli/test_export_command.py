"""``rl-backend export``: training checkpoints as Hugging Face directories."""

from __future__ import annotations

import json
import multiprocessing
import re
import shutil
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from torch.distributed.checkpoint.state_dict_saver import save
from transformers import AutoModelForCausalLM

from actors.folder.checkpoints import RunCheckpoints
from rl_backend.checkpoint.hf_export import TrainingWeights, export_checkpoint
from rl_backend.checkpoint.manifest import MANIFEST_NAME, TrainingManifest
from rl_backend.checkpoint.training_state import WEIGHTS, DigestingWriter
from rl_backend.cli.main import main
from tests.support.critic import squared_error, transformers_values
from tests.support.memory import peak_memory, reset_peak_memory
from tests.support.models import write_tiny_qwen3
from tests.support.moe import write_moe
from tests.support.native import assert_equal_tensors, micro_batches, open_runtime, train, train_with


class Saved(NamedTuple):
    """A run's checkpoints of a policy and a critic.

    Attributes:
        step: the checkpoint of both.
        source: the model that they began from.
        exported: of each, what ``export_weights`` gave in float32.
    """

    step: Path
    source: Path
    exported: Mapping[str, Mapping[str, Tensor]]


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Saved:
    folder = tmp_path_factory.mktemp("run")
    source = write_moe("qwen3_moe", folder / "model")
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        (source / name).write_text(name)
    checkpoints = RunCheckpoints(folder / "checkpoints")
    exported = {}
    with open_runtime(source, param_dtype="bfloat16") as runtime:
        models = {"policy": runtime.build_model(), "critic": runtime.build_model(head="values")}
        train(runtime, models["policy"], 2)
        train_with(squared_error, runtime, models["critic"], 1)
        for name, handle in models.items():
            runtime.save_checkpoint(handle, checkpoints.draft(2) / name)
            exported[name] = {key: tensor.clone() for key, tensor in runtime.export_weights(handle)}
    return Saved(checkpoints.commit(2, {}).path, source, exported)


def stored_weights(path: Path) -> dict[str, Tensor]:
    return {name: tensor for file in path.glob("*.safetensors") for name, tensor in load_file(file).items()}


def export(checkpoint: Path, out: Path, *options: str) -> int:
    return main(["export", "--checkpoint", str(checkpoint), "--out", str(out), *options])


@pytest.mark.shows("export: a training checkpoint becomes a Hugging Face directory, bit-equal to export_weights")
def test_an_exported_policy_has_the_trained_weights_and_the_files_of_its_source(
    saved: Saved, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    assert export(saved.step / "policy", out, "--dtype", "float32", "--shard-size", "100000") == 0
    lines = capsys.readouterr().out
    assert "qwen3_moe, weight version 2, written by the native runtime on 1 rank" in lines
    files = sorted(file.name for file in out.glob("*.safetensors"))
    assert f"{out}: {len(files)} files of weights" in lines
    assert len(files) > 3 and all(file.stat().st_size < 120_000 for file in out.glob("*.safetensors"))
    assert_equal_tensors(stored_weights(out), saved.exported["policy"])
    kept = {entry.name for entry in saved.source.iterdir() if not entry.name.startswith("model")}
    assert {entry.name for entry in out.iterdir()} == {*kept, *files, "model.safetensors.index.json"}
    assert (out / "chat_template.jinja").read_text() == "chat_template.jinja"
    _, found = AutoModelForCausalLM.from_pretrained(out, output_loading_info=True)
    assert not any(found.values()), found


def test_a_run_that_computes_in_bfloat16_is_exported_in_it(
    saved: Saved, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    assert export(saved.step, out, "--name", "policy", "--json") == 0
    facts = json.loads(capsys.readouterr().out)
    rounded = {name: tensor.to(torch.bfloat16) for name, tensor in saved.exported["policy"].items()}
    assert_equal_tensors(stored_weights(out), rounded)
    assert json.loads((out / "config.json").read_text())["dtype"] == facts["dtype"] == "bfloat16"
    assert facts["tensors"] == len(rounded) and facts["bytes"] == sum(tensor.nbytes for tensor in rounded.values())
    assert (facts["weight_version"], facts["files"], facts["head"]) == (2, 1, "log_probs")


def test_an_exported_model_computes_what_the_run_computes(saved: Saved, tmp_path: Path) -> None:
    out = tmp_path / "out"
    assert export(saved.step / "policy", out, "--dtype", "float32") == 0
    with open_runtime(saved.source) as runtime:
        policy = runtime.build_model(forward_only=True)
        runtime.load_checkpoint(policy, saved.step / "policy")
        data = micro_batches([[0], [3], [5]])
        log_probs = runtime.forward_backward(policy, data, None, forward_only=True).output("log_probs")
    model = AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32).eval()
    for batch, found in zip(data, log_probs, strict=True):
        with torch.no_grad():
            logits = model(batch.input_ids[None]).logits[0].log_softmax(-1)
        expected = logits[:-1].gather(1, batch.input_ids[1:, None])[:, 0]
        torch.testing.assert_close(found[: len(expected)], expected, atol=1e-5, rtol=0)


def test_an_exported_critic_is_one_of_transformers(saved: Saved, tmp_path: Path) -> None:
    out = tmp_path / "out"
    assert export(saved.step, out, "--name", "critic", "--dtype", "float32") == 0
    assert_equal_tensors(stored_weights(out), saved.exported["critic"])
    assert len(transformers_values(out, [torch.arange(5, 12)])) == 7


REFUSALS: Mapping[str, tuple[tuple[str, ...], str]] = {
    "several models": (("{step}",), "holds critic, policy; choose one with --name"),
    "no such model": (
        ("{step}", "--name", "actor"),
        "no training checkpoint; there is no such directory",
    ),
    "a name for one model": (("{step}/policy", "--name", "policy"), "--name policy is for a checkpoint of a run"),
    "all steps": (("{step}/..",), "holds the steps 2 of a run; give one, or "),
    "no checkpoint": (("{source}",), "is a Hugging Face directory"),
    "nothing there": (("{step}/absent",), "absent: is not a directory; give a checkpoint, such as runs/"),
    "no source": (("{step}/policy", "--source", "absent"), "absent, given as source, is not a directory"),
    "another model's source": (("{step}/policy", "--source", "{dense}"), "has model_type='qwen3', the model in"),
    "a larger model's source": (("{step}/policy", "--source", "{larger}"), "has num_hidden_layers=4, the model in"),
}


@pytest.mark.parametrize("case", REFUSALS)
def test_what_cannot_be_exported_is_refused_and_leaves_nothing(
    saved: Saved, tied_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], case: str
) -> None:
    options, message = REFUSALS[case]
    larger = tmp_path / "larger"
    larger.mkdir()
    config = json.loads((saved.source / "config.json").read_text())
    (larger / "config.json").write_text(json.dumps({**config, "num_hidden_layers": 4}))
    places = {"step": saved.step, "source": saved.source, "dense": tied_model, "larger": larger}
    checkpoint, *rest = (option.format(**places) for option in options)
    assert export(Path(checkpoint), tmp_path / "out", *rest) == 2
    assert message in capsys.readouterr().err
    assert [entry.name for entry in tmp_path.iterdir()] == ["larger"]


def test_a_place_that_cannot_be_written_is_refused_before_anything_is_read(
    saved: Saved, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert export(saved.step / "policy", tmp_path) == 2
    assert "exists already, or is inside of the checkpoint" in capsys.readouterr().err
    (tmp_path / "file").touch()
    assert export(saved.step / "policy", tmp_path / "file" / "out") == 2
    assert re.search(r"--out .*/file/out: .*/file cannot be made: ", capsys.readouterr().err)
    assert export(saved.step / "policy", saved.step / "policy" / "out") == 2
    assert "is inside of the checkpoint" in capsys.readouterr().err


@pytest.mark.shows("export: a folder that is not there yet is made, and a checkpoint that is not there is said first")
def test_the_command_of_the_documentation_runs_in_an_empty_folder(
    saved: Saved, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert export(Path("runs/mine/checkpoints/latest"), Path("models/mine")) == 2
    assert "--checkpoint runs/mine/checkpoints/latest: is not a directory" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []
    assert export(saved.step / "policy", Path("models/mine"), "--dtype", "float32") == 0
    assert (tmp_path / "models" / "mine" / "config.json").is_file()


def test_the_folder_of_a_run_is_refused_with_what_to_give(
    saved: Saved, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = saved.step.parents[1]
    for name in ("metrics.jsonl", "run.json"):
        (run / name).touch()
    assert export(run, tmp_path / "out") == 2
    error = capsys.readouterr().err
    assert f"--checkpoint {run}: is the folder of a run; give its newest checkpoint, {run}/checkpoints/latest" in error
    for name in ("metrics.jsonl", "run.json"):
        (run / name).unlink()
    bare = tmp_path / "run"
    bare.mkdir()
    (bare / "metrics.jsonl").touch()
    assert export(bare, tmp_path / "out") == 2
    assert "it has no checkpoints; runs with --save-every N save some" in capsys.readouterr().err
    (bare / "model").mkdir()
    (bare / "model" / "config.json").touch()
    assert export(bare, tmp_path / "out") == 2
    assert f"{bare}/model, the trained model, is a Hugging Face directory already" in capsys.readouterr().err


def test_a_run_whose_model_is_gone_says_what_to_give(
    saved: Saved, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    step = tmp_path / "step"
    shutil.copytree(saved.step / "policy", step)
    change_manifest(step, runtime_config={"backend": "native", "hf_path": "/gone/model"})
    assert export(step, tmp_path / "out") == 2
    error = capsys.readouterr().err
    assert "/gone/model, which the run of" in error and "give one with the model's config.json and tokenizer" in error
    assert export(step, tmp_path / "out", "--source", str(saved.source)) == 0


def change_manifest(path: Path, **changes: Any) -> None:
    manifest = TrainingManifest.model_validate_json((path / MANIFEST_NAME).read_text())
    (path / MANIFEST_NAME).write_text(manifest.replace(**changes).sealed_text())


def with_settings(path: Path, settings: object) -> None:
    config = TrainingManifest.model_validate_json((path / MANIFEST_NAME).read_text()).runtime_config
    change_manifest(path, runtime_config={**config, "backend_cfg": settings})


def flip(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)


DAMAGE: Mapping[str, tuple[Callable[[Path], Any], str]] = {
    "a flipped bit": (lambda path: flip(path / "__0_0.distcp"), r"is damaged: __0_0\.distcp has other bytes than were"),
    "a flipped bit in the list": (
        lambda path: flip(path / ".metadata"),
        r"is damaged: \.metadata has other bytes than were",
    ),
    "a missing file": (lambda path: (path / "__0_0.distcp").unlink(), r"is incomplete: __0_0\.distcp is missing"),
    "no manifest": (lambda path: (path / MANIFEST_NAME).unlink(), r"has no manifest\.json, so it is no training checkpoint"),
    "weights that are not stored": (
        lambda path: change_manifest(path, parameters={"model.embed_tokens.weight": (1, 2)}),
        r"has it in shape \(\d+, \d+\), model\.model\.embed_tokens\.weight was expected in shape \(1, 2\)",
    ),
    "no weights": (lambda path: change_manifest(path, parameters={}), r"the model in .*policy has no such weight"),
    "an unknown dtype": (
        lambda path: with_settings(path, {"param_dtype": "int8"}),
        r"manifest\.json has param_dtype='int8' in its runtime_config, which is not among float32, bfloat16",
    ),
    "settings of another kind": (
        lambda path: with_settings(path, []),
        r"manifest\.json has backend_cfg=\[\] in its runtime_config",
    ),
    "another runtime's order": (
        lambda path: change_manifest(path, private=("decoder.weight",)),
        r"has 1 weights in an order that only the native runtime reads, decoder\.weight for one",
    ),
}


@pytest.mark.shows("export: a damaged checkpoint is refused with the name of the file")
@pytest.mark.parametrize("case", DAMAGE)
def test_a_damaged_checkpoint_is_refused_by_the_name_of_the_file(
    saved: Saved, tmp_path: Path, capsys: pytest.CaptureFixture[str], case: str
) -> None:
    damage, message = DAMAGE[case]
    path = tmp_path / "policy"
    shutil.copytree(saved.step / "policy", path)
    damage(path)
    assert export(path, tmp_path / "out") == 2
    assert re.search(message, capsys.readouterr().err)
    assert [entry.name for entry in tmp_path.iterdir()] == ["policy"]


def test_an_interrupt_in_the_middle_of_a_read_ends_the_command_and_leaves_nothing(
    saved: Saved, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(torch, "load", interrupted)
    assert export(saved.step / "policy", tmp_path / "out") == 130
    assert capsys.readouterr().err == "interrupted\n"
    assert list(tmp_path.iterdir()) == []


@pytest.fixture
def large(tmp_path: Path) -> Iterator[Path]:
    """Weights of 96 MiB in 24 tensors, as a run of one rank stores them."""
    source = write_tiny_qwen3(tmp_path / "model")
    path = tmp_path / "large"
    tensors = {f"layers.{index}.weight": torch.full((1024, 1024), float(index)) for index in range(24)}
    writer = DigestingWriter(path)
    save({WEIGHTS + name: tensor for name, tensor in tensors.items()}, storage_writer=writer, no_dist=True)
    manifest = TrainingManifest(
        model_type="qwen3",
        parameters={name: tuple(tensor.shape) for name, tensor in tensors.items()},
        weight_version=0,
        schedule_steps=0,
        optimizer_steps=0,
        world_size=1,
        runtime_config={"backend": "native", "hf_path": str(source)},
        files=writer.written,
    )
    (path / MANIFEST_NAME).write_text(manifest.sealed_text())
    yield path
    shutil.rmtree(path)


@pytest.mark.shows("export: host memory holds a tensor and a piece of it, neither a file nor the model")
@pytest.mark.filterwarnings("ignore:.*assuming the intent is to save in a single process")
def test_one_tensor_is_in_memory_and_not_a_file(large: Path, tmp_path: Path) -> None:
    # A process of its own: what allocators keep depends on all that a process has done.
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        taken = pool.apply(memory_of_export, (large, tmp_path, tmp_path / "model"))
    assert taken < 6 * 2**22, "the largest tensor, a piece of it, and what allocators keep"


def memory_of_export(checkpoint: Path, out: Path, model: Path) -> int:
    """Of the second one: the first imports what both need."""
    before = 0
    for folder in (out / "first", out / "second"):
        weights, before = TrainingWeights(checkpoint), reset_peak_memory()
        export_checkpoint(weights, folder, model, dtype=torch.float32, max_shard_bytes=2**30)
    return peak_memory() - before
