"""Kills of server, training rank and engine under clients that train and sample: nothing is lost, and no step taken twice.

Clients send what Tinker's SDK sends, most of it more than once, and note every request that the server has accepted. Their
data are fixed, so the losses of an undisturbed run say whether a run has taken each step once: ``steps_applied_twice``
counts the losses that differ in any bit.
"""

from __future__ import annotations

import json
import random
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import psutil

from actors.serve.wire import Datum, read_answer
from benchmarks.tinker_task import NAME
from tests.support.serve_process import Served
from tests.support.serve_wire import Wire

CLIENTS, STEPS = 4, 12
"""A run takes so many steps before another one begins."""
KINDS = ("server", "rank", "engine")
_SAVES, _SAMPLES = 3, 2
"""Every so many steps a client saves, or samples from a snapshot."""
_PATIENCE = 300.0
"""Seconds for which a client asks again, as the SDK does."""


class Client:
    """One that trains until it is told to stop.

    Attributes:
        accepted: ids of requests that the server has taken.
        failed: those of them that were answered with an error, by its first words.
        rounds: steps that were answered.
        wrong: losses that are not, in bits, those of weights that have taken each step once.
    """

    def __init__(self, url: str, number: int, expected: Sequence[float]) -> None:
        self._wire, self._number, self._expected = Wire(url), number, expected
        self._random = random.Random(number)
        self.accepted: list[str] = []
        self.failed: Counter[str] = Counter()
        self.rounds = self.wrong = 0
        self.losses: list[float] = []
        self._begin()

    def _begin(self) -> None:
        self._session = self._run = self._path = ""
        self._seq_id = self._step = self._saved = 0

    def work(self, over: threading.Event) -> None:
        while not over.is_set():
            if not self._run and not self._open():
                time.sleep(0.5)
                continue
            if not self._round():
                # What the run had since its last save is gone.
                self._post(f"sessions/{self._session}/finish")
                self._run, self._step = "", self._saved
            elif self._step == STEPS:
                self._post(f"sessions/{self._session}/finish")
                self._begin()

    def train(self) -> list[float]:
        """The losses of an undisturbed run."""
        self._open()
        while self._step < STEPS:
            self._round()
        self._post(f"sessions/{self._session}/finish")
        return self.losses

    def answered(self, request_id: str) -> bool:
        return self._answer(request_id, 60.0) is not None

    def _open(self) -> bool:
        """A run, of the last save where there is one."""
        self._session = self._post("create_session").json()["session_id"]
        asked = {"session_id": self._session, "model_seq_id": 0, "base_model": NAME}
        if self._path:
            made = self._accept("load_weights", path=self._path, optimizer=True, **asked)
        else:
            made = self._accept("create_model", lora_config={"rank": 4 + self._number, "seed": self._number}, **asked)
        found = self._result(made)
        self._run, self._seq_id = (found or {}).get("model_id", ""), 0
        return bool(self._run)

    def _round(self) -> bool:
        """A pass and a step, at times a save or samples; whether all were answered with results."""
        self._post("session_heartbeat", session_id=self._session)
        data = _data(self._number, self._step)
        passed = self._twice(lambda number: self._wire.data(self._run, number, data=data))
        adam = {"learning_rate": 1e-3 * (1 + self._number)}
        stepped = self._next("optim_step", adam_params=adam)
        saves, samples = self._step % _SAVES == _SAVES - 1, self._step % _SAMPLES == 0
        kept = self._next("save_weights", path=f"step{self._step}", ttl_seconds=1800) if saves else ""
        snapshot = self._next("save_weights_for_sampler", sampling_session_seq_id=self._step) if samples else ""
        found = [self._result(each) for each in (passed, stepped, kept, snapshot) if each]
        if found[0] is not None:
            self._compare(found[0]["loss"])
        answers = [each for each in found if each is not None]
        if len(answers) < len(found) or (samples and not self._sample(answers[-1]["sampling_session_id"])):
            return False
        self._step += 1
        self.rounds += 1
        if saves:
            self._path, self._saved = answers[2]["path"], self._step
        return True

    def _compare(self, loss: float) -> None:
        if self._expected:
            self.wrong += loss != self._expected[self._step]
        else:
            self.losses.append(loss)

    def _sample(self, sampler: str) -> bool:
        prompt = {"chunks": [{"type": "encoded_text", "tokens": [5, 6, 7]}]}
        params = {"max_tokens": 4, "seed": self._step}
        asked = {"sampling_session_id": sampler, "prompt": prompt, "num_samples": 2, "sampling_params": params}
        return None not in [self._result(self._accept("asample", seq_id=number, **asked)) for number in range(2)]

    # What the SDK does under these calls.

    def _next(self, route: str, **body: Any) -> str:
        return self._twice(lambda number: self._wire.post(route, model_id=self._run, seq_id=number, **body))

    def _accept(self, route: str, **body: Any) -> str:
        return self._note(self._until_answered(lambda: self._wire.post(route, **body)))

    def _twice(self, send: Callable[[int], httpx.Response]) -> str:
        """Sends the run's next request; in one of three cases again, as a client does whose answer was lost."""
        self._seq_id += 1
        number = self._seq_id
        found = self._note(self._until_answered(lambda: send(number)))
        if self._random.random() < 1 / 3 and found != self._note(self._until_answered(lambda: send(number))):
            raise AssertionError(f"request {number} of {self._run} was accepted twice")
        return found

    def _note(self, answer: httpx.Response) -> str:
        request_id = str(answer.raise_for_status().json()["request_id"])
        if request_id not in self.accepted[-16:]:
            self.accepted.append(request_id)
        return request_id

    def _post(self, route: str, **body: Any) -> httpx.Response:
        return self._until_answered(lambda: self._wire.post(route, **body))

    def _until_answered(self, send: Callable[[], httpx.Response], patience: float = _PATIENCE) -> httpx.Response:
        until, pause = time.monotonic() + patience, 0.1
        while True:
            try:
                answer = send()
                if answer.status_code not in (408, 409, 429) and answer.status_code < 500:
                    return answer
                problem = f"{answer.status_code}: {answer.text[:200]}"
            except httpx.TransportError as error:
                problem = repr(error)
            if time.monotonic() > until:
                raise TimeoutError(f"no answer within {patience:g} s: {problem}")
            time.sleep(pause)
            pause = min(2 * pause, 2.0)

    def _answer(self, request_id: str, patience: float = _PATIENCE) -> httpx.Response | None:
        try:
            return self._until_answered(lambda: self._wire.answer({"request_id": request_id}), patience).raise_for_status()
        except (TimeoutError, httpx.HTTPStatusError):
            return None

    def _result(self, request_id: str) -> dict[str, Any] | None:
        """What was answered; None for an error."""
        answer = self._answer(request_id)
        if answer is None:
            # Counted as lost, when all are asked for at the end.
            return None
        if "protobuf" in answer.headers["content-type"]:
            metrics = read_answer(answer.content)[1] if b"loss:sum" in answer.content else {}
            return {"loss": metrics.get("loss:sum")}
        found: dict[str, Any] = answer.json()
        if "error" in found:
            self.failed[found["error"].partition(",")[0][:60]] += 1
            return None
        return found


