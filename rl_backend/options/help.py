"""Flags of a configuration with their help, and the flag that was meant."""

import argparse
import shlex
import textwrap
from argparse import SUPPRESS, BooleanOptionalAction
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, TypeAliasType, Union, get_args, get_origin

from rl_backend.contracts import BaseConfig
from rl_backend.options.option_set import options_of
from rl_backend.options.parser import CommandParser

type Sections = Mapping[str, type[BaseConfig]]
"""Prefix -> type, of a configuration and all that are nested in it, as of ``dict(sections_of(...))``."""

WIDTH, INDENT = 100, 30
ORDER = ("model", "data", "reward", "sampling", "evaluation", "training", "layout", "memory", "checkpoints", "logging")
"""Groups that come first, and how; others follow in the order of their declaration."""

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

_METAVARS = {int: "INT", float: "FLOAT", str: "TEXT"}


@dataclass(frozen=True)
class OptionRow:
    """One option.

    Attributes:
        flags: without dashes: its short name, if it has one, and its place.
        group: under which help has it; None where help has nothing of it.
        metavar: of its value: ``INT``, ``{auto,cpu}``; empty for a switch, which also has a ``--no-`` form.
        default: None where it must be given.
    """

    place: str
    flags: tuple[str, ...]
    group: str | None
    metavar: str
    text: str
    default: str | None


def option_parser(prog: str, config_type: type[BaseConfig], text: str, sections: Sections) -> CommandParser:
    rows, example = option_rows(config_type, sections), options_of(config_type).example
    required = [f"--{row.flags[0]} {row.metavar}" for row in rows if row.group and row.default is None]
    usage = _lines([f"usage: {prog}", "[--config FILE]", *required, "[--FLAG VALUE ...]"], indent="    ")
    shell = _lines([f"  {prog}", *map(shlex.quote, shlex.split(example))], indent="     ")
    parser = CommandParser(
        prog=prog,
        usage="\n".join(usage).removeprefix("usage: ").replace("%", "%%"),
        description=text,
        epilog="example:\n" + " \\\n".join(shell) if example else None,
        formatter_class=_HelpFormatter,
        add_help=False,
        argument_default=SUPPRESS,
    )
    titles = dict.fromkeys(["general", *ORDER, *filter(None, (row.group for row in rows))])
    groups = {title: parser.add_argument_group(title) for title in titles}
    general = groups["general"]
    of_file = "YAML or JSON with any of these values; flags on the command line replace them"
    general.add_argument("--config", action="append", default=[], metavar="FILE", help=of_file)
    printed = "print all values as YAML that --config reads, and end"
    general.add_argument("--print-config", action="store_true", default=False, help=printed)
    general.add_argument("--help", "-h", action="help", help="this text")
    for row in rows:
        said = f"{row.text} ({'required' if row.default is None else f'default: {row.default}'})".strip()
        form: dict[str, Any] = {"action": "append", "metavar": row.metavar} if row.metavar else {}
        groups[row.group or "general"].add_argument(
            *(f"--{flag}" for flag in row.flags),
            dest=row.place,
            help=said.replace("%", "%%") if row.group else SUPPRESS,
            **form or {"action": BooleanOptionalAction},
        )
    return parser


