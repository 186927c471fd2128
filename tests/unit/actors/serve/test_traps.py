"""What hangs or ends servers of this API: requests out of order, too large, malformed, of others, of the silent."""

from __future__ import annotations

import asyncio
import threading
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import zstandard

from actors.serve import app
from actors.serve import wire as wire_format
from actors.serve.openai import _newest
from actors.serve.store import CHECKPOINTS, RUNS, SAMPLERS
from actors.serve.wire import PassRequest, read_answer, read_cells, read_pass, write_request
from rl_backend.contracts import BatchError
from tests.support.actors_in_process import until
from tests.support.libraries import cookbook
from tests.support.serve_fuzzer import fuzz
from tests.support.serve_wire import IDS, Wire, datum
from tests.support.served import VOCABULARY, served
from tests.support.tinker_clients import Client, train, train_together


def varint(value: int) -> bytes:
    """As protobuf has it."""
    parts = []
    while value > 0x7F:
        parts.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*parts, value])


def test_a_first_chunk_that_arrives_last_is_computed_first_and_gradients_of_all_chunks_add_up(
    running: SimpleNamespace, model: Path
) -> None:
    wire = Wire(running.url)
    norms = []
    for chunks in ((1,), (3, 2, 1)):
        _, run = wire.run(model)
        accepted = [wire.data(run, chunk, rows=1 if len(chunks) > 1 else 3, zstd=chunk == 2) for chunk in chunks]
        found = [read_answer(wire.answer(each).content) for each in accepted]
        assert sum(len(log_probs) for log_probs, _ in found) == 3
        step = wire.post("optim_step", model_id=run, seq_id=len(chunks) + 1, adam_params={"learning_rate": 1e-3, "new": 1})
        norms.append(wire.answer(step).json()["metrics"]["grad_norm"])
    assert norms[0] == pytest.approx(norms[1], rel=1e-6)


