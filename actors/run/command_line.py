"""A command line made from a configuration: a flag for each value, and ``--config FILE`` for those of a file."""

from __future__ import annotations

import os
import re
import sys
from argparse import SUPPRESS, ArgumentParser
from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

from pydantic import create_model
from pydantic_settings import CliSettingsSource
from pydantic_settings.exceptions import SettingsError

from actors.cluster.ray_watch import cluster_loss
from actors.cluster.session import EXIT_TERMINATED, RunTerminated
from actors.folder.start import RunFinishedError
from actors.run.config_file import ConfigFile, as_yaml
from actors.run.help import nearest, write_help
from rl_backend.contracts import (
    BaseConfig,
    ClusterLostError,
    ConfigError,
    EngineDeadError,
    RegistryError,
    RLBackendError,
)
from rl_backend.options.option_set import OptionSet, has, merged, options_of, sections_of

_EARLY = ("backend", "train.backend", "plugins", "train.plugins")
"""Flags that decide which others there are."""

RUN_AGAIN = "start the run again; --resume auto continues from its newest checkpoint"

_ADVICE = {
    "expected one argument": "needs a value; see --help",
    "ignored explicit argument": "takes no value; give the flag, or --no- and its name",
}
"""argparse's words -> ours."""


def parse_config[C: BaseConfig](config_type: type[C], description: str, arguments: Sequence[str] | None = None) -> C:
    """Reads ``config_type`` from the command line; flags given there replace the values of ``--config``.

    A flag is the place of a value, ``--train.backend_cfg.parallel.tp``, or its short name, ``--tp``. With ``--print-config``
    all values are printed as YAML, for ``--config``, and the process ends.

    Raises:
        ConfigError: a flag that is not there, a value that the configuration refuses, or a ``--config`` file that cannot
            be read.
    """
    given = _with_signs([_as_field(argument) for argument in (sys.argv[1:] if arguments is None else arguments)])
    printing = "--print_config" in given
    given = [argument for argument in given if argument != "--print_config"]
    says = options_of(config_type)
    given, repeated = _take_repeated(says, given)
    if len(files := [argument for argument in given if argument.partition("=")[0] == "--config"]) > 1:
        raise ConfigError(f"--config: is given {len(files)} times, and only the last would be read; put all into one file")
    early = _Parser(add_help=False, allow_abbrev=False)
    for name in ("config", *_EARLY):
        early.add_argument(f"--{name}", default=SUPPRESS)
    found = vars(early.parse_known_args(given)[0])
    file = ConfigFile.read(found.pop("config")) if "config" in found else ConfigFile()
    types: Mapping[str, type[BaseConfig]] = {}
    from_flags: dict[str, Any] = {}
    try:
        values = says.nest(file.values)
        known = {name: value for name, value in found.items() if name in says.short or "." in name}
        types = says.section_types(merged(values, says.nest(known)))
        sections = dict(sections_of(config_type, types))
        _read_last[:] = [(says, sections)]
        parser = _Parser(prog=_program(), allow_abbrev=False, add_help=False)
        parser.describe(config_type, description, types)
        for flag in ("--help", "-h"):
            parser.add_argument(flag, action="help")
        parser.add_argument("--config")
        source: Any = CliSettingsSource(
            _with_types(config_type, types),  # type: ignore[arg-type]
            cli_parse_args=given,
            cli_parse_none_str="none",
            cli_implicit_flags=True,
            cli_avoid_json=True,
            cli_shortcuts={path: name for name, path in says.short.items()},
            root_parser=parser,
        )
        _refuse_unknown(file, config_type, sections)
        from_flags = says.nest({**source(), **repeated})
        config = config_type(**merged(values, from_flags, sections))
    except SettingsError as error:
        place = re.search(r"encountered for (\S+):|field \"(\w+)\"", str(error))
        flag = _shown(f"--{place[1] or place[2]}") if place else "command line"
        raise ConfigError(f"{flag}: neither JSON nor NAME=VALUE; give one of them, such as '{{\"name\": 1}}'") from None
    except RegistryError as error:
        raise ConfigError(f"--backend: {error}") from None
    except ConfigError as error:
        sections = dict(sections_of(config_type, types))

        def shown(place: str) -> str:
            of_file = None if has(from_flags, place) else file.line_of(place, says)
            return of_file or _shown(f"--{says.name_of(place)}")

        raise ConfigError(
            _with_short_names(_with_places(str(error), sections, shown), says, config_type.model_fields)
        ) from None
    if printing:
        print(as_yaml(config), end="")
        raise SystemExit(0)
    return config