def run_chaos(served: Served, kills: int, kept: Path, say: Callable[[str], None]) -> None:
    """Kills so many processes of a server, and adds a line to ``kept`` that says what came of it."""
    expected = _expected(served.url, kept)
    clients = [Client(served.url, number, expected[number]) for number in range(CLIENTS)]
    over, broken = threading.Event(), list[BaseException]()

    def work(client: Client) -> None:
        try:
            client.work(over)
        except BaseException as error:  # noqa: BLE001 raised below
            broken.append(error)
            over.set()

    threads = [threading.Thread(target=work, args=(client,), daemon=True) for client in clients]
    for thread in threads:
        thread.start()
    before = sum(len(line["kills"]) for line in _lines(kept))
    chosen, killed = random.Random(before), list[tuple[str, float]]()
    _wait_for_progress(clients, 1, broken)
    for number in range(before, before + kills):
        kind = KINDS[number % len(KINDS)]
        time.sleep(chosen.random() * 2)
        _process(served, kind).kill()
        killed.append((kind, round(_wait_for_progress(clients, 2, broken), 1)))
        say(f"kill {number + 1}, of the {kind}: all clients go on after {killed[-1][1]} s")
    over.set()
    for thread in threads:
        thread.join(2 * _PATIENCE)
    accepted = [(client, each) for client in clients for each in client.accepted]
    lost = sum(not client.answered(each) for client, each in accepted)
    found = {
        "kills": killed,
        "accepted": len(accepted),
        "lost": lost,
        "steps": sum(client.rounds for client in clients),
        "steps_applied_twice": sum(client.wrong for client in clients),
        "failed_through_their_futures": dict(sum((client.failed for client in clients), Counter())),
    }
    with kept.open("a", encoding="utf-8") as file:
        file.write(json.dumps(found) + "\n")
    if broken:
        raise broken[0]


