from __future__ import annotations

import copy
import pickle
import traceback
from pathlib import Path

import pytest

import rl_backend.contracts
from rl_backend.contracts import CheckpointError, ConfigError, RLBackendError
from rl_backend.contracts.errors import listed
from tests.support.errors import error_classes


@pytest.mark.shows("contracts: every error survives pickling, and Ray")
@pytest.mark.parametrize("error_class", error_classes())
def test_every_error_survives_pickling_with_class_message_and_details(error_class: type[RLBackendError]) -> None:
    error = error_class("rank 3 is gone", rank=3, tokens=[1, 2])
    for other in (pickle.loads(pickle.dumps(error)), copy.deepcopy(error)):
        assert type(other) is error_class
        assert str(other) == other.message == "rank 3 is gone"
        assert other.details == {"rank": 3, "tokens": [1, 2]}


@pytest.mark.parametrize("error_class", error_classes())
def test_every_error_is_public_documented_and_printed_with_its_message(error_class: type[RLBackendError]) -> None:
    assert getattr(rl_backend.contracts, error_class.__name__) is error_class
    assert error_class.__doc__
    assert "rank 3 is gone" in traceback.format_exception_only(error_class("rank 3 is gone"))[0]


def test_a_subclass_of_a_third_party_survives_pickling_too() -> None:
    assert type(pickle.loads(pickle.dumps(_OutsideError("x", a=1)))) is _OutsideError


def test_a_configuration_error_names_field_value_and_what_was_expected() -> None:
    error = ConfigError.of("ParallelConfig.tp", 0, "must be at least 1")
    assert str(error) == "ParallelConfig.tp=0: must be at least 1"
    assert error.details == {"field": "ParallelConfig.tp", "value": "0"}


class _OutsideError(RLBackendError):
    """An error of a plugin."""


@pytest.mark.parametrize(
    ("count", "shown"), [(0, ""), (1, "0"), (4, "0, 1, 2, 3"), (5, "0, 1, 2, 3 and 1 more"), (9, "0, 1, 2, 3 and 5 more")]
)
def test_a_long_list_is_cut_with_the_number_of_the_others(count: int, shown: str) -> None:
    assert listed(range(count)) == shown
    assert listed(["a", "b", "c"], 2) == "a, b and 1 more"


def test_a_checkpoint_that_is_wrong_is_named_by_its_path(tmp_path: Path) -> None:
    error = CheckpointError.at(tmp_path / "model", "has no manifest", step=3)
    assert str(error) == f"{tmp_path}/model has no manifest"
    assert error.details == {"path": f"{tmp_path}/model", "step": 3}
