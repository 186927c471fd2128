"""Tokens of episodes, sampled by a transformers model in this process: for measurements that need no engine."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from rl_backend.environment import Generation

_GATHER_SECONDS = 0.01


@dataclass(frozen=True)
class _Asked:
    prompt: Sequence[int]
    seed: int
    stops: frozenset[int]
    most: int
    answer: asyncio.Future[Generation]


class TransformersSource:
    """A :class:`~rl_backend.environment.TokenSource`. Prompts that come at the same time are a batch; each has a generator
    of its own, so what is sampled does not depend on the others."""

    def __init__(self, folder: Path, *, context_tokens: int) -> None:
        self._model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        self._version = 0
        self._asked: list[_Asked] = []
        self.context_tokens = context_tokens
        self.vocab_size = int(self._model.config.vocab_size)

    def load(self, weights: Mapping[str, Tensor], *, version: int) -> None:
        self._model.load_state_dict(dict(weights), strict=False)
        self._model.tie_weights()
        self._version = version

    async def generate(
        self, token_ids: Sequence[int], *, seed: int, stop_token_ids: Sequence[int], max_tokens: int
    ) -> Generation:
        loop = asyncio.get_running_loop()
        answer: asyncio.Future[Generation] = loop.create_future()
        if not self._asked:
            loop.call_later(_GATHER_SECONDS, self._answer)
        self._asked.append(_Asked(token_ids, seed, frozenset(stop_token_ids), max_tokens, answer))
        return await answer

    def _answer(self) -> None:
        asked, self._asked = self._asked, []
        for each, generation in zip(asked, self._sampled(asked), strict=True):
            if not each.answer.done():
                each.answer.set_result(generation)

    @torch.no_grad()
    def _sampled(self, asked: Sequence[_Asked]) -> list[Generation]:
        longest = max(len(each.prompt) for each in asked)
        # Padded on the left, where the mask and the positions leave it out.
        ids = torch.tensor([[*[0] * (longest - len(each.prompt)), *each.prompt] for each in asked])
        mask = torch.tensor([[*[0] * (longest - len(each.prompt)), *[1] * len(each.prompt)] for each in asked])
        generators = [torch.Generator().manual_seed(each.seed % 2**63) for each in asked]
        tokens: list[list[int]] = [[] for _ in asked]
        log_probs: list[list[float]] = [[] for _ in asked]
        cache, new = None, ids
        while True:
            positions = (mask.cumsum(1) - 1).clamp(min=0)[:, -new.shape[1] :]
            output = self._model(
                new, attention_mask=mask, position_ids=positions, past_key_values=cache, use_cache=True, logits_to_keep=1
            )
            cache, scores = output.past_key_values, output.logits[:, -1].log_softmax(-1)
            going = [
                len(each) < one.most and not (each and each[-1] in one.stops)
                for each, one in zip(tokens, asked, strict=True)
            ]
            if not any(going):
                break
            drawn = [
                int(torch.multinomial(row.exp(), 1, generator=one)) for row, one in zip(scores, generators, strict=True)
            ]
            for index, token in enumerate(drawn):
                if going[index]:
                    tokens[index].append(token)
                    log_probs[index].append(float(scores[index, token]))
            new = torch.tensor(drawn)[:, None]
            mask = torch.cat([mask, torch.ones(len(asked), 1, dtype=mask.dtype)], 1)
        return [
            Generation(each, own, "stop" if each[-1] in one.stops else "length", [self._version] * len(each))
            for each, own, one in zip(tokens, log_probs, asked, strict=True)
        ]
