"""The unmodified SDK of Tinker trains over the real routes, and the traps that hang its clients."""

from __future__ import annotations

import argparse
import asyncio
import itertools
import math
import re
import threading
from concurrent.futures import Future
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import httpx
import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from actors.rollout.config import RolloutConfig
from actors.rollout.group.engines import EngineSet
from actors.rollout.group.healing import Healing
from actors.serve import command
from actors.serve.check import CheckFailedError, check_server
from actors.serve.restarts import ServerLostError
from actors.serve.sampling import Sampling
from actors.serve.store import REQUESTS, RUNS, Result, Store
from actors.serve.training import Call, Training
from actors.serve.wire import read_header
from rl_backend.cli.main import main
from rl_backend.contracts import BatchError, ConfigError, EngineDeadError
from tests.support.actors_in_process import until
from tests.support.libraries import cookbook
from tests.support.served import served
from tests.support.tinker_clients import service
from tests.support.torch_engine import TorchEngine

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
    several = torch.tensor([[each, 4] for each in targets])
    wide = {"target_tokens": types.TensorData.from_torch(several), "weights": types.TensorData.from_torch(torch.ones(7, 2))}
    mixed = training.forward(
        [*data, types.Datum(model_input=data[0].model_input, loss_fn_inputs=wide), *data], "cross_entropy"
    )
    shapes = [each["logprobs"].to_torch() for each in mixed.result().loss_fn_outputs]
    assert [tuple(each.shape) for each in shapes] == [(7,), (7, 2), (7,)]
    assert torch.allclose(shapes[1], logits.gather(1, several), atol=1e-5)
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
    hold = Call(lambda run: {"waited": gate.wait(30)})
    running.training.submit(infos[2], 1, "", hold)
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
        assert small.sampling.pushed == 1
        for sampler, samples in zip(samplers, found, strict=True):
            whole = types.ModelInput.from_ints([*IDS, *samples[0].tokens])
            computed = sampler.compute_logprobs(whole).result()[len(IDS) :]
            assert computed == pytest.approx(list(samples[0].logprobs), abs=1e-5)
    assert [each.tokens for each in found[0]] == [each.tokens for each in before] == [each.tokens for each in found[2]]
    assert len({tuple(each.tokens) for each in before}) > 1, "each of a request's samples has a seed of its own"
    assert [each.tokens for each in found[1]] != [each.tokens for each in before]


