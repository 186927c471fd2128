"""A run goes on from a checkpoint exactly where it was, or is refused by the name of what differs."""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from actors.folder.checkpoints import Progress
from actors.folder.folder import RunFolder, set_aside
from actors.folder.identity import require_same_run, saved_facts
from actors.folder.resume import RunFinishedError, RunStart, checkpoints_of, find_start
from examples.grpo import GRPOConfig
from examples.ppo import PPOConfig
from examples.sft import SFTConfig
from rl_backend.contracts import CheckpointError, ConfigError
from tests.support.native import open_runtime


def config_of(tmp_path: Path, **changes: Any) -> GRPOConfig:
    data = tmp_path / "train.jsonl"
    if not data.exists():
        data.write_text('{"prompt": "1+1=", "answer": "2"}\n')
        (tmp_path / "reward.py").write_text("score = 1\n")
        for name in ("m", "other"):
            (tmp_path / name).mkdir()
            (tmp_path / name / "config.json").write_text("{}")
            (tmp_path / name / "model.safetensors").write_bytes(name[:1].encode() * (1 << 20))
    options = {
        "model": str(tmp_path / "m"),
        "dataset": str(data),
        "reward": f"{tmp_path}/reward.py:score",
        "run_dir": str(tmp_path / "run"),
        "steps": 10,
        "save_every": 2,
    }
    return GRPOConfig(**{**options, **changes})


def run(
    config: GRPOConfig, last: int, start: RunStart | None = None, *, finish: bool = False, saved: Path | None = None
) -> None:
    """Steps up to ``last``, saved as the examples save them, or with the model ``saved``; then the run is killed, or comes
    to its end.
    """
    start = start or find_start(config)
    folder = RunFolder(config.run_dir, config, start=start, report_seconds=0)
    store = checkpoints_of(config)
    store.put_aside(start.damaged)
    store.clean_up()
    for step in range(start.step + 1, last + 1):
        folder.log(step, {"reward": step / 10})
        folder.log_samples(step, [{"prompt": "p", "response": "r", "reward": 0.0}] * 2)
        if config.save_every and step % config.save_every == 0:
            model = store.draft(step) / "policy"
            model.mkdir(parents=True)
            (model / "manifest.json").write_text("{}")
            if saved is not None:
                shutil.copytree(saved, model, dirs_exist_ok=True)
            facts = saved_facts(config) | {"dtype": "bfloat16"}
            store.commit(step, {"run": facts, "logs": folder.sync_logs()})
    if finish:
        folder.__exit__(None, None, None)
    folder._lock.release()


def steps_of(run_dir: Path | str, name: str = "metrics.jsonl") -> list[int]:
    return [json.loads(line)["step"] for line in (Path(run_dir) / name).read_text().splitlines()]


def test_a_run_that_was_killed_goes_on_after_its_newest_checkpoint_and_logs_every_step_once(tmp_path: Path) -> None:
    config = config_of(tmp_path)
    run(config, last=5)
    with (tmp_path / "run" / "metrics.jsonl").open("a") as file:
        file.write('{"step": 6, "rew')  # half a line
    (tmp_path / "run" / "checkpoints" / ".step-00000006.incomplete" / "policy").mkdir(parents=True)
    again = config.replace(resume="auto")
    start = find_start(again)
    assert start.step == 4 and start.checkpoint is not None
    run(again, last=10, start=start, finish=True)
    assert steps_of(config.run_dir) == list(range(1, 11))
    assert steps_of(config.run_dir, "samples.jsonl") == [step for step in range(1, 11) for _ in range(2)]
    assert checkpoints_of(config).steps() == [8, 10]
    assert [path.name for path in (tmp_path / "run" / "checkpoints").glob(".*")] == []
    facts = json.loads((tmp_path / "run" / "run.json").read_text())
    assert facts["state"] == "finished" and [each["after_step"] for each in facts["resumed"]] == [4]
    assert "10 of 10" in (tmp_path / "run" / "report.html").read_text()


