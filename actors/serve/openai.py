"""OpenAI's API over the same engines: models, completions and chat, for the base and whatever runs have saved."""

from __future__ import annotations

import asyncio
import json
import time
import uuid
from collections.abc import AsyncIterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from fastapi import FastAPI
from fastapi.responses import JSONResponse, StreamingResponse

from actors.serve.server import Server, UnknownError
from actors.serve.store import CHECKPOINTS, RUNS, SAMPLERS
from actors.serve.training import ADAPTER
from rl_backend.contracts import BatchError, RLBackendError, UnsupportedError
from rl_backend.data.chat_template import decode
from rl_backend.environment.protocol import Generation

_NOT_SERVED: Mapping[str, Sequence[Any]] = {
    "tools": (None, []),
    "functions": (None, []),
    "response_format": (None, {"type": "text"}),
    "logit_bias": (None, {}),
    "presence_penalty": (None, 0),
    "frequency_penalty": (None, 0),
    "top_logprobs": (None, 0),
    "echo": (None, False),
    "suffix": (None, ""),
    "best_of": (None, 1),
}
"""Option -> values that ask for nothing."""
_REPLACEMENT = "\ufffd"
"""What a tokenizer makes of bytes that are no whole character yet."""


def add_openai(app: FastAPI, server: Server, owner_kind: Any, asked_kind: Any) -> None:
    """Adds ``/v1``. ``owner_kind`` and ``asked_kind`` annotate what a request's key and body become."""

    async def models(owner: owner_kind) -> Any:
        return {
            "object": "list",
            "data": [{"id": name, "object": "model", "owned_by": owner} for name in _names(server, owner)],
        }

    async def completions(owner: owner_kind, asked: asked_kind) -> Any:
        return await _reported(_complete(server, owner, asked, chat=False))

    async def chat(owner: owner_kind, asked: asked_kind) -> Any:
        return await _reported(_complete(server, owner, asked, chat=True))

    # Annotations of these are values here, which FastAPI would look for in the module.
    for route in (models, completions, chat):
        route.__annotations__ = {"owner": owner_kind, "asked": asked_kind} if route is not models else {"owner": owner_kind}
    app.get("/v1/models")(models)
    app.post("/v1/completions")(completions)
    app.post("/v1/chat/completions")(chat)


async def _reported(work: Any) -> Any:
    try:
        return await work
    except UnknownError as error:
        return _error(str(error), 404)
    except RLBackendError as error:
        return _error(str(error), 400)


def _error(text: str, status: int) -> JSONResponse:
    return JSONResponse({"error": {"message": text, "type": "invalid_request_error", "code": status}}, status)


def _names(server: Server, owner: str) -> list[str]:
    live = [run["id"] for run in server.store.rows(RUNS, owner=owner, over="") if _newest(server, owner, run["id"])]
    return [server.name, *live, *(shown["tinker_path"] for shown in server.checkpoints(owner))]


def _newest(server: Server, owner: str, run: str) -> Path | None:
    """The adapter that a run saved last, named or not."""
    snapshot = server.newest_snapshot(run)
    saved = sorted(server.store.rows(CHECKPOINTS, run=run, owner=owner), key=lambda row: row["created"])
    return snapshot or (Path(saved[-1]["folder"]) if saved else None)


def _folder(server: Server, owner: str, model: str) -> Path | None:
    """Of the adapter that a request names: a checkpoint, a sampler, or a run's newest; None for the base.

    Raises:
        UnknownError: there is none of that name.
    """
    if model == server.name:
        return None
    if model.startswith("tinker://"):
        return Path(server.find(owner, model)["folder"]) / ADAPTER
    if (sampler := server.store.get(SAMPLERS, id=model, owner=owner)) is not None:
        return server.folder_of(sampler)
    if server.store.get(RUNS, id=model, owner=owner) is not None and (newest := _newest(server, owner, model)):
        return newest / ADAPTER
    raise UnknownError(f"model={model!r} is not known, or has saved nothing yet; see /v1/models")


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
            raise UnsupportedError(f"{name} is not served here; leave it out")
    folder = _folder(server, owner, str(asked.get("model")))
    prompt = await _prompt(server, asked, chat=chat)
    stop = asked.get("stop")
    ends = [stop] if isinstance(stop, str) else list(stop or ())
    params: dict[str, Any] = {
        "temperature": 1.0 if asked.get("temperature") is None else asked["temperature"],
        "top_p": 1.0 if asked.get("top_p") is None else asked["top_p"],
        "max_tokens": asked.get("max_completion_tokens") or asked.get("max_tokens") or (None if chat else 16),
        "stop": [*server.sampling.end_tokens, *ends],
    }
    seed, count = asked.get("seed"), int(asked.get("n") or 1)
    answer = _Answer(server, str(asked["model"]), ends, chat=chat)
    if asked.get("stream"):
        if count != 1:
            raise UnsupportedError(f"n={count} with stream=true is not served here; ask once for each")
        server.sampling.check(prompt)
        return StreamingResponse(
            answer.events(server.sampling.stream(prompt, params, folder, seed)), media_type="text/event-stream"
        )
    work = [
        server.sampling.generate(prompt, params, folder, None if seed is None else int(seed) + index)
        for index in range(count)
    ]
    return await answer.whole(prompt, await asyncio.gather(*work), log_probs=bool(asked.get("logprobs")))


