"""The unmodified SDK of Tinker trains over the real routes, and the traps that hang its clients."""

from __future__ import annotations

import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from actors.serve import command
from actors.serve.check import CheckFailedError, check_server
from actors.serve.store import REQUESTS, RUNS, Result, Store
from actors.serve.training import Call
from actors.serve.wire import read_header
from rl_backend.contracts import BatchError, ConfigError
from tests.support.actors_in_process import until
from tests.support.libraries import cookbook
from tests.support.served import served
from tests.support.tinker_clients import service

IDS = [5, 9, 3, 7, 21, 33, 8]
HEADERS = {"X-API-Key": "tml-local"}


@pytest.fixture
def client(running: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> Any:
    cookbook()
    monkeypatch.setenv("TINKER_TELEMETRY", "0")
    return service(running.url, "tml-local")


def datum(targets: list[int], **columns: list[float]) -> Any:
    from tinker import types

    return types.Datum(model_input=types.ModelInput.from_ints(IDS), loss_fn_inputs={"target_tokens": targets, **columns})


def test_the_sdk_trains_saves_and_resumes_and_every_sum_is_that_of_torch(
    client: Any, model: Path, running: SimpleNamespace
) -> None:
    from tinker import types

    targets, weights = [*IDS[1:], 4], [0.0, 1.0, 1.0, 1.0, 0.5, -1.0, 2.0]
    training = client.create_lora_training_client(base_model=str(model), rank=4, seed=3)
    data, adam = [datum(targets, weights=weights)], types.AdamParams(learning_rate=1e-2)
    first = training.forward_backward(data, "cross_entropy").result()
    with torch.no_grad():
        logits = AutoModelForCausalLM.from_pretrained(model)(torch.tensor([IDS])).logits[0].log_softmax(-1)
    expected = logits[torch.arange(len(IDS)), torch.tensor(targets)].numpy()
    assert np.abs(np.array(first.loss_fn_outputs[0]["logprobs"].data) - expected).max() < 1e-5
    assert first.metrics["loss:sum"] == pytest.approx(-float((expected * np.array(weights)).sum()), abs=1e-4)
    assert training.optim_step(adam).result().metrics["learning_rate"] == 1e-2
    path = training.save_state("one").result().path
    resumed = client.create_training_client_from_state_with_optimizer(path)
    again = [each.forward_backward(data, "cross_entropy").result().metrics["loss:sum"] for each in (training, resumed)]
    assert again[0] == again[1] != first.metrics["loss:sum"]
    assert [path] == [
        each.tinker_path for each in client.create_rest_client().list_checkpoints(path.split("/")[2]).result().checkpoints
    ]
    ratios = {"logprobs": [0.0] * 7, "advantages": [0.0, 1.0, -1.0, 0.5, 0.0, 2.0, 1.0]}
    for loss in ("importance_sampling", "ppo"):
        found = training.forward([datum(targets, **ratios)], loss).result()
        lp = np.array(found.loss_fn_outputs[0]["logprobs"].data)
        ratio, advantage = np.exp(lp), np.array(ratios["advantages"])
        clipped = ratio if loss == "importance_sampling" else ratio.clip(0.8, 1.2)
        assert found.metrics["loss:sum"] == pytest.approx(
            -np.minimum(ratio * advantage, clipped * advantage).sum(), abs=1e-5
        )


def test_what_is_wrong_fails_through_its_future_and_the_client_goes_on(client: Any, model: Path) -> None:
    from tinker import types

    training = client.create_lora_training_client(base_model=str(model), rank=4)
    targets = [*IDS[1:], 4]
    wrong = [
        (datum([*IDS[1:], 999], weights=[1.0] * 7), "cross_entropy", "999"),
        (datum(targets), "stable_reinforce", "stable_reinforce"),
        (datum(targets, logprobs=[0.0] * 7), "ppo", "advantages"),
    ]
    for data, loss, named in wrong:
        with pytest.raises(Exception, match=named):
            training.forward_backward([data], loss).result()
    with pytest.raises(Exception, match="no forward_backward"):
        training.optim_step(types.AdamParams()).result()
    training.forward_backward([datum(targets, weights=[1.0] * 7)], "cross_entropy").result()
    assert training.optim_step(types.AdamParams()).result().metrics["grad_norm"] > 0
    with pytest.raises(Exception, match="rank"):
        client.create_lora_training_client(base_model=str(model), rank=0).result()
    with pytest.raises(Exception, match="other/model"):
        client.create_lora_training_client(base_model="other/model", rank=4).result()


def test_clients_that_wait_share_a_pass_and_a_failure_is_its_own(client: Any, model: Path, running: SimpleNamespace) -> None:
    from tinker import types

    gate = threading.Event()
    runs = [client.create_lora_training_client(base_model=str(model), rank=rank, seed=rank) for rank in (2, 4, 3)]
    infos = [run.get_info().model_id for run in runs]
    targets = [*IDS[1:], 4]
    sent = [
        ([datum(targets, weights=[1.0] * 7)], "cross_entropy"),
        ([datum(targets, logprobs=[0.0] * 7, advantages=[1.0] * 7)] * 2, "ppo"),
    ]
    alone = [run.forward(*each).result().metrics["loss:sum"] for run, each in zip(runs, sent, strict=False)]
    hold = Call("", lambda run: {"waited": gate.wait(30)})
    running.training.submit(infos[2], 1, hold)
    before = len(running.group.passes)
    futures = [run.forward_backward(*each) for run, each in zip(runs, sent, strict=False)]
    until(lambda: all(running.training.waiting[info] for info in infos[:2]))
    gate.set()
    assert [future.result().metrics["loss:sum"] for future in futures] == pytest.approx(alone, abs=1e-5)
    (shared,) = running.group.passes[before:]
    assert len(shared) == 3 and len(set(shared)) == 2
    for run in runs[:2]:
        assert run.optim_step(types.AdamParams()).result().metrics["grad_norm"] > 0


def test_samplers_keep_their_weights_where_engines_keep_fewer(model: Path, tmp_path: Path) -> None:
    cookbook()
    from tinker import types

    prompt = types.ModelInput.from_ints(IDS)

    def sample(sampler: Any, count: int, **options: Any) -> Any:
        asked = types.SamplingParams(max_tokens=6, seed=7, **options)
        return sampler.sample(prompt, num_samples=count, sampling_params=asked).result().sequences

    with served(model, tmp_path, most_pushed=1) as small:
        client = service(small.url)
        training = client.create_lora_training_client(base_model=str(model), rank=4, seed=3)
        samplers = [training.save_weights_and_get_sampling_client().result()]
        before = sample(samplers[0], 3)
        training.forward_backward([datum([*IDS[1:], 4], weights=[1.0] * 7)], "cross_entropy").result()
        training.optim_step(types.AdamParams(learning_rate=3e-2)).result()
        samplers.append(training.save_weights_and_get_sampling_client().result())
        samplers.append(client.create_sampling_client(base_model=str(model)))
        found = [sample(each, 3) for each in samplers]
        assert small.server.sampling.pushed == 1
        for sampler, samples in zip(samplers, found, strict=True):
            whole = types.ModelInput.from_ints([*IDS, *samples[0].tokens])
            computed = sampler.compute_logprobs(whole).result()[len(IDS) :]
            assert computed == pytest.approx(list(samples[0].logprobs), abs=1e-5)
    assert [each.tokens for each in found[0]] == [each.tokens for each in before] == [each.tokens for each in found[2]]
    assert len({tuple(each.tokens) for each in before}) > 1, "each of a request's samples has a seed of its own"
    assert [each.tokens for each in found[1]] != [each.tokens for each in before]


def test_the_check_goes_through_everything_and_names_what_fails(
    running: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []
    check_server(running.url, largest_gap=1e-5, say=said.append)
    assert len(said) == 6 and all(line.startswith("ok   ") for line in said), said
    monkeypatch.setattr(running.training, "_vocab_size", 8)
    with pytest.raises(CheckFailedError, match=r"A run trains.*expected 0 to 7"):
        check_server(running.url, largest_gap=1e-5, say=said.append)


def test_requests_run_by_their_numbers_and_one_that_is_sent_again_runs_once(running: SimpleNamespace, model: Path) -> None:
    def post(route: str, **body: Any) -> Any:
        return httpx.post(f"{running.url}/api/v1/{route}", json=body, headers=HEADERS, timeout=60)

    session = post("create_session").json()["session_id"]
    made = post("create_model", session_id=session, model_seq_id=0, base_model=str(model), lora_config={"rank": 2}).json()
    run = made["model_id"]
    later = [post("save_weights", model_id=run, seq_id=2, path="b").json() for _ in range(2)]
    assert later[0] == later[1]
    assert running.store.get(RUNS, id=run)["over"] == ""
    first = post("save_weights", model_id=run, seq_id=1, path="a").json()
    answers = [post("retrieve_future", request_id=each["request_id"]).json() for each in (first, later[0], later[0])]
    assert [each["path"].rsplit("/", 1)[1] for each in answers] == ["a", "b", "b"]
    taken = post("save_weights", model_id=run, seq_id=3, path="a").json()
    assert "exists" in post("retrieve_future", request_id=taken["request_id"]).json()["error"]
    assert post("save_weights", model_id="no:train:0", seq_id=1, path="a").status_code == 404
    assert httpx.post(f"{running.url}/api/v1/create_session", json={}).status_code == 401
    assert post(f"sessions/{session}/finish").status_code == 200
    over = post("optim_step", model_id=run, seq_id=4, adam_params={}).json()
    assert "finished" in post("retrieve_future", request_id=over["request_id"]).json()["error"]
    assert post("session_heartbeat", session_id=session).status_code == 410


def test_a_restart_keeps_results_and_checkpoints_and_says_what_is_lost(tmp_path: Path) -> None:
    store = Store(tmp_path)
    done, _ = store.accept("run", 1, "ann")
    store.finish(done, Result.of({"path": "x"}))
    lost, _ = store.accept("run", 2, "ann")
    store.close()
    again = Store(tmp_path)
    again.begin()
    assert again.accept("run", 1, "ann") == (done, False)
    kept = {row["id"]: row["body"] for row in again.rows(REQUESTS)}
    assert kept[done] == b'{"path": "x"}'
    assert b"restarted" in kept[lost]
    again.close()


def test_a_key_is_printed_once_and_kept_as_a_digest_and_other_addresses_need_one(tmp_path: Path) -> None:
    store = Store(tmp_path)
    with pytest.raises(ConfigError, match="no keys"):
        command._require_keys(store, "0.0.0.0")
    command._require_keys(store, "127.0.0.1")
    key = command.new_key(tmp_path, "ann")
    assert key.startswith("tml-")
    assert store.owner_of(key) == "ann"
    assert store.owner_of(key + "x") is None
    assert all(key.encode() not in file.read_bytes() for file in tmp_path.iterdir())
    command._require_keys(store, "0.0.0.0")
    with pytest.raises(ConfigError, match="has a key already"):
        command.new_key(tmp_path, "ann")
    store.close()


def test_the_head_of_a_request_is_read_from_its_first_bytes() -> None:
    body = b"\x0a\x05a:b:0\x10\xac\x02"
    assert read_header(body + b"rest") == ("a:b:0", 300)
    for wrong in (b"", body[:4], b"\x12\x01a\x10\x01", b"\x0a\x00\x10\x01"):
        with pytest.raises(BatchError):
            read_header(wrong)
