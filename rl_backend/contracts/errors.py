"""Errors. Each survives pickling: a Ray caller sees its class, message and details."""

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from os import PathLike
from typing import Any, Self


class RLBackendError(Exception):
    """Base of every error that this project raises on purpose: ``details`` are its facts for a program, and picklable."""

    def __init__(self, message: str, **details: Any) -> None:
        super().__init__(message)
        self.message = message
        self.details = details

    def __str__(self) -> str:
        return self.message

    def __reduce__(self) -> tuple[Any, ...]:
        # By keywords: Exception's own __reduce__ would call the class with the message alone, and set the rest afterwards.
        return partial(type(self), self.message, **self.details), ()


def listed(items: Sequence[object], most: int = 4) -> str:
    """The first of ``items`` and how many more there are, for messages."""
    return ", ".join(map(str, items[:most])) + (f" and {len(items) - most} more" if len(items) > most else "")


class ConfigError(RLBackendError):
    """A configuration value that cannot work; raised when the configuration is built."""

    @classmethod
    def of(cls, field: str, value: Any, expected: str) -> Self:
        return cls(f"{field}={value!r}: {expected}", field=field, value=repr(value))

    @classmethod
    def of_all(cls, wrong: Sequence[tuple[str, Any, str]]) -> Self:
        blamed = [(field, f"={value!r}: {expected}") for field, value, expected in wrong]
        return cls("; ".join(field + problem for field, problem in blamed), blamed=blamed, field=wrong[0][0])

    @classmethod
    def refuse_all(cls, wrong: Iterable[tuple[str, Any, str]]) -> None:
        """Raises one error for all that is ``wrong``, as (field, value, what is expected); without any nothing happens."""
        if found := list(wrong):
            raise cls.of_all(found)

    def told(self, name_of: Callable[[str], str], equals: str = "=") -> str:
        """The message with ``name_of(field)`` for each blamed field; ``equals`` stands between a new name and its value."""
        field = self.details.get("field")
        blamed = self.details.get("blamed") or ([(field, self.message.removeprefix(field))] if field else [])
        told = []
        for name, problem in blamed:
            other = name_of(name)
            has_value = problem.startswith("=") and other != name
            told.append(other + (equals + problem[1:] if has_value else problem))
        return "; ".join(told) or self.message


class UnsupportedError(RLBackendError):
    """A request that is understood and that this build, model or machine cannot serve."""


class RegistryError(RLBackendError):
    """An unknown or twice registered model family or runtime."""


class BatchError(RLBackendError):
    """Data that does not fit its contract: shapes, lengths, counts or a missing field."""


class RewardError(BatchError):
    """A reward function that failed on a response, or on every response of a step."""


class EpisodeEndError(RLBackendError):
    """An episode that is over for a reason that is no mistake, such as a limit; ``details["stop"]`` names the reason."""


class EpisodeFailedError(RLBackendError):
    """An episode that failed where ``on_failure="stop"``, or environments that nothing can end."""


class HandleError(RLBackendError):
    """A handle that cannot serve the call: another runtime's, closed, or forward-only where gradients are needed."""


class CheckpointError(RLBackendError):
    """Weights or training state on disk that are missing, incomplete or of another shape."""

    @classmethod
    def at(cls, path: str | PathLike[str], problem: str, **details: Any) -> Self:
        return cls(f"{path} {problem}", path=str(path), **details)


class RunFolderError(RLBackendError):
    """The file system refuses to write to the folder of a running run: no space, read-only, or gone."""


class ExportInterruptedError(RLBackendError):
    """Another rank closed ``export_weights`` before its end, so the iteration ended here too."""


class GroupFailedError(RLBackendError):
    """A rank of a training group died or left its peers in a collective; the group cannot be used again."""


class RanksReplacedError(RLBackendError):
    """Work that only the ranks of before could do: they died and others have taken their place. Begin it again."""


class ClusterLostError(RLBackendError):
    """Ray itself ended: its control store, or the raylet of this process's node."""


class OperationOrderError(RLBackendError):
    """An operation that another driver, or an operation already lost, would interleave with."""


class RolloutError(RLBackendError):
    """A rollout engine that cannot serve the request."""


class EngineDeadError(RolloutError):
    """The engine's process ended."""


class EngineDirtyError(RolloutError):
    """A weight update failed after its first load: the engine refuses requests until it is rebuilt."""


class WeightSyncError(RLBackendError):
    """A push of weights that did not complete."""


class WeightCheckError(WeightSyncError):
    """Weights refused before any of them was loaded; the engine still serves the old ones."""


class WeightVersionError(WeightSyncError):
    """Weights, or a sample, of a version that is older than the one required."""


class ParityError(RLBackendError):
    """A side of a comparison of runtimes that did not run to its end."""


class ScheduleError(RLBackendError):
    """A pipeline schedule that cannot be run: incomplete, deadlocked or beyond its bound of activations."""