def test_bodies_that_are_too_large_or_are_nothing_fail_through_their_futures_and_the_run_goes_on(
    running: SimpleNamespace, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wire = Wire(running.url)
    _, run = wire.run(model)
    head = write_request(PassRequest(run, 1, [], "cross_entropy", {}, False))
    monkeypatch.setattr(app, "MOST_BODY", 1 << 16)
    bomb = zstandard.compress(head + bytes(1 << 20))
    assert len(bomb) < 1 << 10
    large = wire.raw(write_request(PassRequest(run, 2, [datum()] * 2000, "cross_entropy", {}, False)))
    for accepted in (wire.raw(bomb, zstd=True), large):
        assert "larger than" in wire.answer(accepted).json()["error"]
    garbage = wire.raw(write_request(PassRequest(run, 3, [], "cross_entropy", {}, False)) + b"\xff\xff\xff")
    assert "no ForwardBackwardRequest" in wire.answer(garbage).json()["error"]
    assert read_answer(wire.answer(wire.data(run, 4)).content)[1]["loss:sum"] > 0
    for wrong in ({"seq_id": 0}, {"seq_id": -1}, {"seq_id": "5"}, {"seq_id": 2**70}, {"model_id": {}}, {"model_id": None}):
        assert wire.post("optim_step", **{"model_id": run, "seq_id": 5, "adam_params": {}, **wrong}).status_code == 400


def test_sparse_arrays_that_would_fill_the_memory_are_refused() -> None:
    from actors.serve.wire import _MESSAGES

    message = _MESSAGES["ForwardBackwardRequest"](model_id="m", seq_id=1)
    tensor = message.data.add().loss_fn_inputs["target_tokens"]
    tensor.dtype = 2
    tensor.sparse_csr.crow_indices = np.zeros(2, "<i8").tobytes()
    tensor.shape.extend((1, 1 << 40))
    with pytest.raises(BatchError, match="cells"):
        read_pass(message.SerializeToString())
    tensor.shape[:] = (1, -3)
    with pytest.raises(BatchError, match="negative"):
        read_pass(message.SerializeToString())
    # Their product would have tens of thousands of digits.
    tensor.shape[:] = [1 << 62] * 20_000
    with pytest.raises(BatchError, match="20000 dimensions"):
        read_pass(message.SerializeToString())
    tensor.ClearField("sparse_csr")
    with pytest.raises(BatchError, match="20000 dimensions"):
        read_pass(message.SerializeToString())
    with pytest.raises(BatchError, match="1000000 dimensions"):
        read_cells("ids", {"data": [], "shape": [9] * 1_000_000}, -1)
    tensor.sparse_csr.crow_indices = np.zeros(2, "<i8").tobytes()
    tensor.shape[:] = (1, 3)
    assert read_pass(message.SerializeToString()).data[0].inputs["target_tokens"].tolist() == [[0, 0, 0]]


@pytest.mark.parametrize(
    "body",
    [
        b"\x1a\x00" * (1 << 20),
        b"\x1a" + varint(1 << 20) + b"\x0a\x00" * (1 << 19),
        b"\x1a" + varint(1 << 20) + b"\x12\x00" * (1 << 19),
        b"\x2a\x00" * (1 << 20),
        b"\x1a" + varint((1 << 20) + 12) + b"\x12" + varint((1 << 20) + 8) + b"\x12" + varint((1 << 20) + 4) + b"\x22"
        + varint(1 << 20) + b"\x01" * (1 << 20),
        b"\x78\x00" * (1 << 20),
    ],
    ids=["data", "chunks", "arrays", "options", "sizes", "unknown"],
)  # fmt: skip
def test_bodies_of_very_many_empty_parts_are_refused_before_they_take_memory(
    body: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    head = write_request(PassRequest("m", 1, [datum()] * 3, "cross_entropy", {"beta": 1.0}, False))
    assert len(read_pass(head).data) == 3
    monkeypatch.setattr(wire_format, "_read", lambda *_: pytest.fail("it was parsed"))
    with pytest.raises(BatchError, match="more than 524288 fields"):
        read_pass(head + body)
    for wrong in (b"\x1b", b"\x1a\x05", b"\xff" * 11):
        with pytest.raises(BatchError, match="no ForwardBackwardRequest"):
            read_pass(head + wrong)


def test_what_waits_is_bounded_and_what_is_next_always_comes_in(model: Path, tmp_path: Path) -> None:
    with served(model, tmp_path, waiting_bytes=400) as small:
        wire = Wire(small.url)
        _, run = wire.run(model)
        early = [wire.data(run, seq_id).status_code for seq_id in (3, 4, 5, 6, 7)]
        assert early[0] == 200 and early[-1] == 429
        assert wire.data(run, 2).status_code == 429
        # A step holds what is sent with it.
        assert wire.post("optim_step", model_id=run, seq_id=2, adam_params={"new": "x" * 400}).status_code == 429
        for seq_id in (1, 2):
            assert b"loss:sum" in wire.answer(wire.data(run, seq_id)).content
        assert b"loss:sum" in wire.answer(wire.data(run, 3)).content


def test_whoever_polls_for_what_still_waits_is_told_to_ask_again(
    running: SimpleNamespace, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("actors.serve.app.LONG_POLL_SECONDS", 0.05)
    wire = Wire(running.url)
    _, run = wire.run(model)
    early = wire.data(run, 2).json()["request_id"]
    told = wire.post("retrieve_future", request_id=early)
    # Of any other answer the SDK says a line in the user's terminal, or gives up.
    assert (told.status_code, told.json()) == (408, {"queue_state": "active"})
    wire.data(run, 1)
    until(lambda: wire.answer({"request_id": early}).status_code == 200)


def test_a_silent_session_frees_its_runs_and_its_named_checkpoints_live_for_their_time(model: Path, tmp_path: Path) -> None:
    with served(model, tmp_path, session_timeout=0.8) as strict:
        wire = Wire(strict.url)
        session, run = wire.run(model)
        short = wire.post("save_weights", model_id=run, seq_id=1, path="short", ttl_seconds=0.1)
        kept = wire.post("save_weights", model_id=run, seq_id=2, path="kept", ttl_seconds=3600)
        assert wire.answer(short).json()["path"].endswith("short")
        path = wire.answer(kept).json()["path"]
        until(lambda: not strict.training.waiting)
        assert [each["tinker_path"] for each in wire.get("checkpoints").json()["checkpoints"]] == [path]
        over = wire.post("optim_step", model_id=run, seq_id=3, adam_params={})
        assert "no heartbeat" in wire.answer(over).json()["error"]
        assert wire.post("session_heartbeat", session_id=session).status_code == 410
        later = wire.post("create_session").json()["session_id"]
        loaded = wire.post("load_weights", session_id=later, model_seq_id=0, path=path, optimizer=False)
        assert wire.answer(loaded).json()["path"] == path


def test_a_key_never_sees_what_another_has(model: Path, tmp_path: Path) -> None:
    with served(model, tmp_path) as shared:
        ann, bob = (Wire(shared.url, shared.store.make_key(name)) for name in ("ann", "bob"))
        session, run = ann.run(model)
        accepted = ann.post("save_weights", model_id=run, seq_id=1, path="hers").json()
        path = ann.answer(accepted).json()["path"]
        other, _ = bob.run(model)
        sampler = ann.post("create_sampling_session", session_id=session, sampling_session_seq_id=0, base_model=str(model))
        of_hers = [
            bob.answer(accepted),
            bob.data(run, 2),
            bob.post("get_info", model_id=run),
            bob.post("optim_step", model_id=run, seq_id=2, adam_params={}),
            bob.post("save_weights", model_id=run, seq_id=2, path="his"),
            bob.post("weights_info", tinker_path=path),
            bob.post("session_heartbeat", session_id=session),
            bob.post("create_model", session_id=session, model_seq_id=1, base_model=str(model)),
            bob.post("create_sampling_session", session_id=other, sampling_session_seq_id=0, model_path=path),
            bob.post("create_sampling_session", session_id=session, sampling_session_seq_id=1, base_model=str(model)),
            bob.post("asample", sampling_session_id=sampler.json()["sampling_session_id"], prompt={}),
            bob.post(f"sessions/{session}/finish"),
            *(bob.get(f"{kind}/{name}") for kind, name in (("training_runs", run), ("sessions", session))),
            bob.get(f"training_runs/{run}/checkpoints"),
            bob.get(f"samplers/{sampler.json()['sampling_session_id']}"),
        ]
        assert {each.status_code for each in of_hers} <= {404, 410}
        stolen = bob.post("load_weights", session_id=other, model_seq_id=5, path=path, optimizer=True)
        assert "no training checkpoint" in bob.answer(stolen).json()["error"]
        for listed in ("training_runs", "checkpoints", "sessions"):
            assert run not in bob.get(listed).text and session not in bob.get(listed).text
        assert Wire(shared.url, "tml-other").get("sessions").status_code == 401
        assert ann.get("checkpoints").json()["checkpoints"][0]["tinker_path"] == path
        # Published, others may read it, and no more than that.
        route = f"training_runs/{path.removeprefix('tinker://').replace('/', '/checkpoints/', 1)}"
        assert ann.request("POST", f"{route}/publish").status_code == 204
        assert ann.get("checkpoints").json()["checkpoints"][0]["public"] is True
        loaded = bob.post("load_weights", session_id=other, model_seq_id=6, path=path, optimizer=True)
        assert bob.answer(loaded).json()["path"] == path
        assert bob.post("weights_info", tinker_path=path).json()["lora_rank"] == 2
        assert path not in bob.get("checkpoints").text
        for refused in (
            bob.request("DELETE", route),
            bob.request("DELETE", f"{route}/publish"),
            bob.request("PUT", f"{route}/ttl", json={}),
        ):
            assert refused.status_code == 404
        assert ann.request("DELETE", f"{route}/publish").status_code == 204
        assert bob.post("weights_info", tinker_path=path).status_code == 404


def test_nothing_that_is_sent_ends_the_server(running: SimpleNamespace, model: Path) -> None:
    wire = Wire(running.url)
    session, run = wire.run(model)
    seen = fuzz(running.url, session, run, 400, seed=1)
    assert max(seen) < 500 and seen[200] > 20 and seen[400] > 20, seen
    assert wire.get("healthz").status_code == 200
    assert read_answer(wire.answer(wire.data(wire.run(model)[1], 1)).content)[1]["loss:sum"] > 0
    assert running.store.get(RUNS, id=run) is not None


def test_clients_at_one_time_get_the_bits_that_each_has_alone(running: SimpleNamespace, model: Path) -> None:
    cookbook()
    clients = [Client(number, rank, 12) for number, rank in enumerate((4, 2, 8, 3, 16))]
    alone = [train(running.url, str(model), client, VOCABULARY) for client in clients]
    passes = len(running.group.passes)
    together = train_together(running.url, str(model), clients, VOCABULARY)
    assert any(len(set(shared)) > 1 for shared in running.group.passes[passes:])
    for one, two in zip(alone, together, strict=True):
        assert one.equals(two)


def test_samples_that_wait_for_an_engine_are_counted(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gate = threading.Event()

    async def waits(*_: Any) -> bytes:
        while not gate.is_set():
            await asyncio.sleep(0.01)
        return b""

    with served(model, tmp_path, open_samples=4) as small:
        monkeypatch.setattr(small.sampling, "answer", waits)
        wire = Wire(small.url)
        session = wire.post("create_session").json()["session_id"]
        made = wire.post("create_sampling_session", session_id=session, sampling_session_seq_id=0, base_model=str(model))
        asked = {"sampling_session_id": made.json()["sampling_session_id"], "prompt": {}, "num_samples": 2}
        assert [wire.post("asample", seq_id=number, **asked).status_code for number in range(3)] == [200, 200, 429]
        gate.set()
        until(lambda: wire.post("asample", seq_id=2, **asked).status_code == 200)


def test_a_server_that_runs_is_not_open_to_all_when_its_last_key_is_removed(model: Path, tmp_path: Path) -> None:
    with served(model, tmp_path) as shared:
        ann = Wire(shared.url, shared.store.make_key("ann"))
        assert ann.get("sessions").status_code == 200
        shared.store.remove_key("ann")
        assert {each.get("sessions").status_code for each in (ann, Wire(shared.url))} == {401}


def test_sweeping_goes_on_after_it_has_failed(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(_: float) -> None:
        raise OSError("no space is left")

    with served(model, tmp_path, session_timeout=0.8) as strict:
        monkeypatch.setattr(strict.store, "forget", fail)
        Wire(strict.url).run(model)
        until(lambda: not strict.training.waiting)


def test_a_run_answers_with_what_it_saved_last_named_or_not(running: SimpleNamespace, model: Path) -> None:
    wire = Wire(running.url)
    _, run = wire.run(model)

    def save(seq_id: int, **named: Any) -> Path | None:
        made = wire.post("save_weights_for_sampler", model_id=run, seq_id=seq_id, **named)
        assert "error" not in wire.answer(made).json()
        return _newest(running.server, "local", run)

    first = save(1, sampling_session_seq_id=0)
    assert first is not None and first.parent.name == "snapshots"
    second = save(2, path="later")
    assert second is not None and second.parent.name == "checkpoints"
    assert save(3, sampling_session_seq_id=1) not in (None, first, second)


def test_a_run_that_could_not_be_created_is_in_no_list_and_its_requests_are_told_why(
    running: SimpleNamespace, model: Path
) -> None:
    wire = Wire(running.url)
    session, run = wire.run(model)
    failed = [
        wire.post("create_model", session_id=session, model_seq_id=at, base_model=base, lora_config={"rank": rank}).json()
        for at, (base, rank) in enumerate(((str(model), 0), ("other", 2)), 1)
    ]
    for each, why in zip(failed, ("lora_config.rank=0", "base_model='other'"), strict=True):
        assert why in wire.answer(each).json()["error"]
        assert why in wire.answer(wire.data(each["model_id"], 1)).json()["error"]
    assert wire.get(f"sessions/{session}").json()["training_run_ids"] == [run]
    listed = {each["training_run_id"] for each in wire.get("training_runs?limit=100").json()["training_runs"]}
    assert run in listed and not listed & {each["model_id"] for each in failed}
    until(lambda: failed[0]["model_id"] not in running.training.waiting)
    assert run in running.training.waiting


@pytest.mark.parametrize(("named", "wrong"), [("rank", 2.5), ("rank", "8"), ("seed", "x")])
def test_numbers_of_an_adapter_are_whole(named: str, wrong: Any, running: SimpleNamespace, model: Path) -> None:
    wire = Wire(running.url)
    session = wire.post("create_session").json()["session_id"]
    asked = {"session_id": session, "model_seq_id": 0, "base_model": str(model), "lora_config": {"rank": 2, named: wrong}}
    answer = wire.answer(wire.post("create_model", **asked)).json()
    assert answer["category"] == "user" and f"lora_config.{named}=" in answer["error"], answer


def test_what_is_wrong_with_a_save_does_not_stop_what_follows(running: SimpleNamespace, model: Path) -> None:
    wire = Wire(running.url)
    _, run = wire.run(model)
    external = wire.post("save_weights_external", model_id=run, seq_id=1, path="a", age_encryption_recipients=["x"] * 11)
    assert "age_encryption_recipients" in wire.answer(external).json()["error"]
    nameless = wire.post("save_weights", model_id=run, seq_id=2, path=None)
    assert "path=None: expected a text" in wire.answer(nameless).json()["error"]
    assert b"loss:sum" in wire.answer(wire.data(run, 3)).content


def test_a_checkpoint_that_is_deleted_lies_on_disk_while_its_samplers_live(running: SimpleNamespace, model: Path) -> None:
    wire = Wire(running.url)
    session, run = wire.run(model)
    path = wire.answer(wire.post("save_weights_for_sampler", model_id=run, seq_id=1, path="a")).json()["path"]
    folder = Path(running.store.get(CHECKPOINTS, run=run)["folder"])
    other = wire.post("create_session").json()["session_id"]
    wire.post("create_sampling_session", session_id=other, sampling_session_seq_id=0, model_path=path)
    assert wire.request("DELETE", f"training_runs/{run}/checkpoints/sampler_weights/a").status_code == 204
    assert wire.post(f"sessions/{session}/finish").status_code == 200 and folder.is_dir()
    assert wire.post(f"sessions/{other}/finish").status_code == 200
    until(lambda: not folder.exists())


def test_a_sampler_whose_snapshot_has_given_way_says_so_and_another_goes_on(
    running: SimpleNamespace, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(running.server, "limits", replace(running.server.limits, snapshots=1))
    wire = Wire(running.url)
    _, run = wire.run(model)
    made = [wire.post("save_weights_for_sampler", model_id=run, seq_id=at, sampling_session_seq_id=at) for at in (1, 2)]
    samplers = [wire.answer(each).json()["sampling_session_id"] for each in made]
    until(lambda: not Path(running.store.get(SAMPLERS, id=samplers[0])["folder"]).exists())
    asked = {"seq_id": 0, "prompt": {"chunks": [{"tokens": IDS.tolist()}]}, "sampling_params": {"max_tokens": 1}}
    gone, kept = (wire.answer(wire.post("asample", sampling_session_id=each, **asked)) for each in samplers)
    assert "its weights are gone; a run keeps its last 1 unnamed snapshots" in gone.text
    assert "protobuf" in kept.headers["content-type"]


def test_ranks_forget_the_adapter_of_a_checkpoint_that_is_deleted(running: SimpleNamespace, model: Path) -> None:
    wire = Wire(running.url)
    _, run = wire.run(model)
    path = wire.answer(wire.post("save_weights_for_sampler", model_id=run, seq_id=1, path="a")).json()["path"]
    adapter = Path(running.store.get(CHECKPOINTS, run=run)["folder"]) / "adapter"
    other = wire.post("create_session").json()["session_id"]
    made = wire.post("create_sampling_session", session_id=other, sampling_session_seq_id=0, model_path=path).json()
    asked = {"prompt": {"chunks": [{"tokens": IDS.tolist()}]}, "sampling_params": {"max_tokens": 1}, "prompt_logprobs": True}
    sample = wire.post("asample", sampling_session_id=made["sampling_session_id"], seq_id=0, **asked)
    assert "protobuf" in wire.answer(sample).headers["content-type"] and adapter in running.training._readers
    wire.post(f"sessions/{other}/finish")
    assert adapter.is_dir() and adapter in running.training._readers
    assert wire.request("DELETE", f"training_runs/{run}/checkpoints/sampler_weights/a").status_code == 204
    assert not adapter.exists()
    until(lambda: adapter not in running.training._readers)