_read_last: list[tuple[OptionSet, Mapping[str, type[BaseConfig]]]] = []


def in_flags(message: str) -> str:
    """``message`` with flags in place of the fields of the configuration that :func:`parse_config` read last."""
    for says, sections in _read_last:

        def shown(place: str, names: OptionSet = says) -> str:
            return _shown(f"--{names.name_of(place)}")

        message = _with_short_names(
            _with_places(message, sections, shown, bases_of_all=True), says, sections[""].model_fields
        )
    return message


def run_command(main: Callable[[], None]) -> None:
    """Runs ``main`` and ends the process with its status.

    Our errors become one message and status 2; a run that had finished says so with status 0; Ctrl-C is status 130,
    SIGTERM status 143. A run that either ends between two steps has the same status as one that is cut short.
    """
    try:
        main()
    except RunFinishedError as error:
        # A success: schedulers start a run again that ended with it, until its exit status says that it is done.
        print(f"nothing left to do: {error}")
    except RLBackendError as error:
        message = in_flags("; ".join([str(error), *getattr(error, "__notes__", ())]))
        if isinstance(error, EngineDeadError):
            # The loop has ended; an engine alone can only be restarted within one.
            message = message.replace("restart it", RUN_AGAIN)
        print(f"error: {message}", file=sys.stderr)
        _leave(2, lost=isinstance(error, ClusterLostError))
    except RunTerminated:
        print("stopped by SIGTERM", file=sys.stderr)
        _leave(EXIT_TERMINATED, lost=cluster_loss() is not None)
    except KeyboardInterrupt:
        print("stopped", file=sys.stderr)
        _leave(130, lost=cluster_loss() is not None)


def _leave(status: int, *, lost: bool) -> NoReturn:
    if lost:
        # Ray's own exit handlers wait for what has ended, and end with another status.
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)
    raise SystemExit(status) from None


class _Parser(ArgumentParser):
    """argparse with help of our own, and errors that are :class:`ConfigError`."""

    def describe(self, config_type: type[BaseConfig], text: str, types: Mapping[str, type[BaseConfig]]) -> None:
        self._help = config_type, text, dict(sections_of(config_type, types))

    def format_help(self) -> str:
        return write_help(self.prog, *self._help)

    def error(self, message: str) -> NoReturn:
        unknown = re.fullmatch(r"unrecognized arguments: (.*)", message, re.DOTALL)
        # Of several names, as in --train.hf_path/--model or --trace/--no-trace, the last that does not negate.
        known = re.fullmatch(r"argument (?:\S+/)?(--(?!no-)[^\s/]+)(?:/--no-\S+)?: (.*)", message)
        if unknown is None:
            advice = known and _ADVICE.get(known[2].partition(" '")[0], known[2])
            raise ConfigError(f"{_shown(known[1])}: {advice}" if known else f"command line: {message}")
        config_type, _, sections = self._help
        flag, _, value = unknown[1].partition(" ")
        flag, _, inline = flag.partition("=")
        if flag.startswith("--"):
            near = nearest(flag, config_type, sections)
            advice = _unknown("flag", near and _shown(f"--{near}"))
        else:
            advice = "is not a flag; flags begin with --, see --help"
        raise ConfigError(f"{_shown(flag)} {inline or value.partition(' --')[0]}".rstrip() + f": {advice}")


def _as_field(argument: str) -> str:
    """``--run-dir=x`` -> ``--run_dir=x``."""
    if not argument.startswith("--"):
        return argument
    flag, separator, value = argument[2:].partition("=")
    no, name = ("no-", flag[3:]) if flag.startswith("no-") else ("", flag)
    return f"--{no}{name.replace('-', '_')}{separator}{value}"


def _with_signs(given: Sequence[str]) -> list[str]:
    """Arguments with ``--lr=-1e-4`` in place of ``--lr -1e-4``, which argparse takes for two flags."""
    found: list[str] = []
    for argument in given:
        number = re.fullmatch(r"-(inf|nan|[\d.]+(e[+-]?\d+)?)", argument, re.IGNORECASE)
        if number and found and found[-1].startswith("--") and "=" not in found[-1]:
            found[-1] += f"={argument}"
        else:
            found.append(argument)
    return found


