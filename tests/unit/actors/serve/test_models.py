"""Several base models of one server: each has ranks, engines, runs and figures of its own, and a name that finds them."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import openai
import pytest
import torch
from transformers import AutoModelForCausalLM

from actors.cluster.placement import ClusterShare
from actors.serve import command
from actors.serve.store import CHECKPOINTS, Store
from rl_backend.cli.serve import add_arguments
from rl_backend.contracts import ConfigError, GroupFailedError
from tests.support.libraries import cookbook
from tests.support.models import write_tiny_qwen3
from tests.support.serve_wire import Wire
from tests.support.served import served
from tests.support.tinker_clients import service

OTHER = "other/model"
IDS = [5, 9, 3, 7, 21, 33, 8]


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With a vocabulary of its own, and fewer positions."""
    folder = tmp_path_factory.mktemp("other")
    return write_tiny_qwen3(folder, seed=5, vocab_size=96, max_position_embeddings=256, tie_word_embeddings=False)


@pytest.fixture(scope="module")
def both(model: Path, other: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[SimpleNamespace]:
    with served(model, tmp_path_factory.mktemp("state"), name="first", others={OTHER: other}) as found:
        yield found


@torch.no_grad()
def log_probs(folder: Path) -> list[float]:
    """Of all ids but the first, by torch."""
    rows = AutoModelForCausalLM.from_pretrained(folder)(torch.tensor([IDS])).logits[0].log_softmax(-1)
    found: list[float] = rows[:-1].gather(1, torch.tensor(IDS[1:])[:, None])[:, 0].tolist()
    return found


@pytest.mark.shows("server: several base models, each with the log-probs of torch to 1e-5, by Tinker's SDK and openai's")
def test_each_model_trains_and_samples_by_its_name(
    both: SimpleNamespace, model: Path, other: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cookbook()
    from tinker import types

    monkeypatch.setenv("TINKER_TELEMETRY", "0")
    client, ids = service(both.url), types.ModelInput.from_ints(IDS)
    expected = {"first": log_probs(model), OTHER: log_probs(other)}
    assert [each.model_name for each in client.get_server_capabilities().supported_models] == list(expected)
    inputs = {"target_tokens": [*IDS[1:], 4], "weights": [1.0] * len(IDS)}
    data = [types.Datum(model_input=ids, loss_fn_inputs=inputs)]
    runs = {name: client.create_lora_training_client(base_model=name, rank=4, seed=3) for name in expected}
    passed = {name: run.forward_backward(data, "cross_entropy") for name, run in runs.items()}
    paths = []
    for name, run in runs.items():
        found = passed[name].result().loss_fn_outputs[0]["logprobs"].data
        assert found[:-1] == pytest.approx(expected[name], abs=1e-5)
        run.optim_step(types.AdamParams(learning_rate=3e-2)).result()
        base = client.create_sampling_client(base_model=name)
        assert base.compute_logprobs(ids).result()[1:] == pytest.approx(expected[name], abs=1e-5)
        # Engines and trainer of one model, after a step.
        sampler = run.save_weights_and_get_sampling_client()
        (sample,) = sampler.sample(ids, 1, types.SamplingParams(max_tokens=4, seed=1)).result().sequences
        again = sampler.compute_logprobs(types.ModelInput.from_ints([*IDS, *sample.tokens])).result()
        assert again[len(IDS) :] == pytest.approx(list(sample.logprobs), abs=1e-5)
        assert again[1 : len(IDS)] != pytest.approx(expected[name], abs=1e-3)
        paths.append(run.save_weights_for_sampler("kept").result().path)
        info = client.create_rest_client().get_weights_info_by_tinker_path(paths[-1]).result()
        assert info.base_model == run.get_info().model_data.model_name == sampler.get_base_model() == name
    door = openai.OpenAI(base_url=f"{both.url}/v1", api_key="tml-local", max_retries=0)
    known = [each.id for each in door.models.list()]
    assert known[:2] == [*expected] and {*paths} <= {*known}
    asked: Any = {"prompt": IDS, "echo": True, "logprobs": 0, "max_tokens": 1, "temperature": 0}
    for name, path in zip(expected, paths, strict=True):
        base, trained = (
            door.completions.create(model=each, **asked).choices[0].logprobs.token_logprobs[1:-1] for each in (name, path)
        )
        assert base == pytest.approx(expected[name], abs=1e-5) != trained


def test_a_checkpoint_of_one_model_is_refused_for_another_by_name(both: SimpleNamespace) -> None:
    wire = Wire(both.url)
    (session, run), (_, of_other) = wire.run("first"), wire.run(OTHER)
    path = wire.answer(wire.post("save_weights", model_id=run, seq_id=1, path="a")).json()["path"]
    said = f"{path} is of 'first', and the run of '{OTHER}'"
    loaded = wire.post("load_weights", model_id=of_other, seq_id=1, path=path, optimizer=True)
    assert wire.answer(loaded).json()["error"] == said
    assert b"loss:sum" in wire.answer(wire.data(of_other, 2)).content
    asked = {"session_id": session, "path": path, "optimizer": True}
    assert wire.answer(wire.post("load_weights", model_seq_id=1, base_model=OTHER, **asked)).json()["error"] == said
    made = wire.post("load_weights", model_seq_id=2, **asked).json()
    assert wire.answer(made).json()["path"] == path
    assert wire.post("get_info", model_id=made["model_id"]).json()["model_name"] == "first"
    sampler = {"session_id": session, "sampling_session_seq_id": 0}
    wrong = wire.post("create_sampling_session", model_path=path, base_model=OTHER, **sampler)
    assert wrong.status_code == 400 and f"{path} is of 'first'" in wrong.text
    # A model that is not there; requests of its run are answered through futures all the same.
    unknown = f"base_model='third': this server has 'first', '{OTHER}'"
    made = wire.post("create_model", session_id=session, model_seq_id=3, base_model="third", lora_config={}).json()
    assert wire.answer(made).json()["error"] == wire.answer(wire.data(made["model_id"], 1)).json()["error"] == unknown
    wrong = wire.post("create_sampling_session", base_model="third", **sampler)
    assert wrong.status_code == 404 and wrong.json()["detail"] == unknown


def test_what_waits_is_bounded_for_all_models_together(both: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    wire = Wire(both.url)
    (session, run), (_, of_other) = wire.run("first"), wire.run(OTHER)
    monkeypatch.setattr(both.server, "limits", replace(both.server.limits, waiting_bytes=400))
    early = [wire.data(run, seq_id).status_code for seq_id in (3, 4, 5, 6, 7)]
    assert early[0] == 200 and early[-1] == wire.data(of_other, 2).status_code == 429
    assert b"loss:sum" in wire.answer(wire.data(of_other, 1)).content
    wire.post(f"sessions/{session}/finish")


def test_a_model_whose_training_ends_or_that_is_served_no_more_leaves_the_others_alone(
    model: Path, other: Path, tmp_path: Path
) -> None:
    def fails(*_: Any, **__: Any) -> Any:
        raise GroupFailedError("rank 0 died")

    with served(model, tmp_path, name="first", others={OTHER: other}) as broken:
        wire = Wire(broken.url)
        (_, lives), (session, lost) = wire.run("first"), wire.run(OTHER)
        path = wire.answer(wire.post("save_weights", model_id=lost, seq_id=1, path="a")).json()["path"]
        asked = {"session_id": session, "sampling_session_seq_id": 0, "base_model": OTHER}
        sampler = wire.post("create_sampling_session", **asked).json()["sampling_session_id"]
        broken.groups[OTHER].forward_backward = SimpleNamespace(submit=fails)
        assert "training has ended" in wire.answer(wire.data(lost, 2)).json()["error"]
        assert b"loss:sum" in wire.answer(wire.data(lives, 1)).content
        health = wire.get("healthz")
        assert health.status_code == 503 and health.json()["detail"].startswith(f"{OTHER}: training has ended")
        figures = httpx.get(f"{broken.url}/metrics").text.splitlines()
        for name, value in (("first", 1), (OTHER, 0)):
            assert {f'rl_backend_serve_{each}{{model="{name}"}} {value}' for each in ("training_up", "passes_total")} < {
                *figures
            }
        page = httpx.get(f"{broken.url}/").text
        assert f"<th>first<th>{OTHER}" in page and f"<td>{lives}<td>first<td>2<td>0<td>0" in page
    with served(model, tmp_path, name="first") as after:
        wire, said = Wire(after.url), f"base_model='{OTHER}': this server has 'first'"
        (session, _), folder = wire.run("first"), Path(after.store.get(CHECKPOINTS, run=lost)["folder"])
        loaded = wire.post("load_weights", session_id=session, model_seq_id=1, path=path, optimizer=False)
        assert wire.answer(loaded).json()["error"] == said
        for route, asked in (
            ("create_sampling_session", {"session_id": session, "sampling_session_seq_id": 0, "model_path": path}),
            ("asample", {"sampling_session_id": sampler, "prompt": {"chunks": [{"tokens": IDS}]}}),
        ):
            refused = wire.post(route, **asked)
            assert refused.status_code == 404 and refused.json()["detail"] == said
        door = openai.OpenAI(base_url=f"{after.url}/v1", api_key="tml-local")
        assert [each.id for each in door.models.list()] == ["first"]
        assert wire.get("checkpoints").json()["checkpoints"][0]["tinker_path"] == path
        assert wire.request("DELETE", f"training_runs/{lost}/checkpoints/weights/a").status_code == 204
        assert not folder.exists()


def parsed(*arguments: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    return parser.parse_args(arguments)


def test_models_have_the_names_that_the_command_gives_them(tmp_path: Path) -> None:
    one, two = tmp_path / "one", tmp_path / "a=b"
    for folder in (one, two):
        folder.mkdir()

    def folders(*given: str) -> Any:
        return command._folders(parsed(*given))

    assert folders("--model", str(one)) == {str(one): one}
    assert folders("--model", str(two), "--name", "x") == {"x": two}
    assert folders("--model", f"x/y={one}", "--model", str(one), "--model", f"z={two}") == {
        "x/y": one,
        str(one): one,
        "z": two,
    }
    for given, said in (
        ((f"--model=x={one}", f"--model=x={two}"), "the name 'x' is given twice"),
        ((f"--model={one}", f"--model={two}", "--name=x"), "a lone --model DIR"),
        ((f"--model=x={one}", "--name=y"), "a lone --model DIR"),
        ((f"--model=x={tmp_path}/gone",), "no such folder"),
    ):
        with pytest.raises(ConfigError, match=said):
            folders(*given)


def test_what_all_models_take_is_counted_and_refused_before_anything_starts(
    model: Path, other: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    counted = list[tuple[int, int]]()

    def share(ranks: int, engines: int, **_: Any) -> ClusterShare:
        counted.append((ranks, engines))
        return ClusterShare(1, 1, 0.0)

    monkeypatch.setattr(command, "ray_session", lambda *counts: nullcontext(counted.append(counts)))
    monkeypatch.setattr(command, "share_cluster", share)
    monkeypatch.setattr(command, "TrainGroup", lambda *_, **__: pytest.fail("ranks were started"))
    layout = ("--ranks", "2", "--engines", "3", "--dtype", "float32")
    # The first model has so many positions.
    options = parsed(f"--model=a={model}", f"--model=b={other}", *layout, "--max-model-len", "400")
    store = Store(tmp_path)
    with pytest.raises(ConfigError, match="max_model_len=400"), command.open_server(options, store):
        pass
    assert counted == [(4, 6)] * 2
    store.close()
