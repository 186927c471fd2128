"""What the command makes of its options, and how bodies, pages and restarts are counted, without ranks and engines."""

from __future__ import annotations

import argparse
import asyncio
import json
import socket
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import zstandard

from actors.cluster.placement import ClusterShare
from actors.serve import app, command, restarts
from actors.serve.app import _body, _completion, _page, _unpack
from actors.serve.pages import _label, _metric
from actors.serve.restarts import ServerLostError, _status, keep_serving
from actors.serve.server import Limits
from actors.serve.store import JSON, PROTOBUF, Store
from rl_backend.cli.serve import add_arguments
from rl_backend.contracts import BatchError, ConfigError


def parsed(*arguments: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    return parser.parse_args(arguments)


@pytest.mark.parametrize(
    ("host", "is_loopback"),
    [
        ("localhost", True),
        ("127.0.0.1", True),
        ("127.9.9.9", True),
        ("::1", True),
        ("0.0.0.0", False),
        ("::", False),
        ("10.0.0.1", False),
        ("localhost.example.org", False),
        ("", False),
    ],
)
def test_only_addresses_that_others_cannot_reach_need_no_keys(host: str, is_loopback: bool, tmp_path: Path) -> None:
    store = Store(tmp_path)
    with nullcontext() if is_loopback else pytest.raises(ConfigError, match="has no keys"):
        command._require_keys(store, host)
    store.close()


def write_model(folder: Path, **config: Any) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps({"model_type": "qwen3", "vocab_size": 77, **config}))
    return folder


def plan(folder: Path, share: ClusterShare, *options: str) -> Any:
    return command._plan("name", folder, parsed("--model", str(folder), "--dtype", "float32", *options), share)


@pytest.mark.parametrize(
    ("positions", "options", "length", "tokens"),
    [
        (1000, (), 1000, 16384),
        (9000, (), 4096, 16384),
        (None, (), 4096, 16384),
        (9000, ("--max-model-len", "8000"), 8000, 16384),
        (9000, ("--max-tokens", "64"), 4096, 4096),
        (100, ("--max-tokens", "64", "--max-model-len", "50"), 50, 64),
    ],
)
def test_ranks_and_engines_take_texts_of_the_same_length(
    positions: int | None, options: tuple[str, ...], length: int, tokens: int, tmp_path: Path
) -> None:
    folder = write_model(tmp_path / "m", **({} if positions is None else {"max_position_embeddings": positions}))
    found = plan(folder, ClusterShare(2, 3, 0), *options)
    assert (found.rollout.max_model_len, found.runtime.max_tokens_per_micro_batch) == (length, tokens)
    assert (found.rollout.cores_per_engine, found.rollout.is_set("gpus_per_worker")) == (3, False)
    assert not found.rollout.load_tokenizer and found.name == "name" and found.config["vocab_size"] == 77


def test_options_of_ranks_and_engines_reach_each(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "m", max_position_embeddings=64)
    (folder / "tokenizer.json").write_text("{}")
    layout = ("--ranks", "4", "--engines", "2", "--tp", "2", "--max-rank", "48", "--max-adapters", "3")
    found = plan(folder, ClusterShare(2, 3, 0.5), *layout, "--kv-cache-gib", "1.5")
    assert found.rollout.load_tokenizer and found.rollout.gpus_per_worker == 0.5
    assert (found.rollout.num_engines, found.rollout.kv_cache_gib, found.rollout.dtype) == (2, 1.5, "float32")
    assert (found.rollout.max_adapters, found.rollout.max_adapter_rank) == (3, 48)
    assert found.runtime.backend_cfg.parallel.tp == 2 and found.runtime.hf_path == found.rollout.model_path == str(folder)
    with pytest.raises(ConfigError, match="ranks=3"):
        plan(folder, ClusterShare(1, 1, 0), *layout, "--ranks", "3")


