"""The server's routes: Tinker's API as the SDK calls it, OpenAI's beside it, a status page and metrics."""

from __future__ import annotations

import asyncio
import io
import math
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager, suppress
from typing import Annotated, Any

import zstandard
from fastapi import APIRouter, Depends, FastAPI, HTTPException, Request, Response
from fastapi.responses import FileResponse, JSONResponse
from starlette.exceptions import HTTPException as StarletteHTTPException

from actors.serve.server import EXTERNAL, BusyError, Server, UnknownError, held_by, shown_time
from actors.serve.store import CLIENT_NUMBERS, JSON, RUNS, SAMPLERS, SESSIONS, Result
from actors.serve.training import Pass, Step
from actors.serve.wire import read_header, read_json, read_text, read_whole
from rl_backend.contracts import BatchError, RLBackendError, UnsupportedError

LONG_POLL_SECONDS = 25.0  # the SDK gives up on a call after 45 s and asks again
MOST_JSON, MOST_BODY = 8 << 20, 64 << 20
"""Bytes of a request: of JSON, and of data, as they are sent and unpacked."""
_HEADER = 4096
_CONFIG = {
    "pjwt_auth_enabled": False,
    "proto_compress_fwdbwd": True,
    "sample_use_retrieve_futures": True,
    "sample_join_sampling_session": True,
}
_NOT_SERVED = {
    "POST /create_custom_loss": "custom losses on the server",
    "POST /copy_weights": "copy_weights",
    "POST /sessions/search": "search of sessions",
}


async def owner_of(request: Request) -> str:
    """The name behind a request's key; without keys in the store everybody here is one.

    A request without any key is refused even then: pages in a browser can send those to a server on this machine.
    """
    server: Server = request.app.state.server
    key = request.headers.get("x-api-key") or request.headers.get("authorization", "").removeprefix("Bearer ")
    if not key:
        raise HTTPException(401, "no key: send X-API-Key, or Authorization: Bearer")
    owner = server.store.owner_of(key) if server.needs_keys else "local"
    if owner is None:
        raise HTTPException(401, "the key is not known; rl-backend serve --new-key NAME makes one")
    # A client that asks too often must not lose its session by it.
    if not request.url.path.endswith("/session_heartbeat") and (wait := server.rates.wait(owner)):
        message = f"more than {server.limits.requests_per_second:g} requests a second; ask again"
        raise HTTPException(429, message, {"Retry-After": str(math.ceil(wait))})
    return owner


Owner = Annotated[str, Depends(owner_of)]


async def asked_in(request: Request) -> dict[str, Any]:
    body, whole = await _body(request, MOST_JSON)
    if not whole:
        raise HTTPException(413, f"more than {MOST_JSON} bytes of JSON")
    return read_json(body)


Asked = Annotated[dict[str, Any], Depends(asked_in)]


def make_app(server: Server) -> FastAPI:
    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        sweeping = asyncio.create_task(server.sweep())
        yield
        for model in server.models.values():
            model.sampling.close()
        sweeping.cancel()
        with suppress(asyncio.CancelledError):
            await sweeping

    app = FastAPI(title="rl-backend", lifespan=lifespan, docs_url=None, redoc_url=None, openapi_url=None)
    app.state.server = server
    app.add_exception_handler(UnknownError, _told(404))
    app.add_exception_handler(BusyError, _told(429))
    app.add_exception_handler(RLBackendError, _told(400))
    app.add_exception_handler(KeyError, _told(400, "body: {} is missing"))
    for kind in (TypeError, ValueError, AttributeError, OverflowError, RecursionError):
        app.add_exception_handler(kind, _told(400, "body: {}"))
    app.add_exception_handler(StarletteHTTPException, _tell_status)
    app.add_exception_handler(Exception, lambda request, error: _problem(request, f"{type(error).__name__}: {error}", 500))
    api = APIRouter(prefix="/api/v1")
    _add_sessions(api, server)
    _add_training(api, server)
    _add_weights(api, server)
    _add_sampling(api, server)
    _add_lists(api, server)
    for route, what in _NOT_SERVED.items():
        method, path = route.split()
        api.add_api_route(path, _refusal(what), methods=[method])
    app.include_router(api)
    return app


def _told(status: int, words: str = "{}") -> Any:
    return lambda request, error: _problem(request, words.format(error), status)


