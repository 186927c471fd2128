"""``rl-backend completion``: a script with which a shell completes commands, options and their values.

The script has all of them written out, because reading them from the commands takes seconds.
"""

import argparse
import importlib
from collections.abc import Iterable, Iterator

from actors.run.option_table import option_rows
from rl_backend.cli.check import config_type
from rl_backend.cli.example import EXAMPLES
from rl_backend.options.option_set import options_of, sections_of

GENERAL = ("--config", "--print-config", "--help")

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
    """Prints the script."""
    # Here, because that module lists this one.
    from rl_backend.cli.main import COMMANDS

    values = [f'        " "*) words={_lines([*EXAMPLES, *COMMANDS])} ;;']
    options = []
    for name in (*EXAMPLES, *COMMANDS):
        found = dict(_of_example(name) if name in EXAMPLES else _of_command(COMMANDS[name][0]))
        values += [f'        "{name} {flag}") words={_lines(choices)} ;;' for flag, choices in found.items() if choices]
        options.append(f"            {name}) words={_lines(found)} ;;")
    file, first = SHELLS[arguments.shell]
    print(f"# Completion of rl-backend; source it in {file}.")
    print(first + SCRIPT.format(values="\n".join(values), options="\n".join(options)), end="")
    return 0


def _of_example(name: str) -> Iterator[tuple[str, tuple[str, ...]]]:
    """Flag and choices of its value."""
    kind = config_type(name)
    sections = dict(sections_of(kind, options_of(kind).section_types({})))
    for row in option_rows(kind, sections):
        for flag in row.flags:
            yield f"--{flag}", row.choices
            if not row.metavar:
                yield f"--no-{flag}", ()
    yield from ((flag, ()) for flag in GENERAL)


def _of_command(module: str) -> Iterator[tuple[str, tuple[str, ...]]]:
    parser = argparse.ArgumentParser()
    importlib.import_module(module).add_arguments(parser)
    for action in parser._actions:
        choices = tuple(map(str, action.choices or ()))
        yield from ((flag, choices) for flag in action.option_strings if flag.startswith("--"))
        if not action.option_strings:
            yield from ((choice, ()) for choice in choices)
    yield "--debug", ()


def _lines(words: Iterable[str]) -> str:
    return "$'" + "\\n".join(words) + "'"
