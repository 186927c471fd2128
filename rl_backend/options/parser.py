"""argparse that raises one sentence, and names the flag that was meant. Needs no torch."""

import argparse
import re
from collections.abc import Callable, Iterable
from difflib import get_close_matches
from itertools import takewhile
from typing import Any, NoReturn

_IN_THIS_PROJECT = ("rl_backend", "actors", "adapters", "benchmarks", "examples")
_DISTRIBUTIONS = {"yaml": "pyyaml", "PIL": "pillow"}


class CommandError(Exception):
    """What was wrong and what to do, in one message."""


def missing_package(error: BaseException) -> str:
    """What to install, in one sentence; empty where an error is not of a package that is missing here."""
    name = error.name if isinstance(error, ModuleNotFoundError) else None
    # A name with a dot is missing from a package that is there: a mistake, of which the traceback tells more.
    if not name or "." in name or name in _IN_THIS_PROJECT:
        return ""
    return f"the package {name} is not installed: pip install {_DISTRIBUTIONS.get(name, name.replace('_', '-'))}"


class CommandParser(argparse.ArgumentParser):
    """Raises :class:`CommandError` where argparse prints the usage and leaves."""

    def __init__(self, **options: Any) -> None:
        super().__init__(allow_abbrev=False, **options)
        # argparse takes -1e-4 and -inf for flags.
        self._negative_number_matcher = re.compile(r"-(\d|\.\d|inf|nan)", re.IGNORECASE)

    def refuse_unknown(self, words: Iterable[str], meant: Callable[[str], str | None] | None = None) -> None:
        """Refuses flags that are not there."""
        # Before anything is parsed, because argparse first asks for flags that are missing.
        if any(action.nargs == argparse.REMAINDER for action in self._actions):
            return
        known = self._option_string_actions
        for flag in (word.partition("=")[0] for word in takewhile(lambda word: word != "--", words)):
            if flag.startswith("--") and " " not in flag and flag not in known:
                near = meant(flag) if meant else next(iter(get_close_matches(flag, known, n=1)), None)
                advice = f"did you mean {near}?" if near else f"see {self.prog} --help"
                raise CommandError(f"{flag}: there is no such flag; {advice}")

    def choices_of(self) -> dict[str, tuple[str, ...]]:
        """Flag -> the values that it can have; none where they cannot be listed. Words that need no flag are among them."""
        found: dict[str, tuple[str, ...]] = {}
        for action in self._actions:
            listed = str(action.metavar)[1:-1].split(",") if str(action.metavar).startswith("{") else ()
            choices = tuple(map(str, action.choices or listed))
            if action.help != argparse.SUPPRESS:
                found |= {flag: choices for flag in action.option_strings if flag.startswith("--")}
            if not action.option_strings:
                found |= dict.fromkeys(choices, ())
        return found

    def _get_values(self, action: argparse.Action, arg_strings: list[str]) -> Any:
        # argparse drops a value that is -- itself, as in --stop-strings=--.
        return "--" if action.option_strings and arg_strings == ["--"] else super()._get_values(action, arg_strings)

    def error(self, message: str) -> NoReturn:
        raise CommandError(f"{message}; see {self.prog} --help")
