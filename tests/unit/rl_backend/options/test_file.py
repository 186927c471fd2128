"""Files of options, the printed configuration, and the groups of --help."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Any

import pytest

from examples.grpo import GRPOConfig
from examples.ppo import PPOConfig
from examples.sft import SFTConfig
from examples.tenants import TenantsConfig
from rl_backend.contracts import ConfigError
from rl_backend.options.command_line import parse_config

KINDS: list[Any] = [GRPOConfig, PPOConfig, SFTConfig, TenantsConfig]


def read(*arguments: str) -> GRPOConfig:
    return parse_config(GRPOConfig, "", ["--model", "m", "--dataset", "d", "--reward", "r", *arguments])


BAD_FILES = {
    ("a.yaml", "- a"): ": it holds a list, not an object of options",
    ("a.yaml", "lr: 1\na: [\n"): ", line 3: expected the node content, but found '<stream end>'",
    ("a.yaml", "lr: 1\n\tsteps: 2\n"): ", line 2: found character '\\t' that cannot start any token",
    ("a.yaml", "# mine\ntp: 1\nspeed: 3\n"): ", line 3: speed: there is no such option; ",
    ("a.yaml", "temprature: 3"): ", line 1: temprature: there is no such option; did you mean temperature?",
    (
        "a.yaml",
        "max-prompt-tokens: 3",
    ): ", line 1: max-prompt-tokens: there is no such option; did you mean max_prompt_tokens?",
    ("a.yaml", "rollout:\n  seed: 1\n  dtyp: x\n"): (
        ", line 3: rollout.dtyp: there is no such option; did you mean rollout.dtype?"
    ),
    ("a.yaml", "lr: 1.0e-6\nsteps: 2\nlr: 1.0e-5\n"): ", line 3: lr is there twice, first in line 1; keep one",
    ("a.yaml", "tp: 1\nlr: fast\n"): ', line 2: lr="fast": input should be a valid number',
    (
        "a.yaml",
        "rollout:\n  engine_args: {speed: 3}\nloss:\n  name: x\n",
    ): ", line 4: loss.name=\"x\": input should be 'grpo'",
    ("a.json", "lr: 1.0e-6\n"): ": Expecting value: line 1 column 1 (char 0)",
    ("a.json", '{\n"lr": 1,\n"lr": 2\n}'): ", line 3: lr is there twice, first in line 2; keep one",
    ("a.json", '{\n"steps": 0}'): ", line 2: steps=0: input should be greater than or equal to 1",
    ("a.json", "[" * 100_000): ": maximum recursion depth exceeded",
    ("a.yaml", "lr: 1\non: 2\n"): ", line 2: on: there is no such option; did you mean ",
    ("a.yaml", "7: 2\n"): ", line 1: 7: there is no such option; ",
    ("a.yaml", "train: &t {backend_cfg: *t}"): ": maximum recursion depth exceeded",
    # Flags of the section's own values would replace what stands in its place.
    ("a.yaml", "steps: 2\ntrain: 5\n"): ", line 2: train=5: these are several options; give each its own value",
    ("a.yaml", "train:\n  backend_cfg: [1]\n"): ", line 2: train.backend_cfg=[1]: these are several options",
    ("a.yaml", "train.backend_cfg: fast\nlr: 1\n"): ', line 1: train.backend_cfg="fast": these are several options',
    ("a.yaml", "loss:\n"): ", line 1: loss=null: these are several options",
    ("a.json", '{"data":\t3}'): ": data=3: these are several options",
    ("a.yaml", "plugins: 5"): ", line 1: plugins=5: input should be a valid tuple",
    ("a.yaml", "plugins: null"): ", line 1: plugins=null: input should be a valid tuple",
}


@pytest.mark.shows("options: a wrong name or value in a YAML or JSON file is refused with its line")
@pytest.mark.parametrize("file", BAD_FILES, ids=lambda file: f"{file[0]}-{file[1][:16]!r}")
def test_a_wrong_file_is_one_sentence_with_file_and_line(tmp_path: Path, file: tuple[str, str]) -> None:
    name, text = file
    (tmp_path / name).write_text(text)
    with pytest.raises(ConfigError) as refused:
        read("--config", str(tmp_path / name))
    assert str(refused.value).startswith(f"--config {tmp_path / name}{BAD_FILES[file]}")
    assert "\n" not in str(refused.value)


def test_a_value_of_a_flag_is_blamed_on_the_flag_even_where_a_file_has_one(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text("steps: 3\nlr: 1e-5\n")
    with pytest.raises(ConfigError, match=r"^--steps="):
        read("--config", str(tmp_path / "a.yaml"), "--steps", "0")
    assert read("--config", str(tmp_path / "a.yaml")).train.backend_cfg.optimizer.lr == 1e-5


@pytest.mark.shows("options: --print-config prints all values as YAML, which --config reads")
@pytest.mark.parametrize("kind", KINDS)
def test_the_printed_configuration_is_read_as_the_same(
    kind: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given = [*shlex.split(kind.option_set.example), "--lr", "3e-6", "--tp", "2", "--ranks", "2", "--save-every", "5"]
    with pytest.raises(SystemExit) as ended:
        parse_config(kind, "", [*given, "--print-config"])
    assert ended.value.code == 0
    printed = capsys.readouterr().out
    (tmp_path / "printed.yaml").write_text(printed)
    config = parse_config(kind, "", given)
    again = parse_config(kind, "", ["--config", str(tmp_path / "printed.yaml")])
    assert again == config and again.model_dump() == config.model_dump()
    assert "  backend: native\n" in printed and "keep_checkpoints: 2\n" in printed
    assert '#   train.backend_cfg.param_dtype: "auto"\n' in printed
    if kind is not SFTConfig:
        assert f"#   rollout.max_model_len: {config.longest_sequence}\n" in printed
    with pytest.raises(ConfigError, match="required field is missing"):
        parse_config(kind, "", ["--print-config"])


@pytest.mark.shows("options: --help has groups, types, choices and defaults, and ends with an example that runs as it is")
@pytest.mark.parametrize("kind", KINDS)
def test_help_has_groups_and_ends_with_an_example_that_is_read(kind: Any, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse_config(kind, "", ["-h"])
    text = capsys.readouterr().out
    titles = re.findall(r"^(\w[^:\n]*):$", text, re.MULTILINE)
    of_rl = [] if kind is SFTConfig else ["reward", "sampling"]
    everyday = ["model", "data", *of_rl, "evaluation", "training", "layout", "memory", "checkpoints", "logging"]
    assert titles[: len(everyday) + 1] == ["general", *everyday]
    assert titles[-1] == "example"
    words = shlex.split(text.rpartition("example:\n")[2].replace("\\\n", " "))
    options = words[next(index for index, word in enumerate(words) if word.startswith("--")) :]
    assert parse_config(kind, "", options).model == "models/Qwen3-0.6B"
    for row in (
        "  --model, --train.hf_path DIR\n",
        "  --dtype {auto,float32,bfloat16}\n",
        "  --steps INT                 training steps (default: 100)\n",
        " attention,feed_forward)\n",
        "\nmodel:\n  --model, ",
    ):
        assert row in text
