"""An engine in this process, for a server's samplers: Transformers computes, peft has the adapters, no Ray and no vLLM."""

from __future__ import annotations

import asyncio
import copy
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM

from actors.rollout.config import SamplingConfig
from actors.serve import sampling
from rl_backend.environment.protocol import Generation


class TorchEngine:
    """In place of a rollout group: what :class:`~actors.serve.sampling.Sampling` asks of one."""

    def __init__(self, model: Path, longest: int) -> None:
        self._base = AutoModelForCausalLM.from_pretrained(model).eval()
        self.adapters: dict[str | None, Any] = {None: self._base}
        self.infos = {0: SimpleNamespace(max_model_len=longest, vocab_size=self._base.config.vocab_size)}
        self.engines, self.lost_engines = [0], list[int]()
        self.healing = SimpleNamespace(close=lambda: None)

    def push(self, name: str, folder: Path) -> None:
        self.adapters[name] = PeftModel.from_pretrained(copy.deepcopy(self._base), folder).eval()

    def remove_adapter(self, name: str) -> None:
        del self.adapters[name]

    @torch.no_grad()
    def generate(
        self, prompt: Sequence[int], config: SamplingConfig, adapter: str | None, seed: int, most: int
    ) -> Generation:
        model, generator = self.adapters[adapter], torch.Generator().manual_seed(seed % (1 << 63))
        tokens: list[int] = []
        log_probs: list[float] = []
        fed, past = torch.tensor([list(prompt)]), None
        while len(tokens) < most:
            out = model(fed, past_key_values=past, use_cache=True)
            past = out.past_key_values
            temperature = config.temperature or 1.0
            scores = (out.logits[0, -1].float() / temperature).log_softmax(-1)
            chosen = scores.argmax() if config.temperature == 0 else torch.multinomial(scores.exp(), 1, generator=generator)
            tokens.append(int(chosen))
            log_probs.append(float(scores[tokens[-1]]))
            if tokens[-1] in config.stop_token_ids:
                return _generation(tokens, log_probs, "stop")
            fed = torch.tensor([[tokens[-1]]])
        return _generation(tokens, log_probs, "length")


class _Tokens:
    def __init__(self, engine: TorchEngine, config: SamplingConfig, *, adapter: str | None) -> None:
        self._engine, self._config, self._adapter = engine, config, adapter

    async def generate(
        self, prompt: Sequence[int], *, seed: int, stop_token_ids: Sequence[int], max_tokens: int
    ) -> Generation:
        del stop_token_ids  # those of the configuration are all
        return await asyncio.to_thread(self._engine.generate, prompt, self._config, self._adapter, seed, max_tokens)


def _generation(tokens: list[int], log_probs: list[float], finish: Any) -> Generation:
    return Generation(
        token_ids=tokens, log_probs=log_probs, finish=finish, versions=[0] * len(tokens), routes=None, cached_tokens=0
    )


@contextmanager
def samplers(model: Path, longest: int, most_pushed: int = 8) -> Iterator[sampling.Sampling]:
    """Samplers over such an engine."""
    engine: Any = TorchEngine(model, longest)
    with patch.multiple(sampling, RolloutTokens=_Tokens, push_directory=TorchEngine.push):
        yield sampling.Sampling(engine, sampling.end_tokens(model), most_pushed=most_pushed)
