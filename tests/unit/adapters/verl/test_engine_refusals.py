"""What verl's engines refuse, by name, before anything runs."""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from rl_backend.contracts import BatchError, CheckpointError, ConfigError, RLBackendError, UnsupportedError
from rl_backend.runtime import RankPlace
from tests.support.verl_batches import make_batch, rows

ONE_RANK = RankPlace(torch.device("cpu"), 0, 1, None, True)  # type: ignore[arg-type]


def jagged(values: list[torch.Tensor]) -> torch.Tensor:
    return torch.nested.as_nested_tensor(values, layout=torch.jagged)


def positions_of_text(length: int) -> torch.Tensor:
    """As verl makes them for a model that reads images: of the text, and of time, height and width."""
    return torch.arange(length).expand(4, length).contiguous()


def positions_of_an_image(length: int) -> torch.Tensor:
    positions = positions_of_text(length)
    positions[2] = positions[2] // 2
    return positions


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"pad_mode": "left_right"}, UnsupportedError, "pad_mode='left_right'"),
        ({"distillation_use_topk": True}, UnsupportedError, "distillation_use_topk=True"),
        ({"calculate_sum_pi_squared": True}, UnsupportedError, "calculate_sum_pi_squared=True"),
        (
            {"multi_modal_inputs": [{}, {"pixel_values": 1, "mm_token_type_ids": 2}, *[{}] * 6]},
            UnsupportedError,
            "multi_modal_inputs of sequence 1 has pixel_values: models are sampled and trained with text alone",
        ),
        (
            {"position_ids": jagged([positions_of_an_image(len(row["input_ids"])) for row in rows()])},
            BatchError,
            "position_ids do not count the tokens of each sequence from 0, as those of text do",
        ),
        (
            {"position_ids": jagged([torch.arange(1, len(row["input_ids"]) + 1) for row in rows()])},
            BatchError,
            "position_ids do not count",
        ),
        (
            {"use_dynamic_bsz": True, "max_token_len_per_gpu": 29},
            BatchError,
            "max_token_len_per_gpu=29 times 1 context-parallel ranks does not hold the longest sequence, of 30 tokens",
        ),
        (
            {"micro_batch_size_per_gpu": 3},
            BatchError,
            "micro_batch_size_per_gpu=3 times force_group_size=1 does not divide 8 sequences",
        ),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_batches_that_an_engine_cannot_honour_are_refused(
    changes: dict[str, Any], error: type[RLBackendError], message: str
) -> None:
    from verl.utils import tensordict_utils as tu

    from adapters.verl.batches import cut_batch

    batch = make_batch(rows(), "response")
    for name, value in changes.items():
        batch[name] = value if isinstance(value, torch.Tensor) else None
        if not isinstance(value, torch.Tensor):
            tu.assign_non_tensor(batch, **{name: value})
    with pytest.raises(error) as raised:
        cut_batch(batch, ONE_RANK, multiple=1, cp_size=1)
    assert message in str(raised.value)


@pytest.mark.parametrize("lengths", ["own", "equal"])
def test_text_in_a_batch_of_a_model_that_reads_images_is_taken(lengths: str) -> None:
    from verl.utils import tensordict_utils as tu

    from adapters.verl.batches import cut_batch

    some = rows()
    if lengths == "equal":
        some = [some[0]] * len(some)
    batch = make_batch(some, "response")
    batch["position_ids"] = jagged([positions_of_text(len(row["input_ids"])) for row in some])
    tu.assign_non_tensor(batch, multi_modal_inputs=[{"mm_token_type_ids": 0}, None, *[{}] * (len(some) - 2)])
    cut = cut_batch(batch, ONE_RANK, multiple=1, cp_size=1)
    assert sum(map(len, (each.seq_lens for each in cut.packed))) == len(some)


