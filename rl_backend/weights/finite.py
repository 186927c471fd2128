"""Finding NaN and infinity at the price of one pass over memory.

``isfinite().all()`` writes a mask and costs many times a copy. A sum is not finite when any addend is not, so each chunk is
summed first; only a chunk whose sum is not finite (its sum may also have overflowed) is looked at element by element.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from rl_backend.contracts import WeightCheckError

_CHUNK_ELEMENTS = {torch.float16: 1 << 20}
_DEFAULT_CHUNK_ELEMENTS = 1 << 24


def has_non_finite(tensor: Tensor) -> bool:
    """Whether a contiguous tensor holds NaN or infinity. Integer tensors never do."""
    if not tensor.is_floating_point():
        return False
    # A float16 sum overflows at 65504, so its chunks are small enough for ordinary weights to stay below.
    chunk_elements = _CHUNK_ELEMENTS.get(tensor.dtype, _DEFAULT_CHUNK_ELEMENTS)
    chunks = tensor.reshape(-1).split(chunk_elements)
    sums = torch.stack([chunk.sum() for chunk in chunks])
    suspects = (~sums.isfinite()).nonzero().flatten().tolist()
    return any(not bool(chunks[index].isfinite().all()) for index in suspects)


def refuse_non_finite(names: Sequence[str], *, engine: str) -> None:
    """Raises :class:`~rl_backend.contracts.WeightCheckError` unless ``names``, of tensors with NaN or infinity, is empty."""
    if not names:
        return
    more = f" and {len(names) - 8} more" if len(names) > 8 else ""
    raise WeightCheckError(
        f"{engine}: weights hold NaN or infinity and were not loaded: {', '.join(names[:8])}{more}; the trainer's model is "
        "damaged: restore a checkpoint",
        engine=engine,
        names=list(names),
    )
