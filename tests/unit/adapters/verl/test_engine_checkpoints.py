"""Checkpoints in verl's directories, on one rank: what is written, recorded, kept and read, for every choice of contents."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed import FileStore  # type: ignore[attr-defined] # not in its __all__

from adapters.verl.checkpoints import EngineCheckpoints, PendingSave, begin_role, exists_on_rank_0, found_name, own_tokenizer
from adapters.verl.trainers import mark, record_step, trainer_records
from rl_backend.contracts import CheckpointError
from rl_backend.contracts.lora import LoRAConfig

STATE = ("model", "optimizer", "extra")
RECORD = "latest_checkpointed_iteration.txt"


@pytest.fixture(autouse=True)
def group(tmp_path: Path) -> Iterator[None]:
    """This process as the only rank."""
    dist.init_process_group("gloo", store=FileStore(str(tmp_path / ".store"), 1), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


class Runtime:
    """Writes folders with what was asked for, and notes its calls. A save in the background ends when it is waited for."""

    def __init__(self) -> None:
        self.calls: list[Any] = []
        self.done, self.failing = False, ""
        self.config = SimpleNamespace(hf_path="/models/base")

    def save_checkpoint(self, handle: Any, path: Path, hf: bool = False, asynchronous: bool = False) -> None:
        kind = "hf" if hf else "background" if asynchronous else "state"
        self.calls.append((kind, path.name))
        if self.failing == kind:
            raise CheckpointError("disk full")
        path.mkdir(parents=True)
        (path / ("config.json" if hf else "manifest.json")).write_text(f"{kind} {len(self.calls)}")

    def load_checkpoint(self, handle: Any, path: Path) -> None:
        self.calls.append(("load", path.name, (path / "manifest.json").read_text()))

    def checkpoint_is_pending(self, handle: Any) -> bool:
        if self.failing == "pending":
            raise OSError("gone")
        return not self.done

    def wait_for_checkpoint(self, handle: Any) -> None:
        self.calls.append("wait")
        if self.failing == "wait":
            raise CheckpointError("disk full")

    def export_lora_adapter(self, handle: Any) -> Iterator[tuple[str, torch.Tensor]]:
        yield from ((f"base_model.model.a.lora_{part}.weight", torch.ones(2, 2)) for part in "AB")

    def list_lora_adapters(self, base: Any) -> list[Any]:
        return [
            SimpleNamespace(name=name, config=LoRAConfig(rank=2, alpha=alpha)) for name, alpha in (("x", 3.0), ("mine", 7.0))
        ]


HANDLE: Any = SimpleNamespace(name="mine", base="base")


def made(save: tuple[str, ...] = STATE, load: tuple[str, ...] = STATE, *given: Any, **options: Any) -> Any:
    return EngineCheckpoints(frozenset(save), frozenset(load), *given, **options)


def files(path: Path) -> list[str]:
    return sorted(str(file.relative_to(path)) for file in path.rglob("*") if file.is_file())


@pytest.mark.parametrize(
    ("contents", "options", "folders"),
    [
        (STATE, {}, {"huggingface", "training_state"}),
        ((*STATE, "hf_model"), {}, {"huggingface", "training_state"}),
        (("model",), {}, {"huggingface"}),
        (("hf_model",), {}, {"huggingface"}),
        (STATE, {"sharded": True}, {"training_state"}),
        ((*STATE, "hf_model"), {"sharded": True}, {"huggingface", "training_state"}),
        (STATE, {"lora": True}, {"lora_adapter", "training_state"}),
        (("model",), {"lora": True}, {"lora_adapter"}),
        (("model", "hf_model"), {"lora": True}, {"lora_adapter", "huggingface"}),
        (("hf_model",), {"lora": True}, {"huggingface"}),
        ((), {}, set()),
    ],
)
def test_each_part_is_written_into_a_folder_of_its_own(
    tmp_path: Path, contents: tuple[str, ...], options: dict[str, Any], folders: set[str]
) -> None:
    path = tmp_path / "global_step_3" / "actor"
    path.mkdir(parents=True)
    made(contents, **options).save(Runtime(), HANDLE, str(path), None, None, step=3)
    assert {entry.name for entry in path.iterdir()} == folders
    # Without async_save verl's trainer writes its own record.
    assert not (tmp_path / RECORD).exists()
    if "lora_adapter" in folders:
        config = json.loads((path / "lora_adapter" / "adapter_config.json").read_text())
        assert (config["lora_alpha"], config["base_model_name_or_path"]) == (7.0, "/models/base")


def test_the_tokenizer_that_verl_loaded_takes_the_place_of_the_models(tmp_path: Path) -> None:
    def save_pretrained(path: Path) -> None:
        (path / "tokenizer.json").write_text("verl's")

    made(STATE, STATE, SimpleNamespace(save_pretrained=save_pretrained)).save(
        Runtime(), HANDLE, str(tmp_path / "actor"), None, None
    )
    assert (tmp_path / "actor" / "huggingface" / "tokenizer.json").read_text() == "verl's"

    def refuse(path: Path) -> None:
        raise OSError(28, "No space left")

    broken = made(STATE, STATE, SimpleNamespace(save_pretrained=refuse))
    with pytest.raises(CheckpointError, match=r"the tokenizer could not be written to .*huggingface.*No space left"):
        broken.save(Runtime(), HANDLE, str(tmp_path / "actor"), None, None)
    assert (tmp_path / "actor" / "huggingface" / "tokenizer.json").read_text() == "verl's"


@pytest.mark.parametrize(
    ("template", "tokenizer_path", "processor", "expected"),
    [
        (None, None, None, None),
        (None, "/model", "processor", None),
        ("x", None, None, "tokenizer"),
        ("", None, "processor", "processor"),
        (None, "/other", None, "tokenizer"),
        (None, "/other", "processor", "processor"),
    ],
)
def test_a_tokenizer_is_saved_where_it_is_not_the_models_own(
    template: str | None, tokenizer_path: str | None, processor: Any, expected: str | None
) -> None:
    config: Any = SimpleNamespace(
        custom_chat_template=template,
        tokenizer_path=tokenizer_path,
        path="/model",
        tokenizer="tokenizer",
        processor=processor,
    )
    assert own_tokenizer(config) == expected


def test_as_many_checkpoints_are_kept_as_verl_asks_for(tmp_path: Path) -> None:
    checkpoints, runtime = made(), Runtime()

    def saved(step: int, keep: int | None) -> list[str]:
        checkpoints.save(runtime, HANDLE, str(tmp_path / f"global_step_{step}"), None, keep, step=step)
        return sorted(path.name for path in tmp_path.glob("global_step_*"))

    assert saved(1, None) == ["global_step_1"]
    assert saved(2, 2) == ["global_step_1", "global_step_2"]
    assert saved(3, 2) == ["global_step_2", "global_step_3"]
    # What is written anew is the newest, and no reason for another to go.
    assert saved(2, 2) == ["global_step_2", "global_step_3"]
    assert (tmp_path / "global_step_2" / "training_state" / "manifest.json").read_text().startswith("state")
    assert saved(4, 2) == ["global_step_2", "global_step_4"]
    assert saved(5, 1) == ["global_step_5"]


def test_a_save_in_the_background_is_recorded_and_others_go_once_it_is_heard_of(tmp_path: Path) -> None:
    checkpoints, runtime = made(asynchronous=True, last_step=4), Runtime()

    def save(step: int, keep: int = 1) -> None:
        checkpoints.save(runtime, HANDLE, str(tmp_path / f"global_step_{step}" / "actor"), None, keep, step=step)

    def state() -> tuple[str | None, list[str]]:
        record = (tmp_path / RECORD).read_text() if (tmp_path / RECORD).exists() else None
        return record, sorted(path.name for path in tmp_path.glob("global_step_*") if (path / "actor").exists())

    save(1)
    assert runtime.calls == [("hf", ".huggingface.new"), ("background", "training_state")]
    checkpoints.poll(runtime, HANDLE)
    assert state() == (None, ["global_step_1"]) and "wait" not in runtime.calls
    runtime.done = True
    checkpoints.poll(runtime, HANDLE)
    assert state() == ("1", ["global_step_1"]) and runtime.calls.count("wait") == 1
    checkpoints.poll(runtime, HANDLE)
    checkpoints.finish(runtime, HANDLE)
    assert runtime.calls.count("wait") == 1
    save(2)
    assert state() == ("1", ["global_step_1", "global_step_2"])
    save(3)  # finishes the one before
    assert state() == ("2", ["global_step_2", "global_step_3"])
    checkpoints.load(runtime, HANDLE, str(tmp_path / "global_step_3" / "actor"))
    assert state() == ("3", ["global_step_3"]) and runtime.calls[-1][:2] == ("load", "training_state")
    save(4)  # the last step waits
    assert runtime.calls[-1] == ("state", ".training_state.new") and state()[0] == "4"
    assert not list(tmp_path.rglob(".*.saving"))


def test_the_second_save_of_one_name_in_the_background_takes_the_place_of_the_first(tmp_path: Path) -> None:
    checkpoints, runtime = made(asynchronous=True, last_step=0), Runtime()
    path = tmp_path / "global_step_1" / "actor"
    for _ in range(2):
        checkpoints.save(runtime, HANDLE, str(path), None, None, step=1)
    first = (path / "training_state" / "manifest.json").read_text()
    assert runtime.calls[-1] == ("background", ".training_state.new")
    checkpoints.finish(runtime, HANDLE)
    assert (path / "training_state" / "manifest.json").read_text() != first
    assert {entry.name for entry in path.iterdir()} == {"huggingface", "training_state"}


@pytest.mark.parametrize(
    ("contents", "name", "kind"),
    [(("model",), "actor", None), (STATE, "global_step_7", "state"), (STATE, "actor", "background")],
)
def test_only_a_training_state_that_no_trainer_records_is_written_in_the_background(
    tmp_path: Path, contents: tuple[str, ...], name: str, kind: str | None
) -> None:
    runtime, path = Runtime(), tmp_path / "global_step_7" / name
    checkpoints = made(contents, asynchronous=True, last_step=9)
    checkpoints.save(runtime, HANDLE, str(path), None, None, step=7)
    assert {call[0] for call in runtime.calls} - {"hf"} == ({kind} if kind else set())
    assert (tmp_path / RECORD).exists() is (name == "actor" and kind is None)
    checkpoints.finish(runtime, HANDLE)
    assert (tmp_path / RECORD).exists() is (name == "actor")


@pytest.mark.parametrize("failing", ["wait", "pending", "background"])
def test_a_save_that_fails_in_the_background_is_raised_once_and_nothing_is_recorded(tmp_path: Path, failing: str) -> None:
    checkpoints, runtime = made(asynchronous=True), Runtime()
    runtime.failing = failing
    path = tmp_path / "global_step_5" / "actor"

    def run() -> None:
        checkpoints.save(runtime, HANDLE, str(path), None, 1, step=5)
        runtime.done = True
        checkpoints.poll(runtime, HANDLE)

    what = "OSError: gone" if failing == "pending" else "disk full"
    said = what if failing == "background" else f"async_save of step 5 to {path} failed in the background: {what}"
    with pytest.raises(CheckpointError, match=f"^{said}"):
        run()
    assert not (tmp_path / RECORD).exists() and (path.parent / ".actor.saving").exists()
    checkpoints.poll(runtime, HANDLE)
    runtime.failing = ""
    checkpoints.save(runtime, HANDLE, str(tmp_path / "global_step_6" / "actor"), None, 1, step=6)
    checkpoints.finish(runtime, HANDLE)
    assert (tmp_path / RECORD).read_text() == "6"


def test_what_both_the_look_and_the_wait_have_heard_of_is_told_by_the_first(tmp_path: Path) -> None:
    runtime, save = Runtime(), PendingSave(tmp_path / "actor", 2, None, None)
    runtime.failing = "pending"
    assert save.is_done(runtime, HANDLE) and save.problem == "OSError: gone"  # type: ignore[arg-type]
    runtime.failing = "wait"
    with pytest.raises(
        CheckpointError, match=r"failed in the background: OSError: gone \(on rank 0\)|OSError: gone$"
    ) as caught:
        save.commit(runtime, HANDLE)  # type: ignore[arg-type]
    assert isinstance(caught.value.__cause__, CheckpointError)


def test_a_step_is_recorded_when_none_of_its_marks_is_left(tmp_path: Path) -> None:
    roles = [tmp_path / "global_step_3" / name for name in ("actor", "critic", "trainer")]
    for role in roles[:2]:
        begin_role(role)
    mark(roles[2])
    mark(roles[2])
    for role in roles:
        assert not (tmp_path / RECORD).exists()
        record_step(role, 3)
    assert (tmp_path / RECORD).read_text() == "3"
    record_step(roles[0], 12)  # without a mark
    assert (tmp_path / RECORD).read_text() == "12"
    assert sorted(entry.name for entry in tmp_path.iterdir() if entry.name != ".store") == ["global_step_3", RECORD]
    assert trainer_records(tmp_path / "global_step_3") and not trainer_records(roles[0])
    (tmp_path / "file").touch()
    with pytest.raises(CheckpointError, match=rf"{tmp_path}/file/actor could not be saved: "):
        begin_role(tmp_path / "file" / "actor")


@pytest.mark.parametrize(
    ("contents", "lora", "found"),
    [
        (("model",), False, "huggingface"),
        (("hf_model",), False, "huggingface"),
        (("model",), True, "lora_adapter"),
        (("model", "hf_model"), True, "lora_adapter"),
        (STATE, False, None),
        ((*STATE, "hf_model"), True, None),
        ((), False, None),
    ],
)
def test_weights_alone_are_read_where_the_state_is_not(
    tmp_path: Path, contents: tuple[str, ...], lora: bool, found: str | None
) -> None:
    checkpoints, runtime = made(STATE, contents, lora=lora), Runtime()
    file = "adapter_config.json" if lora else "config.json"
    if found is None:
        assert checkpoints.weights_directory(str(tmp_path / "gone")) is None
    else:
        with pytest.raises(CheckpointError, match=rf"{tmp_path}/{found} has no {file}; load_contents without optimizer"):
            checkpoints.weights_directory(str(tmp_path))
        (tmp_path / f".{found}.old").mkdir()  # as a kill leaves it
        (tmp_path / f".{found}.old" / file).touch()
        assert checkpoints.weights_directory(str(tmp_path)) == tmp_path / f".{found}.old"
    (tmp_path / ".training_state.old").mkdir()
    (tmp_path / ".training_state.old" / "manifest.json").write_text("old")
    checkpoints.load(runtime, HANDLE, str(tmp_path))
    assert runtime.calls == ([("load", "training_state", "old")] if set(STATE) <= set(contents) else [])


def test_of_two_that_a_kill_left_the_new_one_is_found(tmp_path: Path) -> None:
    path = tmp_path / "a"
    assert found_name(path) == path and exists_on_rank_0(path) is False
    (tmp_path / ".a.new").mkdir()
    assert found_name(path) == path  # unfinished
    (tmp_path / ".a.old").mkdir()
    assert found_name(path) == tmp_path / ".a.new"
    path.mkdir()
    assert found_name(path) == path and exists_on_rank_0(path) is True
