"""The process of verifiers as a player sees it, with a child that needs no verifiers."""

from __future__ import annotations

import asyncio
import multiprocessing
import threading
from pathlib import Path
from typing import Any

import pytest

from adapters.verifiers import VerifiersPlayer, VerifiersSettings
from adapters.verifiers.process import VerifiersProcess, received
from rl_backend.contracts import ConfigError, EpisodeFailedError
from tests.support.verifiers_settings import SETTINGS

CHILD = """
import json, sys
from multiprocessing.connection import Connection
connection = Connection(int(sys.argv[1]))
settings = json.loads(connection.recv_bytes())
kind = settings["environment"]["kind"]
if kind == "ends":
    sys.exit(3)
if kind == "hangs":
    connection.recv_bytes()
if kind == "broken":
    connection.send_bytes(json.dumps({"ready": False, "problem": "ValueError: odd"}).encode())
    sys.exit(1)
connection.send_bytes(json.dumps({"ready": True, "tasks": ["a", "b"]}).encode())
while True:
    request = json.loads(connection.recv_bytes())
    if "end" in request or request.get("token") == "die":
        break
    if "play" in request:
        told = {"played": request["play"], "errors": [], "asked": request, "settings": settings}
        connection.send_bytes(json.dumps(told).encode())
"""


@pytest.fixture
def stand_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A child without verifiers, which answers with what it was asked."""
    (tmp_path / "child.py").write_text(CHILD)
    monkeypatch.setattr("adapters.verifiers.process._CHILD", tmp_path / "child.py")


def of_kind(kind: str, **changes: Any) -> VerifiersSettings:
    return SETTINGS.replace(environment={"kind": kind}, roles=(), **changes)


@pytest.mark.usefixtures("stand_in")
def test_a_process_is_told_its_settings_answers_by_number_and_its_end_is_told_once() -> None:
    settled: list[Any] = []
    lost, answered = threading.Event(), threading.Event()

    def settle(message: dict[str, Any]) -> None:
        settled.append(message)
        answered.set()

    process = VerifiersProcess(of_kind("plays"), "http://url", settle, lost.set)
    assert process.tasks == ["a", "b"]
    process.send({"play": 3, "task": 1, "token": "x"})
    assert answered.wait(10)
    (message,) = settled
    assert message["asked"] == {"play": 3, "task": 1, "token": "x"} and message["played"] == 3
    told = message["settings"]
    assert told["base_url"] == "http://url" and told["most_tasks"] == 3 and told["renderer"] == {"name": "default"}
    assert told["tokenizer"] == str(Path("some/tokenizer").resolve())
    assert told["path"][:2] == ["/one", "/two"] and told["path"][2].endswith("adapters/verifiers/plugins")
    process.end()
    assert lost.wait(10) and process._process.returncode == 0
    process.end()
    with pytest.raises(EpisodeFailedError, match=r"the process of verifiers has ended: .*; see its output above"):
        process.send({"play": 4})


@pytest.mark.usefixtures("stand_in")
@pytest.mark.parametrize(
    ("kind", "changes", "problem"),
    [
        ("ends", {}, r"environment=\{'kind': 'ends'\}: verifiers cannot load it: its process ended; see its output above"),
        ("broken", {}, r"environment=\{'kind': 'broken'\}: verifiers cannot load it: ValueError: odd"),
        ("hangs", {"start_seconds": 0.1}, "start_seconds=0.1: the environment was not ready by then; raise it"),
        ("plays", {"python": "/no/python"}, "python='/no/python': cannot be run: .*No such file"),
    ],
)
def test_a_player_that_cannot_be_opened_leaves_no_process_and_can_be_opened_later(
    kind: str, changes: dict[str, Any], problem: str
) -> None:
    player = VerifiersPlayer(of_kind(kind, **changes), context_tokens=64)
    for _ in range(2):
        with pytest.raises(ConfigError, match=problem):
            player.open()
        assert player._child is None and player._loop is None
    player.close()


@pytest.mark.usefixtures("stand_in")
def test_episodes_are_played_by_their_numbers_and_lost_with_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("adapters.verifiers.player._result", lambda played, session: played)
    sampler: Any = object()

    async def both(player: VerifiersPlayer) -> list[Any]:
        return list(await asyncio.gather(player({"task": 1}, sampler), player({"task": 0}, sampler)))

    player = VerifiersPlayer(of_kind("plays"), context_tokens=64)
    with player as opened:
        assert opened is player and player.tasks == ["a", "b"] and player.open() is player
        first = asyncio.run(both(player))
        again = asyncio.run(both(player))  # in another loop
        assert [each["asked"]["task"] for each in (*first, *again)] == [1, 0, 1, 0]
        assert sorted(each["played"] for each in (*first, *again)) == [0, 1, 2, 3]
        assert len({each["asked"]["token"] for each in (*first, *again)}) == 4
        for task in (2, -1, None, "0", 1.0):
            with pytest.raises(ConfigError, match=r"expected the number of a task of the environment, 0 to 1"):
                asyncio.run(player({"task": task}, sampler))
        monkeypatch.setattr("adapters.verifiers.player.secrets.token_urlsafe", lambda size: "die")
        with pytest.raises(EpisodeFailedError, match="the process of verifiers ended; see its output above"):
            asyncio.run(player({"task": 1}, sampler))
        assert not player._waiting and not player._endpoint._sessions
    assert player._child is None and player._loop is None


@pytest.mark.usefixtures("stand_in")
def test_an_episode_that_is_cancelled_is_told_and_forgotten() -> None:
    sent: list[Any] = []

    async def run(player: VerifiersPlayer) -> None:
        player.open()
        player._opened().send = sent.append  # type: ignore[method-assign,assignment]
        playing = asyncio.create_task(player({"task": 1}, object()))  # type: ignore[arg-type]
        while not sent:
            await asyncio.sleep(0.01)
        # The thread that listens for all episodes may be about to set it.
        (waiting,) = player._waiting.values()
        assert not waiting.cancel()
        playing.cancel()
        with pytest.raises(asyncio.CancelledError):
            await playing

    player = VerifiersPlayer(of_kind("plays"), context_tokens=64)
    try:
        asyncio.run(run(player))
        assert [sorted(each)[0] for each in sent] == ["play", "cancel"] and sent[1] == {"cancel": sent[0]["play"]}
        assert not player._waiting
        # An answer that comes too late finds nobody.
        player._settle({"played": sent[0]["play"], "errors": []})
    finally:
        player._opened()._process.kill()
        player.close()


def test_nothing_is_received_once_the_other_side_has_ended() -> None:
    ours, theirs = multiprocessing.Pipe()
    theirs.send_bytes(b'{"a": 1}')
    assert received(ours) == {"a": 1}
    theirs.close()
    assert received(ours) is None
    ours.close()
    assert received(ours) is None