@pytest.mark.parametrize("resume", [None, "auto"])
def test_a_run_is_not_written_over_the_model_that_it_begins_with(tmp_path: Path, resume: str | None) -> None:
    config = config_of(tmp_path, resume=resume)
    (tmp_path / "m" / "config.json").write_text('{"model_type": "llama"}')
    with pytest.raises(ConfigError, match=r"has a config\.json that the run would replace"):
        find_start(config.replace(run_dir=str(tmp_path / "m")))
    (tmp_path / "m").rename(tmp_path / "model")
    with pytest.raises(ConfigError, match=r"its model/ is the model that training begins with"):
        find_start(config.replace(model=str(tmp_path / "model"), run_dir=str(tmp_path)))


def test_auto_begins_a_run_that_has_no_checkpoint_and_takes_its_steps_again(tmp_path: Path) -> None:
    config = config_of(tmp_path, resume="auto", save_every=4)
    assert find_start(config) == RunStart()
    run(config, last=3)
    assert find_start(config) == RunStart(replaces=True)
    run(config, last=2)
    assert steps_of(config.run_dir) == [1, 2]
    with pytest.raises(ConfigError, match="holds a run with other options"):
        find_start(config.replace(seed=1))
    with pytest.raises(ConfigError, match=r"holds another run; .*resume=auto"):
        find_start(config.replace(resume=None))


def test_options_saved_under_their_places_are_compared_by_the_short_names_that_they_have_got(tmp_path: Path) -> None:
    config = config_of(tmp_path, resume="auto", top_p=0.9)
    run(config, last=2)
    checkpoint = find_start(config).checkpoint
    assert checkpoint is not None
    saved = checkpoint.state["run"]["options"]
    saved["sampling.top_p"] = saved.pop("top_p")
    require_same_run(config, Progress.of(checkpoint))
    with pytest.raises(ConfigError, match=r"GRPOConfig\.top_p=0\.5"):
        require_same_run(config.replace(top_p=0.5), Progress.of(checkpoint))


def test_what_was_measured_before_the_first_step_does_not_occupy_a_folder(tmp_path: Path) -> None:
    config = config_of(tmp_path)
    for step in (0, 1):
        folder = RunFolder(config.run_dir, config, start=find_start(config), report_seconds=0)
        folder.log_start({"held_out_reward": 0.25})
        if step:
            folder.log(step, {"reward": 0.5})
        folder._lock.release()
    assert steps_of(config.run_dir) == [0, 1]
    with pytest.raises(ConfigError, match="holds another run"):
        find_start(config)


def test_a_run_that_has_finished_goes_on_only_with_more_steps(tmp_path: Path) -> None:
    config = config_of(tmp_path, resume="auto")
    run(config, last=10, finish=True)
    with pytest.raises(RunFinishedError, match="has finished its 10 steps; raise steps"):
        find_start(config)
    with pytest.raises(ConfigError, match=r"^resume=.*has finished its 10 steps; raise steps"):
        find_start(config.replace(resume=str(tmp_path / "run" / "checkpoints" / "latest")))
    with pytest.raises(
        ConfigError, match=r"^resume='\S+/run/': is the folder of a run; give auto .*, or \S+/run/checkpoints/"
    ):
        find_start(config.replace(resume=f"{tmp_path}/run/", run_dir=str(tmp_path / "other")))
    with pytest.raises(ConfigError, match=r"GRPOConfig\.steps=8: .*of step 10 already"):
        find_start(config.replace(steps=8))
    longer = config.replace(steps=12)
    assert find_start(longer).step == 10
    run(longer, last=12, finish=True)
    assert steps_of(config.run_dir) == list(range(1, 13))
    without = config_of(tmp_path, run_dir=str(tmp_path / "without"), save_every=0)
    run(without, last=10, finish=True)
    with pytest.raises(RunFinishedError, match="without has finished its 10 steps"):
        find_start(without.replace(resume="auto"))
    with pytest.raises(ConfigError, match="has finished, without a checkpoint"):
        find_start(without.replace(resume="auto", steps=12))
    with pytest.raises(ConfigError, match="holds a run with other options"):
        find_start(without.replace(resume="auto", seed=1))


