"""Filling a model from a Hugging Face directory: a rank reads the parts of tensors that it keeps."""

from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from rl_backend.checkpoint.hf_reader import FLOAT_DTYPES, HFReader
from rl_backend.checkpoint.kept_weights import find_kept
from rl_backend.contracts import (
    VALUE_HEAD_WEIGHTS,
    CheckpointError,
    CopiedWeight,
    WeightName,
    stored_names,
    stored_tensors,
    text_config,
)
from rl_backend.contracts.errors import listed
from rl_backend.parallel.shards import local_region, local_tensor

LM_HEAD = "lm_head.weight"
LM_HEAD_BIAS = "lm_head.bias"

_EMBEDDINGS = "embed_tokens.weight"
_TIED_ROWS = 4096


def load_weights(
    path: Path | str,
    parameters: Mapping[str, nn.Parameter],
    weight_names: Mapping[str, WeightName],
    *,
    zero_if_absent: Collection[str] = (),
    stored_buffers: tuple[str, ...] = (),
    elsewhere: Collection[str] = (),
    kept: tuple[str, ...] = (),
) -> dict[str, tuple[int, ...]]:
    """Fills each parameter, or this rank's shard of it, from the Hugging Face directory ``path``.

    All names, shapes and dtypes are checked first. Host memory holds the shards and at most one more tensor.

    Args:
        parameters: name in the module -> parameter, a DTensor where it is sharded.
        weight_names: name in the module -> Hugging Face name, or those of the tensors that are packed in it.
        zero_if_absent: Hugging Face names that the directory may lack; their parameters are filled with 0.
        stored_buffers: endings of further names without a parameter that are ignored.
        elsewhere: names of tensors whose parameters other ranks may have; they are not read.
        kept: beginnings of names of tensors that a saved model takes from ``path``; they are not read.

    Returns:
        Name -> shape of the tensors that are kept.

    Raises:
        CheckpointError: as :class:`HFReader`, :func:`check_tensors` and :func:`require_same_head`.
    """
    reader = HFReader(path)
    absent = set(zero_if_absent) - set(reader.infos)
    shapes = {name: tuple(value.shape) for name, value in parameters.items()}
    found = check_tensors(reader, shapes, weight_names, absent, stored_buffers, frozenset(elsewhere), kept)
    if LM_HEAD in reader.infos and not {LM_HEAD, VALUE_HEAD_WEIGHTS[0]} & {*stored_names(weight_names), *elsewhere}:
        # A stored head that is not read must be the embeddings; each rank compares its own rows.
        for name, stored in weight_names.items():
            (_, embeddings), *_ = _read_tensors(stored)
            if embeddings.endswith(_EMBEDDINGS):
                has_rows = bool(local_tensor(parameters[name]).numel())
                _require_same_rows(reader, embeddings, local_region(parameters[name]) if has_rows else (slice(0, 0),))
    with torch.no_grad():
        for name, parameter in parameters.items():
            local, region = local_tensor(parameter), local_region(parameter)
            for index, stored in _read_tensors(weight_names[name]):
                places = list(zip(index, region, strict=False))
                if all(part.start <= place < part.stop for place, part in places):
                    target = local[tuple(place - part.start for place, part in places)]
                    if stored in absent:
                        target.zero_()
                    elif target.numel():
                        target.copy_(reader.read(stored, region[len(index) :]))
    return found


def with_stored_copies(path: Path | str, names: Mapping[str, WeightName]) -> dict[str, WeightName]:
    """``names`` without the copies that ``path`` lacks: a saved or pushed model has the tensors that its directory has."""
    # GLM-4.5 has its embeddings and its head again in its layer for multi-token prediction, GLM-4.6 has them once.
    if not any(isinstance(name, CopiedWeight) for name in names.values()):
        return dict(names)
    stored = HFReader(path).infos

    def held(name: WeightName) -> WeightName:
        if not isinstance(name, CopiedWeight):
            return name
        copies = tuple(copy for copy in name.copies if copy in stored)
        return CopiedWeight(name.name, copies) if copies else name.name

    return {key: held(name) for key, name in names.items()}


def _read_tensors(name: WeightName) -> Iterator[tuple[tuple[int, ...], str]]:
    return stored_tensors(name.name if isinstance(name, CopiedWeight) else name)


