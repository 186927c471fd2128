"""A client that goes through a model of a server, from nothing but its address: it trains, samples, saves and blunders."""

from __future__ import annotations

import itertools
import json
import random
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from actors.serve.wire import Datum, PassRequest, read_answer, read_samples, write_request
from rl_backend.contracts import ConfigError

_ROWS, _LENGTH, _STEPS, _SAMPLED = 4, 12, 4, 8
_KEY = "tml-check"


class CheckFailedError(ConfigError):
    """The server did not do what its documentation says."""


def check_server(url: str, model: str, *, largest_gap: float, say: Callable[[str], None]) -> None:
    """Takes the steps of a client, each of which says what came of it.

    Args:
        model: the base model's name.
        largest_gap: between the log-probs of samples and those of the trainer's forward pass, nats.

    Raises:
        CheckFailedError: names the first step that failed.
    """
    step: Callable[..., Any] = _Client
    try:
        client = _Client(url, model, largest_gap)
        for step in (_trains, _fails_alone, _samples, _resumes, _completes, _ends):
            say(f"ok   {_named(step)}: {step(client)}")
    except (urllib.error.URLError, KeyError, ValueError) as error:
        raise CheckFailedError(f"{_named(step)}: {type(error).__name__}: {error}") from error


def _require(holds: bool, why: str) -> None:
    if not holds:
        raise ValueError(why)


def _named(step: Callable[..., str]) -> str:
    return (step.__doc__ or "").rstrip(".")


class _Client:
    """A run is created."""

    def __init__(self, url: str, model: str, largest_gap: float) -> None:
        self._url, self.model, self.largest_gap = url, model, largest_gap
        known = [each["model_name"] for each in self.get("/api/v1/get_server_capabilities")["supported_models"]]
        _require(model in known, f"the server has {known}, and not {model!r}")
        self.session: str = self.post("create_session", tags=[], sdk_version="check")["session_id"]
        self.run, self.numbers, self.path = self.create(0), 0, ""
        generator = random.Random(0)
        # Ids that every vocabulary has.
        self.ids = np.array([[generator.randrange(1, 48) for _ in range(_LENGTH + 1)] for _ in range(_ROWS)])

    def create(self, number: int, **load: Any) -> str:
        # On a CPU engines of mixtures have no adapters on the head.
        new = {"base_model": self.model, "lora_config": {"rank": 4, "seed": 1, "train_unembed": False}}
        route = "load_weights" if load else "create_model"
        made = self.post(route, session_id=self.session, model_seq_id=number, **(load or new))
        return str(self.result(made)["model_id"])

    def data(self, run: str, number: int, *, forward_only: bool = False, wrong: bool = False) -> Any:
        data = []
        for row in self.ids:
            targets = row[1:] + (1 << 30 if wrong else 0)
            data.append(Datum(row[:-1], {"target_tokens": targets, "weights": np.ones(_LENGTH, np.float32)}))
        body = write_request(PassRequest(run, number, data, "cross_entropy", {}, forward_only))
        return self._asked("/api/v1/forward_backward", body)

    def next(self, route: str, **body: Any) -> Any:
        self.numbers += 1
        return self.post(route, model_id=self.run, seq_id=self.numbers, **body)

    def result(self, accepted: Mapping[str, Any]) -> Any:
        """What a future answers; an error raises."""
        found = self.future(accepted)
        if isinstance(found, dict) and "error" in found:
            raise ValueError(found["error"])
        return found

    def future(self, accepted: Mapping[str, Any]) -> Any:
        while True:
            try:
                return self.post("retrieve_future", request_id=accepted["request_id"])
            except urllib.error.HTTPError as error:
                if error.code != 408:
                    raise

    def post(self, route: str, **body: Any) -> Any:
        return self._asked(f"/api/v1/{route}", json.dumps(body).encode())

    def get(self, path: str) -> Any:
        return self._asked(path, None)

    def _asked(self, path: str, body: bytes | None) -> Any:
        headers = {"X-API-Key": _KEY, "Authorization": f"Bearer {_KEY}", "Content-Type": "application/json"}
        request = urllib.request.Request(self._url + path, body, headers)
        with urllib.request.urlopen(request, timeout=120) as answer:
            text = answer.read()
            return json.loads(text or b"null") if "json" in answer.headers.get("Content-Type", "json") else text


