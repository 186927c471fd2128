"""A failure belongs to a client: what is wrong with one of those that share a pass is answered to that one alone."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from actors.serve.store import Result
from actors.serve.training import Call, Job, Pass, Step, Training
from actors.serve.wire import Datum, PassRequest, read_answer, write_request
from actors.train import recovery
from tests.support.actors_in_process import until
from tests.support.native import VOCAB_SIZE, open_runtime
from tests.support.ranks_in_process import group_that_recovers
from tests.support.served import GroupInProcess

TOKENS, POISON = 64, 77
IDS = np.array([5, 9, 3, 7, 21, 33])


def datum(**columns: Any) -> Datum:
    given = {"target_tokens": np.roll(IDS, -1), **columns}
    return Datum(IDS, {name: np.asarray(values) for name, values in given.items()})


def policy(first: float = -4.0) -> Datum:
    log_probs = np.full(6, -4.0, np.float32)
    log_probs[2] = first
    return datum(logprobs=log_probs, advantages=np.array([0, 1, -1, 0.5, 0, 1], np.float32))


class Clients:
    """Runs of a training half, and the answers to their requests."""

    def __init__(self, group: Any, model: Path, **options: Any) -> None:
        self.group, self.answers = group, dict[str, Result]()
        limits = {"vocab_size": VOCAB_SIZE, "longest": TOKENS, "max_rank": 32, "max_runs": 16}
        self.training = Training(group, self.answers.update, model=model, **limits, **options)
        self._numbers: dict[str, int] = {}
        self.run("gate", 1)

    def run(self, name: str, rank: int) -> None:
        asked = {"rank": rank, "seed": rank}
        self.training.create(name, f"{name}/0", lambda run: {"made": self.training.make(run, asked).rank})
        self._numbers[name] = 1
        assert b"made" in self.wait(f"{name}/0").body

    def ask(self, name: str, job: Job) -> str:
        number = self._numbers[name]
        self._numbers[name] += 1
        self.training.submit(name, number, f"{name}/{number}", job)
        return f"{name}/{number}"

    def passes(self, name: str, data: Sequence[Datum], loss: str = "cross_entropy", *, only: bool = False) -> str:
        body = write_request(PassRequest(name, 1, data, loss, {}, only))
        return self.ask(name, Pass(body))

    def step(self, name: str) -> str:
        return self.ask(name, Step({"adam_params": {"learning_rate": 1e-2}}))

    def wait(self, request: str) -> Result:
        until(lambda: request in self.answers)
        return self.answers[request]

    @contextmanager
    def held(self) -> Iterator[None]:
        """What is asked for meanwhile waits together."""
        gate = threading.Event()
        waits = self.ask("gate", Call(lambda run: {"waited": gate.wait(30)}))
        until(lambda: self.training._runs["gate"].head is not None)
        yield
        gate.set()
        self.wait(waits)


@contextmanager
def clients(model: Path, kind: type[GroupInProcess] = GroupInProcess) -> Iterator[Clients]:
    with open_runtime(model) as runtime:
        found = Clients(kind(runtime, TOKENS), model)
        yield found
        found.training.close()


def trained(found: Clients, name: str, requests: Mapping[str, Sequence[Datum]]) -> list[str]:
    """Requests of a good client, by loss, and two steps with a request between them."""
    asked = [found.passes(name, data, loss) for loss, data in requests.items()]
    return [*asked, found.step(name), found.passes(name, [datum()]), found.step(name)]


GOOD = {"cross_entropy": [datum(weights=np.ones(6, np.float32))] * 2, "ppo": [policy()]}


@pytest.fixture(scope="module")
def alone(model: Path) -> list[bytes]:
    """What a good client is answered where it is the only one."""
    with clients(model) as found:
        found.run("good", 4)
        return [found.wait(each).body for each in trained(found, "good", GOOD)]


BAD = {
    "id": ([datum(), datum(target_tokens=np.array([1, 2, 3, 4, 5, 999]))], "cross_entropy", "datum 1: target_tokens"),
    "length": ([datum(weights=np.ones(4, np.float32))], "cross_entropy", "weights has the shape"),
    "value": ([datum(weights=np.full(6, np.nan, np.float32))], "cross_entropy", "not finite"),
    "ratio": ([policy(), policy(-2000.0)], "ppo", "datum 1: logprobs are up to"),
    "sum": ([datum(weights=np.full(6, 3e38, np.float32))], "cross_entropy", "sum over tokens and data is not finite"),
    "loss": ([policy()], "stable_reinforce", "stable_reinforce"),
}


@pytest.mark.shows(
    "server: a bad datum, loss or adapter fails its own client, and others in the pass get the bits that they get alone"
)
def test_each_bad_request_fails_for_its_own_client_and_a_good_one_gets_the_bits_that_it_gets_alone(
    model: Path, alone: list[bytes]
) -> None:
    with clients(model) as found:
        for rank, name in enumerate(["good", *BAD, "broken"], 4):
            found.run(name, rank if name == "good" else rank % 7 + 2)
        broken = found.training._runs["broken"].tenant
        assert broken is not None
        broken.rows.weights.fill_(np.inf)  # type: ignore[attr-defined]
        before = len(found.group.passes)
        with found.held():
            bad = {name: found.passes(name, data, loss) for name, (data, loss, _) in BAD.items()}
            bad["broken"] = found.passes("broken", [datum()])
            good = trained(found, "good", GOOD)
        assert [found.wait(each).body for each in good] == alone
        for name, (_, _, said) in {**BAD, "broken": (None, None, "datum 0: the adapter gives log-probs")}.items():
            answer = found.wait(bad[name])
            assert said.encode() in answer.body and b'"user"' in answer.body, answer
        assert len(set(found.group.passes[before])) > 1, "nobody has shared a pass"
        # Whoever failed begins again: its gradients are gone.
        for name in ("ratio", "sum"):
            assert b"gradients are dropped" in found.wait(found.step(name)).body
            found.passes(name, [datum()])
            assert b"grad_norm" in found.wait(found.step(name)).body


def test_a_step_leaves_no_gradients(model: Path) -> None:
    with clients(model) as found:
        found.run("ann", 2)
        answers = set()
        for _ in range(2):
            found.passes("ann", [datum()])
            step = found.ask("ann", Step({"adam_params": {"learning_rate": 0.0}}))
            answers.add(found.wait(step).body)
        assert len(answers) == 1 and b"grad_norm" in answers.pop()


def test_adapters_of_one_shape_with_as_many_rows_are_neighbours_in_a_pass(model: Path) -> None:
    sizes = {"a": (17, 1), "b": (2, 2), "c": (18, 1), "d": (3, 1), "e": (4, 2)}
    with clients(model) as found:
        for name, (rank, _) in sizes.items():
            found.run(name, rank)
        before = len(found.group.passes)
        with found.held():
            asked = [found.passes(name, [datum()] * rows) for name, (_, rows) in sizes.items()]
        assert all(b"loss:sum" in found.wait(each).body for each in asked)
        (ids,) = found.group.passes[before:]
        runs = {found.training._runs[name].tenant.lora_id: name for name in sizes}  # type: ignore[union-attr]
        assert [runs[each] for each in dict.fromkeys(ids)] == ["d", "b", "e", "a", "c"]


class Poisoned(GroupInProcess):
    """A pass with a certain token ends in the middle, as where a kernel fails."""

    def forward_backward(self, handle: Any, rows: Any, losses: Any, **options: Any) -> Any:
        found = super().forward_backward(handle, rows, losses, **options)
        if any(POISON in row.input_ids for row in rows):
            raise RuntimeError("a kernel has failed")
        return found


@pytest.mark.shows("server: a pass that fails in the middle fails for the client that it fails on alone")
def test_a_pass_that_fails_in_the_middle_fails_for_the_client_that_it_fails_on_alone(
    model: Path, alone: list[bytes]
) -> None:
    poison = Datum(np.array([5, POISON, 3]), {"target_tokens": np.array([1, 2, 3])})
    with clients(model, Poisoned) as found:
        for rank, name in ((4, "good"), (3, "bad"), (5, "only")):
            found.run(name, rank)
        # The good client has gradients of an earlier request when the pass fails that has its next one.
        first = found.passes("good", GOOD["cross_entropy"])
        found.wait(first)
        with found.held():
            bad = found.passes("bad", [poison])
            only = found.passes("only", [datum()], only=True)
            rest = trained(found, "good", {"ppo": GOOD["ppo"]})
        assert [found.wait(each).body for each in (first, *rest)] == alone
        assert b"a kernel has failed" in found.wait(bad).body
        assert read_answer(found.wait(only).body)[1]["loss:sum"] > 0


@pytest.mark.shows("server: a rank that dies is replaced, and clients get the answers of an undisturbed server")
def test_a_rank_that_dies_is_replaced_and_clients_get_the_answers_of_an_undisturbed_server(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recovery, "end_processes", lambda infos: None)

    def answers(folder: Path, *deaths: int) -> tuple[list[bytes], list[Any]]:
        with group_that_recovers(model, *deaths, max_tokens=TOKENS) as (group, ranks):
            found = Clients(group, model, boundaries=folder)
            found.run("ann", 4)
            found.run("bob", 2)
            asked = []
            for _ in range(20):
                with found.held():
                    asked += [found.passes(name, GOOD["cross_entropy"]) for name in ("ann", "bob")]
                    asked.append(found.step("ann"))
                for each in asked[-3:]:
                    found.wait(each)
            asked.append(found.step("bob"))
            bodies = [found.wait(each).body for each in asked]
            found.training.close()
            return bodies, ranks

    expected, (rank,) = answers(tmp_path / "undisturbed")
    steps = [number for number, name in rank.ran if name == "optimizer_step"]
    assert "save_checkpoint" in [name for _, name in rank.ran], "nothing was kept for new ranks"
    found, ranks = answers(tmp_path / "disturbed", steps[8], steps[18])
    assert found == expected and len(ranks) == 3
    repeated = [name for number, name in ranks[2].ran if number < steps[18]]
    assert repeated.count("load_checkpoint") == 1 and repeated.count("optimizer_step") < 4
    assert len(list((tmp_path / "disturbed").iterdir())) == 1


WRONG_STEPS: Sequence[Mapping[str, Any]] = (
    {"adam_params": [1]},
    {"adam_params": "x"},
    {"optimizer_params": "x"},
    {"adam_params": {"learning_rate": "x"}},
)


@pytest.mark.parametrize("asked", WRONG_STEPS)
def test_values_of_a_step_that_cannot_be_read_fail_that_step_alone(asked: Mapping[str, Any], model: Path) -> None:
    with clients(model) as found:
        for name in ("ann", "bob"):
            found.run(name, 2)
        found.wait(found.passes("bob", [datum()]))
        assert b"error" in found.wait(found.ask("ann", Step(asked))).body
        assert b"grad_norm" in found.wait(found.step("bob")).body and not found.training.failed


def test_a_run_whose_requests_wait_in_a_row_is_saved_for_new_ranks(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recovery, "end_processes", lambda infos: None)
    with group_that_recovers(model, max_tokens=TOKENS) as (group, ranks):
        found = Clients(group, model, boundaries=tmp_path / "kept")
        found.run("ann", 4)
        with found.held():
            for _ in range(17):
                found.passes("ann", [datum()])
                found.step("ann")
            last = found.passes("ann", [datum()])
        found.wait(last)
        found.training.close()
        assert "save_checkpoint" in [name for _, name in ranks[0].ran]


def test_data_with_very_many_targets_share_no_pass(model: Path) -> None:
    wide = Datum(IDS, {"target_tokens": np.tile(IDS[:, None], (1, 400)), "weights": np.full((6, 400), 1e-3, np.float32)})
    with clients(model) as found:
        for name in ("ann", "bob"):
            found.run(name, 2)
        before = len(found.group.passes)
        with found.held():
            asked = [found.passes(name, [wide]) for name in ("ann", "bob")]
        assert all(read_answer(found.wait(each).body)[0][0].shape == (6, 400) for each in asked)
        assert [len(rows) for rows in found.group.passes[before:]] == [1, 1]
