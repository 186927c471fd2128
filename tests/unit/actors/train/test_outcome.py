"""Errors of ranks on their way to the driver, and what they say of the process group."""

from __future__ import annotations

import pickle
import resource
from typing import Any

import pytest
import torch
import torch.distributed as dist

from actors.train.outcome import Failed, RemoteTraceback, breaks_process_group, failed, peak_memory, with_origin
from rl_backend.contracts import BatchError, RLBackendError


@pytest.mark.parametrize(
    ("error", "breaks"),
    [
        (dist.DistNetworkError("refused"), True),
        (dist.DistBackendError("NCCL"), True),
        (torch.AcceleratorError("device-side assert"), True),
        (torch.OutOfMemoryError("CUDA error: out of memory"), False),
        (RuntimeError("[../third_party/gloo/gloo/transport/tcp/pair.cc:598] Connection closed"), True),
        (RuntimeError("CUDA error: an illegal memory access"), True),
        (RuntimeError("NCCL error in: nccl.cpp:77"), True),
        (RuntimeError("cuDNN error: CUDNN_STATUS_EXECUTION_FAILED"), True),
        (RuntimeError("CUBLAS_STATUS_EXECUTION_FAILED when calling cublasGemmEx"), True),
        (RuntimeError("CUBLAS_STATUS_ALLOC_FAILED when calling cublasCreate"), False),
        (RuntimeError("shapes do not match"), False),
        (ValueError("gloo/ is in the text of another error"), False),
        (BatchError("CUDA error"), False),
    ],
)
def test_errors_of_collectives_and_devices_break_the_process_group(error: Exception, breaks: bool) -> None:
    assert breaks_process_group(error) is breaks


def test_an_origin_that_an_error_has_already_stays() -> None:
    error = BatchError("odd", rank=5, remote_traceback="there")
    assert with_origin(Failed(error, "here"), 2) is error
    assert error.details == {"rank": 5, "remote_traceback": "there"}
    assert isinstance(error.__cause__, RemoteTraceback) and (error.__cause__.rank, error.__cause__.text) == (2, "here")


def test_a_foreign_error_gains_a_cause_alone() -> None:
    error = KeyError("x")
    found = with_origin(Failed(error, "here"), 3)
    assert found is error and vars(error) == {}
    assert str(error.__cause__) == "on rank 3:\nhere"
    copy = pickle.loads(pickle.dumps(error.__cause__))
    assert (copy.rank, copy.text) == (3, "here")


class CannotGo(Exception):  # noqa: N818
    """Refuses to be pickled."""

    def __reduce__(self) -> Any:
        raise TypeError("not me")


class CannotArrive(Exception):  # noqa: N818
    """Can be pickled and not be read again."""

    def __init__(self, *, name: str) -> None:
        super().__init__(name)


@pytest.mark.parametrize(
    ("error", "text", "reason"),
    [
        (CannotGo("a", 1), "CannotGo: ('a', 1)", "TypeError: not me"),
        (CannotArrive(name="b"), "CannotArrive: b", "TypeError: "),
    ],
)
def test_an_error_that_cannot_travel_says_what_it_was_and_why(error: Exception, text: str, reason: str) -> None:
    try:
        raise error
    except Exception as raised:  # noqa: BLE001, what a rank catches
        found = failed(raised)
    assert type(found.error) is RLBackendError and str(found.error) == text
    assert found.error.details["type"] == type(error).__name__
    assert found.error.details["not_picklable"].startswith(reason)
    assert found.traceback.startswith("Traceback") and "raise error" in found.traceback


def test_an_error_that_can_travel_is_itself() -> None:
    error = BatchError("odd")
    assert failed(error).error is error


def test_peak_memory_is_of_the_gpu_where_there_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    found, after = peak_memory(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    assert after // 2 < found <= after
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda: 12345)
    assert peak_memory() == 12345