def _tell_status(request: Request, error: Any) -> JSONResponse:
    """An error that was raised with its status: ours, or the router's of an address that is not there."""
    text, status = str(error.detail), error.status_code
    if status in (404, 405):
        text = f"{request.method} {request.url.path}: {text}; docs/serve.md lists what is served"
    return _problem(request, text, status, error.headers)


def _problem(request: Request, text: str, status: int, headers: Mapping[str, str] | None = None) -> JSONResponse:
    """An error in the words of the API that was called."""
    body: dict[str, Any] = {"detail": text}
    if request.url.path.startswith("/v1/"):
        kind = "server_error" if status >= 500 else "rate_limit_error" if status == 429 else "invalid_request_error"
        body = {"error": {"message": text, "type": kind, "param": None, "code": str(status)}}
    return JSONResponse(body, status, headers)


def _refusal(what: str) -> Any:
    def refuse(owner: Owner) -> None:
        raise UnsupportedError(f"{what}: not served here; docs/serve.md lists what is")

    return refuse


def _add_sessions(api: APIRouter, server: Server) -> None:
    @api.post("/client/config")
    def config(owner: Owner) -> Any:
        return _CONFIG

    @api.post("/client/dynamic_config")
    def dynamic_config(owner: Owner) -> Any:
        return {"sample_cancel_enabled": True}

    @api.get("/healthz")
    def health() -> Any:
        if server.failed:
            raise HTTPException(503, server.failed)
        return {"status": "ok"}

    @api.get("/get_server_capabilities")
    def capabilities(owner: Owner) -> Any:
        can = {"trainable": True, "sampleable": True}
        models = server.models.values()
        return {
            "supported_models": [{"model_name": each.name, "max_context_length": each.longest, **can} for each in models]
        }

    @api.post("/create_session")
    async def create_session(owner: Owner, asked: Asked) -> Any:
        return server.create_session(owner, asked)

    @api.post("/session_heartbeat")
    async def heartbeat(owner: Owner, asked: Asked) -> Any:
        if not server.beat(owner, read_text(asked, "session_id")):
            raise HTTPException(410, "the session has ended")
        return {"type": "session_heartbeat"}

    @api.post("/sessions/{session}/finish")
    async def finish(owner: Owner, session: str) -> Any:
        server.known(SESSIONS, owner, session)
        await server.end_session(session, "the session was finished")

    @api.post("/telemetry")
    async def telemetry(request: Request) -> Any:
        # Not kept, and not read: what failed is reported with the headers of requests, keys included.
        await _body(request, 0)
        return {"status": "accepted"}


def _add_training(api: APIRouter, server: Server) -> None:
    @api.post("/create_model")
    async def create_model(owner: Owner, asked: Asked) -> Any:
        return server.create_model(owner, asked)

    @api.post("/get_info")
    async def get_info(owner: Owner, asked: Asked) -> Any:
        run = server.known(RUNS, owner, read_text(asked, "model_id"))
        data = {"arch": "decoder", "model_name": run["base_model"], "tokenizer_id": run["base_model"]}
        return {
            "type": "get_info",
            "model_id": run["id"],
            "model_data": data,
            "model_name": run["base_model"],
            "is_lora": True,
            "lora_rank": run["lora"].get("rank", 32),
        }

    @api.post("/forward_backward")
    async def forward_backward(owner: Owner, request: Request) -> Any:
        body, whole = await _body(request, MOST_BODY)
        unpacked, all_unpacked = body, True
        if request.headers.get("content-encoding") == "zstd":
            unpacked, all_unpacked = await asyncio.to_thread(_unpack, body)
        run, seq_id = read_header(unpacked[:_HEADER])
        if whole and all_unpacked:
            return server.submit(owner, run, seq_id, Pass(unpacked))
        limit = f"{MOST_BODY >> 20} MiB"

        def refuse(_: Any) -> dict[str, Any]:
            raise BatchError(f"forward_backward: the request is larger than {limit}; send fewer data at a time")

        return server.call(owner, {"model_id": run, "seq_id": seq_id}, refuse)

    @api.post("/optim_step")
    async def optim_step(owner: Owner, asked: Asked) -> Any:
        run, seq_id = read_text(asked, "model_id"), read_whole(asked, "seq_id")
        return server.submit(owner, run, seq_id, Step(asked, held_by(asked)))

    @api.post("/retrieve_future")
    async def retrieve_future(owner: Owner, asked: Asked) -> Any:
        result = await server.futures.result(read_text(asked, "request_id"), owner, LONG_POLL_SECONDS)
        if result is None:
            return JSONResponse({"queue_state": "active"}, 408)
        return _answer(result)


