"""The training half of a server without a runtime: what is asked of its group, and what becomes of adapters and requests."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from actors.serve.scores import Scoring
from actors.serve.store import Result
from actors.serve.training import (
    ADAPTER,
    STATE,
    Call,
    Pass,
    Run,
    Step,
    Training,
    _cost,
    _Reading,
    _step_of,
    adam_of,
)
from actors.serve.wire import Datum, PassRequest
from actors.train.context import HandleRef
from rl_backend.contracts import (
    AdamParams,
    BatchError,
    CheckpointError,
    ClusterLostError,
    ConfigError,
    GroupFailedError,
    UnsupportedError,
)
from rl_backend.contracts.lora import LoRAConfig
from tests.support.actors_in_process import until


class Group:
    """Keeps what it is asked, by name and the tenant's name."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, str]] = []
        self.made: list[tuple[str, LoRAConfig]] = []
        self.fails: dict[str, Exception] = {}
        self.wants_boundary = False
        self.config = SimpleNamespace(max_tokens_per_micro_batch=10)
        self.base = HandleRef("group", 0, "base", True, (0, 1), (0, 1))

    def build_model(self, *, name: str, trainable: bool) -> HandleRef:
        assert (name, trainable) == ("base", False)
        return self.base

    def create_lora_adapter(self, base: HandleRef, lora: LoRAConfig, *, name: str) -> HandleRef:
        assert base is self.base
        self.made.append((name, lora))
        return HandleRef("group", len(self.made), name, False, (0, 1), (0, 1), lora_id=len(self.made))

    def __getattr__(self, method: str) -> Callable[..., None]:
        def ask(tenant: HandleRef, *given: Any) -> None:
            self.asked.append((method, " ".join(map(str, (tenant.name, *given)))))
            if method in self.fails:
                raise self.fails[method]

        return ask


@pytest.fixture
def group() -> Group:
    return Group()


@pytest.fixture
def answers() -> dict[str, Result]:
    return {}


@pytest.fixture
def training(group: Any, answers: dict[str, Result], tmp_path: Path) -> Iterator[Training]:
    options: dict[str, Any] = {"vocab_size": 50, "longest": 8, "max_rank": 16, "max_runs": 2}
    made = Training(group, answers.update, model=Path("m"), **options, boundaries=tmp_path / "boundaries")
    # What a test puts into it without a word is not for its thread.
    until(lambda: bool(made._changed._waiters))  # type: ignore[attr-defined]
    yield made
    made.close()


def datum(length: int = 1, width: int | None = None, **columns: Any) -> Datum:
    targets = np.zeros(length if width is None else (length, width), np.int64)
    return Datum(np.zeros(length, np.int64), {"target_tokens": targets, **columns})


def passes(*data: Datum, cursor: int = 0, loss: str = "cross_entropy") -> Pass:
    return Pass(b"", request=PassRequest("r", 1, data, loss, {}, False), cursor=cursor)


def test_a_piece_has_the_data_that_fit_and_at_least_one() -> None:
    data = datum(3), datum(3), datum(3), datum(2, 4), datum(2)
    for tokens, cursor, taken in ((9, 0, 3), (8, 0, 2), (6, 0, 2), (5, 0, 1), (0, 0, 1), (99, 1, 2), (99, 3, 1), (99, 4, 1)):
        assert [id(each) for each in passes(*data, cursor=cursor).piece(tokens)] == [
            id(each) for each in data[cursor : cursor + taken]
        ]
    clips = {"clip_low_threshold": np.zeros(1)}
    assert len(passes(datum(**clips), datum(**clips), datum(), loss="ppo").piece(99)) == 2


def test_data_with_many_targets_cost_more_than_their_tokens() -> None:
    for given, cost in (
        ([datum(5)], 5),
        ([datum(5, 32)], 5),
        ([datum(5, 39)], 6),
        ([datum(1, 64)], 2),
        ([datum(1, 64), datum(5)], 7),
        ([], 0),
    ):
        assert _cost(given) == cost


