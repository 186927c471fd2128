"""Help of a command line that is made from a configuration: its options as rows of a table, and as text."""

from __future__ import annotations

import shlex
import textwrap
from collections.abc import Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from types import NoneType
from typing import Annotated, Any, Literal, TypeAliasType, get_args, get_origin

from rl_backend.contracts import BaseConfig
from rl_backend.options.option_set import options_of

ROOT_GROUP = "options"
"""Of options at the top of a configuration that has no groups."""

OWN_GROUP = "training"
"""Of those that are in no group of a configuration that has some: what the loop itself adds."""

WIDTH, INDENT = 100, 30
ORDER = ("model", "data", "reward", "sampling", "evaluation", "training", "layout", "memory", "checkpoints", "logging")
"""Groups that come first, and how; others follow in the order of their declaration."""

GENERAL = {
    "--config FILE": "YAML or JSON with any of these values; flags on the command line replace them",
    "--print-config": "print all values as YAML that --config reads, and end",
    "--help, -h": "this text",
}

NAMES_ELSEWHERE: Mapping[str, tuple[str, ...]] = {
    "model": ("model_name_or_path", "model_path", "model_name"),
    "dataset": ("dataset_name", "train_files", "train_file", "data_path"),
    "eval_dataset": ("val_files", "test_file"),
    "run_dir": ("output_dir", "save_dir"),
    "steps": ("max_steps", "total_training_steps"),
    "epochs": ("num_train_epochs", "total_epochs"),
    "lr": ("learning_rate",),
    "lr_warmup_steps": ("warmup_steps",),
    "prompts_per_step": ("train_batch_size", "batch_size", "per_device_train_batch_size"),
    "batch_size": ("train_batch_size", "per_device_train_batch_size"),
    "samples_per_prompt": ("num_generations", "group_size"),
    "max_prompt_tokens": ("max_prompt_length",),
    "max_response_tokens": ("max_completion_length", "max_response_length", "max_new_tokens", "max_tokens"),
    "stop_strings": ("stop", "stop_string"),
    "kl_coef": ("beta", "kl_loss_coef"),
    "reward": ("reward_fn", "reward_funcs", "reward_function"),
    "save_every": ("save_steps", "save_freq"),
    "eval_every": ("eval_steps", "test_freq"),
    "resume": ("resume_from_checkpoint",),
    "metrics_to": ("report_to",),
    "lora.rank": ("lora_r", "lora_rank"),
    "tp": ("tensor_parallel_size", "tensor_model_parallel_size"),
    "train.backend_cfg.device": ("device",),
    "rollout.tensor_parallel": ("rollout.tp",),
}
"""Option -> what TRL, verl and others call it."""


@dataclass(frozen=True)
class OptionRow:
    """One option.

    Attributes:
        flags: without dashes: its short name, if it has one, and its place.
        group: under which help has it.
        metavar: of its value: ``INT``, ``{auto,cpu}``; empty for a switch, which also has a ``--no-`` form.
        text: what it is.
        default: None where it must be given.
    """

    flags: tuple[str, ...]
    group: str
    metavar: str
    text: str
    default: str | None


def option_rows(config_type: type[BaseConfig], sections: Mapping[str, type[BaseConfig]]) -> list[OptionRow]:
    """All options that can be given, first those of groups in the order that these name them.

    Args:
        sections: as of :func:`~rl_backend.options.option_set.sections_of`.
    """
    options = options_of(config_type)
    named = [(options.short.get(name, name), title) for title, names in options.groups.items() for name in names]
    groups, position = dict(named), {place: index for index, (place, _) in enumerate(named)}
    rows: list[tuple[int, OptionRow]] = []
    for prefix, kind in sections.items():
        texts = kind.documented()
        title = f"{prefix[:-1]} ({kind.__name__})" if prefix else OWN_GROUP if named else ROOT_GROUP
        for name, field in kind.model_fields.items():
            path = prefix + name
            rule = options.follows.get(path)
            if f"{path}." in sections or (rule is not None and rule.because):
                continue
            default = options.preset.get(path, field.get_default(call_default_factory=True))
            short = options.name_of(path)
            metavar = options.metavars.get(short, metavar_of(field.annotation))
            grouped = path if path in groups else prefix
            required = field.is_required() and path not in options.preset and rule is None
            row = OptionRow(
                flags=(shown(short), *([path] if short != path else [])),
                group=groups.get(grouped, title),
                metavar=metavar,
                text=field.description or texts.get(name, ""),
                default=None if required else "follows from other options" if rule is not None else _plain(default),
            )
            rows.append((position.get(grouped, len(named)), row))
    return [row for _, row in sorted(rows, key=lambda each: each[0])]