def _add_weights(api: APIRouter, server: Server) -> None:
    @api.post("/save_weights")
    async def save_weights(owner: Owner, asked: Asked) -> Any:
        return server.save(owner, asked, "weights")

    @api.post("/save_weights_for_sampler")
    async def save_weights_for_sampler(owner: Owner, asked: Asked) -> Any:
        if asked.get("path") is None:
            return server.snapshot(owner, asked)
        return server.save(owner, asked, "sampler_weights")

    @api.post("/save_weights_external")
    async def save_weights_external(owner: Owner, asked: Asked) -> Any:
        return server.save(owner, asked, EXTERNAL)

    @api.get(f"/training_runs/{{run}}/checkpoints/{EXTERNAL}/{{name}}/external_weights_urls")
    async def external_weights_urls(request: Request, owner: Owner, run: str, name: str) -> Any:
        links, expires = server.links(owner, f"tinker://{run}/{EXTERNAL}/{name}")
        urls = {file: f"{request.base_url}api/v1/external/{end}" for file, end in links.items()}
        return {"urls": urls, "expires": shown_time(expires)}

    @api.get("/external/{token}/{name}")
    async def external(token: str, name: str) -> FileResponse:
        return FileResponse(server.linked(token, name))

    @api.post("/load_weights")
    async def load_weights(owner: Owner, asked: Asked) -> Any:
        return server.load_as_new(owner, asked) if asked.get("session_id") else server.load(owner, asked)


def _completion(answered: Mapping[str, Any]) -> dict[str, Any]:
    if answered["media"] == JSON:
        return {"state": "failed", "request_id": answered["id"]}
    size = answered["size"]
    return {"state": "finished", "request_id": answered["id"], "response_payload_uncompressed_size": size}


def _answer(result: Result) -> Response:
    return Response(result.body, media_type=result.media)


def _add_sampling(api: APIRouter, server: Server) -> None:
    @api.post("/create_sampling_session")
    async def create_sampling_session(owner: Owner, asked: Asked) -> Any:
        return server.create_sampler(owner, asked)

    @api.post("/retrieve_futures")
    async def retrieve_futures(owner: Owner, asked: Asked) -> Any:
        target = {"cloned_sampler_id": 0, **asked["target"]}
        sampler = server.known(SAMPLERS, owner, read_text(target, "sampling_session_id"))["id"]
        client, after = read_whole(target, "cloned_sampler_id"), read_whole({"prev_cursor": 0, **asked}, "prev_cursor")
        wait = LONG_POLL_SECONDS if asked.get("timeout") is None else min(float(asked["timeout"]), LONG_POLL_SECONDS)
        found = await server.futures.completed(sampler, min(client, CLIENT_NUMBERS), after, wait)
        return {
            "completions": [_completion(each) for each in found],
            "cursor": max([after, *(each["place"] for each in found)]),
        }

    @api.post("/cancel_future")
    async def cancel_future(owner: Owner, asked: Asked) -> Response:
        server.cancel(owner, read_text(asked, "request_id"))
        return Response(status_code=204)

    @api.post("/join_sampling_session")
    async def join_sampling_session(owner: Owner, asked: Asked) -> Any:
        joined = server.join(owner, read_text(asked, "sampling_session_id"))
        return {"type": "join_sampling_session", "client_counter": joined}

    @api.get("/samplers/{sampler}")
    async def get_sampler(owner: Owner, sampler: str) -> Any:
        found = server.known(SAMPLERS, owner, sampler)
        return {"sampler_id": sampler, "base_model": found["base_model"], "model_path": found["path"]}

    @api.post("/asample")
    async def asample(owner: Owner, asked: Asked) -> Any:
        return server.sample(owner, asked)


