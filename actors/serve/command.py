"""The server as a process: Ray, ranks and engines, the state folder, and HTTP until it is interrupted."""

from __future__ import annotations

import argparse
import ipaddress
import logging
import math
import socket
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, closing, contextmanager, nullcontext
from logging.handlers import RotatingFileHandler
from pathlib import Path
from typing import Any, NamedTuple

import uvicorn

from actors.cluster.placement import ClusterShare, share_cluster
from actors.cluster.session import ray_session
from actors.folder.lock import RunLock
from actors.options.config import check_ranks, resolve_dtype
from actors.rollout.config import RolloutConfig, positions_of, within_model
from actors.rollout.group.group import RolloutGroup
from actors.serve.app import asked_in, make_app, owner_of
from actors.serve.check import check_server
from actors.serve.openai import add_openai
from actors.serve.pages import add_pages
from actors.serve.restarts import ServerLostError, keep_serving
from actors.serve.sampling import Sampling, end_tokens
from actors.serve.server import Futures, Limits, ServedModel, Server, request_log
from actors.serve.store import Store
from actors.serve.training import Training
from actors.train.group import TrainGroup
from actors.watch.console import Phases
from rl_backend.checkpoint.hf_reader import read_hf_config
from rl_backend.contracts import EXPERT_COUNTS, ConfigError, ParallelConfig, RLBackendError, RuntimeConfig, text_config
from rl_backend.data.hub import local_model

_DEFAULT_LENGTH = 4096
# Adapters that engines keep in host memory; more give way, and come back when they are used.
_MOST_PUSHED = 64
# Of the log of requests; there are two such files at most.
_LOG_BYTES = 16 << 20


def new_key(state: Path, name: str) -> str:
    with closing(Store(state)) as store:
        return store.make_key(name)


def remove_key(state: Path, name: str) -> None:
    with closing(Store(state)) as store:
        store.remove_key(name)


def serve(options: argparse.Namespace) -> int:
    """Serves until SIGTERM or Ctrl-C; with ``--check`` until a client has gone through everything. The exit status.

    Raises:
        ConfigError: an address that others reach, without keys; options that ranks or engines refuse; or what failed in
            ``--check``.
    """
    for name in ("disk_gib", "requests_per_second"):
        value = getattr(options, name)
        if value is not None and not 0 < value < math.inf:
            raise ConfigError.of(name, value, "expected a finite number above 0")
    if options.check:
        with tempfile.TemporaryDirectory() as state, _listening("127.0.0.1", 0) as listener:
            serve_at(listener, argparse.Namespace(**{**vars(options), "state": Path(state)}))
        return 0
    with closing(Store(options.state)) as store:
        _require_keys(store, options.host)
    with _listening(options.host, options.port) as listener:
        if options.restart:
            return keep_serving(serve_at, listener, options)
        serve_at(listener, options)
    return 0


def serve_at(listener: socket.socket, options: argparse.Namespace, up: Callable[[], None] | None = None) -> None:
    """Serves at a port that is taken already.

    Args:
        up: called when it serves; whoever gives it starts the server again, so training that has ended ends this.

    Raises:
        ConfigError: another server has the state folder.
        ServerLostError: ranks or engines have ended for good, and ``up`` is given.
    """
    with closing(Store(options.state)) as store, _alone(store.folder):
        _serve_from(store, listener, options, up)