@pytest.mark.parametrize(
    ("asked", "expected"),
    [
        ({"adam_params": {}}, AdamParams(lr=1e-4, betas=(0.9, 0.95), eps=1e-12, weight_decay=0.0, clip_grad=0.0)),
        (
            {
                "adam_params": {
                    "learning_rate": 0.5, "beta1": 0.1, "beta2": 0.2, "eps": 0.3, "weight_decay": 0.4, "grad_clip_norm": 0.6,
                },
                "optimizer_params": {"type": "muon"},
            },
            AdamParams(lr=0.5, betas=(0.1, 0.2), eps=0.3, weight_decay=0.4, clip_grad=0.6),
        ),
        (
            {"optimizer_params": {"type": "adam", "learning_rate": 0.0, "beta2": 0.0}},
            AdamParams(lr=0.0, betas=(0.9, 0.0), eps=1e-12, weight_decay=0.0, clip_grad=0.0),
        ),
    ],
    ids=range(3),
)  # fmt: skip
def test_a_step_has_the_values_of_its_request(asked: dict[str, Any], expected: AdamParams) -> None:
    assert adam_of(asked) == expected


def test_a_step_of_another_optimizer_is_refused() -> None:
    for asked, named in (
        ({}, "None"),
        ({"optimizer_params": {"type": "muon"}}, "'muon'"),
        ({"optimizer_params": {}}, "None"),
    ):
        with pytest.raises(UnsupportedError, match=f"optimizer {named} is not served here"):
            adam_of(asked)


def test_an_adapter_has_what_was_asked_for(training: Training) -> None:
    every = ("attention", "feed_forward", "head")
    for asked, rank, seed, targets in (
        ({"rank": 16, "seed": None}, 16, 0, every),
        ({"rank": 1, "seed": 7, "train_mlp": False}, 1, 7, ("attention", "head")),
        ({"rank": 2, "train_attn": False, "train_unembed": False}, 2, 0, ("feed_forward",)),
        ({"rank": 2, "train_attn": False, "train_mlp": False}, 2, 0, ("head",)),
    ):
        assert training.config_of(asked) == LoRAConfig(rank=rank, alpha=32.0, targets=targets, seed=seed)
    for asked in ({}, {"rank": None}, {"rank": 17}, {"rank": 0}, {"rank": True}):
        with pytest.raises(ConfigError, match=r"lora_config\.rank=.*this server takes 1 to 16"):
            training.config_of(asked)
    training._max_rank = 32
    assert training.config_of({"rank": None}).rank == training.config_of({}).rank == 32
    with pytest.raises(ConfigError, match="are all false"):
        training.config_of({"train_attn": False, "train_mlp": False, "train_unembed": False})


def run_with(training: Training, name: str, **changed: Any) -> Run:
    """A run whose adapter is there, as the server knows it."""
    run = Run(name)
    training._runs[name] = run
    training.make(run, {"rank": 2})
    return replace_in_place(run, **changed)


def replace_in_place(run: Run, **changed: Any) -> Run:
    for name, value in changed.items():
        setattr(run, name, value)
    return run


def test_as_many_runs_live_as_the_server_takes(training: Training, group: Group) -> None:
    first = run_with(training, "a")
    training._runs["waits"] = Run("waits")
    run_with(training, "b")
    for asks in (lambda: run_with(training, "c"), lambda: training.load(Run("d"), Path("x"), {"rank": 2}, optimizer=True)):
        with pytest.raises(ConfigError, match="2 runs are live, as many as this server takes"):
            asks()
    training.load(first, Path("x"), {"rank": 2}, optimizer=False)
    first.over = "ended"
    run_with(training, "c")
    assert len({name for name, _ in group.made}) == len(group.made) == 4, "each has a name of its own"


@pytest.mark.parametrize(
    ("optimizer", "asked"), [(True, f"load_checkpoint x/{STATE}"), (False, f"import_lora_adapter x/{ADAPTER}")]
)
def test_a_checkpoint_takes_the_place_of_an_adapter_with_or_without_its_optimizer(
    optimizer: bool, asked: str, training: Training, group: Group
) -> None:
    run = run_with(training, "a", trained=True, broken="x", passed=None, unbound=0)
    training.load(run, Path("x"), {"rank": 2, "seed": 5}, optimizer=optimizer)
    method, _, path = asked.partition(" ")
    assert group.asked == [(method, f"a#2 {path}"), ("remove_lora_adapter", "a#1")]
    assert run.tenant is not None and run.tenant.name == "a#2" and run.lora == group.made[1][1]
    assert (run.trained, run.broken, run.passed) == (False, "", []) and run.unbound == 16, "new ranks must not need x"
    group.asked.clear()
    fresh = Run("b")
    training.load(fresh, Path("x"), {"rank": 4}, optimizer=optimizer)
    assert group.asked == [(method, f"b#3 {path}")] and fresh.lora is not None and fresh.lora.rank == 4


