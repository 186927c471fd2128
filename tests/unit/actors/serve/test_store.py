"""The database of a server: whose row is whose, what is counted, and what is forgotten."""

from __future__ import annotations

import sqlite3
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sql

from actors.serve import store as module
from actors.serve.store import (
    CHECKPOINTS,
    CLIENT_NUMBERS,
    JSON,
    KEYS,
    PROTOBUF,
    REQUESTS,
    RUNS,
    SAMPLERS,
    SESSIONS,
    Result,
    Store,
)
from rl_backend.contracts import BatchError


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    made = Store(tmp_path)
    yield made
    made.close()


def add_run(store: Store, name: str, **changed: Any) -> None:
    values = {"session": "s", "owner": "ann", "base_model": "m", "lora": {}, "created": 1.0, "last_request": 1.0, "over": ""}
    assert store.add(RUNS, id=name, **{**values, **changed})


def add_session(store: Store, name: str, *, seen: float, ended: bool) -> None:
    assert store.add(SESSIONS, id=name, owner="ann", created=1.0, seen=seen, ended=ended, asked={})
    assert store.add(SAMPLERS, id=f"{name}:sample", session=name, owner="ann", base_model="m")


def test_an_answer_is_json_or_the_bytes_of_a_message_and_says_whose_fault_it_is() -> None:
    assert Result.of(b'{"error"') == Result(PROTOBUF, b'{"error"') and not Result.of(b'{"error"').is_error
    assert Result.of({"a": 1}) == Result(JSON, b'{"a": 1}') and not Result.of({"a": {"error": 1}}).is_error
    assert Result.failed("no").body == b'{"error": "no", "category": "user"}' and Result.failed("no", "server").is_error
    assert Result.of_error(BatchError("odd")).body == b'{"error": "odd", "category": "user"}'
    assert Result.of_error(KeyError("x")).body == b'{"error": "KeyError: \'x\'", "category": "server"}'


def test_rows_are_added_once_replaced_changed_and_found_by_all_that_is_asked(store: Store) -> None:
    add_run(store, "b")
    add_run(store, "a", owner="bob", over="done")
    assert not store.add(RUNS, **{**store.rows(RUNS)[0], "owner": "other"}), "what is there stays"
    assert [(row["id"], row["owner"]) for row in store.rows(RUNS)] == [("b", "ann"), ("a", "bob")], "in the order of adding"
    assert store.get(RUNS, id="a", owner="ann") is None and store.rows(RUNS, over="", owner="bob") == []
    store.put(RUNS, **{**store.rows(RUNS)[0], "owner": "carl"})
    assert {row["id"]: row["owner"] for row in store.rows(RUNS)} == {"b": "carl", "a": "bob"}
    store.change(RUNS, {"over": "ended", "lora": {"rank": 3}}, owner="bob")
    found = {row["id"]: (row["over"], row["lora"]) for row in store.rows(RUNS)}
    assert found == {"a": ("ended", {"rank": 3}), "b": ("", {})}
    for name, path in (("x", None), ("y", "tinker://p")):
        store.add(SAMPLERS, id=name, session="s", owner="ann", base_model="m", path=path)
    assert [row["id"] for row in store.rows(SAMPLERS, path=None)] == ["x"], "None is a value to look for"
    store.delete(SAMPLERS, session="s", id="y")
    assert [row["id"] for row in store.rows(SAMPLERS)] == ["x"]


