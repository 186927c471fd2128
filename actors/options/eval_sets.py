"""Held-out sets as options."""

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Self

from pydantic import BeforeValidator, ConfigDict, Field, model_validator

from actors.rollout.config import SamplingConfig
from rl_backend.contracts import BaseConfig, ConfigError

_SUFFIXES = (".csv", ".json", ".jsonl", ".parquet")
_OF_SAMPLING = ("temperature", "top_p", "top_k", "min_p", "max_new_tokens", "stop_token_ids", "stop_strings")


class EvalSet(BaseConfig):
    """A held-out set, and how its prompts are answered; None is as the run has it.

    Attributes:
        path: rows, as of ``eval_dataset``.
        n: responses of each prompt; None takes 1, or that of an evaluation alone.
        pass_at: numbers of responses k for which pass@k is estimated, each at most ``n``; None takes 1 and ``n``.
        pass_threshold: a response passes whose reward is at least this; None takes 1.
        temperature: None takes 0 for one response, else that of the run.
        top_p, top_k, min_p: as of :class:`~actors.rollout.config.SamplingConfig`; None cuts no tokens of one response, and
            is as the run has it for several.
        max_new_tokens: longest response.
        stop_token_ids: end a response, beside the tokenizer's end-of-text tokens.
        stop_strings: end a response.
    """

    model_config = ConfigDict(allow_inf_nan=False)

    path: str = Field(min_length=1)
    n: int | None = Field(default=None, ge=1)
    pass_at: tuple[Annotated[int, Field(ge=1)], ...] | None = None
    pass_threshold: float | None = None
    temperature: float | None = Field(default=None, ge=0)
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    max_new_tokens: int | None = Field(default=None, ge=1)
    stop_token_ids: tuple[int, ...] | None = None
    stop_strings: tuple[str, ...] | None = None

    @model_validator(mode="after")
    def _check(self) -> Self:
        self._check_pass_at(self.n)
        return self

    def _check_pass_at(self, n: int | None) -> None:
        k = max(self.pass_at or (0,))
        if n is not None and k > n:
            raise ConfigError.of("EvalSet.pass_at", k, f"pass@{k} needs at least {k} responses, and n={n}; raise n")

    def sampling(self, run: SamplingConfig, n: int = 1, *, greedy: bool = True) -> SamplingConfig:
        """How the set's prompts are answered; where it does not say: ``run``, ``n``, and one response is greedy."""
        n = self.n or n
        self._check_pass_at(n)
        given = {name: value for name in _OF_SAMPLING if (value := getattr(self, name)) is not None}
        if (greedy and n == 1) or given.get("temperature") == 0:
            run = run.replace(n=1, temperature=0.0, **{name: SamplingConfig.model_fields[name].default for name in run.cuts})
        try:
            return run.replace(log_probs=False, **{**given, "n": n})
        except ConfigError as error:
            raise ConfigError(str(error).replace("SamplingConfig.", "EvalSet.")) from None


def _as_given(value: Any) -> Any:
    # The flag may be given several times, once for each path.
    if isinstance(value, list | tuple) and len(value) == 1:
        value = value[0]
    if value == "none":
        return None
    if isinstance(value, str) and value.lstrip().startswith("{"):
        try:
            value = json.loads(value)
        except ValueError as error:
            raise ConfigError.of("eval_dataset", value, f"is neither a path nor JSON: {error}") from None
    if isinstance(value, Mapping):
        return {name: {"path": each} if isinstance(each, str) else each for name, each in value.items()}
    return value


type EvalDatasets = Annotated[str | tuple[str, ...] | dict[str, EvalSet] | None, BeforeValidator(_as_given)]
"""A path, several, or sets by name."""


def sets_by_name(given: str | Sequence[str] | Mapping[str, EvalSet] | None) -> dict[str, EvalSet]:
    """Name -> set; a path is called by its last part without suffix."""
    if isinstance(given, Mapping):
        problem = "names metrics; use letters, digits, '.', '_' and '-'"
        ConfigError.refuse_all(("eval_dataset", name, problem) for name in given if not re.fullmatch(r"[\w.-]+", name))
        return dict(given)
    sets: dict[str, EvalSet] = {}
    for path in [given] if isinstance(given, str) else given or ():
        last = Path(path)
        name = re.sub(r"[^\w.-]+", "-", last.stem if last.suffix in _SUFFIXES else last.name)
        if name in sets:
            both = json.dumps({"a": sets[name].path, "b": path})
            raise ConfigError.of("eval_dataset", path, f"two sets would be called {name!r}; name them, as in '{both}'")
        sets[name] = EvalSet(path=path)
    return sets
