"""OpenAI's API over the same engines: models, completions and chat, for the base and whatever runs have saved."""

from __future__ import annotations

import asyncio
import json
import math
import time
import uuid
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import aclosing
from datetime import UTC, datetime
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from fastapi import Depends, FastAPI, Request
from fastapi.responses import StreamingResponse

from actors.serve.scores import Scores, width_in
from actors.serve.server import EXTERNAL, ServedModel, Server, UnknownError, shown_checkpoint
from actors.serve.store import CHECKPOINTS, RUNS, SAMPLERS
from actors.serve.training import ADAPTER
from actors.serve.wire import read_object, read_text, read_whole
from rl_backend.contracts import BatchError, RLBackendError, UnsupportedError
from rl_backend.data.chat_template import chat_template, decode, encode_messages, require_utf8, template_variables
from rl_backend.environment.protocol import Generation
from rl_backend.environment.tool_call_parsers import CallParser, ParsedTurn, call_parser

_NOT_SERVED: Mapping[str, Sequence[Any]] = {
    "functions": (None, []),
    "response_format": (None, {"type": "text"}),
    "logit_bias": (None, {}),
    "presence_penalty": (None, 0),
    "frequency_penalty": (None, 0),
    "tool_choice": (None, "auto", "none"),
    "suffix": (None, ""),
    "best_of": (None, 1),
    # Of servers that people know; without a word they would be thought to work.
    "top_k": (None, -1, 0),
    "min_p": (None, 0),
    "repetition_penalty": (None, 1),
    "min_tokens": (None, 0),
    "ignore_eos": (None, False),
    "stop_token_ids": (None, []),
}
"""Option -> values that ask for nothing, or for what is done anyway."""
_MARKS = {"hermes": ("<tool_call>",), "pythonic": ("<|tool_call_start|>", "<|python_start|>")}
"""Format of calls -> what a chat template has that writes them so. Others are read as JSON."""
_MOST_LIKELY = 20
"""Likeliest tokens of a place, as OpenAI has it: each is decoded by itself."""
_REPLACEMENT = "\ufffd"
"""What a tokenizer makes of bytes that are no whole character yet."""


def add_openai(
    app: FastAPI,
    server: Server,
    owner_of: Callable[[Request], Awaitable[str]],
    asked_in: Callable[[Request], Awaitable[dict[str, Any]]],
) -> None:
    """Adds ``/v1``. ``owner_of`` and ``asked_in`` read a request's key and body, as for the other routes."""
    of_key, of_body = Depends(owner_of), Depends(asked_in)

    def shown(owner: str, name: str) -> dict[str, Any]:
        return {"id": name, "object": "model", "created": int(server.started), "owned_by": owner}

    @app.get("/v1/models")
    async def models(owner: str = of_key) -> Any:
        return {"object": "list", "data": [shown(owner, name) for name in _names(server, owner)]}

    @app.get("/v1/models/{name:path}")
    async def model(name: str, owner: str = of_key) -> Any:
        _named(server, owner, name)
        return shown(owner, name)

    @app.post("/v1/completions")
    async def completions(owner: str = of_key, asked: dict[str, Any] = of_body) -> Any:
        return await _complete(server, owner, asked, chat=False)

    @app.post("/v1/chat/completions")
    async def chat(owner: str = of_key, asked: dict[str, Any] = of_body) -> Any:
        return await _complete(server, owner, asked, chat=True)


def _names(server: Server, owner: str) -> list[str]:
    live = [run["id"] for run in server.store.rows(RUNS, owner=owner, over="") if _newest(server, owner, run["id"])]
    saved = [row for row in server.store.rows(CHECKPOINTS, owner=owner) if row["kind"] != EXTERNAL]
    paths = [shown_checkpoint(row)["tinker_path"] for row in reversed(saved) if row["base_model"] in server.models]
    return [*server.models, *live, *paths]


def _newest(server: Server, owner: str, run: str) -> Path | None:
    """The adapter that a run saved last, named or not."""
    snapshot = server.newest_snapshot(run)
    rows = server.store.rows(CHECKPOINTS, run=run, owner=owner)
    saved = [(row["created"], Path(row["folder"])) for row in rows if row["kind"] != EXTERNAL]
    newest = max([*saved, *([] if snapshot is None else [snapshot[:2]])], default=None)
    return None if newest is None else newest[1]


class _Named(NamedTuple):
    """What a request names: a base model, or an adapter over it, with what was asked for when it was made."""

    model: ServedModel
    folder: Path | None = None
    lora: Mapping[str, Any] | None = None


