from __future__ import annotations

import pickle
from pathlib import Path

import pytest
import torch

from actors import Loss
from actors.train.loss import LossSender
from rl_backend.contracts import ConfigError, ModelOutput, TokenSequence
from rl_backend.data import pack
from tests.support.losses import nll_loss

NAME = "tests.support.losses:nll_loss"


def test_a_named_loss_is_the_function_with_its_keyword_arguments_also_after_pickling() -> None:
    batch = pack([TokenSequence.from_prompt_and_response([1], [2, 3])], {"batch_num_tokens": 2.0, "dp_size": 1})
    output = ModelOutput(log_probs=torch.tensor([-1.0, -3.0, 0.0]))
    loss = Loss(NAME, scale=2.0)
    for same in (loss, pickle.loads(pickle.dumps(loss))):
        assert same(output, batch) == nll_loss(output, batch, scale=2.0)
        assert repr(same) == "Loss('tests.support.losses:nll_loss', scale=2.0)"


def test_the_same_named_loss_pickles_to_the_same_bytes() -> None:
    assert pickle.dumps(Loss(NAME, scale=2.0)) == pickle.dumps(Loss(NAME, scale=2.0))
    assert pickle.dumps(Loss(NAME, scale=2.0)) != pickle.dumps(Loss(NAME, scale=3.0))


@pytest.mark.parametrize(
    ("target", "keywords", "message"),
    [
        ("tests.support.losses.nll_loss", {}, "expected 'package.module:function'"),
        ("tests.support.nowhere:nll_loss", {}, r"cannot be imported \(No module named 'tests.support.nowhere'\)"),
        ("tests.support.losses:nowhere", {}, "'tests.support.losses' has no attribute 'nowhere'"),
        ("tests.support.losses:__name__", {}, "a str cannot be called"),
        (NAME, {"scales": 2.0}, "unexpected keyword argument 'scales'"),
        ("tests.unit.actors.train.test_sent_loss:needs_more", {}, "missing a required .*'more'"),
        ("tests.unit.actors.train.test_sent_loss:takes_no_data", {}, "too many positional arguments"),
    ],
)
def test_a_loss_that_cannot_work_is_refused_when_it_is_named(target: str, keywords: dict[str, float], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Loss(target, **keywords)


def test_what_cannot_be_called_or_pickled_is_no_loss() -> None:
    with pytest.raises(ConfigError, match="loss is a str; expected a callable or Loss"):
        LossSender().send("nll")  # type: ignore[arg-type]
    generator = (number for number in range(3))
    with pytest.raises(ConfigError, match=r"loss .* cannot be pickled .*generator.*; pass Loss\('package"):
        LossSender().send(lambda model_output, data, dp_group=None: next(generator))  # type: ignore[arg-type, return-value]


def needs_more(model_output: object, data: object, dp_group: object = None, *, more: float) -> None:
    """A loss that cannot be called without a keyword argument."""


def takes_no_data(model_output: object, *, dp_group: object = None) -> None:
    """No loss at all."""


def test_a_module_that_ends_the_process_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "leaving_loss.py").write_text("raise SystemExit(0)\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ConfigError, match=r"leaving_loss ends the process when imported, SystemExit\(0\)"):
        Loss("leaving_loss:loss")
