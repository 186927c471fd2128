"""``rl-backend serve`` with a training rank and a vLLM engine: the unmodified SDK of Tinker, and openai's package."""

from __future__ import annotations

import subprocess
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import openai
import psutil
import pytest
import ray
from ray.util.placement_group import placement_group_table

from rl_backend.cli.main import main
from tests.e2e.conftest import CLUSTER_CPUS
from tests.support.actors_in_process import until
from tests.support.chat_templates import CHATML, chat_tokenizer
from tests.support.libraries import cookbook
from tests.support.models import write_tiny
from tests.support.serve_process import Served, serve_command, serving
from tests.support.tinker_clients import (
    Client,
    Sampled,
    at_one_time,
    close_services,
    reinforce,
    service,
    train,
    train_together,
)

PROMPT = [5, 9, 3, 7, 21]
VOCABULARY = 512


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    tokenizer = chat_tokenizer(CHATML)
    # Its head is its embedding, and the SDK trains the unembedding unless it is told otherwise.
    written = write_tiny(
        "qwen3",
        tmp_path_factory.mktemp("serve") / "model",
        vocab_size=VOCABULARY,
        eos_token_id=tokenizer.eos_token_id,
    )
    tokenizer.save_pretrained(written)
    return written


def command_of(model: Path, *options: str) -> list[str]:
    limits = ("--dtype", "float32", "--max-rank", "16", "--max-model-len", "256", "--kv-cache-gib", "0.1")
    return serve_command(model, *limits, *options)


@contextmanager
def ending(command: list[str], **environment: str) -> Iterator[Served]:
    """A server that ends as it is told."""
    with serving(command, **environment) as found:
        yield found
    assert found.process.returncode in (0, 130, 143)


