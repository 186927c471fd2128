"""Help of a command line: lines, groups, and the option that was probably meant."""

from __future__ import annotations

import shlex
from typing import Any, ClassVar

import pytest
from pydantic import Field

from examples.grpo import GRPOConfig
from examples.sft import SFTConfig
from rl_backend.contracts import BaseConfig
from rl_backend.options.help import nearest, option_parser
from rl_backend.options.option_set import OptionSet, options_of, sections_of
from rl_backend.runtime.bridge.config import BridgeConfig

LONG = "a word of this text is never divided, and a line that is full goes on in the next one below the text before it"


class Part(BaseConfig):
    size: int = 3


class Whole(BaseConfig):
    option_set: ClassVar[OptionSet] = OptionSet(
        short={"size": "part.size"},
        groups={"logging": ("loud",), "mine": ("needed",), "data": ("size",)},
        example="--needed 'two words' --loud --size 12345 " + " ".join(f"--flag-{number} value" for number in range(7)),
    )

    needed: str = Field(description=LONG)
    loud: bool = Field(default=False, description="say more")
    part: Part = Part()
    late: int = 1


def test_help_is_usage_groups_and_an_example() -> None:
    text = option_parser("rl-backend mine", Whole, "What it does.", dict(sections_of(Whole, {}))).format_help()
    head, general, *groups, example = text.split("\n\n")[0:1] + text.split("\n\n")[2:]
    assert head == "usage: rl-backend mine [--config FILE] --needed TEXT [--FLAG VALUE ...]"
    assert text.split("\n\n")[1] == "What it does."
    assert general.splitlines()[0] == "general:" and "--print-config" in general and "--help, -h" in general
    assert groups == [
        "data:\n  --size, --part.size INT  (default: 3)",
        "training:\n  --late INT               (default: 1)",
        "logging:\n  --[no-]loud              say more (default: false)",
        "mine:\n"
        "  --needed TEXT            a word of this text is never divided, and a line that is full goes on in\n"
        "                           the next one below the text before it (required)",
    ]
    title, *lines = example.rstrip("\n").split("\n")
    assert title == "example:" and all(line.endswith(" \\") for line in lines[:-1]) and not lines[-1].endswith("\\")
    assert all(len(line) <= 100 for line in lines) and len(lines) == 2
    words = shlex.split("".join(line.removesuffix("\\") for line in lines))
    assert words == ["rl-backend", "mine", *shlex.split(Whole.option_set.example)]
    assert "example" not in option_parser("x", Part, "", {"": Part}).format_help() and "\n\n\n" not in text
    assert text.endswith("\n") and not text.endswith("\n\n")


def test_a_flag_without_room_beside_its_text_has_a_line_of_its_own() -> None:
    class Wordy(BaseConfig):
        a_name_of_exactly_some_length: int = Field(default=1, description="it")
        seventeen_letters: str = Field(default="x", description="it")
        eighteen_letters_x: str = Field(default="x", description="it")

    lines = option_parser("x", Wordy, "", {"": Wordy}).format_help().splitlines()
    place = lines.index("options:")
    assert lines[place + 1 :] == [
        "  --a-name-of-exactly-some-length INT",
        f"{'':30}it (default: 1)",
        f"  --seventeen-letters TEXT{'':4}it (default: x)",
        f"  --eighteen-letters-x TEXT{'':3}it (default: x)",
    ]


def test_usage_of_many_options_goes_on_without_a_backslash() -> None:
    fields: dict[str, Any] = {f"option_{number}": int for number in range(9)}
    many = type("Many", (BaseConfig,), {"__annotations__": fields, "__module__": __name__})
    usage = option_parser("rl-backend many", many, "t", {"": many}).format_help().split("\n\n")[0].splitlines()
    assert len(usage) == 2 and "\\" not in usage[0] and usage[1].startswith("    --option-")
    assert all(len(line) <= 100 for line in usage)


@pytest.mark.parametrize(
    ("name", "kind", "found"),
    [
        ("--output-dir", GRPOConfig, "run_dir"),
        ("max_steps", GRPOConfig, "steps"),
        ("--train-batch-size", GRPOConfig, "prompts_per_step"),
        ("--train-batch-size", SFTConfig, "batch_size"),
        ("num_generations", SFTConfig, None),
        ("--lora-r", GRPOConfig, "lora.rank"),
        ("device", GRPOConfig, "train.backend_cfg.device"),
        ("rollout.tp", GRPOConfig, "rollout.tensor_parallel"),
        ("--beta", GRPOConfig, "kl_coef"),
        ("sampling.top_q", GRPOConfig, "sampling.top_p"),
        ("train.optimizer.lr", GRPOConfig, "lr"),
        ("clip_ratio_hihg", GRPOConfig, "loss.clip_ratio_high"),
        ("zzzzzzz", GRPOConfig, None),
        ("loss.zzzzzzz", GRPOConfig, None),
    ],
)
def test_a_name_that_others_use_or_a_slip_is_taken_for_the_option(
    name: str, kind: type[BaseConfig], found: str | None
) -> None:
    assert nearest(name, kind, dict(sections_of(kind, options_of(kind).section_types({})))) == found


def test_only_options_of_the_chosen_runtime_are_offered() -> None:
    types = {"train.backend_cfg": BridgeConfig}
    assert nearest("override_transformer_confg", GRPOConfig, dict(sections_of(GRPOConfig, types))) == (
        "train.backend_cfg.override_transformer_config"
    )
    assert nearest("override_transformer_confg", GRPOConfig, dict(sections_of(GRPOConfig, {}))) is None