def summary(kept: Path) -> dict[str, Any]:
    """Of all kills so far."""
    lines = _lines(kept)
    kills = [kill for line in lines for kill in line["kills"]]
    found: dict[str, Any] = {"clients": CLIENTS, "kills": len(kills)}
    for kind in KINDS:
        seconds = [pause for killed, pause in kills if killed == kind]
        found[kind] = {"kills": len(seconds), "longest_seconds_until_all_clients_go_on": max(seconds, default=None)}
    for name in ("accepted", "lost", "steps", "steps_applied_twice"):
        found[name] = sum(line[name] for line in lines)
    failed: Counter[str] = sum((Counter(line["failed_through_their_futures"]) for line in lines), Counter())
    return {**found, "failed_through_their_futures": dict(failed)}


def _wait_for_progress(clients: Sequence[Client], rounds: int, broken: Sequence[BaseException]) -> float:
    """Seconds until every client has finished so many rounds more."""
    started, before = time.monotonic(), [client.rounds for client in clients]
    while any(client.rounds < past + rounds for client, past in zip(clients, before, strict=True)):
        if broken or time.monotonic() > started + _PATIENCE:
            raise broken[0] if broken else TimeoutError(f"not all clients go on after {_PATIENCE:g} s")
        time.sleep(0.05)
    return time.monotonic() - started


def _process(served: Served, kind: str) -> psutil.Process:
    """One of those that live now; it may take a while until there is one."""
    marks = {"server": " serve ", "rank": "TrainWorker", "engine": "RolloutEngine"}
    until = time.monotonic() + 120.0
    while time.monotonic() < until:
        for each in psutil.Process(served.process.pid).children(recursive=kind != "server"):
            try:
                if marks[kind] in " ".join(each.cmdline()) and each.status() != psutil.STATUS_ZOMBIE:
                    return each
            except psutil.Error:
                continue
        time.sleep(0.2)
    raise TimeoutError(f"no process of the {kind} within 120 s")


def _data(number: int, step: int) -> list[Datum]:
    """Two rows of unequal lengths."""
    generator = np.random.default_rng([number, step])
    rows = [generator.integers(10, 90, length + 1) for length in (12, 7 + step)]
    return [Datum(row[:-1], {"target_tokens": row[1:], "weights": np.ones(len(row) - 1, np.float32)}) for row in rows]


def _expected(url: str, kept: Path) -> Sequence[Sequence[float]]:
    file = kept.with_name("expected_losses.json")
    if not file.is_file():
        file.write_text(json.dumps([Client(url, number, ()).train() for number in range(CLIENTS)]), encoding="utf-8")
    found: Sequence[Sequence[float]] = json.loads(file.read_text(encoding="utf-8"))
    return found


def _lines(kept: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in kept.read_text(encoding="utf-8").splitlines()] if kept.is_file() else []
