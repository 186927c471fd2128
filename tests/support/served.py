"""A server in this process: the real routes, training and samplers, over a runtime and an engine without Ray and vLLM."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import MappingProxyType, SimpleNamespace
from typing import Any

import uvicorn

from actors.serve.app import asked_in, make_app, owner_of
from actors.serve.openai import add_openai
from actors.serve.pages import add_pages
from actors.serve.server import Futures, Limits, ServedModel, Server
from actors.serve.store import Store
from actors.serve.training import Training
from actors.train import passes
from rl_backend.checkpoint.hf_reader import read_hf_config
from rl_backend.contracts import RLBackendError
from tests.support.native import open_runtime
from tests.support.torch_engine import samplers

VOCABULARY = 128


class _Submitted:
    """An operation as a group has it: called, or submitted for a future."""

    def __init__(self, work: Any) -> None:
        self._work = work

    def __call__(self, *args: Any, **options: Any) -> Any:
        return self._work(*args, **options)

    def submit(self, *args: Any, **options: Any) -> Any:
        try:
            found = self._work(*args, **options)
        except RLBackendError as error:
            raised = error

            def fail() -> Any:
                raise raised

            return SimpleNamespace(result=fail)
        return SimpleNamespace(result=lambda: found)


class GroupInProcess:
    """The operations of a training group of one rank, on a runtime of this process."""

    def __init__(self, runtime: Any, max_tokens: int) -> None:
        self._runtime, self.config = runtime, SimpleNamespace(max_tokens_per_micro_batch=max_tokens)
        for name in ("optimizer_step", "zero_grad"):
            setattr(self, name, _Submitted(getattr(runtime, name)))
        setattr(self, "forward_backward", _Submitted(self.forward_backward))  # noqa: B010 - a method, also of those derived
        self.passes: list[list[int]] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._runtime, name)

    def forward_backward(self, handle: Any, rows: Any, losses: Any, *, forward_only: bool = False, meta: Any = None) -> Any:
        if losses is not None:
            self.passes.append([int(row.sequence_fields["lora"]) for row in rows])
        most = self.config.max_tokens_per_micro_batch
        shares = passes.spread(handle, rows, passes.PassOptions(most, losses is not None, forward_only, "off", meta or {}))
        context: Any = SimpleNamespace(runtime=self._runtime, handle=lambda each: each)
        found = passes.forward_backward(context, handle, shares.batches[0], losses, forward_only=forward_only)
        return passes.merged(SimpleNamespace(source_ranks=(0,)), shares, [found])  # type: ignore[arg-type]

    def forward(self, handle: Any, rows: Any, *, meta: Any = None) -> Any:
        return self.forward_backward(handle, rows, None, forward_only=True, meta=meta)

    def export_lora_adapter(self, handle: Any) -> Any:
        return dict(self._runtime.export_lora_adapter(handle))


@contextmanager
def served(
    model: Path,
    state: Path,
    *,
    max_tokens: int = 64,
    name: str | None = None,
    most_pushed: int = 8,
    others: Mapping[str, Path] = MappingProxyType({}),
    **limits: Any,
) -> Iterator[SimpleNamespace]:
    """A server at ``url``; ``group`` shows whose rows its passes had. ``others`` are base models beside the first one, by
    name; ``groups`` has all by name.
    """
    with ExitStack() as stack:
        store = Store(state)
        stack.callback(store.close)
        store.begin()
        futures, groups, models = Futures(store), dict[str, GroupInProcess](), list[ServedModel]()
        for each, folder in {name or str(model): model, **others}.items():
            group = GroupInProcess(stack.enter_context(open_runtime(folder)), max_tokens)
            sampling = stack.enter_context(samplers(folder, max_tokens, most_pushed))
            training = Training(
                group,  # type: ignore[arg-type]
                futures.finish,
                model=folder,
                vocab_size=read_hf_config(folder)["vocab_size"],
                longest=max_tokens,
                max_rank=64,
                max_runs=64,
            )
            stack.callback(training.close)
            groups[each] = group
            models.append(ServedModel(each, folder, max_tokens, training, sampling))
        server, first = Server(store, futures, models, Limits(**limits)), models[0]
        with _listening(server) as url:
            yield SimpleNamespace(
                url=url,
                server=server,
                store=store,
                groups=groups,
                group=groups[first.name],
                training=first.training,
                sampling=first.sampling,
            )


@contextmanager
def _listening(server: Server) -> Iterator[str]:
    listener = socket.create_server(("127.0.0.1", 0))
    app = make_app(server)
    add_openai(app, server, owner_of, asked_in)
    add_pages(app, server)
    web = uvicorn.Server(uvicorn.Config(app, log_level="error"))
    thread = threading.Thread(target=web.run, kwargs={"sockets": [listener]}, daemon=True)
    thread.start()
    while not web.started:
        time.sleep(0.01)
    yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    web.should_exit = True
    thread.join(10)
    listener.close()
