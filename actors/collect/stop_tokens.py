"""Stop tokens of a response."""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from actors.folder.state import read_object
from actors.rollout.config import SamplingConfig
from rl_backend.contracts import BatchError, ConfigError
from rl_backend.data.chat_template import ChatTemplate
from rl_backend.data.examples import DataConfig, as_messages
from rl_backend.data.prompts import Prompt


@dataclass(frozen=True)
class Ends:
    """Ends of responses to the prompts of a data set: of texts the model's, of chats also those of the chat template."""

    model: str
    tokenizer: Any
    data: DataConfig
    _of_turns: dict[Hashable, int | None] = field(default_factory=dict)

    def see(self, prompt: Prompt, where: str) -> None:
        """Adds what ends an answer to the prompt of row ``where``, which SFT trains. A prompt may be a text, or messages."""
        messages = as_messages(prompt.example.prompt, self.data, where)
        if messages is None:
            return
        # A rendering for each form, and not for each row: templates end turns by their roles, not by their words.
        tools, documents = prompt.example.tools, prompt.example.documents
        form = (*(message["role"] for message in messages), bool(tools), bool(documents))
        if form in self._of_turns:
            return
        try:
            template = ChatTemplate(self.tokenizer, self.data.chat_template_kwargs, tools, documents)
            self._of_turns[form] = template.turn_end(messages)
        except BatchError as error:
            raise BatchError(f"{where}: {error.message}") from error

    def added_to(self, sampling: SamplingConfig) -> SamplingConfig:
        """``sampling`` with the ends of all prompts that were seen; raises as :func:`stop_token_ids`."""
        of_turns = [end for end in self._of_turns.values() if end is not None]
        ends = (*sampling.stop_token_ids, *stop_token_ids(self.model, self.tokenizer), *of_turns)
        return sampling.replace(stop_token_ids=tuple(dict.fromkeys(ends)))


def stop_token_ids(model: str, tokenizer: Any) -> tuple[int, ...]:
    """What ends a response: the tokenizer's end-of-text token and those that ``generation_config.json`` names."""
    # Chat models end a turn with a different token from a text: both are needed.
    return tuple(dict.fromkeys([tokenizer.eos_token_id, *named_ends(model)]))


def template_end(tokenizer: Any, data: DataConfig) -> int | None:
    """What ends an answer to a question by the chat template; None where there is none, or none that can be used."""
    if not tokenizer.chat_template:
        return None
    question = [{"role": "user", "content": "x"}]
    try:
        return ChatTemplate(tokenizer, data.chat_template_kwargs).turn_end(question)
    except BatchError:  # an environment is told when it is checked, and a player may do without
        return None


def disagreement_of_ends(model: str, tokenizer: Any, data: DataConfig) -> str:
    """In words, what ends a text by ``generation_config.json`` and chat template and not by the tokenizer; else nothing.

    Responses end with any of them here. Rows of text that are trained teach the tokenizer's, and other software may wait for
    another.
    """
    end, named, answer = tokenizer.eos_token_id, named_ends(model), template_end(tokenizer, data)
    others = []
    if named and end not in named:
        others.append(f"generation_config.json ends one with {_shown(named, tokenizer)}")
    # Many chat models end a text with one token and an answer with another, and generation_config.json names both.
    if answer not in (None, end) and not {answer, end} <= set(named):
        others.append(f"the chat template ends an answer with {_shown([answer], tokenizer)}")
    if not others:
        return ""
    return f"but {', and '.join(others)}; make eos_token of tokenizer_config.json and generation_config.json agree with it"


def _shown(tokens: Sequence[int | None], tokenizer: Any) -> str:
    return " or ".join(f"{tokenizer.convert_ids_to_tokens(token)} ({token})" for token in tokens)


def named_ends(model: str) -> list[int]:
    """What ends a text by ``generation_config.json``; nothing where there is none, or it does not say."""
    path = Path(model) / "generation_config.json"
    ids: list[Any] = []
    problem: Exception | str = ""
    try:
        named = read_object(path).get("eos_token_id") if path.exists() else None
        ids = named if isinstance(named, list) else [] if named is None else [named]
    except (OSError, ValueError, RecursionError) as error:
        problem = error
    if not all(type(token) is int for token in ids):
        problem = f"eos_token_id={ids!r}, expected token ids"
    if problem:
        raise ConfigError.of("model", model, f"generation_config.json cannot be used: {problem}; repair or remove it")
    return ids
