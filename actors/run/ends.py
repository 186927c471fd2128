"""What ends a response."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from actors.rollout.config import SamplingConfig
from actors.run.state import read_object
from rl_backend.contracts import ConfigError
from rl_backend.data.chat import turn_end
from rl_backend.data.config import DataConfig
from rl_backend.data.prompts import Prompt, as_messages


@dataclass(frozen=True)
class Ends:
    """Ends of responses to prompts, in training and to held-out sets.

    Attributes:
        model: Hugging Face directory.
        tokenizer: of the model.
        data: how prompts become messages.
    """

    model: str
    tokenizer: Any
    data: DataConfig

    def __call__(self, sampling: SamplingConfig, prompt: Prompt, where: str) -> SamplingConfig:
        """``sampling`` with these ends beside its own.

        Args:
            prompt: of the data; all are texts, or messages.
            where: the data's path.

        Raises:
            ConfigError: ``generation_config.json`` of the model is damaged.
        """
        ends = (*sampling.stop_token_ids, *stop_token_ids(self.model, self.tokenizer), *self._turn_ends(prompt, where))
        return sampling.replace(stop_token_ids=tuple(dict.fromkeys(ends)))

    def _turn_ends(self, prompt: Prompt, where: str) -> list[int]:
        """What ends an answer to messages by the chat template, which SFT trains; nothing for texts."""
        example = prompt.example
        messages = as_messages(example.prompt, self.data, where)
        if messages is None:
            return []
        end = turn_end(
            messages,
            self.tokenizer,
            chat_template_kwargs=self.data.chat_template_kwargs,
            tools=example.tools,
            documents=example.documents,
        )
        return [] if end is None else [end]


def stop_token_ids(model: str, tokenizer: Any) -> tuple[int, ...]:
    """What ends a response: the tokenizer's end-of-text token and those that ``generation_config.json`` names.

    Chat models end a turn with a different token from a text.

    Raises:
        ConfigError: that file is damaged.
    """
    path = Path(model) / "generation_config.json"
    try:
        named = read_object(path).get("eos_token_id") if path.exists() else None
        ids = named if isinstance(named, list) else [] if named is None else [named]
        if not all(type(token) is int for token in ids):
            raise ValueError(f"eos_token_id={named!r}, expected a token id or a list of them")
    except (OSError, ValueError) as error:
        raise ConfigError.of(
            "model", model, f"generation_config.json cannot be used: {error}; repair or remove it"
        ) from None
    return tuple(dict.fromkeys([tokenizer.eos_token_id, *ids]))
