"""A loss crosses to a rank once, as long as it stays the same."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import pytest
import torch

from actors import Loss
from actors.train import loss as module
from actors.train.loss import KEPT_LOSSES, LossReceiver, LossSender, SentLoss
from rl_backend.contracts import ConfigError, MetricValue, ModelOutput, PackedBatch, TokenSequence
from rl_backend.data import pack
from tests.support.losses import ScaledLoss, nll_loss

NAME = "tests.support.losses:nll_loss"
HERE = "tests.unit.actors.train.test_loss_on_the_way"


class Store:
    """Ray's objects."""

    def __init__(self) -> None:
        self.put_in: list[bytes] = []
        self.got = 0

    def put(self, value: bytes) -> int:
        self.put_in.append(value)
        return len(self.put_in) - 1

    def get(self, ref: int) -> bytes:
        self.got += 1
        return self.put_in[ref]


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> Store:
    made = Store()
    monkeypatch.setattr(module, "ray", made)
    return made


def test_a_loss_is_stored_and_fetched_once_and_again_when_its_state_changed(store: Store) -> None:
    sender, receiver = LossSender(), LossReceiver()
    changing: Any = ScaledLoss(2.0)
    first = sender.send(changing)
    assert sender.send(changing) is first and sender.send(Loss(NAME)).digest != first.digest
    assert isinstance(first.pickled, list) and len(first.pickled) == 1, "Ray fetches a reference that is no part of a list"
    received: Any = receiver.receive(first)
    same: Any = receiver.receive(first)
    assert received.scale == 2.0 and same is received and store.got == 1
    changing.scale = 3.0
    second = sender.send(changing)
    assert second.digest != first.digest and len(store.put_in) == 3
    later: Any = receiver.receive(second)
    assert (later.scale, received.scale) == (3.0, 2.0)


def test_the_losses_that_were_used_last_are_kept(store: Store) -> None:
    sender, receiver = LossSender(), LossReceiver()

    def both(scale: float) -> tuple[int, int]:
        """How often it was stored, and fetched."""
        stored, got = len(store.put_in), store.got
        receiver.receive(sender.send(Loss(NAME, scale=scale)))
        return len(store.put_in) - stored, store.got - got

    assert [both(float(number)) for number in range(KEPT_LOSSES)] == [(1, 1)] * KEPT_LOSSES
    assert both(0.0) == (0, 0)
    assert both(100.0) == (1, 1), "which puts out the one that was used longest ago"
    assert both(0.0) == (0, 0) and both(2.0) == (0, 0)
    assert both(1.0) == (1, 1)
    assert both(3.0) == (1, 1), "1.0 has put it out"


def test_one_loss_of_each_tenant_is_sent_as_one(store: Store) -> None:
    losses: Any = {"a": Loss(NAME, scale=2.0), "b": nll_loss}
    received: Any = LossReceiver().receive(LossSender().send(losses))
    assert repr(received["a"]) == repr(losses["a"]) and received["b"] is nll_loss
    for nothing, kind in (({}, "dict"), ({"a": nll_loss, "b": 3}, "dict"), (None, "NoneType")):
        given: Any = nothing
        with pytest.raises(ConfigError, match=f"^loss is a {kind}; expected a callable or Loss"):
            LossSender().send(given)
    assert len(store.put_in) == 1


def by_name(model_output: Any, data: Any, *, dp_group: Any = None, scale: float = 1.0) -> tuple[Any, Any]:
    """Takes its group by name alone."""
    return scale, dp_group


def in_another_place(model_output: Any, data: Any, scale: float = 1.0, dp_group: Any = None) -> tuple[Any, Any]:
    """Takes its group at a place where a rank gives another argument."""
    return scale, dp_group


def in_its_place(model_output: Any, data: Any, dp_group: Any = None, scale: float = 1.0) -> tuple[Any, Any]:
    """Takes its group where a rank gives it."""
    return scale, dp_group


@pytest.mark.parametrize("name", ["by_name", "in_another_place", "in_its_place"])
def test_a_rank_gives_the_group_by_its_place_whatever_the_function_names_it(store: Store, name: str) -> None:
    loss = Loss(f"{HERE}:{name}", scale=4.0)
    received: Any = LossReceiver().receive(LossSender().send(loss))
    assert isinstance(received, partial) == (name == "in_its_place"), "a call of a Loss costs a frame more"
    calls: list[Any] = [received, loss]
    for called in calls:
        assert called("output", "batch", "the group") == (4.0, "the group")
        assert called("output", "batch") == (4.0, None)


def needs_group(model_output: Any, data: Any, dp_group: Any, *, scale: float) -> tuple[Any, Any]:
    """Has no default for its group."""
    return scale, dp_group


class Nested:
    """Holds a loss."""

    @staticmethod
    def loss(
        model_output: ModelOutput, data: PackedBatch, dp_group: Any = None
    ) -> tuple[torch.Tensor, Mapping[str, MetricValue]]:
        return nll_loss(model_output, data, dp_group, scale=3.0)


def test_a_name_may_lead_into_a_class_and_a_group_need_no_default() -> None:
    assert Loss(f"{HERE}:needs_group", scale=2.0)(None, None) == (2.0, None)  # type: ignore[arg-type, comparison-overlap]
    batch = pack([TokenSequence.from_prompt_and_response([1], [2, 3])], {"batch_num_tokens": 2.0, "dp_size": 1})
    output = ModelOutput(log_probs=torch.tensor([-1.0, -3.0, 0.0]))
    loss, metrics = Loss(f"{HERE}:Nested.loss")(output, batch)
    assert loss is not None and float(loss) == 6.0 and metrics["nll"] == (4.0, 2.0)
    with pytest.raises(ConfigError, match=r"'Nested' has no attribute 'other'"):
        Loss(f"{HERE}:Nested.other")


@pytest.mark.parametrize("target", ["", ":", "module", ":function", "tests.support.losses:"])
def test_a_name_has_a_module_and_a_function(target: str) -> None:
    with pytest.raises(ConfigError) as caught:
        Loss(target)
    assert str(caught.value).startswith(f"Loss={target!r}: cannot be imported (")
    assert str(caught.value).endswith("; expected 'package.module:function'")


def test_a_refused_keyword_is_named_with_the_signature() -> None:
    with pytest.raises(ConfigError) as caught:
        Loss(f"{HERE}:by_name", scales=1.0, other=2)
    assert str(caught.value).startswith(f"Loss('{HERE}:by_name'): got an unexpected keyword argument 'scales'; the function")
    assert "dp_group=..., **['other', 'scales']) and its signature is (model_output: " in str(caught.value)
    assert caught.value.details == {"target": f"{HERE}:by_name", "keywords": ["other", "scales"]}


def test_a_sent_loss_is_the_same_by_its_digest() -> None:
    refs: Any = [3]
    assert SentLoss("digest", refs) == SentLoss("digest", refs) != SentLoss("other", refs)