def _trains(client: _Client) -> str:
    """A run trains, with its requests in the wrong order."""
    accepted = []
    for step in range(_STEPS):
        number = client.numbers + 1 + 2 * step
        adam = {"learning_rate": 1e-2}
        client.post("optim_step", model_id=client.run, seq_id=number + 1, adam_params=adam)
        accepted.append(client.data(client.run, number))
        _require(client.data(client.run, number) == accepted[-1], "a request that is sent twice is one")
    client.numbers += 2 * _STEPS
    losses = [read_answer(client.result(each))[1]["loss:sum"] for each in accepted]
    falls = all(after < before for before, after in itertools.pairwise(losses))
    _require(falls, f"the loss did not fall: {losses}")
    return f"loss {losses[0] / client.ids[:, 1:].size:.3f} -> {losses[-1] / client.ids[:, 1:].size:.3f} a token"


def _fails_alone(client: _Client) -> str:
    """A wrong request fails through its future, and the run continues."""
    client.numbers += 1
    found = client.future(client.data(client.run, client.numbers, wrong=True))
    _require(isinstance(found, dict) and found["category"] == "user", f"answered {found}")
    return str(found["error"])


def _samples(client: _Client) -> str:
    """A snapshot samples with the trainer's log-probs."""
    sampler = client.result(client.next("save_weights_for_sampler", sampling_session_seq_id=0))["sampling_session_id"]
    prompt = [int(each) for each in client.ids[0][:5]]
    asked = {
        "sampling_session_id": sampler,
        "prompt": {"chunks": [{"type": "encoded_text", "tokens": prompt}]},
        "num_samples": 2,
        "sampling_params": {"max_tokens": _SAMPLED, "seed": 1},
    }
    (first, second), _ = read_samples(client.result(client.post("asample", seq_id=0, **asked)))
    again, _ = read_samples(client.result(client.post("asample", seq_id=1, **asked)))
    _require([first.tokens, second.tokens] == [each.tokens for each in again], "a seed gives the same samples")
    gap = max(_gap(client, sampler, prompt, each) for each in (first, second))
    _require(gap <= client.largest_gap, f"log-probs differ by {gap:.1e} nats, more than {client.largest_gap:g}")
    return f"largest difference {gap:.1e} nats"


def _gap(client: _Client, sampler: str, prompt: Sequence[int], sample: Any) -> float:
    asked = {
        "sampling_session_id": sampler,
        "prompt": {"chunks": [{"type": "encoded_text", "tokens": [*prompt, *sample.tokens]}]},
        "sampling_params": {"max_tokens": 1},
        "prompt_logprobs": True,
    }
    _, of_prompt = read_samples(client.result(client.post("asample", **asked)))
    if of_prompt is None:
        raise ValueError("no log-probs of a prompt")
    return float(np.abs(of_prompt[len(prompt) :] - np.array(sample.log_probs)).max())


def _resumes(client: _Client) -> str:
    """A run that is created from a checkpoint continues it."""
    client.path = client.result(client.next("save_weights", path="check"))["path"]
    other = client.create(1, path=client.path, optimizer=True)
    client.numbers += 1
    accepted = client.data(client.run, client.numbers, forward_only=True), client.data(other, 1, forward_only=True)
    before, after = (read_answer(client.result(each))[1]["loss:sum"] for each in accepted)
    _require(before == after, f"the loss was {before}, and is {after}")
    return f"{client.path.partition('/weights/')[2]!r} has the same loss, bit for bit"


def _completes(client: _Client) -> str:
    """The same weights answer OpenAI's API."""
    prompt = [int(each) for each in client.ids[0][:5]]
    asked = {"model": client.path, "prompt": prompt, "max_tokens": _SAMPLED, "temperature": 0}
    try:
        found = client._asked("/v1/completions", json.dumps(asked).encode())
    except urllib.error.HTTPError as error:
        said = json.load(error)["error"]["message"]
        _require("tokenizer" in said, said)
        return f"not tried: {said}"
    return f"{found['usage']['completion_tokens']} tokens"


def _ends(client: _Client) -> str:
    """A session ends and frees what it has."""
    client.post(f"sessions/{client.session}/finish", reason={"type": "success"})
    over = client.future(client.next("optim_step", adam_params={}))
    _require("finished" in over["error"], str(over))
    return str(over["error"])
