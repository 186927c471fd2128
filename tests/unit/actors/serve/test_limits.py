"""What one key may have and ask for, what the server forgets in time, and weights for download."""

from __future__ import annotations

import json
import logging
import shutil
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from peft import PeftConfig
from safetensors.torch import load_file
from sqlalchemy.exc import OperationalError

from actors.serve import server
from actors.serve.external import recipients_in
from actors.serve.server import Futures, Rates, request_log
from actors.serve.store import CHECKPOINTS, REQUESTS, SAMPLERS, SESSIONS, Result, Store
from rl_backend.contracts import BatchError
from tests.support.libraries import cookbook
from tests.support.serve_wire import Wire
from tests.support.served import served
from tests.support.tinker_clients import service


def test_a_key_may_save_up_requests_for_ten_seconds_and_has_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    rates = Rates(2.0)
    assert [rates.wait("ann") for _ in range(20)] == [0.0] * 20
    assert rates.wait("ann") == pytest.approx(0.5) and rates.wait("bob") == 0
    now[0] += 0.6
    assert rates.wait("ann") == 0 < rates.wait("ann")
    now[0] += 1e6
    assert [rates.wait("ann") > 0 for _ in range(21)] == [False] * 20 + [True]


def test_a_key_that_asks_too_often_is_told_when_to_come_again_and_others_are_served(model: Path, tmp_path: Path) -> None:
    with served(model, tmp_path, requests_per_second=1.0) as strict:
        ann, bob = (Wire(strict.url, strict.store.make_key(name)) for name in ("ann", "bob"))
        found = [ann.get("sessions") for _ in range(14)]
        assert [each.status_code for each in found[:10]] == [200] * 10 and found[-1].status_code == 429
        assert found[-1].headers["retry-after"] == "1"
        assert bob.get("sessions").status_code == 200
        # Its session goes on all the same.
        session = bob.post("create_session").json()["session_id"]
        beats = [bob.post("session_heartbeat", session_id=session).status_code for _ in range(14)]
        assert beats == [200] * 14 and bob.get("sessions").status_code == 200


def test_what_a_key_has_on_the_disk_is_bounded_and_deleting_makes_room(model: Path, tmp_path: Path) -> None:
    with served(model, tmp_path) as strict:
        ann, bob = (Wire(strict.url, strict.store.make_key(name)) for name in ("ann", "bob"))
        _, run = ann.run(model)

        def save(seq_id: int, **named: Any) -> dict[str, Any]:
            found = ann.answer(ann.post("save_weights_for_sampler", model_id=run, seq_id=seq_id, **named))
            return dict(found.json())

        first = save(1, path="a")
        size = strict.store.get(CHECKPOINTS, run=run)["bytes"]
        strict.server.limits = replace(strict.server.limits, disk_bytes=3 * size + 100)
        assert "path" in save(2, path="b") and "sampling_session_id" in save(3, sampling_session_seq_id=0)
        folders = sorted((tmp_path / "checkpoints").iterdir())
        assert "delete checkpoints" in save(4, path="c")["error"]
        assert "delete checkpoints" in save(5, sampling_session_seq_id=1)["error"]
        assert sorted((tmp_path / "checkpoints").iterdir()) == folders
        _, other = bob.run(model)
        assert "path" in bob.answer(bob.post("save_weights_for_sampler", model_id=other, seq_id=1, path="c")).json()
        assert ann.request("DELETE", f"training_runs/{run}/checkpoints/sampler_weights/a").status_code == 204
        assert save(6, path="a")["path"] == first["path"]
        assert "exists" in save(7, sampling_session_seq_id=0)["error"]
    # What no row has is what was being written when a server ended; the snapshot counts on.
    for lost in ("checkpoints/lost", "snapshots/lost", "boundaries/lost"):
        (tmp_path / lost / "adapter").mkdir(parents=True)
    with served(model, tmp_path) as again:
        assert not list(tmp_path.glob("*/lost")) and again.server.used_bytes("ann") == pytest.approx(3 * size, abs=100)
        snapshot = Path(again.store.get(SAMPLERS, path=None)["folder"])
        assert len(list((tmp_path / "checkpoints").iterdir())) == 3 and snapshot.is_dir()
        shutil.rmtree(snapshot)
        assert again.server.used_bytes("ann") == pytest.approx(2 * size, abs=100)


