"""Which layers of a model are in which stage."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise

from rl_backend.contracts import ConfigError


def split_layers(num_layers: int, num_stages: int, sizes: Sequence[int] | None = None) -> list[range]:
    """The layers of each stage.

    Where the layers do not divide evenly, stages in the middle get one more: the first also has the embeddings, and the last
    the head.

    Args:
        sizes: layers of each stage; None divides them evenly.

    Raises:
        ConfigError: fewer layers than stages, or ``sizes`` that are not of these layers and stages.
    """
    if sizes is None:
        if num_layers < num_stages:
            raise ConfigError.of(
                "ParallelConfig.pp",
                num_stages,
                f"pp * vpp stages need as many layers, the model has {num_layers}; use at most {num_layers} stages",
            )
        each, more = divmod(num_layers, num_stages)
        favoured = [*range(1, num_stages - 1), 0, num_stages - 1][:more]
        sizes = [each + (stage in favoured) for stage in range(num_stages)]
    elif len(sizes) != num_stages or sum(sizes) != num_layers or min(sizes) < 1:
        raise ConfigError.of(
            "NativeConfig.pipeline_layers",
            tuple(sizes),
            f"expected {num_stages} numbers, one for each of pp * vpp stages, each at least 1, that add up to the model's "
            f"{num_layers} layers; these are {len(sizes)} that add up to {sum(sizes)}",
        )
    return [range(start, end) for start, end in pairwise(accumulate(sizes, initial=0))]