def test_a_request_that_comes_again_is_the_one_before_and_moves_no_clock(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [100.0]
    monkeypatch.setattr(time, "time", lambda: now[0])
    add_run(store, "run")
    add_run(store, "other")
    first, is_new = store.accept("run", 0, "ann")
    assert is_new
    now[0] = 200.0
    assert store.accept("run", 0, "bob") == (first, False)
    found = {row["id"]: row["last_request"] for row in store.rows(RUNS)}
    assert found == {"run": 100.0, "other": 1.0}
    others = [store.accept(*each) for each in (("run", 1, "ann"), ("other", 0, "ann"))]
    assert all(new for _, new in others) and len({first, *(each for each, _ in others)}) == 3
    assert {row["id"]: row["last_request"] for row in store.rows(RUNS)} == {"run": 200.0, "other": 200.0}
    row = store.get(REQUESTS, id=first)
    assert row is not None and (row["owner"], row["created"], row["finished"]) == ("ann", 100.0, None)


def test_the_first_answer_of_a_request_stays(store: Store) -> None:
    one, two = (store.accept(scope, 7, "ann")[0] for scope in ("a", "b"))
    found = store.finish({one: Result.of({"n": 1}), "gone": Result.of({}), two: Result.of(b"x")})
    assert found.keys() == {one, two}
    assert {name: found[one][name] for name in ("scope", "seq_id", "owner")} == {"scope": "a", "seq_id": 7, "owner": "ann"}
    assert found[one]["created"] <= time.time() and store.finish({one: Result.of({"n": 2})}) == {}
    row = store.get(REQUESTS, id=one)
    assert row is not None and (row["media"], row["body"]) == (JSON, b'{"n": 1}')


def test_answers_of_a_sampler_are_those_of_one_client_beyond_a_place(store: Store) -> None:
    numbers = (0, CLIENT_NUMBERS - 1, CLIENT_NUMBERS, 2 * CLIENT_NUMBERS - 1, 2 * CLIENT_NUMBERS)
    ids = [store.accept("sampler", number, "ann")[0] for number in numbers]
    waits, other = store.accept("sampler", 1, "ann")[0], store.accept("other", 0, "ann")[0]
    for each in reversed(ids):
        store.finish({each: Result.of(b"12345"), other: Result.of({})})
    found = {client: [row["id"] for row in store.completed("sampler", client, 0)] for client in range(4)}
    assert found == {0: [ids[1], ids[0]], 1: [ids[3], ids[2]], 2: [ids[4]], 3: []}, "in the order of answers"
    first, second = store.completed("sampler", 0, 0)
    assert first["place"] < second["place"] and (first["size"], first["media"]) == (5, PROTOBUF)
    assert [row["id"] for row in store.completed("sampler", 0, first["place"])] == [second["id"]]
    assert store.completed("sampler", 0, second["place"]) == [] and waits not in {row["id"] for row in (first, second)}
    assert [row["id"] for row in store.completed("other", 0, 0)] == [other]


def test_answers_that_come_within_one_tick_of_the_clock_have_places_of_their_own(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module.time, "time_ns", lambda: 5_000_000)
    ids = [store.accept("sampler", number, "ann")[0] for number in range(3)]
    store.finish({each: Result.of({}) for each in ids})
    assert [row["place"] for row in store.completed("sampler", 0, 0)] == [5000, 5001, 5002]


def test_clients_of_a_sampler_are_counted_each_for_itself(store: Store) -> None:
    for name in ("a", "b"):
        store.add(SAMPLERS, id=name, session="s", owner="ann", base_model="m")
    assert [store.count_client(each) for each in ("a", "a", "b", "a")] == [1, 2, 1, 3]


def test_what_was_answered_and_ended_before_a_time_is_forgotten_and_nothing_else(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [10.0]
    monkeypatch.setattr(time, "time", lambda: now[0])
    ids = [store.accept("run", number, "ann")[0] for number in range(3)]
    for each, at in zip(ids, (10.0, 50.0), strict=False):
        now[0] = at
        store.finish({each: Result.of({})})
    for name, seen, ended in (("old", 10.0, True), ("lives", 10.0, False), ("new", 50.0, True), ("ran", 10.0, True)):
        add_session(store, name, seen=seen, ended=ended)
    add_run(store, "run", session="ran")
    store.forget(50.0)
    assert [row["id"] for row in store.rows(REQUESTS)] == ids[1:], "one that is not answered stays"
    assert [row["id"] for row in store.rows(SESSIONS)] == ["lives", "new", "ran"]
    assert [row["session"] for row in store.rows(SAMPLERS)] == ["lives", "new"]


def test_runs_that_were_over_before_a_restart_say_why_they_were(store: Store, tmp_path: Path) -> None:
    add_run(store, "lives")
    add_run(store, "over", over="the session was finished")
    store.begin()
    found = {row["id"]: row["over"] for row in store.rows(RUNS)}
    assert found["over"] == "the session was finished" and found["lives"].startswith("the server was restarted, and")


def test_a_database_of_a_server_before_gets_the_columns_that_it_lacks(tmp_path: Path) -> None:
    Store(tmp_path).close()
    with sqlite3.connect(tmp_path / "serve.sqlite") as old:
        old.execute("DROP INDEX answered")
        for table, column in (
            ("requests", "place"),
            ("checkpoints", "expires"),
            ("checkpoints", "public"),
            ("runs", "failed"),
        ):
            old.execute(f"ALTER TABLE {table} DROP COLUMN {column}")
        old.execute("INSERT INTO checkpoints VALUES ('r', 'weights', 'n', 'ann', 'f', 'm', '{}', 1.0, 5, 'null')")
    old.close()
    again = Store(tmp_path)
    (row,) = again.rows(CHECKPOINTS)
    assert (row["expires"], row["public"], row["bytes"]) == (None, None, 5)
    request, _ = again.accept("scope", 1, "ann")
    again.finish({request: Result.of({})})
    assert len(again.completed("scope", 0, 0)) == 1
    assert [each["name"] for each in sql.inspect(again._engine).get_indexes("requests")] == ["answered"]
    again.close()


def test_keys_that_were_there_are_remembered_by_the_server_that_had_them(tmp_path: Path) -> None:
    store = Store(tmp_path)
    assert not store.has_keys and store.owner_of("tml-x") is None
    ann, bob = (store.make_key(name) for name in ("ann", "bob"))
    assert ann != bob and store.has_keys and (store.owner_of(ann), store.owner_of(bob)) == ("ann", "bob")
    store.remove_key("ann")
    assert store.owner_of(ann) is None and store.owner_of(bob) == "bob"
    store.close()
    again = Store(tmp_path)
    again.remove_key("bob")
    assert again.has_keys and not again.rows(KEYS), "it does not become open to all"
    again.close()
    last = Store(tmp_path)
    assert not last.has_keys
    last.close()