async def _prompt(server: Server, asked: Mapping[str, Any], *, chat: bool) -> list[int]:
    given = asked.get("messages" if chat else "prompt")
    if not chat and isinstance(given, list) and given and all(isinstance(each, int) for each in given):
        return given
    if not chat and isinstance(given, list) and len(given) == 1:
        (given,) = given
    if not isinstance(given, list if chat else str) or not given:
        expected = "a list of messages" if chat else "a text, or token ids; one prompt a request"
        raise BatchError(f"{'messages' if chat else 'prompt'}: expected {expected}")
    tokenizer = await asyncio.to_thread(_tokenizer, server.model)
    if not chat:
        return list(tokenizer.encode(given))
    try:
        return list(tokenizer.apply_chat_template(given, add_generation_prompt=True, return_dict=False))
    except Exception as error:  # noqa: BLE001 a template raises what it likes
        raise BatchError(f"messages: the chat template refuses them: {type(error).__name__}: {error}") from None


class _Answer:
    """An answer in OpenAI's words."""

    def __init__(self, server: Server, model: str, ends: Sequence[str], *, chat: bool) -> None:
        self._server, self._ends, self._chat = server, ends, chat
        self._kind = "chat.completion" if chat else "text_completion"
        self._head = {"id": f"cmpl-{uuid.uuid4().hex}", "created": int(time.time()), "model": model}

    async def whole(self, prompt: Sequence[int], found: Sequence[Generation], *, log_probs: bool) -> Mapping[str, Any]:
        tokenizer = await asyncio.to_thread(_tokenizer, self._server.model)
        choices = []
        for index, each in enumerate(found):
            text = self._cut(decode(each.token_ids, tokenizer, special=False))
            choice = {"index": index, "finish_reason": _reason(each), "logprobs": None}
            choice |= {"message": {"role": "assistant", "content": text}} if self._chat else {"text": text}
            if log_probs:
                choice["logprobs"] = self._log_probs(tokenizer, each)
            choices.append(choice)
        sampled = sum(len(each.token_ids) for each in found)
        usage = {"prompt_tokens": len(prompt), "completion_tokens": sampled, "total_tokens": len(prompt) + sampled}
        return {**self._head, "object": self._kind, "choices": choices, "usage": usage}

    async def events(self, pieces: AsyncIterator[Generation]) -> AsyncIterator[str]:
        """Server-sent events. Text that may be the beginning of a stop string, or half a character, waits for the rest."""
        sent, last = "", None
        tokens: list[int] = []
        held = max((len(each) - 1 for each in self._ends), default=0)
        try:
            tokenizer = await asyncio.to_thread(_tokenizer, self._server.model)
            async for piece in pieces:
                tokens += piece.token_ids
                last = piece
                text = decode(tokens, tokenizer, special=False)
                ready = self._cut(text)
                if len(ready) == len(text):
                    ready = text[: len(text) - held].rstrip(_REPLACEMENT)
                if len(ready) > len(sent):
                    yield self._event(ready[len(sent) :], None)
                    sent = ready
            rest = self._cut(decode(tokens, tokenizer, special=False))[len(sent) :]
            yield self._event(rest, "length" if last is None else _reason(last))
            yield "data: [DONE]\n\n"
        except RLBackendError as error:
            yield f"data: {json.dumps({'error': {'message': str(error), 'type': 'invalid_request_error'}})}\n\n"

    def _event(self, text: str, reason: str | None) -> str:
        choice: dict[str, Any] = {"index": 0, "finish_reason": reason}
        choice |= {"delta": {"role": "assistant", "content": text}} if self._chat else {"text": text}
        kind = "chat.completion.chunk" if self._chat else self._kind
        return f"data: {json.dumps({**self._head, 'object': kind, 'choices': [choice]})}\n\n"

    def _cut(self, text: str) -> str:
        found = [at for each in self._ends if (at := text.find(each)) >= 0]
        return text[: min(found)] if found else text

    def _log_probs(self, tokenizer: Any, found: Generation) -> Mapping[str, Any]:
        texts = [decode([token], tokenizer) for token in found.token_ids]
        pairs = list(zip(texts, found.log_probs, strict=True))
        if self._chat:
            return {
                "content": [{"token": text, "logprob": value, "bytes": None, "top_logprobs": []} for text, value in pairs]
            }
        return {"tokens": texts, "token_logprobs": [value for _, value in pairs], "top_logprobs": None, "text_offset": None}


def _reason(found: Generation) -> str:
    return "stop" if found.finish == "stop" else "length"