@pytest.mark.shows("resume: a finished run whose last checkpoints were removed continues from the newest that is left")
def test_a_finished_run_whose_later_checkpoints_were_removed_goes_on_from_the_newest_that_is_left(tmp_path: Path) -> None:
    config = config_of(tmp_path, resume="auto", keep_checkpoints=0)
    run(config, last=10, finish=True)
    checkpoints = tmp_path / "run" / "checkpoints"
    for step in (8, 10):
        shutil.rmtree(checkpoints / f"step-{step:08d}")
    for resume in ("auto", str(checkpoints / "step-00000006")):
        start = find_start(config.replace(resume=resume))
        assert (start.step, start.same_folder) == (6, True)
    run(config, last=10, start=find_start(config), finish=True)
    assert steps_of(config.run_dir) == list(range(1, 11)), "steps 7 to 10 are there once"
    assert checkpoints_of(config).steps() == [2, 4, 6, 8, 10]
    with pytest.raises(RunFinishedError):
        find_start(config)
    shutil.rmtree(checkpoints / "step-00000010")
    assert find_start(config.replace(steps=12)).step == 8


def damage(checkpoint: Path) -> None:
    """Flips a bit in the middle of the largest file of the model."""
    file = max((checkpoint / "policy").iterdir(), key=lambda each: each.stat().st_size)
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)


@pytest.mark.shows("resuming: damaged_checkpoint=earlier continues from the newest checkpoint that is whole, and says so")
def test_damaged_checkpoints_are_passed_over_where_that_is_asked(tmp_path: Path, tied_model: Path) -> None:
    with open_runtime(tied_model) as runtime:
        runtime.save_checkpoint(runtime.build_model(), tmp_path / "saved")
    config = config_of(tmp_path, resume="auto", damaged_checkpoint="earlier", keep_checkpoints=0)
    run(config, 9, saved=tmp_path / "saved")
    checkpoints = tmp_path / "run" / "checkpoints"
    assert find_start(config).step == 8 and not find_start(config).warnings()
    damage(checkpoints / "step-00000006")
    assert find_start(config).step == 8
    damage(checkpoints / "step-00000008")
    assert find_start(config.replace(damaged_checkpoint="refuse")).step == 8, "ranks find it when they load it"
    start = find_start(config)
    first, second = start.warnings()
    assert start.step == 4 and "step-00000008/policy is damaged" in first and "step-00000006 is renamed" in second
    assert "The run goes back to step 4" in first
    run(config, 8, start, saved=tmp_path / "saved")
    assert steps_of(config.run_dir) == [*range(1, 9)]
    assert len(list(checkpoints.glob("step-*.damaged-*"))) == 2 and find_start(config).step == 8
    (resumed,) = json.loads((tmp_path / "run" / "run.json").read_text())["resumed"]
    assert resumed["after_step"] == 4 and resumed["damaged"] == ["step-00000008", "step-00000006"]
    for step in (2, 4, 6, 8):
        damage(checkpoints / f"step-{step:08d}")
    with pytest.raises(CheckpointError, match=r"every checkpoint is damaged: .*step-00000008.*; .*step-00000002"):
        find_start(config)


def test_checkpoints_that_cannot_be_read_are_passed_over_and_those_of_another_format_are_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = config_of(tmp_path, resume="auto", damaged_checkpoint="earlier", keep_checkpoints=0)
    run(config, 4)

    def read(model: Path) -> Any:
        if "step-00000004" in str(model):
            raise OSError(errno.EIO, "Input/output error")
        return SimpleNamespace(require_files=lambda path: None, files={})

    monkeypatch.setattr("actors.folder.checkpoints.read_manifest", read)
    start = find_start(config)
    (warning,) = start.warnings()
    assert start.step == 2 and "step-00000004 is damaged: [Errno 5] Input/output error. The run goes back to" in warning
    newest = tmp_path / "run" / "checkpoints" / "step-00000004"
    (newest / "policy" / "manifest.json").write_text("changed")
    (warning,) = find_start(config).warnings()
    assert "it has other bytes than were written. The run goes back to step 2" in warning
    file = newest / "run.json"
    file.write_text(re.sub(r'"format": ?1', '"format": 9', file.read_text()))
    with pytest.raises(CheckpointError, match="step-00000004 has format 9, this version reads format 1; continue with"):
        find_start(config)


