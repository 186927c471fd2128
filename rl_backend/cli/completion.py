"""``rl-backend completion``: a script with which a shell completes commands, options and their values."""

import argparse
import importlib
from collections.abc import Iterable

from rl_backend.cli.check import config_type
from rl_backend.cli.example import EXAMPLES
from rl_backend.options.help import option_parser
from rl_backend.options.option_set import options_of, sections_of
from rl_backend.options.parser import CommandParser

SCRIPT = """\
_rl_backend() {{
    local IFS=$'\\n' words=""
    local current="${{COMP_WORDS[COMP_CWORD]}}" previous="${{COMP_WORDS[COMP_CWORD-1]}}" command="${{COMP_WORDS[1]}}"
    if [ "$COMP_CWORD" -eq 1 ]; then
        command=""
    elif [ "$COMP_CWORD" -gt 2 ] && {{ [ "$command" = example ] || [ "$command" = check ]; }}; then
        command="${{COMP_WORDS[2]}}"
    fi
    case "$command $previous" in
{values}
        *) case "$command" in
{options}
        esac ;;
    esac
    COMPREPLY=($(compgen -W "$words" -- "$current"))
    if [ "${{#COMPREPLY[@]}}" -eq 0 ] && [ "${{current#-}}" = "$current" ]; then
        COMPREPLY=($(compgen -f -- "$current"))
    fi
}}
complete -o filenames -F _rl_backend rl-backend
"""

SHELLS = {
    "bash": ("~/.bashrc", ""),
    "zsh": ("~/.zshrc", "autoload -U +X bashcompinit && bashcompinit\n"),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.epilog = "To install: rl-backend completion bash > ~/.rl-backend-completion, and in ~/.bashrc: source that file."
    parser.add_argument("shell", choices=tuple(SHELLS))


def run(arguments: argparse.Namespace) -> int:
    # Here, because main lists this module.
    from rl_backend.cli.main import COMMANDS

    # All are written out, because reading them from the commands takes seconds.
    values = [f'        " "*) words={_lines([*EXAMPLES, *COMMANDS])} ;;']
    options = []
    for name in (*EXAMPLES, *COMMANDS):
        found = _parser(name, COMMANDS[name][0] if name in COMMANDS else "").choices_of()
        values += [f'        "{name} {flag}") words={_lines(choices)} ;;' for flag, choices in found.items() if choices]
        options.append(f"            {name}) words={_lines(found)} ;;")
    file, first = SHELLS[arguments.shell]
    print(f"# Completion of rl-backend; source it in {file}.")
    print(first + SCRIPT.format(values="\n".join(values), options="\n".join(options)), end="")
    return 0


def _parser(name: str, module: str) -> CommandParser:
    if name in EXAMPLES:
        kind = config_type(name)
        return option_parser("", kind, "", dict(sections_of(kind, options_of(kind).section_types({}))))
    parser = CommandParser()
    importlib.import_module(module).add_arguments(parser)
    parser.add_argument("--debug", action="store_true")
    return parser


def _lines(words: Iterable[str]) -> str:
    return "$'" + "\\n".join(words) + "'"