def _named(server: Server, owner: str, name: str) -> _Named:
    """A base model, a checkpoint, a sampler, or a run's newest.

    Raises:
        UnknownError: there is none of that name.
    """
    if name in server.models:
        return _Named(server.models[name])
    if name.startswith("tinker://"):
        found = server.find_adapter(owner, name)
        return _Named(server.model(found["base_model"]), Path(found["folder"]) / ADAPTER, found["lora"])
    if (sampler := server.store.get(SAMPLERS, id=name, owner=owner)) is not None:
        return _Named(server.model(sampler["base_model"]), server.folder_of(sampler), sampler["lora"])
    run = server.store.get(RUNS, id=name, owner=owner)
    if run is not None and (newest := _newest(server, owner, name)):
        return _Named(server.model(run["base_model"]), newest / ADAPTER, run["lora"])
    raise UnknownError(f"model={name!r} is not known, or has saved nothing yet; see /v1/models")


@cache
def _tokenizer(model: Path) -> Any:
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(model, local_files_only=True)
    except (OSError, ValueError) as error:
        raise UnsupportedError(
            f"{model} has no tokenizer that can be read ({error}); send token ids to completions"
        ) from None


async def _complete(server: Server, owner: str, asked: Mapping[str, Any], *, chat: bool) -> Any:
    for name, idle in _NOT_SERVED.items():
        if asked.get(name) not in idle:
            raise UnsupportedError(f"{name}={asked[name]!r} is not served here; leave it out")
    model, folder, lora = _named(server, owner, read_text(asked, "model"))
    tools = [] if not chat or asked.get("tool_choice") == "none" else asked.get("tools") or []
    if not isinstance(tools, list) or not all(isinstance(each, Mapping) for each in tools):
        raise BatchError("tools: expected a list of objects")
    prompt = await _prompt(model.folder, asked, tools, chat=chat)
    stop = asked.get("stop")
    ends = [stop] if isinstance(stop, str) else [] if stop is None else stop
    if not isinstance(ends, list) or not all(isinstance(each, str) and each for each in ends):
        raise BatchError(f"stop={stop!r}: expected a text, or a list of texts")
    most = next((name for name in ("max_completion_tokens", "max_tokens") if asked.get(name) is not None), "")
    params = {
        **{name: asked.get(name) for name in ("temperature", "top_p", "seed")},
        "max_tokens": read_whole(asked, most, 1, 1 << 31) if most else None if chat else 16,
        "stop": [*model.sampling.end_tokens, *ends],
    }
    count = 1 if asked.get("n") is None else read_whole(asked, "n", 1, server.limits.open_samples)
    server.require_places(count)
    draw = model.sampling.read(prompt, params, count)
    answer = _Answer(server, model, asked["model"], ends, has_tools=bool(tools), chat=chat)
    # A number in completions, which may be 0; a flag in chats.
    shown = asked.get("logprobs")
    wants_log_probs = bool(shown) or (not chat and shown == 0 and shown is not False)
    echo = not chat and bool(asked.get("echo"))
    if asked.get("stream"):
        if count != 1 or wants_log_probs or echo:
            raise UnsupportedError("stream=true with logprobs, echo, or n above 1, is not served here; leave one out")
        shows_usage = bool(read_object(asked, "stream_options").get("include_usage"))
        pieces = model.sampling.stream(draw, folder)
        return StreamingResponse(answer.events(prompt, pieces, shows_usage=shows_usage), media_type="text/event-stream")
    widest = min(_MOST_LIKELY, model.sampling.vocab_size)
    width = width_in(asked, "top_logprobs" if chat else "logprobs", count * model.longest, widest)
    if width and not wants_log_probs:
        raise BatchError(f"top_logprobs={width} without logprobs=true; set that too")
    with server.places(count):
        found = await model.sampling.generate(draw, folder)
        scores: Sequence[Scores | None] = [None] * count
        if width or (echo and wants_log_probs):
            scores = await model.sampling.scores_of(draw, found, width, model.scorer(folder, lora))
        return await asyncio.to_thread(answer.whole, prompt, found, scores, log_probs=wants_log_probs, echo=echo)


