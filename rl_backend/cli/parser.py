"""argparse with errors of one sentence, and the flag that was meant. Needs no torch."""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterable, Sequence
from difflib import get_close_matches
from itertools import takewhile
from typing import NoReturn

from rl_backend.cli.command import CommandError

_KINDS = {"int": "a whole number", "float": "a number"}


class CommandParser(argparse.ArgumentParser):
    """Raises :class:`CommandError` where argparse prints the usage and leaves."""

    def refuse_unknown(self, words: Sequence[str]) -> None:
        """Looks for flags that are not there before anything is parsed: argparse first asks for those that are missing.

        Raises:
            CommandError: names the flag and, where one is near, the one that was meant.
        """
        if any(action.nargs == argparse.REMAINDER for action in self._actions):
            return
        for word in takewhile(lambda word: word != "--", words):
            flag = word.partition("=")[0]
            known = any(option.startswith(flag) for option in self._option_string_actions)  # argparse completes them
            if re.match(r"--?[a-zA-Z]", word) and " " not in flag and not known and not _is_number(word):
                self._refuse(flag)

    def error(self, message: str) -> NoReturn:
        unknown = re.fullmatch(r"unrecognized arguments: (\S+).*", message, re.DOTALL)
        if unknown is not None:
            self._refuse(unknown[1])
        missing = re.fullmatch(r"the following arguments are required: (.*)", message)
        if missing is not None:
            raise CommandError(f"{missing[1]}: must be given; see {self.prog} --help")
        wrong = re.fullmatch(r"argument (?:\S+/)?([^\s:]+): (.*)", message, re.DOTALL)
        if wrong is None:
            raise CommandError(f"{message}; see {self.prog} --help")
        name, problem = wrong[1], wrong[2]
        if kind := re.fullmatch(r"invalid (int|float) value: '(.*)'", problem, re.DOTALL):
            raise CommandError(f"{name} {kind[2]}: expected {_KINDS[kind[1]]}")
        if choice := re.fullmatch(r"invalid choice: '(.*)' \(choose from (.*)\)", problem, re.DOTALL):
            raise CommandError(f"{name} {choice[1]}: expected one of {choice[2].replace("'", '')}")
        if problem.startswith("expected "):
            problem = "needs a value"
        elif problem.startswith("ignored explicit argument"):
            problem = "takes no value"
        raise CommandError(f"{name}: {problem}; see {self.prog} --help")

    def _refuse(self, word: str) -> NoReturn:
        help_of = f"see {self.prog} --help"
        if not word.startswith("-"):
            raise CommandError(f"{word}: is one argument too many; {help_of}")
        raise CommandError(f"{word}: there is no such flag; {nearest_of(word, self._option_string_actions) or help_of}")


def nearest_of(word: str, known: Iterable[str]) -> str:
    """A question about the name that was meant; empty where none is near."""
    near = get_close_matches(word, list(known), n=1)
    return f"did you mean {near[0]}?" if near else ""


def _is_number(word: str) -> bool:
    try:
        float(word)
    except ValueError:
        return False
    return True
