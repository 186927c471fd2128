"""The identity of a run: which contents of which files a resumed run must share."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from actors.folder import identity as identity_module
from actors.folder.checkpoints import Progress
from actors.folder.identity import require_same_run, saved_facts
from actors.folder.resume import LOGS, RunStart, require_new_run
from rl_backend.contracts import CheckpointError, ConfigError
from tests.unit.actors.folder.test_resume import config_of


def contents(config: Any) -> Any:
    return saved_facts(config)["contents"]


@pytest.mark.parametrize("size", [0, 100, 1 << 16, (1 << 16) + 1, 3 << 20])
def test_weights_are_known_by_their_size_and_pieces_from_the_first_byte_to_the_last(tmp_path: Path, size: int) -> None:
    config = config_of(tmp_path)
    file = tmp_path / "m" / "model.safetensors"
    data = bytearray(os.urandom(size))
    file.write_bytes(data)
    known = contents(config)["model"]
    assert known["model.safetensors"]["num_bytes"] == size
    # Pieces of 64 KiB at 16 places; the second begins at a fifteenth of the way.
    step = max(size - (1 << 16), 0) / 15
    for place in {0, size - 1, int(step), int(7 * step) + 50, int(14 * step) + 10} if size else ():
        changed = bytearray(data)
        changed[min(max(place, 0), size - 1)] ^= 1
        file.write_bytes(changed)
        assert contents(config)["model"] != known, place
    file.write_bytes(data + b"1")
    assert contents(config)["model"] != known
    file.write_bytes(data)
    assert contents(config)["model"] == known


def test_only_files_that_decide_are_read_of_a_model(tmp_path: Path) -> None:
    config = config_of(tmp_path)
    known = contents(config)["model"]
    assert set(known) == {"config.json", "model.safetensors"}
    (tmp_path / "m" / "README.md").write_text("x")
    (tmp_path / "m" / "pytorch_model.bin").write_text("x")
    (tmp_path / "m" / "folder").mkdir()
    assert contents(config)["model"] == known
    (tmp_path / "m" / "second.safetensors").write_bytes(b"y")
    assert set(contents(config)["model"]) == {*known, "second.safetensors"}


def test_functions_are_known_by_their_file_and_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = config_of(tmp_path)
    known = contents(config)["reward"]
    assert (known["function"], known["num_bytes"]) == ("score", len("score = 1\n"))
    assert contents(config.replace(reward="json:dumps"))["reward"]["function"] == "dumps"
    for nothing in ("nowhere.py:f", "no_such_module:f", "no_such_module.deeper:f", "just words", "sys:exit"):
        assert contents(config.replace(reward=nothing))["reward"] is None
    weighted = {"a": {"function": f"{tmp_path}/reward.py:score", "weight": 2}, "b": "json:dumps"}
    named = contents(config.replace(reward=weighted))["reward"]
    assert named["a"] == {"weight": 2.0, "content": known} and named["b"]["weight"] == 1.0
    (tmp_path / "breaks.py").write_text("raise SystemError\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    assert contents(config.replace(reward="breaks.deeper:f"))["reward"] is None


def test_sets_of_a_run_are_known_by_name(tmp_path: Path) -> None:
    config = config_of(tmp_path)
    (tmp_path / "held.jsonl").write_text("x\n")
    assert contents(config)["eval_dataset"] is None
    one = contents(config.replace(eval_dataset=f"{tmp_path}/held.jsonl"))["eval_dataset"]
    assert one["num_bytes"] == 2
    two = contents(config.replace(eval_dataset=[f"{tmp_path}/held.jsonl", f"{tmp_path}/train.jsonl"]))["eval_dataset"]
    assert two["held"] == one and two["train"] == contents(config)["dataset"]


@pytest.mark.shows("resume: held-out sets in another order, or answered differently, are refused")
def test_held_out_sets_keep_their_options_and_their_order(tmp_path: Path) -> None:
    rows = str(config_of(tmp_path).dataset)
    sets: dict[str, Any] = {"a": {"path": rows, "n": 4, "pass_at": [1, 2]}, "b": {"path": rows}}

    def of(**options: Any) -> Any:
        return config_of(tmp_path, eval_dataset={**sets, "a": {**sets["a"], **options}})

    saved = json.loads(json.dumps(saved_facts(of())))
    (tmp_path / "moved.jsonl").write_text(Path(rows).read_text())
    require_same_run(of(path=f"{tmp_path}/moved.jsonl"), Progress(2, {"run": saved}, tmp_path))
    others = [
        of(n=8),
        of(temperature=0.5),
        of(top_p=0.9),
        of(pass_at=[1, 4]),
        of(pass_threshold=0.5),
        of(stop_strings=["x"]),
    ]
    others.append(config_of(tmp_path, eval_dataset={"b": sets["b"], "a": sets["a"]}))
    for other in others:
        with pytest.raises(ConfigError, match=r"eval_dataset=.* has \[\['a', {'n': 4, .* would not go on as it was"):
            require_same_run(other, Progress(2, {"run": saved}, tmp_path))
    del saved["options"]["eval_dataset"]  # of a version that did not say
    require_same_run(of(n=8), Progress(2, {"run": saved}, tmp_path))


def test_a_folder_of_data_is_asked_for_its_split_and_known_by_all_its_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Any] = []
    files = [tmp_path / name for name in ("a", "b")]
    for file in files:
        file.write_text(file.name)

    def data_files(source: str, *, field: str, default_split: str | None) -> list[Path]:
        asked.append((source, field, default_split))
        return files

    monkeypatch.setattr(identity_module, "data_files", data_files)
    config = config_of(tmp_path, dataset=str(tmp_path / "folder"), eval_dataset=str(tmp_path / "held"))
    found = contents(config)
    assert asked == [(f"{tmp_path}/folder", "dataset", "train"), (f"{tmp_path}/held", "eval_dataset", None)]
    assert len(found["dataset"]) == 2 and found["dataset"] == found["eval_dataset"]
    files[1].write_text("c")
    assert contents(config)["dataset"] != found["dataset"]


@pytest.mark.parametrize(
    ("metrics", "used"),
    [
        (None, False),
        ("", False),
        ('{"step": 0, "reward": 1}\n', False),
        ('{"step": 1}\n', True),
        ('{"step": 0, "reward": 1}\n{"step": 1}\n', True),
        ('{"step": 10}\n', True),
    ],
)
def test_a_folder_is_used_once_a_step_was_taken_or_a_checkpoint_saved(
    tmp_path: Path, metrics: str | None, used: bool
) -> None:
    if metrics is not None:
        (tmp_path / LOGS[0]).write_text(metrics)
    if used:
        with pytest.raises(
            ConfigError, match=rf"^run_dir='{tmp_path}': holds another run; choose a new directory, remove it"
        ):
            require_new_run(tmp_path)
    else:
        require_new_run(str(tmp_path))
        (tmp_path / "checkpoints" / "step-00000002").mkdir(parents=True)
        with pytest.raises(ConfigError, match="holds another run"):
            require_new_run(tmp_path)


@pytest.mark.parametrize("name", ["config.json", "samples.jsonl", "held_out.jsonl"])
def test_a_run_does_not_replace_what_is_none_of_a_run(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_text("")
    require_new_run(tmp_path)
    (tmp_path / name).write_text('{\n  "model_type": "llama"\n}')
    with pytest.raises(ConfigError, match=rf"^run_dir='{tmp_path}': has a {name} that the run would replace"):
        require_new_run(tmp_path)
    (tmp_path / "run.json").write_text("{}")
    require_new_run(tmp_path)
    (tmp_path / "run.json").write_text("{}")
    require_new_run(tmp_path)


def test_a_start_knows_its_step_its_folder_and_its_state(tmp_path: Path) -> None:
    checkpoint: Any = type("Checkpoint", (), {"step": 7, "path": tmp_path, "state": {"mine": {"a": 1}, "odd": [1]}})()
    begin, going = RunStart(), RunStart(checkpoint)
    assert (begin.step, begin.same_folder, begin.progress.part("mine"), begin.describe()) == (0, False, {}, [])
    assert (going.step, going.same_folder, going.progress.part("mine")) == (7, False, {"a": 1})
    assert going.describe() == [f"continuing after step 7, from {tmp_path}"]
    for part in ("odd", "nothing"):
        with pytest.raises(
            CheckpointError, match=rf"^{tmp_path} has no usable '{part}' in its state; continue from another"
        ):
            going.progress.part(part)


@pytest.mark.parametrize(
    "name",
    ["tokenizer.model", "chat_template.jinja", "merges.txt", "generation_config.json", "additional_chat_templates/x.jinja"],
)
def test_what_makes_text_of_tokens_decides(tmp_path: Path, name: str) -> None:
    config = config_of(tmp_path)
    known = contents(config)["model"]
    file = tmp_path / "m" / name
    file.parent.mkdir(exist_ok=True)
    found = []
    for text in ("a", "b"):
        file.write_text(text)
        found.append(contents(config)["model"])
        assert found[-1].keys() == {*known, name}
    assert found[0] != found[1]


def test_a_task_that_is_generated_is_known_by_its_name_and_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "made").write_text("rows")
    monkeypatch.setattr(identity_module, "data_files", lambda source, **_: [tmp_path / "made"])
    monkeypatch.setattr(identity_module, "is_gym", lambda source: source.startswith("gym"))
    task, other, plain = (
        contents(config_of(tmp_path, dataset=dataset))["dataset"] for dataset in ("gym:sum?most=3", "gym:sum?most=4", "x")
    )
    assert task == ["gym:sum?most=3", *plain] and other == ["gym:sum?most=4", *plain] and len(plain) == 1
