"""The table of atoms is what runtimes and training groups do."""

from __future__ import annotations

import inspect
import pickle
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from actors import HandleRef, RankContext, TrainGroup
from actors.train.worker import run
from rl_backend.contracts import HandleError, OptimizerConfig
from rl_backend.contracts.atoms import ATOMS, PARTS, Operation
from rl_backend.runtime import Runtime
from rl_backend.runtime.native.engine import NativeRuntime
from tests.support.native import micro_batches, open_runtime, token_loss

NOT_ATOMS = {"place", "close"}


def parameters(function: Any) -> dict[str, inspect.Parameter]:
    found = dict(inspect.signature(inspect.unwrap(function)).parameters)
    return {name: each for name, each in found.items() if name not in ("self", "handle")}


def test_every_method_of_a_runtime_is_in_the_table() -> None:
    public = {name for name in vars(Runtime) if not name.startswith("_")} - NOT_ATOMS
    assert public == ATOMS.keys()


@pytest.mark.parametrize("name", [name for name, atom in ATOMS.items() if atom.join])
def test_a_group_offers_every_atom_that_can_leave_a_rank_with_its_signature(name: str) -> None:
    runtime, group = parameters(getattr(Runtime, name)), parameters(getattr(TrainGroup, name))
    assert {each: given.default for each, given in group.items()} == {each: given.default for each, given in runtime.items()}


class _Handle:
    forward_only = False


class _Widened:
    """A runtime whose atom has an argument more than ours."""

    def __init__(self) -> None:
        self.seen: list[tuple[Any, Mapping[str, Any]]] = []

    def lr_scheduler_step(self, handle: Any, *, by: int = 1) -> float:
        self.seen.append((handle, {"by": by}))
        return 0.25 * by


def test_an_argument_more_passes_through_everything_between_the_caller_and_the_engine() -> None:
    """Nothing on the way names an atom's arguments: contract, engine and caller are all that knows them."""
    runtime: Any = _Widened()
    context, handle = RankContext(runtime, "group", 0, 1, operation=7), _Handle()
    context._handles[7] = handle  # type: ignore[assignment]
    ref = HandleRef("group", 7, "policy", False, (0,), (0,))
    sent = pickle.loads(pickle.dumps(Operation("lr_scheduler_step", {"handle": ref, "by": 3})))
    assert run(context, sent, None) == 0.75
    assert runtime.seen == [(handle, {"by": 3})]


def test_an_operation_survives_pickling_with_the_configurations_among_its_arguments() -> None:
    operation = Operation("build_model", {"name": "policy", "optimizer": OptimizerConfig(lr=0.5)}, number=4)
    assert pickle.loads(pickle.dumps(operation)) == operation


def calls(runtime: NativeRuntime, handle: Any, tmp_path: Path) -> dict[str, Any]:
    """Every atom of one handle that has needs beyond a handle of this runtime."""
    batches = micro_batches([[0, 1]])

    def mode(context: Any) -> None:
        with context:
            pass

    return {
        "train_mode": lambda: mode(runtime.train_mode(handle)),
        "zero_grad": lambda: runtime.zero_grad(handle),
        "forward_backward": lambda: runtime.forward_backward(handle, batches, token_loss),
        "optimizer_step": lambda: runtime.optimizer_step(handle),
        "lr_scheduler_step": lambda: runtime.lr_scheduler_step(handle),
        "export_weights": lambda: runtime.export_weights(handle),
        "export_shards": lambda: runtime.export_shards(handle),
        "export_gradients": lambda: runtime.export_gradients(handle),
        "training_state": lambda: runtime.training_state(handle),
        "activations": lambda: runtime.activations(handle, batches),
        "get_optimizer_state": lambda: runtime.get_optimizer_state(handle),
        "reset_optimizer": lambda: runtime.reset_optimizer(handle),
        "export_lora_adapter": lambda: runtime.export_lora_adapter(handle),
        "import_lora_adapter": lambda: runtime.import_lora_adapter(handle, {}),
        "save_checkpoint": lambda: runtime.save_checkpoint(handle, tmp_path / "saved"),
        "load_checkpoint": lambda: runtime.load_checkpoint(handle, tmp_path / "saved"),
    }


def test_a_runtime_refuses_what_the_table_says_that_a_model_lacks(tied_model: Path, tmp_path: Path) -> None:
    with open_runtime(tied_model) as runtime:
        reference, policy = runtime.build_model(forward_only=True), runtime.build_model()
        needing = {name for name, atom in ATOMS.items() if atom.needs.trained or atom.needs.parts}
        assert needing == calls(runtime, policy, tmp_path).keys()
        for name, call in calls(runtime, reference, tmp_path).items():
            if ATOMS[name].needs.trained:
                with pytest.raises(HandleError, match=f"{name}.* forward-only"):
                    call()
        runtime.forward_backward(policy, micro_batches([[0, 1]]), token_loss)
        for part in PARTS:
            runtime.to(policy, "cpu", **{each: each == part for each in PARTS})
            for name, call in calls(runtime, policy, tmp_path).items():
                if part in ATOMS[name].needs.parts:
                    with pytest.raises(HandleError, match=f"{name} .* while its {part} is in host memory"):
                        call()
            runtime.to(policy, "device")
        policy.broken = "a pass failed"
        for name, call in calls(runtime, policy, tmp_path).items():
            if ATOMS[name].needs.whole_gradients:
                with pytest.raises(HandleError, match=rf"{name} .* a pass failed; call zero_grad first"):
                    call()
        policy.broken, policy.damaged = "", "a load failed"
        for name, call in calls(runtime, policy, tmp_path).items():
            if ATOMS[name].needs.weights:
                with pytest.raises(HandleError, match="no usable weights: a load failed"):
                    call()