def require_same_head(path: Path | str) -> None:
    """Raises :class:`CheckpointError` for a directory that says that its head is its embeddings, and stores another head."""
    # transformers unties a head that differs without a word, and vLLM drops it: neither is what the other computes.
    reader = HFReader(path)
    # Further ones are copies for the prediction of further tokens.
    embeddings = min((name for name in reader.infos if name.endswith(_EMBEDDINGS)), key=len, default=None)
    if LM_HEAD in reader.infos and embeddings is not None and is_tied(reader.config):
        _require_same_rows(reader, embeddings, (slice(0, reader.infos[embeddings].shape[0]),))


def is_tied(hf_config: Mapping[str, Any]) -> bool:
    """What ``config.json`` says of the head; where it says nothing, what transformers fills in."""
    name = "tie_word_embeddings"
    given = [part[name] for part in (hf_config, text_config(hf_config)) if part.get(name) is not None]
    if given:
        return any(given)
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    model_type = hf_config.get("model_type")
    return model_type in CONFIG_MAPPING and bool(getattr(CONFIG_MAPPING[model_type](), name, False))


def _require_same_rows(reader: HFReader, embeddings: str, region: tuple[slice, ...]) -> None:
    rows, *columns = region
    starts = range(rows.start, rows.stop, _TIED_ROWS)
    regions = ((slice(start, min(start + _TIED_ROWS, rows.stop)), *columns) for start in starts)
    if reader.infos[LM_HEAD].shape != reader.infos[embeddings].shape or not all(
        torch.equal(reader.read(LM_HEAD, region), reader.read(embeddings, region)) for region in regions
    ):
        raise CheckpointError(
            f"{reader.path} has tie_word_embeddings=true in config.json, but a {LM_HEAD} that differs from its "
            "embeddings; set tie_word_embeddings to false to use that head, or remove the tensor"
        )


def check_tensors(
    reader: HFReader,
    shapes: Mapping[str, tuple[int, ...]],
    weight_names: Mapping[str, WeightName],
    absent: Collection[str] = (),
    stored_buffers: tuple[str, ...] = (),
    elsewhere: frozenset[str] = frozenset(),
    kept: tuple[str, ...] = (),
) -> dict[str, tuple[int, ...]]:
    """As :func:`load_weights`, without reading: whole ``shapes`` by names in the module; ``absent`` tensors are not needed.

    Raises:
        CheckpointError: missing, surplus or quantised tensors, or other shapes, all that there are; a kept one of a dtype
            that is not written.
    """
    wanted = {
        stored: shape[len(index) :]
        for name, shape in shapes.items()
        for index, stored in stored_tensors(weight_names[name])
        if stored not in absent
    }
    score = VALUE_HEAD_WEIGHTS[0]
    known = elsewhere | wanted.keys() | {LM_HEAD}
    known |= {LM_HEAD_BIAS} if score in known else set()
    # A head that is not asked for is ignored for a critic, and with tied embeddings where it equals them.
    ignored = ("rotary_emb.inv_freq", *stored_buffers)
    unread = [name for name in reader.infos if name not in known and not name.endswith(ignored)]
    surplus = [name for name in unread if not name.startswith(kept)]
    held = {name: (reader.infos[name], shape) for name, shape in wanted.items() if name in reader.infos}
    found = {
        "it has no tensor": [name for name in wanted if name not in held],
        "it has tensor": [
            *(
                f"{name} of shape {stored.shape}, not {shape}"
                for name, (stored, shape) in held.items()
                if stored.shape != shape
            ),
            *(
                f"{name} of dtype {stored.dtype}, not {', '.join(FLOAT_DTYPES)} (convert quantised weights first)"
                for name, (stored, _) in held.items()
                if not isinstance(stored.dtype, torch.dtype)
            ),
        ],
        "the model has no parameter for": surplus,
    }
    problems = [f"{kind} {listed(wrong)}" for kind, wrong in found.items() if wrong]
    if problems:
        remedy = "take both from one model"
        if score in surplus and LM_HEAD not in reader.infos:
            remedy = "it holds a critic or a reward model: build it with head='values', or give a language model's directory"
        raise CheckpointError(
            f"the weights in {reader.path} do not fit its config.json: {'; '.join(problems)}; {remedy}", problems=problems
        )
    return find_kept(reader, kept, known)