def test_the_check_goes_through_everything_and_names_what_fails(
    running: SimpleNamespace, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []
    check_server(running.url, str(model), largest_gap=1e-5, say=said.append)
    assert len(said) == 6 and all(line.startswith("ok   ") for line in said), said
    generate, drawn = TorchEngine.generate, itertools.count()
    with monkeypatch.context() as ignoring:
        # An engine that ignores seeds.
        ignoring.setattr(TorchEngine, "generate", lambda *asked: generate(*asked[:4], next(drawn), asked[5]))
        with pytest.raises(CheckFailedError, match=r"A snapshot samples.*a seed gives the same samples"):
            check_server(running.url, str(model), largest_gap=1e-5, say=said.append)
    monkeypatch.setattr(running.training, "_vocab_size", 8)
    with pytest.raises(CheckFailedError, match=r"A run trains.*expected 0 to 7"):
        check_server(running.url, str(model), largest_gap=1e-5, say=said.append)
    with pytest.raises(CheckFailedError, match=r"A run is created.*not 'other'"):
        check_server(running.url, "other", largest_gap=1e-5, say=said.append)


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
    store.finish({done: Result.of({"path": "x"})})
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
    with pytest.raises(ConfigError, match=r"'anne'.*has no key"):
        command.remove_key(tmp_path, "anne")
    assert store.owner_of(key) == "ann"
    command.remove_key(tmp_path, "ann")
    assert store.owner_of(key) is None
    store.close()


def test_the_head_of_a_request_is_read_from_its_first_bytes() -> None:
    body = b"\x0a\x05a:b:0\x10\xac\x02"
    assert read_header(body + b"rest") == ("a:b:0", 300)
    for wrong in (b"", body[:4], b"\x12\x01a\x10\x01", b"\x0a\x00\x10\x01"):
        with pytest.raises(BatchError):
            read_header(wrong)


@pytest.mark.shows("server: likeliest tokens and given targets of prompts have the log-probs of torch, to 1e-5")
def test_likeliest_tokens_and_given_targets_of_prompts_have_the_log_probs_of_torch(client: Any, model: Path) -> None:
    from tinker import types

    reference = AutoModelForCausalLM.from_pretrained(model)

    @torch.no_grad()
    def expected(ids: list[int], temperature: float = 1.0) -> torch.Tensor:
        logits: torch.Tensor = reference(torch.tensor([ids])).logits[0]
        return (logits / temperature).log_softmax(-1)

    sampler = client.create_sampling_client(base_model=str(model)).result()
    wanted = torch.full((len(IDS) - 1, 16), -1)
    wanted[0, 1], wanted[4, :3] = 4, torch.tensor([9, 5, 100])
    plain, asked = expected(IDS), types.SamplingParams(max_tokens=3, seed=1, temperature=0.7)
    for targets in (types.TensorData.from_torch(wanted), types.TensorData.from_torch_sparse(wanted, pad_value=-1)):
        found = sampler.sample(
            types.ModelInput.from_ints(IDS),
            num_samples=2,
            sampling_params=asked,
            include_prompt_logprobs=True,
            topk_prompt_logprobs=4,
            topk_sample_logprobs=5,
            target_prompt_logprobs=targets,
            prompt_logprobs_last_n=5,
        ).result()
        assert found.prompt_logprobs[:2] == found.topk_prompt_logprobs[:2] == [None, None]
        for at in range(2, len(IDS)):
            assert found.prompt_logprobs[at] == pytest.approx(float(plain[at - 1, IDS[at]]), abs=1e-5)
            values, ids = plain[at - 1].topk(4)
            assert [token for token, _ in found.topk_prompt_logprobs[at]] == ids.tolist()
            assert [value for _, value in found.topk_prompt_logprobs[at]] == pytest.approx(values.tolist(), abs=1e-5)
        scored = found.target_prompt_logprobs
        assert scored.shape == list(wanted.shape) and scored.sparse_col_indices == targets.sparse_col_indices
        rows = plain[:-1].gather(1, wanted.clamp(min=0))
        assert torch.allclose(scored.to_torch(), rows.where(wanted >= 0, 0.0), atol=1e-5)
        for sample in found.sequences:
            cooled = expected([*IDS, *sample.tokens], 0.7)[len(IDS) - 1 :]
            for token, log_prob, likely, row in zip(
                sample.tokens, sample.logprobs, sample.topk_logprobs, cooled, strict=False
            ):
                values, ids = row.topk(5)
                assert [each for each, _ in likely] == ids.tolist()
                assert [value for _, value in likely] == pytest.approx(values.tolist(), abs=1e-5)
                assert dict(likely).get(token, log_prob) == pytest.approx(log_prob, abs=1e-5)


def test_the_likeliest_tokens_of_an_adapter_are_its_own(client: Any, model: Path) -> None:
    from tinker import types

    training = client.create_lora_training_client(base_model=str(model), rank=4, seed=3)
    training.forward_backward([datum([*IDS[1:], 4], weights=[1.0] * 7)], "cross_entropy").result()
    training.optim_step(types.AdamParams(learning_rate=3e-2)).result()
    sampler, greedy = training.save_weights_and_get_sampling_client(), types.SamplingParams(max_tokens=4, temperature=0.0)
    options = {"num_samples": 1, "sampling_params": greedy, "topk_prompt_logprobs": 2, "topk_sample_logprobs": 1}
    prompt = types.ModelInput.from_ints(IDS)
    base = client.create_sampling_client(base_model=str(model)).result().sample(prompt, **options).result()
    for found in (sampler.sample(prompt, **options).result(), base):
        (sample,) = found.sequences
        assert [row[0][0] for row in sample.topk_logprobs] == list(sample.tokens)
        assert [row[0][1] for row in sample.topk_logprobs] == pytest.approx(list(sample.logprobs), abs=1e-5)
    assert found.topk_prompt_logprobs != sampler.sample(prompt, **options).result().topk_prompt_logprobs


def test_what_is_wrong_with_a_request_for_samples_is_named(running: SimpleNamespace, model: Path) -> None:
    def post(route: str, **body: Any) -> Any:
        return httpx.post(f"{running.url}/api/v1/{route}", json=body, headers=HEADERS, timeout=60).json()

    session = post("create_session")["session_id"]
    made = post("create_sampling_session", session_id=session, sampling_session_seq_id=0, base_model=str(model))
    sampler = made["sampling_session_id"]
    prompt = {"chunks": [{"type": "encoded_text", "tokens": IDS}]}
    wrong = [
        ({"topk_prompt_logprobs": 129}, "topk_prompt_logprobs=129: expected a number up to 128"),
        ({"topk_sample_logprobs": "x"}, "topk_sample_logprobs='x'"),
        ({"target_prompt_logprobs": {"data": [1], "shape": [1, 1]}}, r"shape \(1, 1\); expected \(6, K\)"),
        ({"target_prompt_logprobs": {"data": [128] * 6, "shape": [6, 1]}}, "expected ids from 0 to 127"),
        ({"target_prompt_logprobs": {"data": [-1] * 6, "shape": [6, 1]}}, "at least one"),
        ({"target_prompt_logprobs": {"data": "x"}}, "no array of whole numbers"),
        ({"target_prompt_logprobs": {"data": [1], "shape": [6, 1 << 40]}}, "at most"),
        ({"topk_sample_logprobs": 1, "sampling_params": {"max_tokens": 1, "top_p": 0.5}}, "with top_p are not served"),
        ({"prompt_alt_tokens_k": 2}, "prompt_alt_tokens_k=2 is not served"),
        ({"sampling_params": {"stop": ["x"] * 300}}, "stop: 300 of them"),
        ({"sampling_params": {"stop": 5.5}}, "stop=5.5: expected a text"),
        ({"sampling_params": {"stop": {"a": 1}}}, "stop=.*expected a text"),
        ({"sampling_params": {"temperature": "hot"}}, "temperature='hot': expected a number"),
        ({"sampling_params": {"top_k": -7}}, "top_k=-7: expected a whole number from -1"),
        ({"sampling_params": {"seed": 1.5}}, "seed=1.5: expected a whole number"),
        ({"sampling_params": {"seed": 1 << 63}}, "seed=9223372036854775808: expected a whole number"),
        ({"sampling_params": {"max_tokens": 0}}, "max_tokens=0: expected a whole number from 1"),
        ({"prompt": {"chunks": [{"tokens": ["a"]}]}}, "a token that is no whole number"),
        ({"prompt": {"chunks": [{}]}}, "a token that is no whole number"),
        ({"prompt": {"chunks": [3]}}, "prompt.chunks: expected a list of objects"),
        ({"prompt": "x"}, "prompt='x': expected an object"),
        ({"sampling_params": [1]}, r"sampling_params=\[1\]: expected an object"),
        ({"topk_prompt_logprobs": True}, "topk_prompt_logprobs=True: expected a number"),
        (
            {"topk_sample_logprobs": 100, "num_samples": 2000, "sampling_params": {"max_tokens": 50}},
            "topk_sample_logprobs=100: expected a number up to",
        ),
    ]
    for seq_id, (changed, named) in enumerate(wrong):
        asked = {"sampling_params": {"max_tokens": 1}, "prompt": prompt, **changed}
        accepted = post("asample", sampling_session_id=sampler, seq_id=seq_id, **asked)
        answer = post("retrieve_future", request_id=accepted["request_id"])
        assert answer["category"] == "user" and re.search(named, answer["error"]), answer


def test_answers_of_a_sampler_are_told_in_their_order_to_each_of_its_clients(
    running: SimpleNamespace, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def post(route: str, **body: Any) -> Any:
        return httpx.post(f"{running.url}/api/v1/{route}", json=body, headers=HEADERS, timeout=60)

    session = post("create_session").json()["session_id"]
    made = post("create_sampling_session", session_id=session, sampling_session_seq_id=0, base_model=str(model))
    sampler = made.json()["sampling_session_id"]

    def sample(seq_id: int, most: int = 2) -> str:
        prompt = {"chunks": [{"type": "encoded_text", "tokens": IDS}]}
        asked = {"sampling_session_id": sampler, "seq_id": seq_id, "prompt": prompt, "sampling_params": {"max_tokens": most}}
        return str(post("asample", **asked).json()["request_id"])

    def told(client: int, after: int, wait: float | None = None) -> tuple[list[tuple[str, str]], int]:
        target = {"type": "sampling_session", "sampling_session_id": sampler, "cloned_sampler_id": client}
        found = post("retrieve_futures", target=target, prev_cursor=after, timeout=wait).json()
        return [(each["request_id"], each["state"]) for each in found["completions"]], found["cursor"]

    joined = [post("join_sampling_session", sampling_session_id=sampler).json()["client_counter"] for _ in range(2)]
    assert joined == [1, 2]
    assert told(0, 0, wait=0) == ([], 0)
    first, wrong = sample(0), sample(1, most=0)
    seen, cursor = [], 0
    while len(seen) < 2:
        new, cursor = told(0, cursor)
        seen += new
    assert sorted(seen) == sorted([(first, "finished"), (wrong, "failed")]) and told(0, cursor, wait=0) == ([], cursor)
    other = sample(2 * 10**9)
    until(lambda: bool(told(2, 0, wait=0)[0]))
    assert told(2, 0)[0] == [(other, "finished")] and told(0, cursor, wait=0)[0] == []
    # A request that nobody waits for any more does not sample on.
    gate = threading.Event()
    monkeypatch.setattr(TorchEngine, "generate", lambda *_: gate.wait(90))
    long = sample(2)
    assert post("cancel_future", request_id=long).status_code == 204
    assert "cancelled" in post("retrieve_future", request_id=long).json()["error"]
    until(lambda: running.sampling.open == 0)
    assert told(0, cursor)[0] == [(long, "failed")]
    assert post("cancel_future", request_id=first).status_code == 204
    assert post("retrieve_future", request_id=first).headers["content-type"] == "application/x-protobuf"
    assert post("cancel_future", request_id="other").status_code == 404
    gate.set()


def test_a_copy_of_a_sampling_client_is_another_client(client: Any, model: Path) -> None:
    from tinker import SamplingClient, types

    sampler = client.create_sampling_client(base_model=str(model)).result()
    asked = types.SamplingParams(max_tokens=4, seed=1)
    prompt = types.ModelInput.from_ints(IDS)
    copies = [SamplingClient.from_sampler_handle(sampler.get_sampler_handle(), api_key="tml-local") for _ in range(2)]
    found = [each.sample(prompt, num_samples=1, sampling_params=asked).result().sequences[0] for each in (sampler, *copies)]
    assert [each.tokens for each in found] == [found[0].tokens] * 3
    assert len({each.sequence_id for each in found}) == 3


def test_a_server_without_engines_goes_on_as_long_as_others_may_take_their_place() -> None:
    engines = EngineSet(RolloutConfig(model_path="nowhere"))
    sampling = Sampling(SimpleNamespace(engine_set=engines), (), most_pushed=1)  # type: ignore[arg-type]
    server: Any = SimpleNamespace(failed="", models={"m": SimpleNamespace(name="m", sampling=sampling)})
    web: Any = SimpleNamespace(should_exit=False)
    lost: list[Exception] = []

    def watch() -> None:
        try:
            command._until_lost(server, web)
        except ServerLostError as error:
            lost.append(error)

    thread = threading.Thread(target=watch)
    thread.start()
    assert not engines.engines
    thread.join(1.5)
    assert thread.is_alive()
    engines.give_up(EngineDeadError("engine 0 was started again 3 times within an hour"))
    thread.join(10)
    assert [str(each) for each in lost] == ["m: engine 0 was started again 3 times within an hour"]


def test_an_adapter_waits_for_an_engine_that_takes_the_place_of_a_lost_one(tmp_path: Path) -> None:
    class Heals:
        """Engines of which the only one is lost at first, and replaced by whoever waits."""

        lost = True

        def wait_for_engine(self, error: EngineDeadError) -> None:
            if not self.lost:
                raise error
            self.lost = False

        def push(self, _: Any, name: str, folder: Path) -> None:
            if self.lost or folder.name == "gone":
                raise EngineDeadError("no rollout engine is left")

    engines = Heals()
    sampling = Sampling(SimpleNamespace(engine_set=engines), (), most_pushed=2)  # type: ignore[arg-type]
    with patch("actors.serve.sampling.push_directory", engines.push):
        assert asyncio.run(sampling.push(tmp_path / "adapter")).startswith(tmp_path.name)
        assert sampling.pushed == 1
        with pytest.raises(EngineDeadError):
            asyncio.run(sampling.push(tmp_path / "gone"))


def test_an_adapter_is_pushed_once_where_whoever_asked_first_is_gone(tmp_path: Path) -> None:
    began, gate, pushed = threading.Event(), threading.Event(), list[str]()

    def push(_: Any, name: str, folder: Path) -> None:
        pushed.append(name)
        began.set()
        gate.wait(10)

    sampling = Sampling(SimpleNamespace(), (), most_pushed=2)  # type: ignore[arg-type]

    async def leave() -> str:
        asks = asyncio.create_task(sampling.push(tmp_path / "adapter"))
        await asyncio.to_thread(began.wait, 10)
        asks.cancel()
        await asyncio.wait([asks])
        gate.set()
        return await sampling.push(tmp_path / "adapter")

    with patch("actors.serve.sampling.push_directory", push):
        assert [asyncio.run(leave())] == pushed


def test_whoever_waits_for_an_engine_is_answered_when_the_server_closes(model: Path, tmp_path: Path) -> None:
    engines, lost = EngineSet(RolloutConfig(model_path="nowhere")), EngineDeadError("lost")
    engines.heals = True

    def wait() -> None:
        with pytest.raises(EngineDeadError):
            engines.wait_for_engine(lost)

    waits = threading.Thread(target=wait)
    with served(model, tmp_path) as closing:
        closing.sampling._rollout.healing.close = Healing(engines, lambda _: None).close
        waits.start()
    waits.join(10)
    assert not waits.is_alive()


def test_two_servers_do_not_share_a_state_folder(tmp_path: Path) -> None:
    listener: Any = None
    with command._alone(tmp_path), pytest.raises(ConfigError, match="another server has it"):
        command.serve_at(listener, argparse.Namespace(state=tmp_path))
    with command._alone(tmp_path):
        pass


def test_a_port_that_does_not_exist_is_refused_by_name(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", "--model", "any", "--port", "70000", "--state", str(tmp_path)]) == 2
    assert "--host 127.0.0.1 --port 70000: " in capsys.readouterr().err


def test_the_port_of_a_server_that_still_starts_is_taken() -> None:
    with command._listening("127.0.0.1", 0) as listener, pytest.raises(ConfigError, match="choose another"):
        command._listening(*listener.getsockname()).__enter__()


def test_a_reader_who_leaves_as_training_ends_leaves_others_their_error() -> None:
    class Leaves(Future[Any]):
        def done(self) -> bool:
            return not self.cancel()

    lost, leaves, stays, runs = EngineDeadError("lost"), Leaves(), Future[Any](), Future[Any]()
    runs.set_running_or_notify_cancel()
    readings: Any = [SimpleNamespace(answer=answer) for answer in (leaves, stays, runs)]
    training: Any = SimpleNamespace(_changed=threading.Condition(), _runs={}, _readings=[], _answer=lambda: None)
    Training._lose(training, lost, readings)
    assert leaves.cancelled() and stays.exception(0) is lost and runs.exception(0) is lost


@pytest.mark.parametrize("name", ["disk_gib", "requests_per_second"])
def test_limits_are_finite_numbers(name: str, tmp_path: Path) -> None:
    for wrong in (math.inf, math.nan, 0.0, -1.0):
        options = {"disk_gib": None, "requests_per_second": None, "state": tmp_path, name: wrong}
        with pytest.raises(ConfigError, match=f"{name}.*expected a finite number above 0"):
            command.serve(argparse.Namespace(**options))


def test_clients_of_a_mixture_train_experts_that_share_a_factor() -> None:
    for kinds in (("feed_forward", "experts"), ("feed_forward",)):
        server: Any = SimpleNamespace(_max_rank=8, _kinds=kinds)
        asked = [{"rank": 8}, {"rank": 8, "train_mlp": False}]
        found = [Training.config_of(server, each).experts_share_factor for each in asked]
        assert found == ["experts" in kinds, False]
