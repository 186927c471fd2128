"""Samplers on the engines: the base, and adapters that are pushed when they are used and give way when others are."""

from __future__ import annotations

import asyncio
import secrets
from collections import OrderedDict
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from actors.collect.stop_tokens import named_ends
from actors.rollout.config import SamplingConfig
from actors.rollout.group.group import RolloutGroup
from actors.rollout.messages import prompt_problem, sample_seed
from actors.rollout.tokens import RolloutTokens
from actors.serve.scores import EMPTY, Scores, Scoring, width_in
from actors.serve.wire import MOST_WHOLE, Cells, Sampled, Top, read_number, read_object, read_whole, write_samples
from actors.sync.adapter_push import push_directory
from rl_backend.checkpoint.hf_reader import read_hf_config
from rl_backend.contracts import BatchError, EngineDeadError, EngineDirtyError, RLBackendError, UnsupportedError
from rl_backend.environment.protocol import Generation

type Score = Callable[[Scoring], Awaitable[Scores]]

# A text that streams comes in pieces of so many tokens.
STREAMED_TOKENS = 8
# Of one request; engines look for each after every token.
_MOST_STOPS = 256
_UNCHANGED = {"temperature": 1.0, "top_p": 1.0, "top_k": -1}


class Draw(NamedTuple):
    """A prompt, and how its responses are drawn, of ``room`` tokens at most and with a seed each."""

    prompt: Sequence[int]
    sampling: SamplingConfig
    room: int
    seeds: Sequence[int]


