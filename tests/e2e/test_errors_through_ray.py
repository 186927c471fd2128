from __future__ import annotations

import pytest
import ray

from rl_backend.contracts import RLBackendError
from tests.support.errors import error_classes


@ray.remote(num_cpus=0)
class Remote:
    """Another process."""

    def fail(self, error_class: type[RLBackendError]) -> None:
        raise error_class("rank 3 is gone", rank=3)

    def answer(self, error: RLBackendError) -> RLBackendError:
        return error


def test_every_error_reaches_a_ray_caller_with_class_message_and_details(ray_cluster: None) -> None:
    remote = Remote.remote()
    classes = error_classes()
    assert len(classes) > 10
    for error_class in classes:
        returned = ray.get(remote.answer.remote(error_class("rank 3 is gone", rank=3)))
        assert type(returned) is error_class
        assert (returned.message, returned.details) == ("rank 3 is gone", {"rank": 3})
        with pytest.raises(error_class) as caught:
            ray.get(remote.fail.remote(error_class))
        assert type(caught.value.cause) is error_class
        assert (caught.value.cause.message, caught.value.cause.details) == ("rank 3 is gone", {"rank": 3})
