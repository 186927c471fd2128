"""The server as a process: Ray, ranks and engines, the state folder, and HTTP until it is interrupted."""

from __future__ import annotations

import argparse
import ipaddress
import socket
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import uvicorn

from actors.cluster.placement import share_cluster
from actors.cluster.session import ray_session
from actors.options.config import check_ranks, resolve_dtype
from actors.rollout.config import RolloutConfig, positions_of
from actors.rollout.group.group import RolloutGroup
from actors.serve.app import Asked, Owner, make_app
from actors.serve.openai import add_openai
from actors.serve.sampling import Sampling, end_tokens
from actors.serve.server import Futures, Limits, Server
from actors.serve.store import Store
from actors.serve.training import Training
from actors.train.group import TrainGroup
from actors.watch.console import Phases
from rl_backend.checkpoint.hf_reader import read_hf_config
from rl_backend.contracts import ConfigError, ParallelConfig, RuntimeConfig, text_config
from rl_backend.data.hub import local_model

_DEFAULT_LENGTH = 4096
# Adapters that engines keep in host memory; more give way, and come back when they are used.
_MOST_PUSHED = 64
_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")


def new_key(state: Path, name: str) -> str:
    store = Store(state)
    try:
        return store.make_key(name)
    finally:
        store.close()


def remove_key(state: Path, name: str) -> None:
    store = Store(state)
    try:
        store.remove_key(name)
    finally:
        store.close()


def serve(options: argparse.Namespace) -> None:
    """Serves until SIGTERM or Ctrl-C.

    Raises:
        ConfigError: an address that others reach, without keys; or options that ranks or engines refuse.
    """
    store = Store(options.state)
    try:
        _require_keys(store, options.host)
        with _listening(options.host, options.port) as listener, open_server(options, store) as server:
            host, port = listener.getsockname()[:2]
            print(f"serving {server.name} at http://{host}:{port}", flush=True)
            print(
                f"  TINKER_BASE_URL=http://{host}:{port} TINKER_API_KEY=tml-...   status page: http://{host}:{port}/",
                flush=True,
            )
            app = make_app(server)
            add_openai(app, server, Owner, Asked)
            config = uvicorn.Config(
                app, log_level="warning", timeout_graceful_shutdown=5, h11_max_incomplete_event_size=65536
            )
            uvicorn.Server(config).run(sockets=[listener])
    finally:
        store.close()


@contextmanager
def open_server(options: argparse.Namespace, store: Store) -> Iterator[Server]:
    """Ranks, engines and the server over them.

    Raises:
        ConfigError, UnsupportedError: they cannot be had.
    """
    model = Path(local_model(options.model)).resolve()
    name = options.name or (options.model if not Path(options.model).expanduser().is_dir() else str(model))
    phases = Phases()
    with ExitStack() as stack:
        store.begin()
        stack.enter_context(ray_session(options.ranks, options.engines))
        share = share_cluster(options.ranks, options.engines, take_turns=True)
        dtype, length = resolve_dtype(options.dtype), _length(model, options)
        parallel = {size: getattr(options, size) for size in ParallelConfig.model_fields}
        runtime = RuntimeConfig(
            plugins=options.plugin,
            backend=options.runtime,
            hf_path=str(model),
            max_tokens_per_micro_batch=max(options.max_tokens, length),
            backend_cfg={"param_dtype": dtype, "parallel": parallel},
        )
        check_ranks("RuntimeConfig", runtime, options.ranks, options.dtype)
        rollout = RolloutConfig(
            model_path=str(model),
            num_engines=options.engines,
            dtype=dtype,
            max_model_len=length,
            load_tokenizer=(model / "tokenizer.json").is_file(),
            max_adapters=options.max_adapters,
            max_adapter_rank=options.max_rank,
            cores_per_engine=share.cores_per_engine,
            kv_cache_gib=options.kv_cache_gib,
            **({"gpus_per_worker": share.gpus} if share.gpus else {}),
        )
        with phases.phase("ranks", f"starting {options.ranks} of {options.runtime}"):
            group = stack.enter_context(TrainGroup(runtime, options.ranks, share.cores_per_rank, share.gpus))
        with phases.phase("engines", f"starting {options.engines}"):
            engines = stack.enter_context(RolloutGroup(rollout))
        config = text_config(read_hf_config(model))
        futures = Futures(store)
        with phases.phase("model", "loading the base"):
            training = Training(
                group,
                futures.finish,
                model=model,
                vocab_size=int(config["vocab_size"]),
                longest=length,
                max_rank=options.max_rank,
                max_runs=options.max_runs,
                kinds=("feed_forward", "experts") if any(config.get(each) for each in _EXPERTS) else ("feed_forward",),
            )
        stack.callback(training.close)
        sampling = Sampling(engines, end_tokens(model), most_pushed=_MOST_PUSHED)
        limits = Limits(session_timeout=options.session_timeout, keep_results=options.keep_results)
        yield Server(store, futures, training, sampling, name=name, model=model, longest=length, limits=limits)


def _length(model: Path, options: argparse.Namespace) -> int:
    positions = positions_of(str(model)) or _DEFAULT_LENGTH
    return options.max_model_len or min(positions, _DEFAULT_LENGTH)


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
        except (OSError, OverflowError) as error:
            raise ConfigError(f"--host {host} --port {port}: {error}; choose another") from None
        yield listener