class Sampling:
    """Requests for samples. All methods are for the event loop.

    Args:
        end_tokens: what ends a response where a request does not say.
        most_pushed: adapters that engines keep at one time; one in use never gives way.
    """

    def __init__(self, rollout: RolloutGroup, end_tokens: Sequence[int], *, most_pushed: int) -> None:
        self._rollout, self.end_tokens, self._most_pushed = rollout, tuple(end_tokens), most_pushed
        self._pushed: OrderedDict[Path, str] = OrderedDict()
        self._in_use: dict[Path, int] = {}
        self._pushing = asyncio.Lock()
        self.open = 0
        self.samples = self.tokens = 0

    @property
    def longest(self) -> int:
        """Tokens of prompt and response together."""
        return next(iter(self._rollout.infos.values())).max_model_len

    @property
    def vocab_size(self) -> int:
        return next(iter(self._rollout.infos.values())).vocab_size

    @property
    def pushed(self) -> int:
        return len(self._pushed)

    @property
    def engines(self) -> Mapping[str, int]:
        return {"alive": len(self._rollout.engines), "lost": len(self._rollout.lost_engines)}

    async def push(self, folder: Path) -> str:
        """The name under which engines serve the adapter of a folder, which they have when this returns.

        Raises:
            EngineDeadError, EngineDirtyError: all engines are lost, and none is replaced any more.
        """
        # Whoever asks may be cancelled; what engines have then is known here all the same.
        return await asyncio.shield(self._push(folder))

    async def _push(self, folder: Path) -> str:
        async with self._pushing:
            if folder in self._pushed:
                self._pushed.move_to_end(folder)
                return self._pushed[folder]
            idle = [each for each in self._pushed if not self._in_use.get(each)]
            for each in idle[: max(0, len(self._pushed) + 1 - self._most_pushed)]:
                await self._remove(each)
            name = f"{folder.parent.name}-{secrets.token_hex(4)}"
            while name not in self._pushed.values():
                try:
                    await asyncio.to_thread(push_directory, self._rollout, name, folder)
                    self._pushed[folder] = name
                except (EngineDeadError, EngineDirtyError) as error:
                    await asyncio.to_thread(self._rollout.engine_set.wait_for_engine, error)
            return name

    def require_hope(self) -> None:
        """Raises the error of an engine that was lost too often to be replaced again."""
        self._rollout.engine_set.require_hope()

    def close(self) -> None:
        """Ends the replacing of engines, so that whoever waits for one is answered."""
        self._rollout.healing.close()

    async def forget(self, folder: Path) -> None:
        """Frees an adapter in the engines; requests that sample with it end with it."""
        async with self._pushing:
            if folder in self._pushed:
                await self._remove(folder)

    async def answer(self, asked: Mapping[str, Any], folder: Path | None, score: Score) -> bytes:
        """The answer to a request of the API, as it is sent.

        Args:
            folder: of the adapter; None for the base.
            score: the log-probs of a text.

        Raises:
            BatchError, ConfigError, UnsupportedError: what is asked for.
        """
        prompt = prompt_of(asked)
        for name in ("prompt_alt_tokens_k", "record_stability_info"):
            if asked.get(name):
                raise UnsupportedError(f"{name}={asked[name]!r} is not served here; leave it out")
        draw = self.read(prompt, read_object(asked, "sampling_params"), asked.get("num_samples", 1))
        wanted = Scoring.of(asked, prompt, self.vocab_size)
        scored = len(draw.seeds) * (len(prompt) + draw.room)
        width = width_in(asked, "topk_sample_logprobs", scored, self.vocab_size)
        scoring = [] if wanted is None else [score(wanted)]
        found, scores = await asyncio.gather(self.generate(draw, folder), asyncio.gather(*scoring))
        samples = [Sampled(each.token_ids, each.log_probs, cut_off=each.finish != "stop") for each in found]
        if width:
            of_texts = await self.scores_of(draw, found, width, score)
            tops = [(each.top_ids[len(prompt) :], each.top_log_probs[len(prompt) :]) for each in of_texts]
            samples = [replace(sample, top=top) for sample, top in zip(samples, tops, strict=True)]
        return write_samples(samples) if wanted is None else write_samples(samples, *_shown(asked, wanted, scores[0]))

    async def scores_of(self, draw: Draw, found: Sequence[Generation], width: int, score: Score) -> Sequence[Scores]:
        """Of the prompt with each response, with the ``width`` likeliest tokens, by the trainer's forward pass.

        Raises:
            UnsupportedError: of a distribution that is cut.
        """
        cuts, temperature = draw.sampling.cuts, draw.sampling.temperature or 1.0
        if cuts:
            raise UnsupportedError(f"the likeliest tokens with {', '.join(cuts)} are not served here; leave one out")
        texts = [[*draw.prompt, *each.token_ids] for each in found]
        return await asyncio.gather(*(score(Scoring(text, width, None, temperature)) for text in texts))

    async def generate(self, draw: Draw, folder: Path | None) -> Sequence[Generation]:
        """The responses, all at one time."""
        async with self._adapter(folder) as adapter:
            work = (self._generate(draw.prompt, draw.sampling, adapter, seed, draw.room) for seed in draw.seeds)
            return await asyncio.gather(*work)

    async def stream(self, draw: Draw, folder: Path | None) -> AsyncGenerator[Generation, None]:
        """One response in pieces, each a request that continues the one before; the engines' prefix cache has its keys."""
        so_far, left = list(draw.prompt), draw.room
        async with self._adapter(folder) as adapter:
            for number in range(left):
                part = sample_seed(draw.seeds[0], 0, 0, number)
                piece = await self._generate(so_far, draw.sampling, adapter, part, min(left, STREAMED_TOKENS))
                so_far += piece.token_ids
                left -= len(piece.token_ids)
                yield piece
                if piece.finish == "stop" or left <= 0:
                    return

    @asynccontextmanager
    async def _adapter(self, folder: Path | None) -> AsyncIterator[str | None]:
        if folder is None:
            yield None
            return
        self._in_use[folder] = self._in_use.get(folder, 0) + 1
        try:
            yield await self.push(folder)
        finally:
            self._in_use[folder] -= 1
            if not self._in_use[folder]:
                del self._in_use[folder]

    async def _remove(self, folder: Path) -> None:
        name = self._pushed.pop(folder)
        with suppress(RLBackendError):  # engines that are lost have no adapters any more
            await asyncio.to_thread(self._rollout.remove_adapter, name)

    def read(self, prompt: Sequence[int], params: Mapping[str, Any], count: int) -> Draw:
        """What a request of either API asks for; a parameter of None is one that is not given.

        Raises:
            BatchError, ConfigError: what cannot be.
        """
        if problem := prompt_problem(prompt, self.longest, self.vocab_size):
            raise BatchError(f"the prompt {problem}")
        room = self.longest - len(prompt)
        if params.get("max_tokens") is not None:
            room = min(read_whole(params, "max_tokens", 1), room)
        seed = None if params.get("seed") is None else read_whole(params, "seed", -MOST_WHOLE)
        seeds = [secrets.randbits(62) if seed is None else sample_seed(seed, 0, 0, index) for index in range(count)]
        return Draw(prompt, self._sampling(params), room, seeds)

    def _sampling(self, params: Mapping[str, Any]) -> SamplingConfig:
        stop = params.get("stop")
        stops: list[str | int] | None = [stop] if isinstance(stop, str | int) else stop
        if not isinstance(stops, list | None) or not all(isinstance(each, str | int) for each in stops or ()):
            raise BatchError(f"stop={stops!r}: expected a text, an id, or a list of them")
        if stops and len(stops) > _MOST_STOPS:
            raise BatchError(f"stop: {len(stops)} of them; expected at most {_MOST_STOPS}")
        asked = _UNCHANGED | {name: each for name, each in params.items() if each is not None}
        given: dict[str, Any] = {
            "temperature": read_number(asked, "temperature"),
            "top_p": read_number(asked, "top_p"),
            # The SDK's -1 is no bound, as 0 is.
            "top_k": max(read_whole(asked, "top_k", -1), 0),
        }
        if given["temperature"] == 0:
            given = {"temperature": 0.0}
        # None is the end of the text, an empty list is nothing at all.
        given["stop_token_ids"] = tuple(
            self.end_tokens if stops is None else (each for each in stops if isinstance(each, int))
        )
        given["stop_strings"] = tuple(each for each in stops or () if isinstance(each, str))
        return SamplingConfig(**given)

    async def _generate(
        self, prompt: Sequence[int], sampling: SamplingConfig, adapter: str | None, seed: int, most: int
    ) -> Generation:
        tokens = RolloutTokens(self._rollout, sampling, adapter=adapter)
        self.open += 1
        try:
            found = await tokens.generate(prompt, seed=seed, stop_token_ids=(), max_tokens=most)
        finally:
            self.open -= 1
        self.samples += 1
        self.tokens += len(found.token_ids)
        return found