@pytest.mark.parametrize(("experts", "recover"), [(4, "checkpoint"), (0, "off")])
def test_training_adapts_what_its_model_has_and_keeps_states_where_it_recovers(
    experts: int, recover: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: dict[str, Any] = {}
    monkeypatch.setattr(
        command, "Training", lambda group, finish, **options: made.update(options, group=group, finish=finish)
    )
    monkeypatch.setattr(command, "Sampling", lambda rollout, ends, **options: (rollout, ends, options))
    folder = write_model(tmp_path / "m", max_position_embeddings=64, num_experts=experts, eos_token_id=5)
    options = parsed("--model", str(folder), "--recover", recover, "--max-rank", "48", "--max-runs", "3")
    given: Any = command._Plan(
        "name", folder, json.loads((folder / "config.json").read_text()), *[SimpleNamespace(max_model_len=64)] * 2
    )
    store: Any = SimpleNamespace(folder=tmp_path)
    futures: Any = SimpleNamespace(finish="finish")
    found: Any = command._served(given, "group", "rollout", futures, store, options)  # type: ignore[arg-type]
    assert made == {
        "group": "group",
        "finish": "finish",
        "model": folder,
        "vocab_size": 77,
        "longest": 64,
        "max_rank": 48,
        "max_runs": 3,
        "kinds": ("feed_forward", "experts") if experts else ("feed_forward",),
        "boundaries": tmp_path / "boundaries" if recover == "checkpoint" else None,
    }
    assert (found.name, found.folder, found.longest) == ("name", folder, 64)
    assert found.sampling == ("rollout", [5], {"most_pushed": 64})


def test_limits_of_the_command_are_those_of_the_server_and_ranks_start_while_engines_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    began: list[Any] = []

    @contextmanager
    def group(what: str, *given: Any) -> Iterator[Any]:
        began.append((what, *given))
        yield SimpleNamespace(join=lambda: began.append(f"{what} joined"))
        began.append(f"{what} ended")

    folder = write_model(tmp_path / "m", max_position_embeddings=64)
    model: Any = SimpleNamespace(
        name="n", training=SimpleNamespace(close=lambda: began.append("closed"), failed="", tokens=0)
    )
    model.tokens = {}
    monkeypatch.setattr(command, "ray_session", lambda *counts: nullcontext())
    monkeypatch.setattr(command, "share_cluster", lambda *_, **__: ClusterShare(2, 3, 0.5))
    monkeypatch.setattr(command, "RolloutGroup", lambda config, *, wait: group("engines", config.num_engines, wait))
    monkeypatch.setattr(command, "TrainGroup", lambda config, *sizes, recover: group("ranks", *sizes, recover))
    monkeypatch.setattr(command, "_served", lambda *_: model)
    limits = ("--session-timeout", "9", "--keep-results", "8", "--disk-gib", "0.5", "--requests-per-second", "7")
    store = Store(tmp_path / "state")
    with command.open_server(parsed("--model", str(folder), "--dtype", "float32", *limits), store) as server:
        assert began == [("engines", 1, True), ("ranks", 1, 2, 0.5, "checkpoint"), "engines joined"]
        assert server.limits == Limits(session_timeout=9.0, keep_results=8.0, disk_bytes=1 << 29, requests_per_second=7.0)
        assert server.rates.wait("ann") == 0
    assert began[3:] == ["closed", "ranks ended", "engines ended"]
    store.close()


def test_what_works_beside_the_server_ends_it_and_is_heard() -> None:
    def fails() -> None:
        raise ServerLostError("lost")

    for work, said in ((lambda: None, ""), (fails, "lost")):
        web: Any = SimpleNamespace(started=False, should_exit=False)
        with pytest.raises(ServerLostError, match="lost") if said else nullcontext(), command._beside(web, work):
            time.sleep(0.1)
            assert not web.should_exit, "before the server has started nothing is done"
            web.started = True
        assert web.should_exit


@pytest.mark.parametrize(("dtype", "largest"), [("float32", 1e-3), ("bfloat16", 0.1)])
def test_a_check_goes_through_every_model_with_the_gap_of_its_dtype(
    dtype: str, largest: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Any] = []
    monkeypatch.setattr(
        command, "check_server", lambda url, name, *, largest_gap, say: asked.append((url, name, largest_gap))
    )
    server: Any = SimpleNamespace(models={"a": 1, "b": 2})
    command._check("http://x", server, parsed("--model", "m", "--dtype", dtype))
    assert asked == [("http://x", "a", largest), ("http://x", "b", largest)]


@pytest.mark.parametrize(
    ("ends", "status", "pauses"),
    [
        # Of each process: its status, and whether it has served.
        ([(0, True)], 0, []),
        ([(2, False)], 2, []),
        ([(1, True), (0, True)], 0, [0.0]),
        ([(137, True), (1, False), (1, False), (1, False)], 1, [0.0, 2.0, 2.0]),
        (
            [(1, True), (1, False), (1, False), (1, True), (1, False), (1, False), (0, True)],
            0,
            [0.0, 2.0, 2.0, 0.0, 2.0, 2.0],
        ),
        ([(1, True), (0, False)], 0, [0.0]),
    ],
    ids=range(6),
)
def test_a_server_that_has_served_is_started_again_unless_it_fails_three_times_in_a_row(
    ends: list[tuple[int, bool]], status: int, pauses: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    left, slept = list(ends), list[float]()

    class Event:
        def __init__(self) -> None:
            self.is_set = lambda: left_before[1]

    left_before = (0, False)

    def end(_: Any) -> int:
        nonlocal left_before
        left_before = left.pop(0)
        return left_before[0]

    fork = SimpleNamespace(Event=Event, Process=lambda **_: None)
    monkeypatch.setattr(restarts.multiprocessing, "get_context", lambda kind: fork)
    monkeypatch.setattr(restarts, "_status", end)
    monkeypatch.setattr(restarts.time, "sleep", slept.append)
    listener: Any = None
    assert keep_serving(lambda *_: None, listener, argparse.Namespace()) == status
    assert not left and slept == pauses


@pytest.mark.parametrize(("code", "status"), [(0, 0), (None, 0), (2, 2), (-9, 137), (-15, 143)])
def test_a_process_that_a_signal_ends_has_the_status_that_a_shell_gives_it(code: int | None, status: int) -> None:
    process: Any = SimpleNamespace(start=lambda: None, join=lambda: None, exitcode=code, pid=1)
    assert _status(process) == status


def test_lists_are_cut_by_limit_and_offset_and_say_how_long_they_are() -> None:
    rows: Any = list(range(5))
    for limit, offset, shown in ((2, 0, [0, 1]), (2, 4, [4]), (0, 0, []), (9, 9, []), (5, 1, [1, 2, 3, 4])):
        assert _page(rows, limit, offset) == (shown, {"offset": offset, "limit": limit, "total_count": 5})
    for limit, offset in ((-1, 0), (1, -1)):
        with pytest.raises(BatchError, match=f"limit={limit}, offset={offset}: "):
            _page(rows, limit, offset)


@pytest.mark.parametrize(("size", "whole"), [(0, True), (7, True), (8, True), (9, False), (40, False)])
def test_a_body_is_kept_up_to_a_size_and_read_to_its_end(size: int, whole: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[bytes] = []

    async def stream() -> AsyncIterator[bytes]:
        for _ in range(size):
            read.append(b"x")
            yield b"x"

    request: Any = SimpleNamespace(stream=stream)
    kept, is_whole = asyncio.run(_body(request, 8))
    assert is_whole is whole and len(kept) == min(size, 9) and len(read) == size
    monkeypatch.setattr(app, "MOST_BODY", 8)
    assert _unpack(zstandard.compress(b"x" * size)) == (b"x" * min(size, 8), whole)


def test_a_body_that_is_not_packed_is_refused() -> None:
    with pytest.raises(BatchError, match="body: not zstd"):
        _unpack(b"x" * 40)


def test_a_request_that_failed_is_told_of_without_its_answer() -> None:
    assert _completion({"media": JSON, "id": "a", "size": 5}) == {"state": "failed", "request_id": "a"}
    assert _completion({"media": PROTOBUF, "id": "a", "size": 5}) == {
        "state": "finished",
        "request_id": "a",
        "response_payload_uncompressed_size": 5,
    }


def test_metrics_have_prometheus_form() -> None:
    assert _metric("n", "gauge", "what it is", {"": 1.0, '{a="b"}': 0.5}) == [
        "# HELP rl_backend_serve_n what it is",
        "# TYPE rl_backend_serve_n gauge",
        "rl_backend_serve_n 1",
        'rl_backend_serve_n{a="b"} 0.5',
    ]
    assert _metric("n", "counter", "x", {"": 12345678901.0})[2].endswith(" 12345678901")
    assert _label('a"b\\c\nd') == '{model="a\\"b\\\\c\\nd"}'


def test_a_port_may_be_of_an_address_of_the_sixth_version() -> None:
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        pytest.skip("no such addresses here")
    with command._listening("::1", 0) as listener:
        assert listener.family == socket.AF_INET6 and listener.getsockname()[1] > 0