def _serve_from(store: Store, listener: socket.socket, options: argparse.Namespace, up: Callable[[], None] | None) -> None:
    log = RotatingFileHandler(store.folder / "requests.jsonl", maxBytes=_LOG_BYTES, backupCount=1, encoding="utf-8")
    request_log.setLevel(logging.INFO)
    request_log.propagate = False
    request_log.addHandler(log)
    try:
        if up is not None:
            # The last key may be gone since the server was started for the first time.
            _require_keys(store, options.host)
        with open_server(options, store) as server:
            host, port = listener.getsockname()[:2]
            url = f"http://{host}:{port}"
            app = make_app(server)
            add_openai(app, server, owner_of, asked_in)
            add_pages(app, server)
            config = uvicorn.Config(
                app, log_level="warning", timeout_graceful_shutdown=5, h11_max_incomplete_event_size=65536
            )
            web = uvicorn.Server(config)
            with _beside(web, lambda: _check(url, server, options)) if options.check else nullcontext():
                print(f"serving {', '.join(server.models)} at {url}", flush=True)
                if not options.check:
                    print(f"  TINKER_BASE_URL={url} TINKER_API_KEY=tml-...   status page: {url}/", flush=True)
                if up is not None:
                    up()
                with _beside(web, lambda: _until_lost(server, web)) if up is not None else nullcontext():
                    web.run(sockets=[listener])
    finally:
        request_log.removeHandler(log)
        log.close()


@contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """Holds a state folder: a second server would end the requests of the first, and delete what it has saved."""
    try:
        lock = RunLock(folder)
    except ConfigError as error:
        raise ConfigError.of("state", str(folder), "another server has it; give each its own") from error
    with lock:
        yield


@contextmanager
def _beside(web: uvicorn.Server, work: Callable[[], None]) -> Iterator[None]:
    """Runs ``work`` in a thread when the server has started, and ends the server with it; what it raises is raised here."""
    raised: list[Exception] = []

    def run() -> None:
        while not web.started:
            time.sleep(0.05)
        try:
            work()
        except Exception as error:  # noqa: BLE001 raised below
            raised.append(error)
        web.should_exit = True

    thread = threading.Thread(target=run, name="beside", daemon=True)
    thread.start()
    yield
    thread.join(5.0)
    if raised:
        raise raised[0]


def _check(url: str, server: Server, options: argparse.Namespace) -> None:
    # Rounding; other weights would differ by more than 0.1.
    largest = 1e-3 if resolve_dtype(options.dtype) == "float32" else 0.1
    for name in server.models:
        print(name, flush=True)
        check_server(url, name, largest_gap=largest, say=lambda line: print(line, flush=True))
    print("the server does what docs/serve.md says", flush=True)


def _until_lost(server: Server, web: uvicorn.Server) -> None:
    while not web.should_exit:
        time.sleep(1.0)
        if server.failed:
            raise ServerLostError(server.failed)
        for model in server.models.values():
            try:
                model.sampling.require_hope()
            except RLBackendError as error:
                raise ServerLostError(f"{model.name}: {error}") from error


@contextmanager
def open_server(options: argparse.Namespace, store: Store) -> Iterator[Server]:
    """Ranks and engines of every model, and the server over them.

    Raises:
        ConfigError, UnsupportedError: they cannot be had.
    """
    folders, phases = _folders(options), Phases()
    ranks, engines = options.ranks * len(folders), options.engines * len(folders)
    with ExitStack() as stack:
        store.begin()
        stack.enter_context(ray_session(ranks, engines))
        share = share_cluster(ranks, engines, take_turns=True)
        plans = [_plan(name, folder, options, share) for name, folder in folders.items()]
        futures, models = Futures(store), list[ServedModel]()
        # Ranks start, and load the bases, meanwhile; on a GPU that both share an engine measures first what is free.
        rollouts = [stack.enter_context(RolloutGroup(plan.rollout, wait=0 < share.gpus < 1)) for plan in plans]
        with phases.phase("ranks", f"starting {ranks} of {options.runtime}"):
            sizes = options.ranks, share.cores_per_rank, share.gpus
            groups = [stack.enter_context(TrainGroup(plan.runtime, *sizes, recover=options.recover)) for plan in plans]
        with phases.phase("model", "loading the base"):
            for plan, group, rollout in zip(plans, groups, rollouts, strict=True):
                models.append(_served(plan, group, rollout, futures, store, options))
                stack.callback(models[-1].training.close)
        with phases.phase("engines", f"starting {engines}"):
            for rollout in rollouts:
                rollout.join()
        limits = Limits(
            session_timeout=options.session_timeout,
            keep_results=options.keep_results,
            disk_bytes=None if options.disk_gib is None else int(options.disk_gib * 2**30),
            requests_per_second=options.requests_per_second,
        )
        yield Server(store, futures, models, limits)