def option_rows(config_type: type[BaseConfig], sections: Sections) -> list[OptionRow]:
    options = options_of(config_type)
    named = [(options.short.get(name, name), title) for title, names in options.groups.items() for name in names]
    groups, position = dict(named), {place: index for index, (place, _) in enumerate(named)}
    rows: list[tuple[int, OptionRow]] = []
    for prefix, kind in sections.items():
        texts = kind.documented()
        title = f"{prefix[:-1]} ({kind.__name__})" if prefix else "training" if named else "options"
        for name, field in kind.model_fields.items():
            place = prefix + name
            rule, short = options.follows.get(place), options.name_of(place)
            # Help has no flags that are refused, but they are read, to be refused with the reason.
            hidden = f"{place}." in sections or (rule is not None and rule.because)
            grouped = place if place in groups else prefix
            default = _plain(options.preset.get(place, field.get_default(call_default_factory=True)))
            required = field.is_required() and place not in options.preset and rule is None
            row = OptionRow(
                place,
                flags=tuple(dict.fromkeys((shown(short), shown(place)))),
                group=None if hidden else groups.get(grouped, title),
                metavar=options.metavars.get(short, metavar_of(field.annotation)),
                text=field.description or texts.get(name, ""),
                default=None if required else default if rule is None else rule.text,
            )
            rows.append((position.get(grouped, len(named)), row))
    return [row for _, row in sorted(rows, key=lambda each: each[0])]


def alternatives(annotation: Any) -> Iterator[Any]:
    if isinstance(annotation, TypeAliasType):
        yield from alternatives(annotation.__value__)
    elif get_origin(annotation) is Annotated:
        yield from alternatives(get_args(annotation)[0])
    elif get_origin(annotation) in (Union, UnionType):
        for each in get_args(annotation):
            yield from alternatives(each)
    else:
        yield annotation


def metavar_of(annotation: Any) -> str:
    """``{auto,cpu}``, ``INT``; empty for a switch."""
    kind, *more = [each for each in alternatives(annotation) if each is not NoneType]
    if more:
        return "JSON"
    if get_origin(kind) is Literal:
        return f"{{{','.join(map(str, get_args(kind)))}}}"
    if get_origin(kind) in (tuple, list):
        each = get_args(kind)[0]
        return f"{_METAVARS[each]},..." if each in _METAVARS else "JSON"
    return "" if kind is bool else _METAVARS.get(kind, "JSON")


def shown(name: str) -> str:
    """A flag without its dashes: ``run-dir``, but ``train.hf_path``."""
    return name.replace("-", "_") if "." in name else name.replace("_", "-")


def nearest(name: str, config_type: type[BaseConfig], sections: Sections) -> str | None:
    places = [prefix + name for prefix, kind in sections.items() for name in kind.model_fields]
    short = options_of(config_type).short
    asked = name.lstrip("-").replace("-", "_")
    # Of places with the same last name, the first is nearest to the run itself.
    ends = {place.rpartition(".")[2]: place for place in reversed(places)} | {name: name for name in short}
    near = [option for option, names in NAMES_ELSEWHERE.items() if asked in names and option in {*places, *short}]
    near = near or (get_close_matches(asked, places, n=1, cutoff=0.8) if "." in asked else [])
    near = near or [ends[end] for end in get_close_matches(asked.rpartition(".")[2], ends, n=1)]
    return near[0] if near else None


class _HelpFormatter(argparse.RawDescriptionHelpFormatter):
    def __init__(self, prog: str) -> None:
        super().__init__(prog, max_help_position=INDENT, width=WIDTH)

    def _format_action_invocation(self, action: argparse.Action) -> str:
        # argparse repeats the value after every flag, and lists both forms of a switch.
        is_switch = isinstance(action, BooleanOptionalAction)
        flags = [flag for flag in action.option_strings if not (is_switch and flag.startswith("--no-"))]
        text = ", ".join(flag.replace("--", "--[no-]") if is_switch else flag for flag in flags)
        return "\n  ".join(textwrap.wrap(f"{text} {action.metavar or ''}", WIDTH - 2, break_on_hyphens=False))


def _plain(value: Any) -> str:
    if value in (None, (), {}, ""):
        return "none"
    if isinstance(value, tuple):
        return ",".join(map(str, value))
    return str(value).lower() if isinstance(value, bool) else str(value)


def _lines(words: Sequence[str], indent: str) -> list[str]:
    text = " ".join(word.replace(" ", "\xa0") for word in words)
    lines = textwrap.wrap(text, WIDTH - 2, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)
    return [line.replace("\xa0", " ") for line in lines]