def test_a_disk_that_is_almost_full_fails_saves_alone(model: Path, tmp_path: Path) -> None:
    with served(model, tmp_path, free_bytes=1 << 60) as full:
        wire = Wire(full.url)
        _, run = wire.run(model)
        saved = wire.answer(wire.post("save_weights", model_id=run, seq_id=1, path="a")).json()
        assert "MiB left" in saved["error"] and not list((tmp_path / "checkpoints").glob("*"))
        assert b"loss:sum" in wire.answer(wire.data(run, 2)).content


def test_old_answers_are_forgotten_and_nothing_of_a_living_run_is_done_twice(model: Path, tmp_path: Path) -> None:
    with served(model, tmp_path) as brief:
        wire = Wire(brief.url)
        session, run = wire.run(model)
        wire.answer(wire.data(run, 1))
        stepped = wire.post("optim_step", model_id=run, seq_id=2, adam_params={})
        assert "metrics" in wire.answer(stepped).json()
        made = wire.post("create_sampling_session", session_id=session, sampling_session_seq_id=0, base_model=str(model))
        brief.store.forget(time.time())
        assert brief.store.rows(REQUESTS) == []
        gone = wire.answer(stepped)
        assert gone.status_code == 404 and "keep-results" in gone.text
        again = wire.post("optim_step", model_id=run, seq_id=2, adam_params={})
        assert "was answered" in wire.answer(again).json()["error"]
        created = wire.post("create_model", session_id=session, model_seq_id=0, base_model=str(model), lora_config={})
        assert "was created before" in wire.answer(created).json()["error"]
        assert brief.training.steps_of(run) == 1 and b"loss:sum" in wire.answer(wire.data(run, 3)).content
        # Of a session that lives the samplers stay; of one that has ended all goes but its runs.
        sampler = made.json()["sampling_session_id"]
        assert wire.get(f"samplers/{sampler}").status_code == 200
        wire.post(f"sessions/{session}/finish")
        empty = wire.post("create_session").json()["session_id"]
        wire.post(f"sessions/{empty}/finish")
        brief.store.forget(time.time() + 1)
        assert wire.get(f"samplers/{sampler}").status_code == 404
        assert [row["id"] for row in brief.store.rows(SESSIONS)] == [session] and not brief.store.rows(SAMPLERS)
        assert wire.get(f"training_runs/{run}").status_code == 200


def test_a_client_that_counts_answers_hears_of_those_that_come_after_the_forgotten(tmp_path: Path) -> None:
    store = Store(tmp_path)
    places = []
    for seq_id in (1, 2, 3):
        request, _ = store.accept("sampler", seq_id, "ann")
        store.finish({request: Result.of({})})
        places += [each["place"] for each in store.completed("sampler", 0, max(places, default=0))]
        store.forget(time.time() + 1)
    assert len(places) == 3 and places == sorted(set(places))
    store.close()