def test_an_earlier_checkpoint_goes_on_in_a_new_folder_and_leaves_the_later_ones_alone(tmp_path: Path) -> None:
    config = config_of(tmp_path, keep_checkpoints=0)
    run(config, last=6)
    earlier = str(tmp_path / "run" / "checkpoints" / "step-00000004")
    with pytest.raises(ConfigError, match="has later checkpoints, up to step 6; remove them, or continue in a new run_dir"):
        find_start(config.replace(resume=earlier))
    elsewhere = config.replace(resume=earlier, run_dir=str(tmp_path / "other"))
    start = find_start(elsewhere)
    assert (start.step, start.same_folder) == (4, False)
    for last in (4, 5):
        run(elsewhere, last=last)
        with pytest.raises(ConfigError, match=r"began after .*step-00000004 and has no checkpoint yet"):
            find_start(elsewhere.replace(resume="auto"))
    run(elsewhere, last=8)
    assert steps_of(elsewhere.run_dir) == [5, 6, 7, 8]
    assert find_start(elsewhere.replace(resume="auto")).step == 8
    assert steps_of(config.run_dir) == list(range(1, 7))
    with pytest.raises(ConfigError, match="holds another run"):
        find_start(elsewhere)
    killed = elsewhere.replace(run_dir=str(tmp_path / "killed"))
    RunFolder(killed.run_dir, killed, start=find_start(killed), report_seconds=0)._lock.release()
    (tmp_path / "killed" / "run.json").unlink()  # killed as soon as it had written where it begins
    with pytest.raises(ConfigError, match=r"began after .*step-00000004 and has no checkpoint yet"):
        find_start(killed.replace(resume="auto"))
    assert find_start(killed).step == 4
    latest = str(tmp_path / "run" / "checkpoints" / "latest")
    assert find_start(config.replace(resume=latest)).step == 6


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"prompts_per_step": 16}, r"GRPOConfig\.prompts_per_step=16: .* has 32"),
        ({"seed": 1}, r"GRPOConfig\.seed=1"),
        ({"lr": 2e-6}, r"GRPOConfig\.lr=2e-06"),
        ({"dtype": "float32"}, r"GRPOConfig\.dtype='float32': is float32 here; .* has bfloat16"),
        ({"plugins": "math"}, r"GRPOConfig\.plugins=\('math',\)"),
        ({"train.backend_cfg.reduce_dtype": "bfloat16"}, r"GRPOConfig\.train\.backend_cfg\.reduce_dtype='bfloat16'"),
        (
            {"backend": "bridge", "train.backend_cfg.override_transformer_config": {"moe_z_loss_coeff": 0.1}},
            r"GRPOConfig\.train\.backend_cfg\.override_transformer_config=\{'moe_z_loss_coeff'",
        ),
        ({"temperature": 0.9}, r"GRPOConfig\.temperature=0\.9"),
        ({"rollout.engine_args": {"quantization": "fp8"}}, r"GRPOConfig\.rollout\.engine_args=\{'quantization'"),
        ({"loss": {"name": "gspo"}}, r"GRPOConfig\.loss\.name='gspo'"),
        ({"seed": 1, "lr": 2e-6, "kl_coef": 0.1}, r"GRPOConfig\.seed="),
        ({"max_staleness": 1}, r"GRPOConfig\.max_staleness=1"),
        ({"kl_coef": 0.1}, r"GRPOConfig\.kl_coef=0\.1"),
    ],
)
def test_options_that_decide_what_is_learned_may_not_change(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    config = config_of(tmp_path)
    run(config, last=2)
    with pytest.raises(ConfigError, match=message):
        find_start(config.replace(resume="auto", **changes))


def test_where_and_how_long_a_run_goes_may_change(tmp_path: Path) -> None:
    config = config_of(tmp_path)
    run(config, last=2)
    moved = tmp_path / "moved"
    shutil.copytree(config.model, moved / "model")
    shutil.copy(config.dataset, moved)
    shutil.copy(tmp_path / "reward.py", moved)
    files = {"model": str(moved / "model"), "dataset": f"{moved}/train.jsonl", "reward": f"{moved}/reward.py:score"}
    changes = {"steps": 20, "ranks": 4, "tp": 2, "backend": "bridge", "engines": 2, "transport": "gloo", "trace": True}
    saving = {"save_every": 9, "keep_checkpoints": 0, "async_save": False, "dtype": "bfloat16"}
    assert find_start(config.replace(resume="auto", **changes, **saving, **files)).step == 2
    execution = {"activation_checkpointing": "full", "log_prob_chunk_tokens": 7, "device": "cpu", "reduce_dtype": "float32"}
    given = {f"train.backend_cfg.{name}": value for name, value in execution.items()}
    assert find_start(config.replace(resume="auto", **given)).step == 2


@pytest.mark.shows("runs: a run whose model, tokenizer, chat template, data or reward function has changed is not continued")
def test_other_contents_of_the_files_of_a_run_are_refused(tmp_path: Path) -> None:
    config = config_of(tmp_path, resume="auto")
    templates = tmp_path / "m" / "additional_chat_templates"
    templates.mkdir()
    kept = {"config.json", "model.safetensors"}
    made = {"tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "additional_chat_templates/tool_use.jinja"}
    for name in made:
        (tmp_path / "m" / name).write_text("as it was")
    absent = {"generation_config.json", "tokenizer.model", "merges.txt", "additional_chat_templates/rag.jinja"}
    run(config, last=2)
    files = [f"m/{name}" for name in sorted(kept | made | absent)]
    for name in (*files, "reward.py", "train.jsonl"):
        file = tmp_path / name
        before = file.read_bytes() if file.exists() else None
        middle = len(before or b"") // 2
        option = {"m": "model", "reward.py": "reward", "train.jsonl": "dataset"}[Path(name).parts[0]]
        for content in (b"new" if before is None else before[:middle] + b"#" + before[middle + 1 :], None):
            if content is not None:
                file.write_bytes(content)
            elif before is not None and option == "model":
                file.unlink()
            else:
                continue
            with pytest.raises(
                ConfigError, match=rf"GRPOConfig\.{option}=.*: is not, byte for byte, what the run of .* has"
            ):
                find_start(config)
        if before is None:
            file.unlink()
        else:
            file.write_bytes(before)
        assert find_start(config).step == 2, f"{name} as it was"


def test_other_contents_of_the_file_of_tools_and_another_day_are_refused(tmp_path: Path) -> None:
    file = tmp_path / "tools.json"
    file.write_text('[{"name": "add"}]')
    config = config_of(tmp_path, tools_file=str(file), chat_template_kwargs={"strftime_now": "2026-01-31"})
    run(config, last=2)
    assert find_start(config.replace(resume="auto")).step == 2
    with pytest.raises(ConfigError, match=r"GRPOConfig\.chat_template_kwargs=.*2026-02-01"):
        find_start(config.replace(resume="auto", chat_template_kwargs={"strftime_now": "2026-02-01"}))
    file.write_text('[{"name": "sub"}]')
    with pytest.raises(ConfigError, match=r"GRPOConfig\.tools_file=.*: is not, byte for byte, what the run of .* has"):
        find_start(config.replace(resume="auto"))


def test_other_contents_of_a_folder_of_data_and_of_a_model_of_the_hub_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    datasets = pytest.importorskip("datasets", reason="datasets is not installed")
    datasets.Dataset.from_list([{"prompt": "1+1=", "answer": "2"}]).save_to_disk(tmp_path / "folder")
    config = config_of(tmp_path, resume="auto", dataset=str(tmp_path / "folder"), eval_dataset=f"{tmp_path}/folder")
    run(config, last=2)
    assert find_start(config).step == 2
    datasets.Dataset.from_list([{"prompt": "1+1=", "answer": "3"}]).save_to_disk(tmp_path / "folder")
    with pytest.raises(ConfigError, match=r"GRPOConfig\.dataset=.*folder': is not, byte for byte, what the run of .* has"):
        find_start(config)
    monkeypatch.setattr("actors.folder.identity.local_model", lambda name: str(tmp_path / name.partition("/")[2]))
    ppo = PPOConfig(**{name: getattr(config, name) for name in ("model", "dataset", "reward")})
    facts = [saved_facts(ppo.replace(critic_model=name))["contents"] for name in ("org/m", "org/other")]
    assert facts[0] != facts[1] and saved_facts(ppo.replace(critic_model=str(tmp_path / "m")))["contents"] == facts[0]


def test_another_model_another_function_and_another_critic_are_refused(tmp_path: Path) -> None:
    config = config_of(tmp_path, resume="auto")
    run(config, last=2)
    with pytest.raises(ConfigError, match=r"GRPOConfig\.model=.*other': is not, byte for byte"):
        find_start(config.replace(model=str(tmp_path / "other")))
    for reward in (f"{tmp_path}/reward.py:other", "examples.demo.task:score"):
        with pytest.raises(ConfigError, match=r"GRPOConfig\.reward=.*: is not, byte for byte"):
            find_start(config.replace(reward=reward))
    options = {name: getattr(config, name) for name in ("model", "dataset", "reward")}
    ppo, critic = PPOConfig(**options), str(tmp_path / "other")
    assert saved_facts(ppo)["contents"] != saved_facts(ppo.replace(critic_model=critic))["contents"]


def test_checkpoints_of_other_programs_are_refused(tmp_path: Path) -> None:
    config = config_of(tmp_path)
    run(config, last=2)
    options = {"model": "m", "dataset": config.dataset, "run_dir": str(tmp_path / "new")}
    resume = str(tmp_path / "run" / "checkpoints" / "latest")
    with pytest.raises(ConfigError, match="is of a run of GRPOConfig, this is one of SFTConfig"):
        find_start(SFTConfig(**options, resume=resume))
    with pytest.raises(ConfigError, match="is of a run of GRPOConfig, this is one of PPOConfig"):
        find_start(PPOConfig(**options, reward="r", resume=resume))
    store = checkpoints_of(config)
    (store.draft(4) / "policy").mkdir(parents=True)
    (store.draft(4) / "policy" / "manifest.json").write_text("{}")
    store.commit(4, {"mine": 1})
    with pytest.raises(CheckpointError, match=r"is of another program: .*KeyError: 'run'"):
        find_start(config.replace(resume="auto"))


def test_logs_that_have_lost_lines_are_refused(tmp_path: Path) -> None:
    config = config_of(tmp_path)
    run(config, last=2)
    (tmp_path / "run" / "samples.jsonl").unlink()
    again = config.replace(resume="auto")
    with pytest.raises(ConfigError, match=r"samples\.jsonl': cannot be read"):
        find_start(again)


@pytest.mark.shows("resume: logs that are damaged or have lost lines are refused by name")
@pytest.mark.parametrize("name", ["metrics.jsonl", "samples.jsonl"])
def test_logs_that_are_damaged_or_shorter_are_refused(tmp_path: Path, name: str) -> None:
    config = config_of(tmp_path)
    run(config, last=5)
    again, log = config.replace(resume="auto"), tmp_path / "run" / name
    start, text = find_start(again), log.read_text()
    log.write_text(text.replace("1", "7", 1))
    with pytest.raises(ConfigError, match=rf"{name}': is damaged: its first \d+ bytes are not those"):
        find_start(again)
    with pytest.raises(ConfigError, match="is damaged"):
        RunFolder(again.run_dir, again, start=start)
    log.write_text(text[:40])
    with pytest.raises(ConfigError, match=rf"{name}': has lost lines: it had \d+ bytes .* and has 40"):
        find_start(again)
    log.write_text(text)
    run(again, last=6, start=find_start(again))
    assert steps_of(tmp_path / "run") == [1, 2, 3, 4, 5, 6]
    assert find_start(again).step == 6


def test_files_that_a_resume_reads_are_on_the_disk_before_they_get_their_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    flushed, fsync = [], os.fsync

    def record(descriptor: int) -> None:
        flushed.append((Path(os.readlink(f"/proc/self/fd/{descriptor}")).name, os.fstat(descriptor).st_size > 0))
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", record)
    config = config_of(tmp_path)
    with RunFolder(config.run_dir, config, report_seconds=0):
        assert {(".config.json.new", True), (".run.json.spare", True)} <= set(flushed)
        assert all(has_contents for _, has_contents in flushed)


def test_one_run_at_a_time_writes_to_a_folder(tmp_path: Path) -> None:
    config = config_of(tmp_path)
    decided = find_start(config.replace(resume="auto"))
    with (
        RunFolder(config.run_dir, config, report_seconds=0),
        pytest.raises(ConfigError, match="in use by a run that is still alive"),
    ):
        RunFolder(config.run_dir, config, report_seconds=0)
    run(config, last=2)
    with pytest.raises(ConfigError, match="another run saved step 2 here in the meantime"):
        RunFolder(config.run_dir, config, start=RunStart(replaces=True, newest=decided.newest))


def test_what_stands_where_a_result_goes_is_kept_under_another_name(tmp_path: Path) -> None:
    for _ in range(3):
        assert set_aside(tmp_path / "trace.json") == tmp_path / "trace.json"
        (tmp_path / "trace.json").write_text("")
        set_aside(tmp_path / "model").mkdir()
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        *("model", "model.1", "model.2"),
        *("trace.1.json", "trace.2.json", "trace.json"),
    ]


DAMAGED_JSON = ["[]", "7", "{", "[" * 100_000]


def short(value: object) -> str:
    return str(value)[:12]


@pytest.mark.parametrize("name", ["config.json", "run.json"])
@pytest.mark.parametrize("text", DAMAGED_JSON, ids=short)
def test_a_damaged_file_of_the_run_is_named_when_it_is_resumed(tmp_path: Path, name: str, text: str) -> None:
    for finished, save_every in ((True, 2), (True, 0), (False, 0)):
        config = config_of(tmp_path, resume="auto", save_every=save_every, run_dir=f"{tmp_path}/{finished}-{save_every}")
        run(config, last=2, finish=finished)
        if name == "config.json" and save_every:
            (Path(config.run_dir) / "run.json").write_text('{"state": "finished"}')
        (Path(config.run_dir) / name).write_text(text)
        with pytest.raises(ConfigError, match=rf"run_dir=.*{name} of the run in it cannot be read: .*; put the file right"):
            find_start(config)


def test_a_file_of_the_run_without_what_a_resume_needs_is_named(tmp_path: Path) -> None:
    config = config_of(tmp_path, resume="auto")
    run(config, last=2)
    without = config_of(tmp_path, resume="auto", save_every=0, run_dir=str(tmp_path / "without"))
    run(without, last=2)
    (tmp_path / "without" / "config.json").write_text('{"steps": "many"}')
    with pytest.raises(ConfigError, match="holds a run with other options, without a checkpoint"):
        find_start(without)


@pytest.mark.parametrize("part", ["logs", "run"])
@pytest.mark.parametrize(
    "value", [None, [], 7, {"metrics.jsonl": []}, {"example": "GRPOConfig", "options": 7, "contents": {}}]
)
def test_a_state_that_another_program_saved_is_refused(tmp_path: Path, part: str, value: Any) -> None:
    config = config_of(tmp_path, resume="auto")
    run(config, last=2)
    store = checkpoints_of(config)
    saved = store.latest()
    assert saved is not None
    state = {**saved.state, part: value} if value is not None else {k: v for k, v in saved.state.items() if k != part}
    (store.draft(4) / "policy").mkdir(parents=True)
    (store.draft(4) / "policy" / "manifest.json").write_text("{}")
    store.commit(4, state)
    with pytest.raises(CheckpointError, match=r"step-00000004 (does not say|is of another program)"):
        find_start(config)
    with pytest.raises(CheckpointError, match="has no usable 'batches' in its state; continue from another"):
        RunStart(saved).progress.part("batches")


@pytest.mark.parametrize("resume", [None, "auto"])
def test_a_folder_whose_name_is_too_long_is_refused_by_name(tmp_path: Path, resume: str | None) -> None:
    with pytest.raises(ConfigError, match=r"run_dir=.*File name too long"):
        find_start(config_of(tmp_path, resume=resume, run_dir=str(tmp_path / ("x" * 300))))