def _folders(options: argparse.Namespace) -> Mapping[str, Path]:
    """The directories of all models, by the names that clients call them.

    Raises:
        ConfigError: one that is not there, or a name that says nothing or too much.
    """
    found: dict[str, Path] = {}
    for given in options.model:
        named, equals, where = given.partition("=")
        if not equals or Path(given).expanduser().is_dir():
            named, where = "", given
        if options.name is not None and (named or len(options.model) > 1):
            raise ConfigError.of("name", options.name, "names a lone --model DIR; write --model NAME=DIR instead")
        folder = Path(local_model(where)).resolve()
        name = named or options.name or (str(folder) if Path(where).expanduser().is_dir() else where)
        if name in found:
            raise ConfigError.of("model", given, f"the name {name!r} is given twice; give each model its own")
        found[name] = folder
    return found


class _Plan(NamedTuple):
    """What is started of one model."""

    name: str
    folder: Path
    config: Mapping[str, Any]
    runtime: RuntimeConfig
    rollout: RolloutConfig


def _plan(name: str, folder: Path, options: argparse.Namespace, share: ClusterShare) -> _Plan:
    """Raises what ranks or engines would refuse, before any of them is started."""
    dtype = resolve_dtype(options.dtype)
    length = options.max_model_len or min(positions_of(str(folder)) or _DEFAULT_LENGTH, _DEFAULT_LENGTH)
    parallel = {size: getattr(options, size) for size in ParallelConfig.model_fields}
    runtime = RuntimeConfig(
        plugins=options.plugin,
        backend=options.runtime,
        hf_path=str(folder),
        max_tokens_per_micro_batch=max(options.max_tokens, length),
        backend_cfg={"param_dtype": dtype, "parallel": parallel},
    )
    check_ranks("RuntimeConfig", runtime, options.ranks, options.dtype)
    rollout = RolloutConfig(
        model_path=str(folder),
        num_engines=options.engines,
        dtype=dtype,
        max_model_len=length,
        load_tokenizer=(folder / "tokenizer.json").is_file(),
        max_adapters=options.max_adapters,
        max_adapter_rank=options.max_rank,
        cores_per_engine=share.cores_per_engine,
        kv_cache_gib=options.kv_cache_gib,
        **({"gpus_per_worker": share.gpus} if share.gpus else {}),
    )
    return _Plan(name, folder, text_config(read_hf_config(folder)), runtime, within_model(rollout))


def _served(
    plan: _Plan, group: TrainGroup, rollout: RolloutGroup, futures: Futures, store: Store, options: argparse.Namespace
) -> ServedModel:
    mixes, length = any(plan.config.get(each) for each in EXPERT_COUNTS), plan.rollout.max_model_len
    training = Training(
        group,
        futures.finish,
        model=plan.folder,
        vocab_size=int(plan.config["vocab_size"]),
        longest=length,
        max_rank=options.max_rank,
        max_runs=options.max_runs,
        kinds=("feed_forward", "experts") if mixes else ("feed_forward",),
        boundaries=store.folder / "boundaries" if options.recover == "checkpoint" else None,
    )
    sampling = Sampling(rollout, end_tokens(plan.folder), most_pushed=_MOST_PUSHED)
    return ServedModel(plan.name, plan.folder, length, training, sampling)


def _require_keys(store: Store, host: str) -> None:
    if not _is_loopback(host) and not store.has_keys:
        raise ConfigError(
            f"--host {host}: others can reach this address, and {store.folder} has no keys: make one with --new-key NAME, "
            "or listen at 127.0.0.1"
        )


def _is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


@contextmanager
def _listening(host: str, port: int) -> Iterator[socket.socket]:
    """The port, taken before anything else is started."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family) as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind((host, port))
            # Not only when it serves: until then the port of a socket that is bound with SO_REUSEADDR can be bound again.
            listener.listen()
        except (OSError, OverflowError) as error:
            raise ConfigError(f"--host {host} --port {port}: {error}; choose another") from None
        yield listener
