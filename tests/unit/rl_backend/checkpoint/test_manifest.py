"""Manifests: their seal, and what a checkpoint is refused for."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rl_backend.checkpoint.manifest import MANIFEST_NAME, FileFacts, TenantFacts, TrainingManifest, damaged, read_manifest
from rl_backend.contracts import CheckpointError
from tests.support.written_checkpoints import manifest_of

FACTS = FileFacts(num_bytes=4, xxh3="0123456789abcdef")
FULL = {
    "parameters": {"a.weight": (3, 5), "b.weight": ()},
    "kept": {"mtp.weight": (2,)},
    "in_float32": ("b.weight",),
    "head": "values",
    "fewer_steps": {"b.weight": 1},
    "lora": TenantFacts(config={"rank": 4}, base="ab+cd", num_draws=7),
    "extra": {"digest": "", "text": 'a "digest": "" of theirs'},
    "files": {".metadata": FACTS, "__0_0.distcp": FACTS.replace(num_bytes=0)},
}


def test_what_was_written_is_read_again_whatever_its_texts_say(tmp_path: Path) -> None:
    for given in ({}, FULL):
        manifest = manifest_of(**given)
        (tmp_path / MANIFEST_NAME).write_text(manifest.sealed_text())
        found = read_manifest(tmp_path)
        assert found.replace(digest="") == manifest
        assert re.fullmatch("[0-9a-f]{16}", found.digest)
        # A manifest that was read is written as it is.
        assert found.sealed_text() == manifest.sealed_text()


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (lambda text: text.replace('"weight_version": 3', '"weight_version": 4'), "it has other text than was written"),
        (lambda text: text.replace('"digest": "', '"digest": "0'), "it has other text than was written"),
        (lambda text: text + "\n", "it has other text than was written"),
        (lambda text: text.replace('"world_size": 2', '"world_size": 0'), "world_size=0|greater than or equal to 1"),
        (lambda text: text.replace('"model_type": "qwen3",', ""), "model_type|Field required"),
        (lambda text: text.replace('"model_type"', '"model_kind"'), "model_kind|Field required"),
        (lambda text: text[: len(text) // 2], "EOF|JSON"),
        (lambda text: text.replace('".metadata"', '"../.metadata"'), r"'\.\./\.metadata', which leads out of the folder"),
    ],
)
def test_a_manifest_that_was_changed_is_damaged(tmp_path: Path, change: Callable[[str], str], problem: str) -> None:
    text = manifest_of(**FULL).sealed_text()
    assert change(text) != text
    (tmp_path / MANIFEST_NAME).write_text(change(text))
    with pytest.raises(CheckpointError, match=rf"manifest\.json is damaged: .*({problem}).*; take an earlier") as caught:
        read_manifest(tmp_path)
    assert caught.value.details == {"path": str(tmp_path), "name": MANIFEST_NAME}


def test_bytes_that_are_no_text_are_damaged_and_what_cannot_be_read_is_said_so(tmp_path: Path) -> None:
    (tmp_path / MANIFEST_NAME).write_bytes(b"\xff\xfe")
    with pytest.raises(CheckpointError, match=r"manifest\.json is damaged: .*codec can't decode"):
        TrainingManifest.read_sealed(tmp_path / MANIFEST_NAME)
    with pytest.raises(CheckpointError, match=r"gone is damaged: .*No such file") as caught:
        TrainingManifest.read_sealed(tmp_path / "gone")
    assert caught.value.details == {"path": str(tmp_path), "name": "gone"}


def test_a_directory_without_a_manifest_says_what_it_is(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=rf"{tmp_path}/gone has no manifest\.json"):
        read_manifest(tmp_path / "gone")
    with pytest.raises(
        CheckpointError, match=r"has no manifest\.json, so it is no training checkpoint; a save that did not"
    ):
        read_manifest(tmp_path)
    (tmp_path / "config.json").touch()
    with pytest.raises(CheckpointError, match=r"it is a Hugging Face directory: give it as RuntimeConfig\.hf_path"):
        read_manifest(tmp_path)


@pytest.mark.parametrize("version", [1, 3, 20])
def test_another_format_is_refused_by_its_number_before_its_fields_are_read(tmp_path: Path, version: int) -> None:
    (tmp_path / MANIFEST_NAME).write_text(f'{{"format" : {version}, "new": 1}}')
    with pytest.raises(
        CheckpointError, match=rf"{tmp_path} has format {version}, this version reads format 2; load it with"
    ):
        read_manifest(tmp_path)


PARAMETERS: dict[str, tuple[int, ...]] = {"a.weight": (3, 5), "b.weight": (3,)}


@pytest.mark.parametrize(
    ("here", "problem"),
    [
        ({}, None),
        (
            {"model_type": "llama", "head": "log_probs"},
            "a 'qwen3' model, this one is 'llama'; a model with head='values', this one has head='log_probs'; load it into "
            r"one of build_model\(head='values'\)$",
        ),
        (
            {"parameters": {**PARAMETERS, "b.weight": (4,)}},
            r"another model: b\.weight has shape \(3,\) there and \(4,\) here \(1 differ\); load it with .*"
            "hf_path='/nowhere/model'",
        ),
        (
            {"parameters": {"a.weight": (5, 3), "b.weight": (4,)}},
            r"a\.weight has shape \(3, 5\) there and \(5, 3\) here \(2 differ\)",
        ),
        ({"parameters": {"a.weight": (3, 5)}}, r"b\.weight has shape \(3,\) there and none here"),
        ({"parameters": {**PARAMETERS, "c.weight": ()}}, r"c\.weight has shape none there and \(\) here"),
    ],
)
def test_a_checkpoint_of_another_model_is_refused_with_the_differences(
    tmp_path: Path, here: dict[str, Any], problem: str | None
) -> None:
    manifest = manifest_of(parameters=PARAMETERS, head="values")
    given: dict[str, Any] = {"model_type": "qwen3", "parameters": PARAMETERS, "head": "values", **here}
    if problem is None:
        manifest.require_model(path=tmp_path, **given)
        return
    with pytest.raises(CheckpointError, match=f"{tmp_path} holds .*{problem}"):
        manifest.require_model(path=tmp_path, **given)


def test_private_names_are_read_by_the_runtime_alone_that_wrote_them(tmp_path: Path) -> None:
    manifest = manifest_of(private=("one", "two", "three"), runtime_config={"backend": "bridge"})
    manifest.require_readable_by("bridge", tmp_path)
    manifest.replace(private=()).require_readable_by("native", tmp_path)
    with pytest.raises(
        CheckpointError,
        match=r"was written by the bridge runtime, which has one and 2 other weights in an order of its own that the native "
        r"runtime does not read; load it with backend='bridge'",
    ) as caught:
        manifest.require_readable_by("native", tmp_path)
    assert caught.value.details == {"path": str(tmp_path), "backend": "bridge"}


def test_every_file_has_to_be_there_with_its_size(tmp_path: Path) -> None:
    manifest = manifest_of(files={"a": FACTS, "b": FACTS.replace(num_bytes=0)})
    (tmp_path / "a").write_text("four")
    (tmp_path / "b").touch()
    manifest.require_files(tmp_path)
    (tmp_path / "b").write_text("x")
    with pytest.raises(CheckpointError, match="is damaged: b has 1 bytes, 0 were written") as caught:
        manifest.require_files(tmp_path)
    assert caught.value.details == {"path": str(tmp_path), "name": "b"}
    (tmp_path / "a").unlink()
    (tmp_path / "a").mkdir()
    with pytest.raises(CheckpointError, match="is incomplete: a is missing"):
        manifest.require_files(tmp_path)
    assert damaged(tmp_path, "a", "it is gone").message == f"{tmp_path} is damaged: it is gone; take an earlier checkpoint"