def test_routes_to_replay_that_are_missing_or_too_few_are_refused() -> None:
    from adapters.verl.batches import BatchRoutes, router_replay
    from adapters.verl.options.settings import RouterReplayMode

    batch = make_batch(rows(), "response", enable_routing_replay=True)
    assert router_replay(batch, "R2", forward_only=True) == "record"
    assert router_replay(batch, "R2", forward_only=False) == router_replay(batch, "R3", forward_only=True) == "replay"
    assert router_replay(batch, "disabled", forward_only=False) == "off"
    sources: dict[RouterReplayMode, str] = {"R2": "compute_log_prob", "R3": "the rollout"}
    for mode, source in sources.items():
        with pytest.raises(BatchError) as raised:
            BatchRoutes(mode, num_layers=3).require(batch)
        assert source in str(raised.value)
    batch["routed_experts"] = jagged([torch.zeros(len(row["input_ids"]) - 1, 3, 2, dtype=torch.int16) for row in rows()])
    assert router_replay(batch, "R2", forward_only=True) == "replay"
    BatchRoutes("R3", num_layers=3).require(batch)
    assert BatchRoutes("R3", num_layers=3).of(batch)[1] == "all"
    assert BatchRoutes("R3", num_layers=4).of(batch)[1] == "moe"
    with pytest.raises(BatchError) as raised:
        BatchRoutes("R2", num_layers=3).require(batch)
    assert "sequence 0 has 7 rows for 8 tokens" in str(raised.value)


@pytest.mark.parametrize(("local_path", "hdfs_path"), [("hdfs://a/b", None), ("/tmp/a", "hdfs://a/b"), ("/tmp/a", "/b")])
def test_checkpoints_on_hdfs_are_refused(local_path: str, hdfs_path: str | None) -> None:
    from adapters.verl.checkpoints import STATE, EngineCheckpoints

    with pytest.raises(UnsupportedError) as raised:
        EngineCheckpoints(STATE, STATE).load(None, None, local_path, hdfs_path)  # type: ignore[arg-type]
    assert "default_hdfs_dir=null" in str(raised.value)


class Noted:
    """Takes every call, and notes its name; those in ``failing`` raise."""

    def __init__(self, calls: list[str], *failing: str) -> None:
        self._calls, self._failing = calls, failing

    def __getattr__(self, name: str) -> Any:
        def call(*_: Any, **__: Any) -> None:
            self._calls.append(name)
            if name in self._failing:
                raise CheckpointError("disk full")

        return call


@pytest.mark.parametrize(
    ("has_model", "failing", "called"),
    [(True, "", ["finish", "close"]), (True, "finish", ["finish", "close"]), (False, "", ["close"])],
    ids=["saved", "not saved", "no model"],
)
def test_an_engine_that_is_closed_frees_its_runtime_whatever_becomes_of_its_last_save(
    has_model: bool, failing: str, called: list[str]
) -> None:
    from adapters.verl.engine import LanguageModelEngine

    calls: list[str] = []
    engine = object.__new__(LanguageModelEngine)
    engine._checkpoints = Noted(calls, failing)  # type: ignore[assignment]
    engine._runtime = Noted(calls)  # type: ignore[assignment]
    engine._model = SimpleNamespace(trained=None) if has_model else None  # type: ignore[assignment]
    with pytest.raises(CheckpointError, match="disk full") if failing else nullcontext():
        engine.close()
    assert calls == called


def test_an_engine_rests_after_a_save_that_failed() -> None:
    from adapters.verl.engine import LanguageModelEngine

    moved: list[Any] = []
    engine = object.__new__(LanguageModelEngine)
    engine.mode = None
    engine.settings = SimpleNamespace(param_offload=True, optimizer_offload=False)  # type: ignore[assignment]
    engine._checkpoints, engine._runtime = Noted([], "save"), None  # type: ignore[assignment]
    engine._model = SimpleNamespace(  # type: ignore[assignment]
        trained=None, move=lambda where, **parts: moved.append((where, *(name for name, moves in parts.items() if moves)))
    )
    with pytest.raises(CheckpointError, match="disk full"):
        engine.save_checkpoint("/tmp/step_1")
    assert moved == [("device", "model", "optimizer"), ("cpu", "model", "grad")]


def test_without_an_accelerator_the_message_says_how_to_train_on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    from adapters.verl.engine import LanguageModelEngine

    monkeypatch.setattr("verl.utils.device.get_device_name", lambda: "cuda")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.delenv("VERL_PLATFORM", raising=False)
    with pytest.raises(ConfigError, match=r"VERL_PLATFORM=''.*set it to 'cpu', in every process"):
        LanguageModelEngine(None, None, None, None)  # type: ignore[arg-type]
