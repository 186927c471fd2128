"""transformers' side of DeepSeek-V3.2 and GLM-5: its GLM-5 with the rotations of released models, trained in this process.

transformers has no class of the former and rotates other features of the latter; no process of its own would know.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from torch import Tensor

from rl_backend.checkpoint.hf_reader import HFReader, read_hf_config
from rl_backend.lab.parity.config import TRANSFORMERS, ParityConfig, ParitySide, plan_batch
from rl_backend.lab.parity.record import SideRecord, merge_ranks
from rl_backend.lab.parity.transformers_side import record_transformers
from tests.support.sparse_models import as_glm, corrected_rotations

INDEXER = ".indexer."
EAGER = ParitySide(runtime=TRANSFORMERS, options={"attn_implementation": "eager"})
"""The only attention of transformers' GLM-5 that is causal."""


@contextmanager
def as_transformers_reads(source: Path, folder: Path) -> Iterator[None]:
    """Makes ``folder`` the model of ``source`` as transformers' GLM-5, which has the right rotations meanwhile."""
    fields = read_hf_config(source)
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(as_glm(fields)))
    (folder / "model.safetensors").symlink_to(source / "model.safetensors")
    with corrected_rotations(str(fields["model_type"])):
        yield


def record_corrected(config: ParityConfig, folder: Path) -> SideRecord:
    """Trains on the batch of ``config``.

    Indexers have no gradient on either side, and are not decayed by ours: here neither. Those of layers that reuse a choice
    are transformers' alone, of random weights, and nothing reads them.

    Args:
        folder: for the directory as transformers reads it; is made.
    """
    source = Path(config.model)
    with as_transformers_reads(source, folder):
        rank = record_transformers(config.replace(model=str(folder), reference=EAGER), EAGER)
    stored = HFReader(source).infos.keys()

    def of_files(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return {name: tensor for name, tensor in tensors.items() if name in stored}

    frozen = {name: tensor for name, tensor in rank.loaded_weights.items() if INDEXER in name}
    rank = replace(
        rank,
        loaded_weights=of_files(rank.loaded_weights),
        gradients={name: tensor for name, tensor in rank.gradients.items() if INDEXER not in name},
        weights=of_files({**rank.weights, **frozen}),
    )
    return merge_ranks([rank], plan_batch(config, 1))
