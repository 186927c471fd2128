"""Answers of a rank, and its errors on their way to the driver."""

import resource
import traceback
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from ray import cloudpickle

from rl_backend.contracts import RLBackendError

AFTERWARDS = "all ranks were stopped: build a new group and load the last checkpoint"
"""Ends what is said of a group that has ended."""

_SIGNS = ("gloo/", "CUDA error", "NCCL error", "CUDNN_STATUS_", "CUBLAS_STATUS_EXECUTION_FAILED")


@dataclass(frozen=True)
class RankInfo:
    """``started``: when its process was, by the kernel's clock, because numbers of processes come again."""

    rank: int
    node_id: str
    node_ip: str
    pid: int
    started: str = ""


class Apart[R](NamedTuple):
    """A result in two parts: the driver is sent ``value``, and gets and owns a reference to ``stored`` in Ray's object
    store.
    """

    value: R
    stored: Any


@dataclass(frozen=True)
class Completed:
    """An operation that ran to its end; ``peak_memory`` as of :func:`peak_memory`, 0 where it was not looked at."""

    value: Any
    peak_memory: int = 0


@dataclass(frozen=True)
class Failed:
    error: Exception
    traceback: str


type Outcome = Completed | Failed


def peak_memory() -> int:
    """Bytes, the most that this process has held so far: allocated on its GPU, or without one resident in host memory."""
    if torch.cuda.is_initialized():
        return torch.cuda.max_memory_allocated()
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


class RemoteTraceback(Exception):  # noqa: N818, shown as the cause of an error, never raised
    def __init__(self, rank: int, text: str) -> None:
        super().__init__(f"on rank {rank}:\n{text}")
        self.rank = rank
        self.text = text

    def __reduce__(self) -> tuple[Any, ...]:
        return (RemoteTraceback, (self.rank, self.text))


def failed(error: Exception) -> Failed:
    """``error`` made ready to travel; one that cannot be pickled becomes an RLBackendError of the same text."""
    text = "".join(traceback.format_exception(error))
    try:
        cloudpickle.loads(cloudpickle.dumps(error))
    except Exception as reason:  # noqa: BLE001, a foreign exception's pickling can raise anything
        error = RLBackendError(
            f"{type(error).__name__}: {error}",
            type=type(error).__qualname__,
            not_picklable=f"{type(reason).__name__}: {reason}",
        )
    return Failed(error, text)


def with_origin(failure: Failed, rank: int) -> Exception:
    """The error itself, with the rank and the remote traceback as its cause and, for our errors, in its details."""
    error = failure.error
    error.__cause__ = RemoteTraceback(rank, failure.traceback)
    if isinstance(error, RLBackendError):
        error.details.setdefault("rank", rank)
        error.details.setdefault("remote_traceback", failure.traceback)
    return error


def breaks_process_group(error: Exception) -> bool:
    """Whether the error came from a collective or a device, after which the process group is of no more use."""
    # Running out of memory does not stay.
    if isinstance(error, torch.OutOfMemoryError):
        return False
    # Every later call of the process fails with an error of CUDA, while its peers wait in a collective.
    if isinstance(error, dist.DistError | torch.AcceleratorError):
        return True
    # gloo reports lost peers and time-outs as a plain RuntimeError that names its source file.
    return isinstance(error, RuntimeError) and any(sign in str(error) for sign in _SIGNS)
