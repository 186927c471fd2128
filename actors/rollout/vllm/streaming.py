"""vLLM's NCCL and CUDA IPC receivers, with every bucket checked before it is loaded. Has not been run: needs CUDA.

A bucket with NaN or infinity, or one that vLLM's loaders refuse, is not loaded, and nothing after it; the rest is still
received, because the sender waits for it. Checksums of what was received are compared with the sender's after the last
bucket. Each of these failures leaves the engine dirty.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from vllm.distributed.weight_transfer.base import WeightTransferUpdateInfo
from vllm.distributed.weight_transfer.ipc_engine import IPCWeightTransferEngine
from vllm.distributed.weight_transfer.nccl_engine import NCCLWeightTransferEngine

from rl_backend.contracts import WeightSyncError
from rl_backend.weights.inspection import device_checksum, has_non_finite


@dataclass
class ChecksumInfo(WeightTransferUpdateInfo):
    """Last message of a push: name -> :func:`~rl_backend.weights.inspection.device_checksum` where it was sent."""

    checksums: dict[str, int]


class CheckedLoad:
    """Stands in for the model while vLLM's receiver runs: checks each bucket, then hands it on."""

    def __init__(self, model: Any) -> None:
        self._model = model
        self.begin()

    def begin(self) -> None:
        """Forgets the push before."""
        self._received: dict[str, Tensor] = {}
        self._non_finite: list[str] = []
        self._refused: Exception | None = None

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Loads one bucket, unless it or an earlier one is damaged."""
        bucket = list(weights)
        try:
            for name, tensor in bucket:
                self._received[name] = device_checksum(tensor)
                if has_non_finite(tensor):
                    self._non_finite.append(name)
            if not self._non_finite and self._refused is None:
                self._model.load_weights(bucket)
        except Exception as error:  # noqa: BLE001, raised by `confirm`: an error here would leave the sender waiting
            self._refused = self._refused or error

    def confirm(self, checksums: dict[str, int]) -> None:
        """Raises :class:`~rl_backend.contracts.WeightSyncError` unless all that was sent arrived, unchanged and finite."""
        received = {name: int(checksum) for name, checksum in self._received.items()}
        changed = [name for name in {**checksums, **received} if checksums.get(name) != received.get(name)]
        if self._refused is not None:
            problem = f"vLLM could not load them: {type(self._refused).__name__}: {self._refused}"
        elif self._non_finite:
            problem = f"weights hold NaN or infinity: {', '.join(self._non_finite[:8])}"
        elif changed:
            problem = f"received bytes differ from those sent: {', '.join(changed[:8])}"
        else:
            return
        raise WeightSyncError(problem) from self._refused


class _Checked:
    """Mixed into vLLM's receivers, which load through ``self.model``."""

    model: Any
    _load: CheckedLoad | None = None

    def start_weight_update(self) -> None:
        # One for all pushes: from 0.33 vLLM keeps what it was told to receive by its model, and is not told it again.
        self._load = self._load or CheckedLoad(self.model)
        self._load.begin()
        super().start_weight_update()  # type: ignore[misc]

    def parse_update_info(self, update_dict: dict[str, Any]) -> WeightTransferUpdateInfo:
        if "checksums" in update_dict:
            return ChecksumInfo(**update_dict)
        return super().parse_update_info(update_dict)  # type: ignore[misc]

    def receive_weights(self, update_info: WeightTransferUpdateInfo) -> None:
        assert self._load is not None, "start_weight_update() comes before weights are received"
        if isinstance(update_info, ChecksumInfo):
            self._load.confirm(update_info.checksums)
            return
        model, self.model = self.model, self._load
        try:
            super().receive_weights(update_info)  # type: ignore[misc]
        finally:
            self.model = model


class CheckedNcclWeightTransferEngine(_Checked, NCCLWeightTransferEngine):
    model_update_group: Any

    def shutdown(self) -> None:
        # vLLM 0.30 drops the communicator, and NCCL keeps its memory of the GPU; 0.32 destroys it.
        group, self.model_update_group = self.model_update_group, None
        if group is not None:
            group.destroy()
        super().shutdown()


class CheckedIpcWeightTransferEngine(_Checked, IPCWeightTransferEngine):
    """Reads the trainer's GPU memory."""