async def _prompt(model: Path, asked: Mapping[str, Any], tools: Sequence[Any], *, chat: bool) -> list[int]:
    given = asked.get("messages" if chat else "prompt")
    if not chat and isinstance(given, list) and len(given) == 1 and not isinstance(given[0], int):
        (given,) = given
    if not chat and isinstance(given, list) and given and all(isinstance(each, int) for each in given):
        return given
    if not isinstance(given, list if chat else str) or not given:
        expected = "a list of messages" if chat else "a text, or token ids; one prompt a request"
        raise BatchError(f"{'messages' if chat else 'prompt'}: expected {expected}")
    require_utf8(given, "messages" if chat else "prompt")
    tokenizer = await asyncio.to_thread(_tokenizer, model)
    if not chat:
        return list(await asyncio.to_thread(tokenizer.encode, given))
    variables = dict(read_object(asked, "chat_template_kwargs"))
    if "strftime_now" in template_variables(chat_template(tokenizer)):
        variables.setdefault("strftime_now", datetime.now(UTC).date().isoformat())
    messages = [_message(each) for each in given]
    return await asyncio.to_thread(encode_messages, messages, tokenizer, chat_template_kwargs=variables, tools=tools)


def _message(said: Any) -> dict[str, Any]:
    """A message as chat templates take it: its text in one piece, arguments of its calls as objects."""
    if not isinstance(said, Mapping):
        raise BatchError(f"messages: {said!r} is no object with role and content")
    content = said.get("content")
    if isinstance(content, list) and all(isinstance(each, Mapping) and each.get("type") == "text" for each in content):
        content = "".join(str(each.get("text", "")) for each in content)
    calls = [{**call, "function": _function(call["function"])} for call in said.get("tool_calls") or ()]
    return {**said, "content": "" if content is None else content, **({"tool_calls": calls} if calls else {})}


def _function(called: Mapping[str, Any]) -> Mapping[str, Any]:
    arguments = called.get("arguments")
    return {**called, "arguments": json.loads(arguments or "{}") if isinstance(arguments, str) else arguments}


def _call_parser(tokenizer: Any) -> CallParser:
    template = chat_template(tokenizer)
    return call_parser(next((name for name, marks in _MARKS.items() if any(mark in template for mark in marks)), "json"))