def _shown(asked: Mapping[str, Any], wanted: Scoring, scores: Scores) -> tuple[np.ndarray | None, Top | None, Cells | None]:
    """Of a prompt what was asked for, as it is written."""
    first = max(0, len(wanted.tokens) - int(asked.get("prompt_logprobs_last_n") or len(wanted.tokens)))
    log_probs, ids, values = (np.array(each) for each in (scores.log_probs, scores.top_ids, scores.top_log_probs))
    log_probs[:first], ids[:first], values[:first] = np.nan, *EMPTY
    targets = None if wanted.targets is None else Cells(scores.targets, wanted.targets.present)
    return log_probs if asked.get("prompt_logprobs") else None, (ids, values) if wanted.top else None, targets


def prompt_of(asked: Mapping[str, Any]) -> list[int]:
    """Raises :class:`UnsupportedError` for a prompt that is not text, :class:`BatchError` for ids that are no numbers."""
    tokens: list[int] = []
    chunks = read_object(asked, "prompt").get("chunks") or ()
    if not isinstance(chunks, Sequence) or not all(isinstance(chunk, Mapping) for chunk in chunks):
        raise BatchError("prompt.chunks: expected a list of objects")
    for chunk in chunks:
        if chunk.get("type", "encoded_text") != "encoded_text":
            raise UnsupportedError(f"a prompt with a chunk of type {chunk['type']!r} is not served here; only text is")
        ids = chunk.get("tokens")
        if not isinstance(ids, list) or not all(type(each) is int for each in ids):
            raise BatchError("the prompt has a token that is no whole number")
        tokens += ids
    return tokens


def end_tokens(model: Path) -> list[int]:
    """The ids that end a text, as the model's directory says."""
    if named := named_ends(str(model)):
        return named
    found = read_hf_config(model).get("eos_token_id")
    return found if isinstance(found, list) else [] if found is None else [found]