def test_a_checkpoint_that_cannot_be_loaded_leaves_the_adapter_as_it_was(training: Training, group: Group) -> None:
    run = run_with(training, "a", trained=True)
    tenant, lora = run.tenant, run.lora
    group.fails["load_checkpoint"] = CheckpointError("damaged")
    with pytest.raises(CheckpointError):
        training.load(run, Path("x"), {"rank": 2}, optimizer=True)
    assert (run.tenant, run.lora, run.trained) == (tenant, lora, True)
    assert group.asked[-1] == ("remove_lora_adapter", "a#2")
    for asked in ({"rank": 4}, {"rank": 2, "train_mlp": False}):
        with pytest.raises(ConfigError, match="create a run from the checkpoint instead"):
            training.load(run, Path("x"), asked, optimizer=True)
    assert len(group.made) == 2 and run.tenant is tenant


def test_adapters_that_compute_log_probs_are_kept_while_they_are_used_last(training: Training, group: Group) -> None:
    lora, folders = LoRAConfig(rank=2), [Path(f"{number}") for number in range(5)]
    readers = [training._reader(folder, lora).name for folder in folders[:4]]
    assert training._reader(folders[0], lora).name == readers[0] and len(group.made) == 4
    training._reader(folders[4], lora)
    assert ("remove_lora_adapter", readers[1]) in group.asked and list(training._readers) == [
        *folders[2:4],
        folders[0],
        folders[4],
    ]
    training._drop_reader(folders[3])
    training._drop_reader(folders[3])
    assert sum(name == "remove_lora_adapter" for name, _ in group.asked) == 2
    group.fails["import_lora_adapter"] = CheckpointError("gone")
    with pytest.raises(CheckpointError):
        training._reader(folders[1], lora)
    assert group.asked[-1] == ("remove_lora_adapter", group.made[-1][0]) and folders[1] not in training._readers


def test_states_of_runs_are_saved_between_steps_when_they_are_due(training: Training, group: Group, tmp_path: Path) -> None:
    training._max_runs = 9
    folder = training._boundaries
    assert folder is not None
    old = folder / "old"
    old.mkdir(parents=True)
    due = run_with(training, "due", unbound=16, boundary=old)
    run_with(training, "early", unbound=15)
    run_with(training, "has gradients", unbound=99, trained=True)
    training._runs["not made"] = replace_in_place(Run("not made"), unbound=99)

    def saved() -> list[str]:
        training._bound()
        names = [given.split()[0] for name, given in group.asked if name == "save_checkpoint"]
        bounds = [given.split() for name, given in group.asked if name == "bound"]
        assert all(first == second for _, first, second in bounds)
        group.asked.clear()
        return names

    assert saved() == ["due#1"] and due.unbound == 0 and not old.exists()
    assert due.boundary is not None and due.boundary.parent == folder and saved() == []
    group.wants_boundary = True
    assert saved() == ["early#2"], "those that have taken a step since, to free the driver's memory"
    # One that cannot be saved is tried again after as many steps, and the others are saved.
    group.wants_boundary = False
    for run in training._runs.values():
        run.unbound = 16
    kept, group.fails["save_checkpoint"] = due.boundary, CheckpointError("the disk is full")
    assert saved() == ["due#1", "early#2"] and due.boundary is kept and due.unbound == 0


def test_what_is_asked_of_a_run_that_is_over_or_was_answered_fails_at_once(
    training: Training, answers: dict[str, Result]
) -> None:
    run = replace_in_place(Run("a"), next_seq=3)
    training._runs["a"] = run
    job = Call(lambda run: {})
    training.submit("a", 2, "answered", job)
    training.submit("other", 1, "of none", job)
    assert (
        b"request 2 of the run was answered" in answers["answered"].body and b"the run has ended" in answers["of none"].body
    )
    training.submit("a", 5, "early", Step({}, 7))
    training.submit("a", 4, "earlier", Pass(bytes(11)))
    assert answers.keys() == {"answered", "of none"} and sorted(run.waiting) == [4, 5]
    assert training.waiting_bytes == 18 and training.waiting == {"a": 2}
    assert [training.is_next("a", number) for number in (2, 3, 4)] == [True, True, False] and training.is_next("other", 9)
    assert run.head is None
    run.over = "the session was finished"
    training.submit("a", 3, "late", job)
    assert b"the session was finished" in answers["late"].body and b'"server"' in answers["late"].body
    assert training.waiting == {}
    training.failed = "training has ended"
    training.submit("a", 3, "too late", job)
    assert b"training has ended" in answers["too late"].body