class _Answer:
    """An answer in OpenAI's words."""

    def __init__(
        self, server: Server, model: ServedModel, name: str, ends: Sequence[str], *, has_tools: bool, chat: bool
    ) -> None:
        self._server, self._model, self._ends, self._has_tools, self._chat = server, model, ends, has_tools, chat
        self._kind = "chat.completion" if chat else "text_completion"
        self._has_begun = False
        self._head = {"id": f"cmpl-{uuid.uuid4().hex}", "created": int(time.time()), "model": name}

    def whole(
        self,
        prompt: Sequence[int],
        found: Sequence[Generation],
        scores: Sequence[Scores | None],
        *,
        log_probs: bool,
        echo: bool,
    ) -> Mapping[str, Any]:
        tokenizer = _tokenizer(self._model.folder)
        choices = []
        for index, (each, scored) in enumerate(zip(found, scores, strict=True)):
            turn = self._turn(each.token_ids, tokenizer)
            choice = {"index": index, "finish_reason": _reason(each.finish, turn), "logprobs": None}
            text = (decode(prompt, tokenizer) if echo else "") + turn.content
            choice |= {"message": _assistant(turn)} if self._chat else {"text": text}
            if log_probs:
                choice["logprobs"] = self._log_probs(tokenizer, prompt, each, scored, echo=echo)
            choices.append(choice)
        usage = _usage(prompt, sum(len(each.token_ids) for each in found))
        return {**self._head, "object": self._kind, "choices": choices, "usage": usage}

    async def events(
        self, prompt: Sequence[int], pieces: AsyncGenerator[Generation, None], *, shows_usage: bool
    ) -> AsyncIterator[str]:
        """Server-sent events. What may be the beginning of a stop string or of a call, or half a character, waits."""
        sent, finish = "", "length"
        tokens: list[int] = []
        held = max((len(each) - 1 for each in self._ends), default=0)
        try:
            tokenizer = await asyncio.to_thread(_tokenizer, self._model.folder)
            with self._server.places(1):
                async with aclosing(pieces):
                    async for piece in pieces:
                        tokens += piece.token_ids
                        finish = piece.finish
                        text = decode(tokens, tokenizer, special=False)
                        if len(self._cut(text)) < len(text):
                            # Engines see one piece, and no stop string that began in the piece before.
                            finish = "stop"
                            break
                        ready = text[: max(0, len(text) - held)].rstrip(_REPLACEMENT)
                        if not self._has_tools and len(ready) > len(sent):
                            yield self._event(ParsedTurn(ready[len(sent) :]), None)
                            sent = ready
            turn = self._turn(tokens, tokenizer)
            rest = ParsedTurn(turn.content[len(sent) :], turn.attempts)
            yield self._event(rest, _reason(finish, turn))
            if shows_usage:
                yield self._line([], usage=_usage(prompt, len(tokens)))
            yield "data: [DONE]\n\n"
        except RLBackendError as error:
            yield f"data: {json.dumps({'error': {'message': str(error), 'type': 'invalid_request_error'}})}\n\n"

    def _event(self, said: ParsedTurn, reason: str | None) -> str:
        choice: dict[str, Any] = {"index": 0, "finish_reason": reason}
        delta = _assistant(said)
        if self._has_begun:
            # Clients join what deltas have, and two roles would be one word.
            del delta["role"]
        self._has_begun = True
        return self._line([choice | ({"delta": delta} if self._chat else {"text": said.content})])

    def _line(self, choices: Sequence[Any], **more: Any) -> str:
        kind = "chat.completion.chunk" if self._chat else self._kind
        return f"data: {json.dumps({**self._head, 'object': kind, 'choices': choices, **more})}\n\n"

    def _turn(self, token_ids: Sequence[int], tokenizer: Any) -> ParsedTurn:
        """What was said, and the calls of tools in it; where one cannot be read, all of it is what was said."""
        text = ParsedTurn(self._cut(decode(token_ids, tokenizer, special=False)))
        if not self._has_tools:
            return text
        ends = self._model.sampling.end_tokens
        # Some models write calls with special tokens.
        written = decode(token_ids[:-1] if token_ids and token_ids[-1] in ends else token_ids, tokenizer)
        turn = _call_parser(tokenizer)(self._cut(written))
        return turn if turn.attempts and all(each.status == "ok" for each in turn.attempts) else text

    def _cut(self, text: str) -> str:
        found = [at for each in self._ends if (at := text.find(each)) >= 0]
        return text[: min(found)] if found else text

    def _log_probs(
        self, tokenizer: Any, prompt: Sequence[int], found: Generation, scored: Scores | None, *, echo: bool
    ) -> Mapping[str, Any]:
        def text(token: int) -> str:
            return decode([int(token)], tokenizer)

        ids, values = list(found.token_ids), list(found.log_probs)
        if echo and scored is not None:
            # No distribution is before the first token.
            ids, values = [*prompt, *ids], [*scored.log_probs[: len(prompt)].tolist(), *values]
        likely: list[list[tuple[str, float]]] = [[] for _ in ids]
        if scored is not None and scored.top_ids.shape[1]:
            rows = zip(scored.top_ids[-len(ids) :], scored.top_log_probs[-len(ids) :], strict=True)
            likely = [[(text(token), float(value)) for token, value in zip(*row, strict=True)] for row in rows]
        texts = [text(each) for each in ids]
        if self._chat:
            content = [
                {**_token(word, value), "top_logprobs": [_token(*each) for each in row]}
                for word, value, row in zip(texts, values, likely, strict=True)
            ]
            return {"content": content}
        none = [index for index, value in enumerate(values) if math.isnan(value)]
        return {
            "tokens": texts,
            "token_logprobs": [None if index in none else value for index, value in enumerate(values)],
            "top_logprobs": [None if index in none else _by_text(row) for index, row in enumerate(likely)]
            if any(likely)
            else None,
            "text_offset": [sum(map(len, texts[:index])) for index in range(len(texts))],
        }


def _by_text(row: Sequence[tuple[str, float]]) -> dict[str, float]:
    """Of tokens that look the same, the likeliest."""
    found: dict[str, float] = {}
    for text, value in row:
        found.setdefault(text, value)
    return found


def _token(text: str, value: float) -> dict[str, Any]:
    return {"token": text, "logprob": value, "bytes": list(text.encode())}


def _usage(prompt: Sequence[int], sampled: int) -> dict[str, int]:
    return {"prompt_tokens": len(prompt), "completion_tokens": sampled, "total_tokens": len(prompt) + sampled}


def _assistant(said: ParsedTurn) -> dict[str, Any]:
    if not said.attempts:
        return {"role": "assistant", "content": said.content}
    calls = [
        {
            "index": index,
            "id": f"call_{uuid.uuid4().hex}",
            "type": "function",
            "function": {"name": each.name, "arguments": json.dumps(each.arguments)},
        }
        for index, each in enumerate(said.attempts)
    ]
    return {"role": "assistant", "content": said.content or None, "tool_calls": calls}


def _reason(finish: str, turn: ParsedTurn) -> str:
    return "tool_calls" if turn.attempts else "stop" if finish == "stop" else "length"