def metavar_of(annotation: Any) -> str:
    """``{auto,cpu}``, ``INT``; empty for a switch."""
    if isinstance(annotation, TypeAliasType):
        return metavar_of(annotation.__value__)
    if get_origin(annotation) is Annotated:
        return metavar_of(get_args(annotation)[0])
    if annotation is bool:
        return ""
    if get_origin(annotation) is Literal:
        return f"{{{','.join(map(str, get_args(annotation)))}}}"
    kinds = [each for each in get_args(annotation) if each is not NoneType]
    if NoneType in get_args(annotation) and len(kinds) == 1:
        return metavar_of(kinds[0])
    named = {int: "INT", float: "FLOAT", str: "TEXT"}
    if get_origin(annotation) in (tuple, list):
        return f"{metavar_of(kinds[0])},..." if kinds[0] in named else "JSON"
    return named.get(annotation, "JSON")


def _plain(value: Any) -> str:
    if value in (None, (), {}, ""):
        return "none"
    if isinstance(value, tuple):
        return ",".join(map(str, value))
    return str(value).lower() if isinstance(value, bool) else str(value)


def shown(name: str) -> str:
    """A flag without its dashes: ``run-dir``, but ``train.hf_path``."""
    return name.replace("-", "_") if "." in name else name.replace("_", "-")


def write_help(prog: str, config_type: type[BaseConfig], text: str, sections: Mapping[str, type[BaseConfig]]) -> str:
    """Usage, the options in groups, and an example, in lines of at most 100 characters."""
    rows = option_rows(config_type, sections)
    required = [f"--{row.flags[0]} {row.metavar}" for row in rows if row.default is None]
    usage = [f"usage: {prog}", "[--config FILE]", *required, "[--FLAG VALUE ...]"]
    lines = [*_filled(usage, ""), "", *_wrap(text, "")]
    groups: dict[str, list[str]] = {"general": [line for flag, meaning in GENERAL.items() for line in _row(flag, meaning)]}
    groups |= {title: [] for title in ORDER}
    for row in rows:
        said = f"{row.text} ({'required' if row.default is None else f'default: {row.default}'})".strip()
        groups.setdefault(row.group, []).extend(_row(_flags(row), said))
    for title, described in groups.items():
        if described:
            lines += ["", f"{title}:", *described]
    if example := options_of(config_type).example:
        lines += ["", "example:", *_filled([prog, *_pairs(example)], "  ")]
    return "\n".join(lines) + "\n"


def nearest(name: str, config_type: type[BaseConfig], sections: Mapping[str, type[BaseConfig]]) -> str | None:
    """The option that was probably meant: its place or short name."""
    places = [prefix + name for prefix, kind in sections.items() for name in kind.model_fields]
    short = options_of(config_type).short
    asked = name.lstrip("-").replace("-", "_")
    ends = {place.rpartition(".")[2]: place for place in reversed(places)} | {name: name for name in short}
    options = {*places, *short}
    near = [option for option, elsewhere in NAMES_ELSEWHERE.items() if asked in elsewhere and option in options]
    near = near or (get_close_matches(asked, places, n=1, cutoff=0.8) if "." in asked else [])
    near = near or [ends[end] for end in get_close_matches(asked.rpartition(".")[2], ends, n=1)]
    return near[0] if near else None


def _pairs(example: str) -> list[str]:
    """``--flag value`` as one word each, which no line divides."""
    words: list[str] = []
    for word in shlex.split(example):
        if word.startswith("--") or not words:
            words.append(word)
        else:
            words[-1] += f" {shlex.quote(word)}"
    return words


def _filled(words: list[str], indent: str) -> list[str]:
    """Lines of these words; a backslash ends those that go on, as in a shell."""
    lines = [indent + words[0]]
    for word in words[1:]:
        if len(lines[-1]) + len(word) + 3 > WIDTH:
            lines[-1] += " \\" if indent else ""
            lines.append(f"{indent}   ")
        lines[-1] += f" {word}"
    return lines


def _flags(row: OptionRow) -> str:
    flags = ", ".join(f"--{'' if row.metavar else '[no-]'}{each}" for each in row.flags)
    return f"{flags} {row.metavar}".rstrip()


def _row(flags: str, text: str) -> list[str]:
    lines = _wrap(text, " " * INDENT)
    if len(flags) + 4 > INDENT:
        return [*_wrap(flags, "  "), *lines]
    return [f"  {flags}".ljust(INDENT) + lines[0][INDENT:], *lines[1:]]


def _wrap(text: str, indent: str) -> list[str]:
    return textwrap.wrap(text, WIDTH, initial_indent=indent, subsequent_indent=indent, break_on_hyphens=False)
