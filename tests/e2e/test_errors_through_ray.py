from __future__ import annotations

import pytest
import ray

from rl_backend.contracts import RLBackendError
from tests.support.errors import error_classes


def test_every_error_reaches_a_ray_caller_with_class_message_and_details(ray_cluster: None) -> None:
    @ray.remote(num_cpus=0)
    def fail(error_class: type[RLBackendError]) -> None:
        raise error_class("rank 3 is gone", rank=3)

    @ray.remote(num_cpus=0)
    def answer(error: RLBackendError) -> RLBackendError:
        return error

    classes = error_classes()
    assert len(classes) > 10
    for error_class, raised, returned in zip(
        classes,
        [fail.remote(error_class) for error_class in classes],
        ray.get([answer.remote(error_class("rank 3 is gone", rank=3)) for error_class in classes]),
        strict=True,
    ):
        assert type(returned) is error_class
        assert (returned.message, returned.details) == ("rank 3 is gone", {"rank": 3})
        with pytest.raises(error_class) as caught:
            ray.get(raised)
        assert type(caught.value.cause) is error_class
        assert (caught.value.cause.message, caught.value.cause.details) == ("rank 3 is gone", {"rank": 3})
