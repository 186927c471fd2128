"""The model of an engine and its tenant: what is built, moved and given to a rollout, and what a failure leaves."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from adapters.verl import engine_model
from adapters.verl.engine_model import EngineModel
from rl_backend.contracts import CheckpointError, UnsupportedError
from rl_backend.contracts.lora import LoRAConfig

FACTORS = {
    "base_model.model.a.lora_A.weight": torch.ones(2, 5),
    "base_model.model.a.lora_B.weight": torch.zeros(7, 2),
    "base_model.model.score.weight": torch.ones(1, 5),
}


class Runtime:
    """Notes its calls."""

    def __init__(self) -> None:
        self.calls: list[Any] = []
        self.tenants, self.failing, self.unsaved = 0, False, 0
        self.imported: Any = None

    def build_model(self, **options: Any) -> str:
        self.calls.append(("build", options))
        return "base"

    def create_lora_adapter(self, base: str, config: Any, optimizer: Any) -> Any:
        self.tenants += 1
        self.calls.append(("create", base, config.targets, optimizer))
        return SimpleNamespace(number=self.tenants, lora=config)

    def import_lora_adapter(self, tenant: Any, given: Any) -> None:
        self.imported = given
        self.calls.append(("import", tenant.number, given if isinstance(given, str) else sorted(given)))
        if self.failing:
            raise UnsupportedError("another rank")

    def remove_lora_adapter(self, tenant: Any) -> None:
        self.calls.append(("remove", tenant.number))
        if tenant.number == self.unsaved:
            raise CheckpointError("disk full")

    def export_lora_adapter(self, tenant: Any) -> Iterator[tuple[str, Tensor]]:
        yield from FACTORS.items()

    def to(self, handle: Any, where: str, **parts: bool) -> None:
        self.calls.append((handle if handle == "base" else "tenant", where, *(name for name in parts if parts[name])))

    def weight_infos(self, handle: Any, dtype: torch.dtype) -> list[Any]:
        return [SimpleNamespace(nbytes=each) for each in (3, 2**29, 5)] if handle == "base" else [SimpleNamespace(nbytes=3)]

    def export_weights(self, handle: Any, **options: Any) -> Any:
        return ("weights of", "base" if handle == "base" else "tenant", options)

    def export_shards(self, handle: Any, **options: Any) -> Any:
        return ("shards of", handle, options)


def lora(**changes: Any) -> Any:
    config = LoRAConfig(rank=2, alpha=4, seed=5, use_dora=changes.pop("use_dora", False))
    given: dict[str, Any] = {"config": config, "merge": False, "adapter_path": None, "initial": ("kaiming", "zero")}
    return SimpleNamespace(
        **{**given, **changes},
        for_model=lambda path: config.replace(targets=(f"of {path}",)),
        for_rollout=lambda: {"r": 2},
    )


def made(settings_lora: Any, runtime: Runtime, hf_path: str | None = None, **more: Any) -> EngineModel:
    settings: Any = SimpleNamespace(
        lora=settings_lora,
        forward_only=more.get("forward_only", False),
        head=more.get("head", "log_probs"),
        runtime=SimpleNamespace(hf_path="/first"),
    )
    return EngineModel(runtime, settings, "adam", hf_path)  # type: ignore[arg-type]


def test_a_model_without_an_adapter_is_trained_itself() -> None:
    runtime = Runtime()
    model = made(None, runtime, "/other", forward_only=True, head="values")
    built = {"forward_only": True, "head": "values", "hf_path": "/other", "optimizer": "adam"}
    assert runtime.calls == [("build", built)]
    assert model.base == model.trained == model.at_work == "base"
    runtime.calls.clear()
    model.move("cpu", model=True, optimizer=False, grad=True)
    model.move("device", model=False, optimizer=False, grad=False)
    assert runtime.calls == [("base", "cpu", "model", "grad")]
    # One weight beyond the usual budget is gathered whole.
    found, config = model.for_rollout(torch.bfloat16, base_sync_done=None)
    expected: Any = ("weights of", "base", {"dtype": torch.bfloat16, "byte_budget": 2**29})
    assert (found, config) == (expected, None)
    shards: Any = ("shards of", "base", {"dtype": torch.float32})
    assert model.shards(torch.float32) == shards


@pytest.mark.parametrize("hf_path", [None, "/other"])
def test_a_tenant_is_trained_over_a_frozen_base(hf_path: str | None) -> None:
    runtime = Runtime()
    model = made(lora(adapter_path="/start"), runtime, hf_path, head="values")
    assert runtime.calls == [
        ("build", {"trainable": False, "head": "values", "hf_path": hf_path}),
        ("create", "base", (f"of {hf_path or '/first'}",), "adam"),
        ("import", 1, "/start"),
    ]
    assert model.trained is model.at_work and model.trained.number == 1
    runtime.calls.clear()
    model.move("cpu", model=True, optimizer=True, grad=False)
    model.move("device", model=False, optimizer=False, grad=True)
    assert runtime.calls == [("base", "cpu", "model"), ("tenant", "cpu", "model", "optimizer"), ("tenant", "device", "grad")]
    with pytest.raises(UnsupportedError, match=r"HFModelConfig\.lora: delta_sharded sends shares of weights"):
        model.shards(torch.float32)


def test_batches_run_on_the_base_inside_and_on_the_tenant_after_an_error() -> None:
    model = made(lora(), Runtime())

    def work() -> None:
        with model.without_adapter(), model.without_adapter():
            assert model.at_work == "base"
            raise ValueError("mine")

    with model.without_adapter():
        with model.without_adapter():
            pass
        assert model.at_work == "base"
    assert model.at_work is model.trained
    with pytest.raises(ValueError, match="mine"):
        work()
    assert model.at_work is model.trained


def test_a_tenant_is_renewed_and_one_that_is_refused_leaves_it() -> None:
    runtime = Runtime()
    model = made(lora(), runtime)
    first = model.trained
    runtime.calls.clear()
    runtime.failing = True
    with pytest.raises(UnsupportedError, match="another rank"):
        model.renew_tenant("/saved")
    assert model.trained is first is model.at_work
    assert runtime.calls == [("create", "base", ("of /first",), "adam"), ("import", 2, "/saved"), ("remove", 2)]
    runtime.calls.clear()
    runtime.failing = False
    model.renew_tenant("/saved")
    assert model.trained is model.at_work and model.trained.number == 3
    assert runtime.calls[-2:] == [("import", 3, "/saved"), ("remove", 1)]


def test_a_tenant_whose_save_failed_stays_and_the_new_one_goes() -> None:
    runtime = Runtime()
    model = made(lora(), runtime)
    runtime.unsaved = 1
    with pytest.raises(CheckpointError, match="disk full"):
        model.renew_tenant("/saved")
    assert model.trained is model.at_work and model.trained.number == 1
    assert runtime.calls[-2:] == [("remove", 1), ("remove", 2)]


def test_a_rollout_gets_merged_weights_or_the_base_once_and_then_the_adapter() -> None:
    merged, config = made(lora(merge=True), Runtime()).for_rollout(torch.bfloat16, base_sync_done=False)
    budget = engine_model._EXPORT_BYTES
    expected: Any = ("weights of", "tenant", {"dtype": torch.bfloat16, "byte_budget": budget})
    assert (merged, config) == (expected, None)
    model = made(lora(), Runtime())
    base, config = model.for_rollout(torch.float32, base_sync_done=False)
    whole: Any = ("weights of", "base", {"dtype": torch.float32, "byte_budget": 2**29})
    assert (base, config) == (whole, {"r": 2})
    factors, config = model.for_rollout(torch.bfloat16, base_sync_done=True)
    found = dict(factors)
    assert config == {"r": 2} and found.keys() == FACTORS.keys()
    assert all(each.dtype == torch.bfloat16 for each in found.values())
    with pytest.raises(UnsupportedError, match=r"lora\.merge=False: checkpoint engines other than naive send whole"):
        model.for_rollout(torch.bfloat16, base_sync_done=None)
    for done in (True, False):
        with pytest.raises(UnsupportedError, match=r"rollouts serve no DoRA adapters; set lora\.merge=True"):
            made(lora(use_dora=True), Runtime()).for_rollout(torch.bfloat16, base_sync_done=done)


LARGE = {
    "base_model.model.a.lora_A.weight": torch.full((64, 200), 3.0),
    "base_model.model.a.lora_B.weight": torch.ones(300, 64),
}


def drawn(initial: tuple[str, str], monkeypatch: pytest.MonkeyPatch, seed: int = 5) -> dict[str, Tensor] | None:
    monkeypatch.setattr(Runtime, "export_lora_adapter", lambda self, tenant: iter({**FACTORS, **LARGE, **OTHER}.items()))
    runtime, settings = Runtime(), lora(initial=initial)
    settings.for_model = lambda path: LoRAConfig(rank=64, seed=seed)
    made(settings, runtime)
    found: dict[str, Tensor] | None = runtime.imported
    return found


OTHER = {"base_model.model.b.lora_A.weight": torch.ones(64, 200)}


@pytest.mark.parametrize(
    ("kind", "spread", "largest"),
    [
        ("xavier", (2 / 264) ** 0.5, None),
        ("kaiming", (1 / 200) ** 0.5 / 3**0.5, (1 / 200) ** 0.5),
        ("normal", 0.2, None),
        ("zero", 0.0, 0.0),
    ],
)
def test_first_factors_are_drawn_as_asked_for_from_the_seed_and_the_name(
    kind: str, spread: float, largest: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    name, other = "base_model.model.a.lora_A.weight", "base_model.model.b.lora_A.weight"
    found = drawn((kind, "normal"), monkeypatch)
    assert found is not None and found.keys() == {*FACTORS, *OTHER}
    assert torch.equal(found["base_model.model.score.weight"], torch.ones(1, 5))
    assert float(found[name].std()) == pytest.approx(spread, rel=0.05)
    assert largest is None or float(found[name].abs().max()) <= largest + 1e-7
    assert float(found["base_model.model.a.lora_B.weight"].std()) == pytest.approx(0.2, rel=0.05)
    again, reseeded = drawn((kind, "normal"), monkeypatch), drawn((kind, "normal"), monkeypatch, seed=6)
    assert again is not None and torch.equal(again[name], found[name])
    if kind != "zero":
        assert reseeded is not None and not torch.equal(reseeded[name], found[name])
        assert not torch.equal(found[other], found[name])


def test_pefts_own_first_factors_are_left_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    assert drawn(("kaiming", "zero"), monkeypatch) is None
    found = drawn(("kaiming", "kaiming"), monkeypatch)
    assert found is not None and found["base_model.model.a.lora_B.weight"].any()