def test_every_answer_is_a_line_of_the_log_which_no_key_is_in(
    model: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    with served(model, tmp_path / "state") as shared:
        key = shared.store.make_key("ann")
        wire = Wire(shared.url, key)
        _, run = wire.run(model)
        wire.answer(wire.data(run, 1))
        wire.answer(wire.post("save_weights", model_id=run, seq_id=2, path="?"))
        wire.post("telemetry", events=[{"headers": {"X-API-Key": key}}])
        assert Wire(shared.url, f"{key}x").get("sessions").status_code == 401
    lines = [json.loads(each.getMessage()) for each in caplog.records if each.name == request_log.name]
    assert [(each["scope"], each["seq_id"], each["owner"], "error" in each) for each in lines] == [
        (run, 0, "ann", False),
        (run, 1, "ann", False),
        (run, 2, "ann", True),
    ]
    ours = [each for each in caplog.records if not each.name.startswith(("httpx", "httpcore"))]
    assert not any(key in str(each.__dict__) for each in ours)
    assert all(key.encode() not in file.read_bytes() for file in (tmp_path / "state").rglob("*") if file.is_file())


def test_failed_requests_are_counted_once(tmp_path: Path) -> None:
    store = Store(tmp_path)
    futures = Futures(store)
    request, _ = store.accept("run", 1, "ann")
    for result in (Result.failed("no"), Result.failed("no"), Result.of({})):
        futures.finish({request: result})
    assert futures.errors == 1
    store.close()


def test_external_weights_are_downloaded_by_the_cookbook_plain_and_encrypted(
    running: SimpleNamespace, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cookbook()
    from tinker_cookbook import weights

    monkeypatch.setenv("TINKER_API_KEY", "tml-local")
    monkeypatch.setenv("TINKER_BASE_URL", running.url)
    monkeypatch.setenv("TINKER_TELEMETRY", "0")
    client = service(running.url)
    training = client.create_lora_training_client(base_model=str(model), rank=4, seed=3).result()
    saved = training.save_state("state").result().path
    path = training.save_weights_external("mine").result().path
    assert path.endswith("/external_weights/mine")
    for number, each in enumerate((path, saved)):
        weights.download(tinker_path=each, output_dir=str(tmp_path / str(number)), base_url=running.url)
    plain, decrypted = (load_file(tmp_path / each / "adapter_model.safetensors") for each in ("0", "1"))
    assert plain.keys() == decrypted.keys() and all(bool((plain[name] == decrypted[name]).all()) for name in plain)
    assert PeftConfig.from_pretrained(str(tmp_path / "1")).r == 4
    # The export of the second download is deleted with it.
    kinds = [each.checkpoint_type for each in client.create_rest_client().list_user_checkpoints().result().checkpoints]
    assert kinds.count("external") == 1
    wire = Wire(running.url)
    run = path.split("/")[2]
    found = wire.get(f"training_runs/{run}/checkpoints/external_weights/mine/external_weights_urls").json()
    url = found["urls"]["adapter_config.json"]
    assert wire.get(url.partition("/api/v1/")[2]).status_code == 200
    for wrong in (url.replace("adapter_config.json", "..%2fx"), url.replace("/external/", "/external/x")):
        assert wire.get(wrong.partition("/api/v1/")[2]).status_code == 404
    session = wire.post("create_session").json()["session_id"]
    sampled = wire.post("create_sampling_session", session_id=session, sampling_session_seq_id=0, model_path=path)
    assert sampled.status_code == 404 and "for downloads" in sampled.text


def test_recipients_that_are_no_public_keys_are_refused() -> None:
    cookbook()
    for wrong in (["age1x"], "age1x", [3], ["x"] * 11):
        with pytest.raises(BatchError, match="age_encryption_recipients"):
            recipients_in({"age_encryption_recipients": wrong})
    assert recipients_in({}) == ()


def test_metadata_are_bounded_and_only_external_weights_have_recipients(running: SimpleNamespace, model: Path) -> None:
    wire, large = Wire(running.url), {"user_metadata": {"a": "x" * (16 << 10)}}
    session, run = wire.run(model)
    made = {"session_id": session, "model_seq_id": 1, "base_model": str(model)}
    for refused in (wire.post("create_session", **large), wire.post("create_model", **made, **large)):
        assert refused.status_code == 400 and "user_metadata: " in refused.text
    answers = [
        wire.answer(wire.post("save_weights_for_sampler", model_id=run, seq_id=seq_id, path="a", **more)).json()
        for seq_id, more in enumerate((large, {"age_encryption_recipients": ["x"]}), 1)
    ]
    assert "user_metadata: " in answers[0]["error"] and "path" in answers[1]


def test_an_answer_that_cannot_be_written_is_tried_again_for_a_minute(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, now = Store(tmp_path), [0.0]
    request, _ = store.accept("run", 1, "ann")
    finish, left = store.finish, [3]

    def fails(*args: Any) -> Any:
        left[0] -= 1
        if left[0] >= 0:
            raise OperationalError("UPDATE", {}, Exception("the database is locked"))
        return finish(*args)

    monkeypatch.setattr(store, "finish", fails)
    clock = SimpleNamespace(
        time=time.time, monotonic=lambda: now[0], sleep=lambda seconds: now.__setitem__(0, now[0] + seconds)
    )
    monkeypatch.setattr(server, "time", clock)
    Futures(store).finish({request: Result.of({"a": 1})})
    row = store.get(REQUESTS, id=request)
    assert now == [3.0] and row is not None and row["body"] == b'{"a": 1}'
    left[0] = 1000
    with pytest.raises(OperationalError):
        Futures(store).finish({request: Result.of({})})
    assert 60 <= now[0] - 3.0 <= 62
    store.close()