def test_texts_are_read_by_the_tokens_of_all_ranks_and_one_at_least() -> None:
    budget: Any = SimpleNamespace(
        _group=SimpleNamespace(config=SimpleNamespace(max_tokens_per_micro_batch=10)),
        base=SimpleNamespace(data_parallel_size=2),
    )
    assert Training._budget.fget(budget) == 20  # type: ignore[attr-defined]

    def taken(*lengths: int) -> tuple[list[int], list[int]]:
        answer: Any = None
        waiting = [_Reading(None, None, Scoring([1] * length), answer) for length in lengths]
        training: Any = SimpleNamespace(_readings=waiting, _budget=20)
        now = Training._next_readings(training)
        return [len(each.scoring.tokens) for each in now], [len(each.scoring.tokens) for each in training._readings]

    assert taken(10, 10, 1) == ([10, 10], [1])
    assert taken(10, 11, 1) == ([10], [11, 1]), "none overtakes another"
    assert taken(30, 1) == ([30], [1])
    assert taken() == ([], [])


def test_a_step_needs_gradients_that_are_whole_and_begins_them_anew() -> None:
    tenant, lora = HandleRef("group", 1, "a", False, (0,), (0,)), LoRAConfig(rank=2)
    asked = Step({"adam_params": {"learning_rate": 0.5}})
    run = Run("a", tenant, lora, waiting={0: asked}, trained=True)
    assert _step_of(run)[0] is tenant and _step_of(run)[1].lr == 0.5
    run.trained, run.broken = True, "a pass failed"
    with pytest.raises(BatchError, match="nothing was changed, and gradients are dropped: a pass failed"):
        _step_of(run)
    assert run.broken == ""
    run.trained = False
    with pytest.raises(BatchError, match="no forward_backward since the last step"):
        _step_of(run)
    run.broken, run.waiting = "a pass failed", {0: Step({"adam_params": {"eps": -1.0}})}
    with pytest.raises(ConfigError):
        _step_of(run)
    assert run.broken == "", "whatever comes of the step"


def test_a_save_that_fails_leaves_no_folder(training: Training, group: Group, tmp_path: Path) -> None:
    run = run_with(training, "a")
    for failing in ("save_checkpoint", "export_lora_adapter"):
        group.fails = {failing: CheckpointError("the disk is full")}
        with pytest.raises(CheckpointError):
            training.save(run, tmp_path / "saved", state=True)
        assert not (tmp_path / "saved").exists()
    group.asked.clear()
    with pytest.raises(CheckpointError):
        training.save(run, tmp_path / "saved", state=False)
    assert [name for name, _ in group.asked] == ["export_lora_adapter"]
    with pytest.raises(BatchError, match="could not be created"):
        training.save(Run("never made"), tmp_path / "saved", state=True)


def test_a_run_that_ends_frees_its_adapter_and_its_state_and_fails_what_waits(
    training: Training, group: Group, answers: dict[str, Result], tmp_path: Path
) -> None:
    (tmp_path / "state").mkdir()
    run_with(training, "a", boundary=tmp_path / "state", waiting={5: Step({}, request_id="waits")}, next_seq=3)
    run_with(training, "b", waiting={5: Step({}, request_id="of another")}, next_seq=3)
    training._end("a", "the session was finished")
    training._end("a", "again")
    training._answer()
    assert group.asked == [("remove_lora_adapter", "a#1")] and not (tmp_path / "state").exists()
    assert answers.keys() == {"waits"} and b"the session was finished" in answers["waits"].body
    assert training._runs.keys() == {"b"} and (training.steps_of("a"), training.steps_of("b")) == (0, 0)


def test_only_the_end_of_the_group_is_nobody_s_own(training: Training, answers: dict[str, Result]) -> None:
    def fails(error: Exception) -> None:
        with training._fails_alone(run):
            raise error

    run = run_with(training, "a", waiting={0: Step({}, request_id="one"), 1: Step({}, request_id="two")})
    fails(KeyError("x"))
    assert run.next_seq == 1 and b"KeyError" in training._answers["one"].body
    for lost in (GroupFailedError("a rank died"), ClusterLostError("Ray is gone")):
        with pytest.raises(type(lost)):
            fails(lost)
    assert run.next_seq == 1 and run.waiting.keys() == {1}


def test_a_run_that_computes_again_answers_nothing_twice(training: Training) -> None:
    first, second = passes(datum()), passes(datum())
    waits = Step({}, request_id="waits")
    run = run_with(training, "a", again=[first, second], waiting={0: waits}, alone=True)
    for expected in (first, second, waits):
        assert run.head is expected and not training._answers
        training._done(run, Result.of({}))
    assert training._answers.keys() == {"waits"} and (run.next_seq, run.alone) == (1, False)
