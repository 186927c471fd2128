"""What a server does without HTTP, ranks and engines: names, limits, times, and what goes with a session."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from actors.serve.app import _shown_run
from actors.serve.external import Links
from actors.serve.openai import _named, _names, _newest
from actors.serve.scores import Scoring
from actors.serve.server import (
    BusyError,
    Futures,
    Limits,
    ServedModel,
    Server,
    Snapshot,
    UnknownError,
    expiry,
    metadata_in,
    shown_checkpoint,
    shown_time,
)
from actors.serve.store import CHECKPOINTS, REQUESTS, RUNS, SAMPLERS, SESSIONS, Result, Store
from actors.serve.training import ADAPTER
from rl_backend.contracts import BatchError

ENDS: list[tuple[str, str]] = []


class Samples:
    """Samplers that answer when they are told to."""

    def __init__(self) -> None:
        self.tokens, self.forgotten = 0, list[Path]()
        self.gate: asyncio.Event | None = None

    async def answer(self, asked: Any, folder: Any, score: Any) -> bytes:
        if self.gate is not None:
            await self.gate.wait()
        return b"samples"

    async def forget(self, folder: Path) -> None:
        self.forgotten.append(folder)


def served(name: str) -> ServedModel:
    forgotten: list[Path] = []
    training: Any = SimpleNamespace(
        tokens=0,
        failed="",
        forgotten=forgotten,
        forget=forgotten.append,
        end=lambda run, why: ENDS.append((f"{name}: {run}", why)),
    )
    sampling: Any = Samples()
    return ServedModel(name, Path("nowhere"), 64, training, sampling)


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    ENDS.clear()
    store = Store(tmp_path / "state")
    yield Server(store, Futures(store), [served("first"), served("second")], Limits())
    store.close()


def add_run(server: Server, name: str, base: str = "first", **changed: Any) -> None:
    values = {"owner": "ann", "created": 1.0, "last_request": 1.0, "over": "", "failed": False, "lora": {"rank": 3}}
    server.store.add(RUNS, id=name, session=name.partition(":")[0], base_model=base, **{**values, **changed})


def add_checkpoint(server: Server, run: str, name: str, folder: Path, kind: str = "weights", **changed: Any) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    values = {
        "owner": "ann",
        "base_model": "first",
        "lora": {},
        "created": 5.0,
        "bytes": 7,
        "expires": None,
        "public": False,
    }
    server.store.put(CHECKPOINTS, run=run, kind=kind, name=name, folder=str(folder), **{**values, **changed})
    return folder


def test_speeds_are_of_the_last_minute_and_of_each_model(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    now, (first, second) = [server.started], server.models.values()
    monkeypatch.setattr(time, "time", lambda: now[0])
    first.training.tokens, first.sampling.tokens = 30, 4
    second.training.tokens = 100
    assert server.speeds(first) == {"trained": 30.0, "sampled": 4.0}, "of less than a second, as of one"
    for seconds, tokens in ((10, 300), (30, 900), (80, 2000)):
        now[0] = server.started + seconds
        first.training.tokens = tokens
        server._count(now[0])
    assert len(server._counts) == 2, "the others are longer ago than a minute"
    now[0] += 20
    assert server.speeds(first) == pytest.approx({"trained": (2000 - 900) / 70, "sampled": 0.0})
    assert server.speeds(second) == {"trained": 0.0, "sampled": 0.0}


def test_whether_keys_are_needed_is_looked_up_once_a_second_until_they_are(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    now, looks = [100.0], list[float]()
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    has = type(server.store).has_keys

    def looked(store: Store) -> bool:
        looks.append(now[0])
        return has.fget(store)  # type: ignore[attr-defined, no-any-return]

    monkeypatch.setattr(Store, "has_keys", property(looked))
    assert [server.needs_keys for _ in range(3)] == [False] * 3
    server.store.make_key("ann")
    now[0] = 100.5
    assert not server.needs_keys and looks == [100.0]
    now[0] = 101.5
    assert server.needs_keys and server.needs_keys
    now[0] = 900.0
    assert server.needs_keys and looks == [100.0, 101.5]


def test_models_are_found_by_their_names_and_what_ended_their_training_is_told_of_each(server: Server) -> None:
    assert server.model("second").name == "second" and server.failed == ""
    for wrong in ("third", None, 3, ["first"]):
        with pytest.raises(UnknownError, match="this server has 'first', 'second'"):
            server.model(wrong)
    server.models["second"].training.failed = "a rank died"
    assert server.failed == "second: a rank died"
    server.models["first"].training.failed = "it too"
    assert server.failed == "first: it too; second: a rank died"


def test_a_checkpoint_is_given_a_life_of_up_to_ten_years(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(time, "time", lambda: 1000.0)
    assert expiry({}) is None and expiry({"ttl_seconds": None}) is None
    assert (expiry({"ttl_seconds": 5}), expiry({"ttl_seconds": 0.5})) == (1005.0, 1000.5)
    assert expiry({"ttl_seconds": 316224000}) == 316225000.0
    for wrong in (0, -1, 316224001, "5", float("nan"), float("inf")):
        with pytest.raises(BatchError, match="ttl_seconds="):
            expiry({"ttl_seconds": wrong})


def test_metadata_are_bounded_by_their_bytes_as_json() -> None:
    most = 16384 - 2
    assert metadata_in({}) is None and metadata_in({"user_metadata": "x" * most}) == "x" * most
    with pytest.raises(BatchError, match="user_metadata: 16385 bytes; expected at most 16384"):
        metadata_in({"user_metadata": "x" * (most + 1)})


def test_a_checkpoint_is_shown_with_its_times_in_utc() -> None:
    row = {
        "kind": "sampler_weights",
        "name": "n",
        "created": 86400.0,
        "run": "r",
        "bytes": 5,
        "public": None,
        "expires": 3661,
    }
    expected = {
        "checkpoint_id": "sampler_weights/n",
        "checkpoint_type": "sampler",
        "time": "1970-01-02T00:00:00Z",
        "tinker_path": "tinker://r/sampler_weights/n",
        "size_bytes": 5,
        "public": False,
        "user_metadata": {"a": 1},
        "expires_at": "1970-01-01T01:01:01Z",
    }
    assert shown_checkpoint({**row, "user_metadata": {"a": 1}}) == expected
    assert shown_checkpoint({**row, "user_metadata": {"a": 1}, "expires": None}) == {**expected, "expires_at": None}
    assert shown_time(0) == "1970-01-01T00:00:00Z"


def test_places_for_samples_are_bounded_unless_nobody_else_has_one_and_are_given_back(server: Server) -> None:
    server.limits = replace(server.limits, open_samples=4)
    server.require_places(9)

    def fails() -> None:
        with server.places(3):
            server.require_places(1)
            with pytest.raises(BusyError, match="3 samples are open"):
                server.require_places(2)
            raise KeyError

    with pytest.raises(KeyError):
        fails()
    server.require_places(4)
    assert server._open_samples == 0


def test_checkpoints_are_found_by_their_whole_path_by_those_who_may_read_them(server: Server, tmp_path: Path) -> None:
    for name, created in (("old", 5.0), ("new", 6.0)):
        add_checkpoint(server, "s:train:0", name, tmp_path / name, created=created)
    add_checkpoint(server, "s:train:1", "other", tmp_path / "other", created=5.5)
    add_checkpoint(server, "s:train:0", "hers", tmp_path / "hers", owner="bob", public=True)
    path = "tinker://s:train:0/weights/old"
    assert server.find("ann", path)["created"] == 5.0
    for wrong in (path[9:], f"{path}/x", path.replace("weights", "sampler_weights"), "tinker://s:train:0/weights", ""):
        with pytest.raises(UnknownError, match="is not known"):
            server.find("ann", wrong)
    assert server._find("ann", path, "weights") is not None and server._find("ann", path, "sampler_weights") is None
    with pytest.raises(UnknownError):
        server.find("bob", path)
    public = path.replace("old", "hers")
    assert server.find("ann", public)["owner"] == "bob"
    with pytest.raises(UnknownError):
        server.find("ann", public, own=True)
    assert server.find("bob", public, own=True)["name"] == "hers"
    assert [each["checkpoint_id"] for each in server.checkpoints("ann")] == ["weights/new", "weights/other", "weights/old"]
    assert [each["checkpoint_id"] for each in server.checkpoints("ann", "s:train:0")] == ["weights/new", "weights/old"]
    server.publish("ann", path, public=True)
    assert server.find("bob", path)["name"] == "old"
    server.keep_checkpoint("ann", path, {"ttl_seconds": 50})
    assert server.find("ann", path)["expires"] == pytest.approx(time.time() + 50, abs=5)
    others = [server.find("ann", f"tinker://s:train:{run}/weights/{name}") for run, name in ((0, "new"), (1, "other"))]
    assert [(each["public"], each["expires"]) for each in others] == [(False, None)] * 2
    server.keep_checkpoint("ann", path, {})
    assert server.find("ann", path)["expires"] is None


def test_a_session_that_is_used_again_lives_and_one_that_has_ended_beats_no_more(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [1000.0]
    monkeypatch.setattr(time, "time", lambda: now[0])
    session = server.create_session("ann", {"tags": ["a"], "unheard_of": 1})["session_id"]
    assert server.known(SESSIONS, "ann", session)["asked"] == {
        "tags": ["a"], "sdk_version": None, "display_name": None, "user_metadata": None,
    }  # fmt: skip
    now[0] = 1100.0
    assert server.beat("ann", session) and server.known(SESSIONS, "ann", session)["seen"] == 1100.0
    assert not server.beat("bob", session) and not server.beat("ann", "other")
    with pytest.raises(UnknownError, match=f"session '{session}' is not known"):
        server.require_session("bob", session)
    asyncio.run(server.end_session(session, "over"))
    assert not server.beat("ann", session)
    now[0] = 1200.0
    server.require_session("ann", session)
    found = server.known(SESSIONS, "ann", session)
    assert (found["ended"], found["seen"]) == (False, 1200.0) and server.beat("ann", session)


def test_only_sessions_that_are_silent_and_checkpoints_whose_time_is_over_go(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [1000.0]
    monkeypatch.setattr(time, "time", lambda: now[0])
    silent, speaks = (server.create_session("ann", {})["session_id"] for _ in range(2))
    for session, base in ((silent, "second"), (speaks, "first")):
        add_run(server, f"{session}:train:0", base)
    add_run(server, f"{silent}:train:1", over="it was over before")
    kept = {
        name: add_checkpoint(server, f"{silent}:train:0", name, tmp_path / name, expires=expires)
        for name, expires in (("stays", None), ("later", 1400.0), ("gone", 1399.0))
    }
    now[0] = 1200.0
    server.beat("ann", speaks)
    now[0] = 1400.0
    asyncio.run(server._sweep_once())
    assert [run for run, _ in ENDS] == [f"second: {silent}:train:0"] and "no heartbeat for 300 s" in ENDS[0][1]
    assert {row["id"]: row["ended"] for row in server.store.rows(SESSIONS)} == {silent: True, speaks: False}
    assert server.known(RUNS, "ann", f"{silent}:train:1")["over"] == "it was over before"
    assert {row["name"] for row in server.store.rows(CHECKPOINTS)} == {"stays", "later"}
    assert [folder.exists() for folder in kept.values()] == [True, True, False]


def test_a_session_takes_its_snapshots_with_it_and_leaves_what_has_a_name_or_another_sampler(
    server: Server, tmp_path: Path
) -> None:
    session, lives = (server.create_session("ann", {})["session_id"] for _ in range(2))
    folders = {name: tmp_path / name for name in ("snapshot", "named", "shared", "deleted")}
    for folder in folders.values():
        (folder / ADAPTER).mkdir(parents=True)
    add_checkpoint(server, f"{session}:train:0", "named", folders["named"])

    def sampler(name: str, folder: str | None, path: str | None, of: str = session) -> None:
        where = None if folder is None else str(folders[folder])
        server.store.add(SAMPLERS, id=name, session=of, owner="ann", base_model="first", folder=where, path=path)

    sampler("base", None, None)
    sampler("of a snapshot", "snapshot", None)
    sampler("of a name", "named", "tinker://p")
    # Their checkpoints were deleted; of one another session has a sampler.
    sampler("of a deleted", "deleted", "tinker://q")
    sampler("of a shared", "shared", "tinker://r")
    sampler("its other", "shared", "tinker://r", lives)
    asyncio.run(server.end_session(session, "over"))
    assert {name for name, folder in folders.items() if folder.exists()} == {"named", "shared"}
    gone = [folders[name] / ADAPTER for name in ("snapshot", "deleted")]
    for model in server.models.values():
        sampling: Any = model.sampling
        training: Any = model.training
        assert sampling.forgotten == training.forgotten == gone
    asyncio.run(server.end_session(lives, "over"))
    assert not folders["shared"].exists() and folders["named"].exists()


def test_samples_that_are_asked_for_twice_are_drawn_once_and_without_a_number_each_time(server: Server) -> None:
    server.store.add(SAMPLERS, id="s", session="x", owner="ann", base_model="first")

    async def sample() -> None:
        sampling: Any = server.models["first"].sampling
        sampling.gate = asyncio.Event()
        asked = {"sampling_session_id": "s", "seq_id": 0, "num_samples": 3}
        first, again = server.sample("ann", asked), server.sample("ann", asked)
        assert first == again and server._open_samples == 3 and len(first["sample_sequence_ids"]) == 3
        free = [server.sample("ann", {"sampling_session_id": "s"}) for _ in range(2)]
        assert len({each["request_id"] for each in (first, *free)}) == 3 and server._open_samples == 5
        assert [len(each["sample_sequence_ids"]) for each in free] == [1, 1]
        # What one request gives up the others keep.
        server.cancel("ann", free[0]["request_id"])
        for _ in range(3):
            await asyncio.sleep(0)
        assert server._open_samples == 4
        sampling.gate.set()
        while server._tasks:
            await asyncio.sleep(0)
        for _ in range(3):
            await asyncio.sleep(0)
        assert server._open_samples == 0
        server.cancel("ann", first["request_id"])

    asyncio.run(sample())
    bodies = [row["body"] for row in server.store.rows(REQUESTS)]
    assert bodies.count(b"samples") == 2 and sum(b"cancelled" in body for body in bodies) == 1


def test_texts_are_scored_up_to_the_model_s_length(server: Server) -> None:
    asked: list[Any] = []
    model = server.models["first"]

    def read(folder: Any, lora: Any, scoring: Scoring) -> Any:
        asked.append((folder, lora))
        raise KeyError("computed")

    training: Any = model.training
    training.read_log_probs, training.config_of = read, lambda given: f"lora of {given}"
    for given, lora in ((None, None), ({"rank": 3}, "lora of {'rank': 3}")):
        score: Callable[[Scoring], Any] = model.scorer(Path("folder"), given)
        with pytest.raises(KeyError):
            asyncio.run(score(Scoring([1] * 64)))
        assert asked.pop() == (Path("folder"), lora)
        with pytest.raises(BatchError, match="a text of 65 tokens; log-probs are computed up to 64"):
            asyncio.run(score(Scoring([1] * 65)))
    assert not asked


def test_an_address_of_a_file_ends_after_an_hour_and_leads_to_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [1000.0]
    monkeypatch.setattr(time, "time", lambda: now[0])
    for name in ("b.bin", "a.json"):
        (tmp_path / "one" / name).parent.mkdir(exist_ok=True)
        (tmp_path / "one" / name).write_text(name)
    (tmp_path / "secret").write_text("x")
    links = Links()
    found, expires = links.make(tmp_path / "one")
    assert list(found) == ["a.json", "b.bin"] and expires == 4600.0
    token, _, name = found["b.bin"].partition("/")
    assert links.find(token, name) == tmp_path / "one" / "b.bin"
    assert [links.find(token, each) for each in ("../secret", "secret", "")] == [None] * 3
    assert links.find("other", name) is None
    now[0] = 4599.0
    again, _ = links.make(tmp_path / "one")
    assert again != found and links.find(token, name) is not None, "the first goes on to its own end"
    now[0] = 4601.0
    assert links.find(token, name) is None and links.find(again["b.bin"].partition("/")[0], name) is not None
    links.make(tmp_path / "one")
    assert len(links._folders) == 2, "what has expired is forgotten"


def test_a_run_is_shown_with_the_newest_checkpoint_of_each_kind(server: Server, tmp_path: Path) -> None:
    add_run(server, "s:train:0", last_request=86400.0, user_metadata={"a": 1})
    add_run(server, "s:train:1", lora={})
    for number, (kind, created) in enumerate(
        (("weights", 7.0), ("weights", 9.0), ("sampler_weights", 8.0), ("weights", 5.0))
    ):
        add_checkpoint(server, "s:train:0", str(number), tmp_path / str(number), kind, created=created)
    shown, other = (_shown_run(server, server.known(RUNS, "ann", f"s:train:{number}")) for number in range(2))
    assert (shown["last_checkpoint"]["checkpoint_id"], shown["last_sampler_checkpoint"]["checkpoint_id"]) == (
        "weights/1",
        "sampler_weights/2",
    )
    assert (shown["lora_rank"], shown["user_metadata"], shown["last_request_time"]) == (3, {"a": 1}, "1970-01-02T00:00:00Z")
    assert (other["lora_rank"], other["last_checkpoint"], other["last_sampler_checkpoint"]) == (32, None, None)


def test_names_of_openai_s_list_are_those_that_can_be_sampled(server: Server, tmp_path: Path) -> None:
    for name, changed in (
        ("s:train:0", {}),
        ("s:train:1", {}),
        ("s:train:2", {"over": "ended"}),
        ("s:train:3", {"owner": "bob"}),
    ):
        add_run(server, name, **changed)
        add_checkpoint(server, name, "old", tmp_path / f"{name}-old", owner=changed.get("owner", "ann"), created=5.0)
    add_checkpoint(server, "s:train:0", "new", tmp_path / "new", created=7.0)
    add_checkpoint(server, "s:train:0", "for downloads", tmp_path / "x", "external_weights", created=9.0)
    add_checkpoint(server, "s:train:0", "of another model", tmp_path / "y", base_model="third", created=4.0)
    add_run(server, "s:train:4")
    assert _names(server, "ann") == [
        "first",
        "second",
        "s:train:0",
        "s:train:1",
        "tinker://s:train:0/weights/new",
        "tinker://s:train:2/weights/old",
        "tinker://s:train:1/weights/old",
        "tinker://s:train:0/weights/old",
    ]
    assert _newest(server, "ann", "s:train:0") == tmp_path / "new" and _newest(server, "ann", "s:train:4") is None
    for made, newest in ((6.0, tmp_path / "new"), (8.0, tmp_path / "snapshot")):
        server._snapshots["s:train:0"] = deque(
            [Snapshot(made - 1, tmp_path / "before"), Snapshot(made, tmp_path / "snapshot")]
        )
        assert _newest(server, "ann", "s:train:0") == newest
    server._snapshots["s:train:0"] = deque()
    assert _newest(server, "ann", "s:train:0") == tmp_path / "new"
    for name, folder in (("tinker://s:train:0/weights/old", "s:train:0-old"), ("s:train:1", "s:train:1-old")):
        found = _named(server, "ann", name)
        assert (found.model.name, found.folder) == ("first", tmp_path / folder / ADAPTER)
    assert _named(server, "ann", "second") == (server.models["second"], None, None)
    for name in ("s:train:4", "s:train:3", "third"):
        with pytest.raises(UnknownError):
            _named(server, "ann", name)


def test_whoever_waits_for_an_answer_has_it_and_leaves_nothing_behind(server: Server) -> None:
    futures = server.futures
    one, other = (server.store.accept(scope, 0, "ann")[0] for scope in ("run", "sampler"))

    async def wait() -> None:
        assert await futures.result(one, "ann", 0.01) is None, "not yet"
        for name, owner in ((one, "bob"), ("gone", "ann")):
            with pytest.raises(UnknownError, match="is not known"):
                await futures.result(name, owner, 10)
        waits = [asyncio.create_task(futures.result(one, "ann", 10)) for _ in range(2)]
        told = asyncio.create_task(futures.completed("sampler", 0, 0, 10))
        await asyncio.sleep(0.01)
        await asyncio.to_thread(futures.finish, {one: Result.of({"n": 1}), other: Result.of(b"x")})
        assert await asyncio.gather(*waits) == [Result.of({"n": 1})] * 2
        assert [row["id"] for row in await told] == [other]
        assert await futures.result(one, "ann", 0) == Result.of({"n": 1}), "again, from the database"
        assert await futures.completed("sampler", 1, 0, 0) == []
        assert not futures._waiting.keys() - {"sampler"}

    asyncio.run(wait())


def test_whoever_stops_waiting_for_a_sampler_leaves_the_others_waiting(server: Server) -> None:
    futures = server.futures
    request, _ = server.store.accept("sampler", 0, "ann")

    async def wait() -> None:
        longer = asyncio.create_task(futures.completed("sampler", 0, 0, 10))
        for _ in range(2):
            assert await futures.completed("sampler", 0, 0, 0.01) == [], "nothing yet, and again"
        assert not longer.done()
        futures.finish({request: Result.of(b"x")})
        assert [row["id"] for row in await longer] == [request]

    asyncio.run(wait())
