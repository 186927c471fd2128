"""Whether an export yields what was announced of it, tensor by tensor."""

from __future__ import annotations

from collections.abc import Generator, Iterable, Sequence

from torch import Tensor

from rl_backend.contracts import TensorInfo, WeightCheckError
from rl_backend.weights.dtypes import name_of_dtype


def as_announced(infos: Sequence[TensorInfo], weights: Iterable[tuple[str, Tensor]]) -> Generator[tuple[TensorInfo, Tensor]]:
    """Each of ``infos`` with its tensor, before anything is done with the tensor.

    Whoever receives weights places them by what was announced. Two tensors of one size that change places would arrive
    with right digests under each other's names.

    Args:
        infos: the tensors in the order announced.
        weights: (name, full tensor), a collective's generator in general. It is closed when it differs, or when this
            generator is closed, which tells the other ranks.

    Raises:
        WeightCheckError: ``weights`` differ from ``infos`` in a name, shape, dtype or number.
    """
    iterator = iter(weights)
    try:
        for place, info in enumerate(infos):
            name, tensor = next(iterator, (None, None))
            if name is None or tensor is None:
                raise WeightCheckError(f"the export ended before {info.name}; {place} of {len(infos)} tensors came")
            found = (name, tuple(tensor.shape), name_of_dtype(tensor.dtype))
            if found != (info.name, info.shape, info.dtype):
                raise WeightCheckError(
                    f"the export yielded {found}, but announced {(info.name, info.shape, info.dtype)}; nothing of it was "
                    "sent: the runtime's weight_infos and export_weights must agree in names and order",
                    name=name,
                    announced=info.name,
                )
            yield info, tensor
        extra = next(iterator, None)
        if extra is not None:
            raise WeightCheckError(f"the export yielded {extra[0]} after the {len(infos)} tensors that it announced")
    finally:
        close = getattr(iterator, "close", None)
        if close is not None:
            close()