@pytest.fixture(scope="module")
def served(model: Path, ray_cluster: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """On the cluster of the session, which was there before; the last test of this module ends it."""
    command = command_of(model, "--state", str(tmp_path_factory.mktemp("state")))
    with ending(command, RAY_ADDRESS=ray.get_runtime_context().gcs_address) as found:
        yield found


@pytest.fixture
def client(served: Served, monkeypatch: pytest.MonkeyPatch) -> Any:
    cookbook()
    monkeypatch.setenv("TINKER_TELEMETRY", "0")
    return service(served.url, "tml-local")


@pytest.fixture(autouse=True)
def clients_are_closed() -> Iterator[None]:
    yield
    close_services()


@pytest.mark.shows(
    "server: Tinker's SDK trains, and samples of every snapshot have the trainer's log-probs, to 1e-5 in float32"
)
def test_snapshots_sample_with_the_log_probs_of_the_weights_that_they_are_of(served: Served, client: Any) -> None:
    from tinker import types

    def datum(ids: list[int], **columns: list[float]) -> Any:
        inputs = {"target_tokens": ids[1:], **columns}
        return types.Datum(model_input=types.ModelInput.from_ints(ids[:-1]), loss_fn_inputs=inputs)

    prompt, sampling = types.ModelInput.from_ints(PROMPT), types.SamplingParams(max_tokens=8, seed=1)
    training = client.create_lora_training_client(base_model=served.model, rank=8, seed=3)
    base = client.create_sampling_client(base_model=served.model)
    first = training.save_weights_and_get_sampling_client()
    before = first.sample(prompt, num_samples=2, sampling_params=sampling).result().sequences
    losses = []
    for _ in range(3):
        passed = training.forward_backward(
            [datum([*PROMPT, 33, 8], weights=[0.0, 1.0, 1.0, 1.0, 0.5, 2.0])], "cross_entropy"
        )
        training.optim_step(types.AdamParams(learning_rate=1e-2)).result()
        losses.append(passed.result().metrics["loss:sum"])
    assert losses[2] < losses[1] < losses[0]
    second = training.save_weights_and_get_sampling_client()
    after = second.sample(prompt, num_samples=2, sampling_params=sampling).result().sequences
    again = first.sample(prompt, num_samples=2, sampling_params=sampling).result().sequences
    assert [each.tokens for each in again] == [each.tokens for each in before], "a snapshot keeps its weights"
    assert [each.tokens for each in after] != [each.tokens for each in before]
    for sampler, samples in ((first, before), (second, after)):
        for sample in samples:
            whole = [*PROMPT, *sample.tokens]
            computed = sampler.compute_logprobs(types.ModelInput.from_ints(whole)).result()[len(PROMPT) :]
            assert computed == pytest.approx(list(sample.logprobs), abs=1e-5)
    # B starts at zero: the first snapshot is the base.
    assert base.compute_logprobs(prompt).result()[1:] == pytest.approx(first.compute_logprobs(prompt).result()[1:], abs=1e-5)
    ids, skipped = [*PROMPT, *after[0].tokens], [0.0] * (len(PROMPT) - 1)
    on_policy = datum(ids, logprobs=[*skipped, *after[0].logprobs], advantages=[*skipped, *([1.0] * len(after[0].tokens))])
    for loss in ("importance_sampling", "ppo"):
        assert training.forward_backward([on_policy], loss).result().metrics["loss:sum"] == pytest.approx(
            -len(after[0].tokens), abs=1e-3
        )


@pytest.mark.shows("server: openai's package completes and chats with the base and with adapters, in pieces as well")
def test_the_openai_package_talks_to_what_is_trained(served: Served, client: Any) -> None:
    training = client.create_lora_training_client(base_model=served.model, rank=4)
    path = training.save_weights_for_sampler("talk").result().path
    door = openai.OpenAI(base_url=f"{served.url}/v1", api_key="tml-local")
    assert {served.model, path} <= {each.id for each in door.models.list().data}
    whole = door.completions.create(model=served.model, prompt="12+3", max_tokens=8, seed=1)
    assert whole.usage is not None and whole.usage.completion_tokens <= 8
    messages: Any = [{"role": "user", "content": "1"}]
    greedy: Any = {"model": path, "messages": messages, "max_tokens": 20, "temperature": 0}
    said = door.chat.completions.create(**greedy).choices[0].message.content
    pieces = door.chat.completions.create(**greedy, stream=True)
    assert "".join(each.choices[0].delta.content or "" for each in pieces if each.choices) == said
    for page, text in (("/", "rl-backend"), ("/metrics", "rl_backend_serve_checkpoints 1")):
        with urllib.request.urlopen(served.url + page) as answer:
            assert text in answer.read().decode()


@pytest.mark.shows(
    "server: openai's package chats with a run, in pieces, while it is being trained, and hears what it learns"
)
def test_a_run_is_talked_to_in_streams_while_it_is_being_trained(served: Served, client: Any) -> None:
    from tinker import types

    training = client.create_lora_training_client(base_model=served.model, rank=16, seed=5).result()
    tokenizer, reply = training.get_tokenizer(), " ".join(map(str, range(20)))
    messages: Any = [{"role": "user", "content": "count"}]
    prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    said = [*tokenizer.encode(reply, add_special_tokens=False), tokenizer.eos_token_id]
    weights = [0.0] * (len(prompt) - 1) + [1.0] * len(said)
    inputs = {"target_tokens": [*prompt[1:], *said], "weights": weights}
    datum = types.Datum(model_input=types.ModelInput.from_ints([*prompt, *said[:-1]]), loss_fn_inputs=inputs)
    steps, over = list[float](), threading.Event()

    def train_on() -> None:
        while not over.is_set():
            for _ in range(4):
                training.forward_backward([datum], "cross_entropy")
                training.optim_step(types.AdamParams(learning_rate=1e-2)).result()
                steps.append(time.monotonic())
            # A run's name stands for its newest save.
            training.save_weights_and_get_sampling_client().result()

    door = openai.OpenAI(base_url=f"{served.url}/v1", api_key="tml-local")
    heard, meanwhile, last = list[str](), 0, time.monotonic() + 120
    training.save_weights_and_get_sampling_client().result()
    with ThreadPoolExecutor(1) as pool:
        learner = pool.submit(train_on)
        try:
            while reply not in heard and not learner.done() and time.monotonic() < last:
                asked: Any = {"model": training.model_id, "messages": messages, "max_tokens": len(said), "temperature": 0}
                pieces = [
                    (len(steps), each.choices[0].delta.content)
                    for each in door.chat.completions.create(**asked, stream=True)
                    if each.choices and each.choices[0].delta.content
                ]
                heard.append("".join(text for _, text in pieces))
                meanwhile += pieces[-1][0] - pieces[0][0]
        finally:
            over.set()
        learner.result()
    assert heard[0] != reply == heard[-1], heard[-1]
    assert len(pieces) > 3 and meanwhile, "steps are taken between the pieces of an answer"


def test_a_second_server_does_not_take_the_port(served: Served, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    port = served.url.rpartition(":")[2]
    assert main(["serve", "--model", served.model, "--port", port, "--state", str(tmp_path)]) == 2
    assert f"--port {port}" in capsys.readouterr().err


@pytest.mark.long
@pytest.mark.shows("server: each of eight clients at one time gets the bits that it has alone")
def test_eight_clients_at_one_time_get_the_bits_that_each_has_alone(served: Served) -> None:
    cookbook()
    clients = [Client(number, rank, 24) for number, rank in enumerate((4, 16, 8, 2, 12, 6, 16, 1))]
    alone = [train(served.url, served.model, each, VOCABULARY) for each in clients]
    together = train_together(served.url, served.model, clients, VOCABULARY)
    assert [one.equals(two) for one, two in zip(alone, together, strict=True)] == [True] * len(clients)


@pytest.mark.long
@pytest.mark.shows(
    "server: eight clients that train on their own samples at one time sample the tokens that each samples alone"
)
def test_eight_clients_that_sample_at_one_time_get_the_tokens_that_each_gets_alone(served: Served) -> None:
    cookbook()
    clients = [Client(number, rank, 8) for number, rank in enumerate((4, 16, 8, 2, 12, 6, 16, 1))]

    def work(client: Client, ready: Callable[[], object] = lambda: None) -> Sampled:
        return reinforce(served.url, served.model, client, PROMPT, ready)

    alone = [work(client) for client in clients]
    for one, two in zip(alone, at_one_time(clients, work), strict=True):
        assert one.tokens == two.tokens
        np.testing.assert_allclose(one.log_probs, two.log_probs, rtol=0, atol=1e-5)
    assert len({str(each.tokens) for each in alone}) == len(clients)


@pytest.mark.long
@pytest.mark.shows("server: --check goes through each of its models from nothing and says what came of it")
def test_check_goes_through_a_server_of_two_models_from_nothing(model: Path, tmp_path: Path) -> None:
    other = write_tiny("qwen3", tmp_path / "other", vocab_size=300, seed=1)
    command = command_of(model, "--model", f"other={other}", "--check")
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("\nok   ") == 12 and f"\nserving {model}, other at http" in f"\n{done.stdout}"


@pytest.mark.long
@pytest.mark.shows("server: with --restart one that is killed serves again, and a client continues from its save")
def test_a_server_that_is_killed_serves_again_and_a_client_continues(model: Path, tmp_path: Path) -> None:
    cookbook()
    from tinker import types

    ids = types.ModelInput.from_ints(PROMPT)
    data = [types.Datum(model_input=ids, loss_fn_inputs={"target_tokens": [*PROMPT[1:], 3], "weights": [1.0] * 5})]
    with ending(command_of(model, "--state", str(tmp_path), "--restart")) as supervised:
        mine = service(supervised.url)
        training = mine.create_lora_training_client(base_model=supervised.model, rank=4)
        training.forward_backward(data, "cross_entropy").result()
        training.optim_step(types.AdamParams(learning_rate=1e-2)).result()
        path = training.save_state("kept").result().path
        before = training.forward(data, "cross_entropy").result().metrics["loss:sum"]
        (server,) = (
            each for each in psutil.Process(supervised.process.pid).children() if " serve " in " ".join(each.cmdline())
        )
        server.kill()
        killed = time.monotonic()
        # Asked of a server that is not there: the connection waits in the port.
        with pytest.raises(Exception, match="restarted"):
            training.forward(data, "cross_entropy").result()
        assert time.monotonic() - killed < 120
        resumed = mine.create_training_client_from_state_with_optimizer(path)
        assert resumed.forward(data, "cross_entropy").result().metrics["loss:sum"] == before
    assert sum(line.startswith("serving ") for line in supervised.said) == 2, "".join(supervised.said)


@pytest.mark.long
@pytest.mark.shows("server: the kill of a training rank costs clients time, and nothing else")
def test_a_rank_that_is_killed_costs_clients_time_alone(model: Path, tmp_path: Path) -> None:
    cookbook()
    from tinker import types

    ids = types.ModelInput.from_ints(PROMPT)
    data = [types.Datum(model_input=ids, loss_fn_inputs={"target_tokens": [*PROMPT[1:], 3], "weights": [1.0] * 5})]

    def trained(url: str, name: str, between: Any = lambda: None) -> list[float]:
        training = service(url).create_lora_training_client(base_model=name, rank=4, seed=1)
        found = []
        for step in range(4):
            passed = training.forward_backward(data, "cross_entropy")
            if step == 2:
                between()
            training.optim_step(types.AdamParams(learning_rate=1e-2)).result()
            found.append(passed.result().metrics["loss:sum"])
        return found

    with ending(command_of(model, "--state", str(tmp_path))) as supervised:
        expected = trained(supervised.url, supervised.model)
        started = psutil.Process(supervised.process.pid).children(recursive=True)
        (rank,) = (each for each in started if "TrainWorker" in " ".join(each.cmdline()))
        assert trained(supervised.url, supervised.model, rank.kill) == expected and not rank.is_running()
    assert sum(line.startswith("serving ") for line in supervised.said) == 1, "".join(supervised.said)


@pytest.mark.shows(
    "server: by RAY_ADDRESS it trains and samples on a Ray cluster that is there, and nothing of it stays there when it ends"
)
def test_a_server_on_a_cluster_that_is_there_leaves_it_as_it_was(served: Served, client: Any) -> None:
    """Ends the server of this module."""
    from tinker import types

    (job,) = (each["JobID"] for each in ray._private.state.jobs() if each["DriverPid"] == served.process.pid)

    def actors() -> dict[int, str]:
        found = (each for each in ray._private.state.actors().values() if each["JobID"] == job)
        return {each["Pid"]: each["ActorClassName"] for each in found if each["State"] != "DEAD"}

    def reserved() -> list[str]:
        # The id of a group ends with that of its job.
        return [name for name, each in placement_group_table().items() if name.endswith(job) and each["state"] != "REMOVED"]

    training = client.create_lora_training_client(base_model=served.model, rank=4, seed=1)
    ids = types.ModelInput.from_ints(PROMPT)
    datum = types.Datum(model_input=ids, loss_fn_inputs={"target_tokens": [*PROMPT[1:], 3], "weights": [1.0] * 5})
    training.forward_backward([datum], "cross_entropy").result()
    training.optim_step(types.AdamParams(learning_rate=1e-2)).result()
    sampler = training.save_weights_and_get_sampling_client()
    (sample,) = sampler.sample(ids, num_samples=1, sampling_params=types.SamplingParams(max_tokens=4)).result().sequences
    assert 1 <= len(sample.tokens) <= 4
    assert set(actors().values()) >= {"RolloutEngine", "TrainWorker"} and len(reserved()) == 2
    members = [psutil.Process(pid) for pid in actors()]
    processes = [*members, *(child for each in members for child in each.children(recursive=True))]
    close_services()
    served.process.terminate()
    served.process.wait(60)
    until(lambda: not actors() and not reserved() and not any(each.is_running() for each in processes))
    assert ray.cluster_resources()["CPU"] == CLUSTER_CPUS