def _add_lists(api: APIRouter, server: Server) -> None:
    store = server.store

    @api.post("/weights_info")
    async def weights_info(owner: Owner, asked: Asked) -> Any:
        found = server.find(owner, read_text(asked, "tinker_path"))
        lora = found["lora"]
        trains = {name: lora.get(name, True) for name in ("train_unembed", "train_mlp", "train_attn")}
        return {"base_model": found["base_model"], "is_lora": True, "lora_rank": lora.get("rank", 32), **trains}

    @api.get("/training_runs")
    def training_runs(owner: Owner, limit: int = 20, offset: int = 0) -> Any:
        shown, cursor = _page([*reversed(server.runs(owner=owner))], limit, offset)
        return {"training_runs": [_shown_run(server, run) for run in shown], "cursor": cursor}

    @api.get("/training_runs/{run}")
    def training_run(owner: Owner, run: str) -> Any:
        return _shown_run(server, server.known(RUNS, owner, run))

    @api.get("/training_runs/{run}/checkpoints")
    def checkpoints_of_run(owner: Owner, run: str) -> Any:
        server.known(RUNS, owner, run)
        return {"checkpoints": server.checkpoints(owner, run)}

    @api.delete("/training_runs/{run}/checkpoints/{kind}/{name}")
    def remove_checkpoint(owner: Owner, run: str, kind: str, name: str) -> Response:
        server.remove_checkpoint(owner, run, kind, name)
        return Response(status_code=204)

    @api.put("/training_runs/{run}/checkpoints/{kind}/{name}/ttl")
    def keep_checkpoint(owner: Owner, asked: Asked, run: str, kind: str, name: str) -> None:
        server.keep_checkpoint(owner, f"tinker://{run}/{kind}/{name}", asked)

    @api.api_route("/training_runs/{run}/checkpoints/{kind}/{name}/publish", methods=["POST", "DELETE"])
    def publish(request: Request, owner: Owner, run: str, kind: str, name: str) -> Response:
        server.publish(owner, f"tinker://{run}/{kind}/{name}", public=request.method == "POST")
        return Response(status_code=204)

    @api.get("/checkpoints")
    def checkpoints(owner: Owner, limit: int = 100, offset: int = 0) -> Any:
        shown, cursor = _page(server.checkpoints(owner), limit, offset)
        return {"checkpoints": shown, "cursor": cursor}

    @api.get("/sessions")
    def sessions(owner: Owner, limit: int = 20, offset: int = 0) -> Any:
        shown, _ = _page([*reversed(store.rows(SESSIONS, owner=owner))], limit, offset)
        return {"sessions": [session["id"] for session in shown]}

    @api.get("/sessions/{session}")
    def session(owner: Owner, session: str) -> Any:
        found = server.known(SESSIONS, owner, session)
        return {
            "training_run_ids": [run["id"] for run in server.runs(session=session)],
            "sampler_ids": [sampler["id"] for sampler in store.rows(SAMPLERS, session=session)],
            "user_metadata": found["asked"].get("user_metadata"),
            "display_name": found["asked"].get("display_name"),
        }


def _page(rows: list[dict[str, Any]], limit: int, offset: int) -> tuple[list[dict[str, Any]], dict[str, int]]:
    if limit < 0 or offset < 0:
        raise BatchError(f"limit={limit}, offset={offset}: expected numbers from 0")
    return rows[offset : offset + limit], {"offset": offset, "limit": limit, "total_count": len(rows)}


def _shown_run(server: Server, run: dict[str, Any]) -> dict[str, Any]:
    newest = {shown["checkpoint_type"]: shown for shown in reversed(server.checkpoints(run["owner"], run["id"]))}
    return {
        "training_run_id": run["id"],
        "base_model": run["base_model"],
        "model_owner": run["owner"],
        "is_lora": True,
        "lora_rank": run["lora"].get("rank", 32),
        "corrupted": False,
        "last_request_time": shown_time(run["last_request"]),
        "last_checkpoint": newest.get("training"),
        "last_sampler_checkpoint": newest.get("sampler"),
        "user_metadata": run["user_metadata"],
    }


async def _body(request: Request, most: int) -> tuple[bytes, bool]:
    """At most so many bytes of a request, and whether that is all; the rest is read and dropped."""
    parts, size = [], 0
    async for part in request.stream():
        if size <= most:
            parts.append(part)
        size += len(part)
    return b"".join(parts), size <= most


def _unpack(body: bytes) -> tuple[bytes, bool]:
    """At most :data:`MOST_BODY` bytes, and whether that is all; the sizes that a body claims are not believed."""
    try:
        with zstandard.ZstdDecompressor(max_window_size=1 << 27).stream_reader(io.BytesIO(body)) as reader:
            found = reader.read(MOST_BODY)
            return found, not reader.read(1)
    except zstandard.ZstdError as error:
        raise BatchError(f"body: not zstd: {error}") from None