def _shown(flag: str) -> str:
    """As help has it: ``--run-dir``, but ``--train.hf_path``."""
    flag = flag.partition("=")[0]
    return flag if "." in flag else flag.replace("_", "-")


def _program() -> str:
    """How this process was called, without its options: ``rl-backend grpo``, ``python -m examples.grpo``."""
    _, *words = sys.orig_argv[: len(sys.orig_argv) - len(sys.argv) + 1]
    if words and not words[0].startswith("-") and not words[0].endswith(".py"):
        return " ".join([Path(words[0]).name, *words[1:]])
    return " ".join(["python", *words])


def _with_types(kind: type[BaseConfig], types: Mapping[str, type[BaseConfig]], prefix: str = "") -> type[BaseConfig]:
    """A subclass whose nested configurations have these types, for a parser that reads annotations."""
    fields: dict[str, Any] = {}
    for name, field in kind.model_fields.items():
        if any(f"{path}.".startswith(f"{prefix}{name}.") for path in types) and isinstance(field.annotation, type):
            nested = types.get(prefix + name, field.annotation)
            fields[name] = (_with_types(nested, types, f"{prefix}{name}."), field)
    return create_model(kind.__name__, __base__=kind, **fields) if fields else kind


def _with_places(
    message: str, sections: Mapping[str, type[BaseConfig]], shown: Callable[[str], str], *, bases_of_all: bool = False
) -> str:
    """The message with flags or lines of a file in place of fields: ``OptimizerConfig.lr=0`` -> ``--lr=0``.

    Errors name the class that checks, which may be a base of a section's: ``LoRAConfig`` of ``PolicyLoRA``.

    Args:
        bases_of_all: those of the whole configuration too, whose fields may be of one user's, and stand elsewhere in a file.
    """
    kinds = [
        (base.__name__, prefix)
        for prefix, kind in sections.items()
        for base in (kind.__mro__ if prefix or bases_of_all else (kind,))
    ]
    shared = {name for name, times in Counter(name for name, _ in kinds).items() if times > 1}
    prefixes = {name: prefix for name, prefix in kinds if name not in shared}
    prefixes |= {kind.__name__: prefix for prefix, kind in sections.items()}
    names = "|".join(map(re.escape, prefixes))
    return re.sub(rf"\b({names})\.([\w.]*\w)", lambda match: shown(prefixes[match[1]] + match[2]), message)


def _with_short_names(message: str, says: OptionSet, fields: Iterable[str]) -> str:
    """The message with a flag in place of an option that begins it: ``model='m'`` -> ``--model='m'``."""
    names = "|".join(map(re.escape, {*says.short, *fields}))
    return re.sub(rf"^({names})=", lambda match: f"{_shown('--' + match[1])}=", message)


def _refuse_unknown(file: ConfigFile, config_type: type[BaseConfig], sections: Mapping[str, type[BaseConfig]]) -> None:
    says = options_of(config_type)
    for name, line in file.lines.items():
        prefix, dot, last = says.place_of(name).rpartition(".")
        kind = sections.get(prefix + dot)
        if kind is not None and last not in kind.model_fields:
            near = nearest(name, config_type, sections)
            raise ConfigError(f"--config {file.path}, line {line}: {name}: {_unknown('option', near)}")


def _unknown(what: str, near: str | None) -> str:
    return f"there is no such {what}; {f'did you mean {near}?' if near else 'see --help'}"


def _take_repeated(says: OptionSet, given: Sequence[str]) -> tuple[list[str], dict[str, list[str]]]:
    """Arguments without the flags of :attr:`OptionSet.repeated`, and their values by name."""
    left: list[str] = []
    found: dict[str, list[str]] = {}
    rest = deque(given)
    while rest:
        argument = rest.popleft()
        flag, inline, value = argument.partition("=")
        place = says.short.get(flag[2:], flag[2:]) if flag.startswith("--") else ""
        if place not in says.repeated or not (inline or (rest and not rest[0].startswith("--"))):
            left.append(argument)
        else:
            found.setdefault(place, []).append(value if inline else rest.popleft())
    return left, found
