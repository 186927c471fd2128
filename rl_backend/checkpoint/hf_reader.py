"""Reading Hugging Face directories: a rank reads the parts of tensors that it keeps."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from rl_backend.contracts import VALUE_HEAD_WEIGHTS, CheckpointError, WeightName, stored_names, stored_tensors

WEIGHTS_INDEX = "model.safetensors.index.json"
SINGLE_FILE = "model.safetensors"
LM_HEAD = "lm_head.weight"

_DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


class StoredTensor(NamedTuple):
    """What a file's header says of one tensor. ``dtype`` is safetensors' own name where it is no plain float."""

    shape: tuple[int, ...]
    dtype: torch.dtype | str


def read_hf_config(path: Path | str) -> dict[str, Any]:
    """``config.json`` of a local Hugging Face directory.

    Raises:
        CheckpointError: the directory or the file is missing, or the file is not a JSON object.
    """
    directory = Path(path)
    if not directory.is_dir():
        raise CheckpointError(
            f"hf_path {str(path)!r} is not a directory; download the model first and give its local directory",
            path=str(path),
        )
    return _read_json_object(directory / "config.json", "give a Hugging Face model directory, which has one")


class HFReader:
    """The tensors of a local Hugging Face directory, in one or several safetensors files, with or without an index.

    Opening checks every file's header against its size. No file stays open between calls.

    Attributes:
        config: ``config.json``.
        infos: Hugging Face name -> shape and dtype.

    Raises:
        CheckpointError: a missing directory, ``config.json`` or weight file, a truncated or corrupt one, or an index that
            does not fit the files.
    """

    def __init__(self, path: Path | str) -> None:
        self.path = Path(path)
        self.config = read_hf_config(path)
        self.infos: dict[str, StoredTensor] = {}
        self._files: dict[str, Path] = {}
        index = self.path / WEIGHTS_INDEX
        weight_map = _read_weight_map(index) if index.is_file() else None
        for file in _weight_files(self.path, weight_map):
            self._read_header(file, weight_map)
        if weight_map is not None:
            self._check_index(weight_map)

    def read(self, name: str, region: tuple[slice, ...] = ()) -> Tensor:
        """One tensor, or the part of it in ``region``, a slice for each of its first dimensions.

        The result may share the file's memory map, which lives as long as the result does: copy it and let it go.

        Raises:
            CheckpointError: there is no such tensor, or the file can no longer be read.
        """
        if name not in self._files:
            raise CheckpointError(f"{self.path} has no tensor {name!r}", tensor=name)
        with _open(self._files[name]) as file:
            if not self.infos[name].shape:
                return file.get_tensor(name)  # type: ignore[no-any-return]
            return file.get_slice(name)[region or (slice(None),)]  # type: ignore[no-any-return]

    def read_rows(self, name: str, start: int, stop: int) -> Tensor:
        """Rows ``start`` to ``stop`` of the first dimension; see :meth:`read`."""
        return self.read(name, (slice(start, stop),))

    def _read_header(self, file: Path, weight_map: Mapping[str, str] | None) -> None:
        with _open(file) as opened:
            for name in opened.keys():  # noqa: SIM118 - not a dictionary
                if weight_map is not None and weight_map.get(name) != file.name:
                    continue
                if name in self._files:
                    raise CheckpointError(
                        f"tensor {name!r} is in both {self._files[name].name} and {file.name} of {self.path}, without an "
                        f"index that says which counts; remove one of the files or write {WEIGHTS_INDEX}",
                        tensor=name,
                    )
                stored = opened.get_slice(name)
                dtype = stored.get_dtype()
                self.infos[name] = StoredTensor(tuple(stored.get_shape()), _DTYPES.get(dtype, dtype))
                self._files[name] = file

    def _check_index(self, weight_map: Mapping[str, str]) -> None:
        absent = sorted(set(weight_map) - set(self.infos))
        if absent:
            name = absent[0]
            raise CheckpointError(
                f"{WEIGHTS_INDEX} of {self.path} says that {name!r} is in {weight_map[name]}, which does not have it "
                f"({len(absent)} such tensors); the download is mixed or incomplete, fetch it again",
                tensors=absent,
            )


_TIED_ROWS = 4096


def load_weights(
    path: Path | str,
    parameters: Mapping[str, nn.Parameter],
    weight_names: Mapping[str, WeightName],
    *,
    zero_if_absent: Collection[str] = (),
    stored_buffers: tuple[str, ...] = (),
) -> None:
    """Fills each parameter, or this rank's shard of it, from the Hugging Face directory ``path``.

    All names, shapes and dtypes are checked first. Then one stored tensor after the other is read, only what the shard has
    of it, and converted to the parameter's dtype, so that host memory holds the shards and at most one more tensor. A stored
    ``lm_head.weight`` that is not asked for is ignored for a critic, and with tied embeddings where it equals them; stored
    rotary frequencies are ignored; any other tensor without a parameter is refused.

    Args:
        parameters: name in the module -> parameter, a DTensor where it is sharded.
        weight_names: name in the module -> Hugging Face name, or those of the tensors that are packed in it.
        zero_if_absent: Hugging Face names that the directory may lack; their parameters are filled with 0.
        stored_buffers: endings of names without a parameter that are ignored as well.

    Raises:
        CheckpointError: what :class:`HFReader` raises, a missing, surplus or quantised tensor, another shape, or a head that
            differs from the embeddings that it should be tied to.
    """
    reader = HFReader(path)
    absent = set(zero_if_absent) - set(reader.infos)
    wanted = {
        stored: tuple(value.shape[len(index) :])
        for name, value in parameters.items()
        for index, stored in stored_tensors(weight_names[name])
        if stored not in absent
    }
    _check_tensors(reader, wanted, stored_buffers)
    _check_tied_head(reader, parameters, weight_names)
    with torch.no_grad():
        for name, parameter in parameters.items():
            local, region = _local_part(parameter)
            for index, stored in stored_tensors(weight_names[name]):
                places = list(zip(index, region, strict=False))
                if all(part.start <= place < part.stop for place, part in places):
                    target = local[tuple(place - part.start for place, part in places)]
                    if stored in absent:
                        target.zero_()
                    elif target.numel():
                        target.copy_(reader.read(stored, region[len(index) :]))


def _check_tied_head(reader: HFReader, parameters: Mapping[str, nn.Parameter], names: Mapping[str, WeightName]) -> None:
    """A stored head that is not read must be the embeddings; each rank compares its own rows.

    transformers unties one that differs without a word, and vLLM drops it: neither is what the other computes.
    """
    if LM_HEAD not in reader.infos or {LM_HEAD, VALUE_HEAD_WEIGHTS[0]} & set(stored_names(names)):
        return
    for name, embeddings in names.items():
        if not isinstance(embeddings, str) or not embeddings.endswith("embed_tokens.weight"):
            continue
        local, (rows, *columns) = _local_part(parameters[name])
        chunks = range(rows.start, rows.stop, _TIED_ROWS) if local.numel() else ()
        regions = ((slice(start, min(start + _TIED_ROWS, rows.stop)), *columns) for start in chunks)
        if reader.infos[LM_HEAD].shape != reader.infos[embeddings].shape or not all(
            torch.equal(reader.read(LM_HEAD, region), reader.read(embeddings, region)) for region in regions
        ):
            raise CheckpointError(
                f"{reader.path} has tie_word_embeddings=true in config.json, but a {LM_HEAD} that differs from its "
                "embeddings; set tie_word_embeddings to false to use that head, or remove the tensor",
                tensor=LM_HEAD,
            )


def _check_tensors(reader: HFReader, wanted: Mapping[str, tuple[int, ...]], stored_buffers: tuple[str, ...]) -> None:
    score = VALUE_HEAD_WEIGHTS[0]
    if score in reader.infos and score not in wanted and LM_HEAD not in reader.infos:
        raise CheckpointError(
            f"{reader.path} holds a critic or a reward model: it has {score} and no {LM_HEAD}; build it with head='values', "
            "or give the directory of a language model",
            tensor=score,
        )
    missing = [name for name in wanted if name not in reader.infos]
    if missing:
        raise CheckpointError(
            f"{reader.path} has no tensor {_listed(missing)}; the model that config.json describes needs it",
            tensors=missing,
        )
    for name, shape in wanted.items():
        stored = reader.infos[name]
        if stored.shape != shape:
            raise CheckpointError(
                f"tensor {name!r} of {reader.path} has shape {stored.shape}; {_expected(name, shape)}",
                tensor=name,
            )
        if not isinstance(stored.dtype, torch.dtype):
            raise CheckpointError(
                f"tensor {name!r} of {reader.path} has dtype {stored.dtype}; expected {', '.join(_DTYPES)}; convert "
                "quantised weights first",
                tensor=name,
            )
    ignored = ("rotary_emb.inv_freq", *stored_buffers)
    surplus = [name for name in reader.infos if name not in wanted and name != LM_HEAD and not name.endswith(ignored)]
    if surplus:
        raise CheckpointError(
            f"{reader.path} has tensor {_listed(surplus)}, for which the model that config.json describes has no parameter; "
            "the weights and the configuration are of different models",
            tensors=surplus,
        )


def _expected(name: str, shape: tuple[int, ...]) -> str:
    if name in VALUE_HEAD_WEIGHTS:
        return f"a critic's has {shape}: one value per token"
    return f"config.json describes {shape}; the weights and the configuration are of different models"


def _local_part(parameter: nn.Parameter) -> tuple[Tensor, tuple[slice, ...]]:
    """This rank's storage of a parameter and the region of the full tensor that it holds."""
    data = parameter.detach()
    if not isinstance(data, DTensor):
        return data, tuple(slice(0, size) for size in data.shape)
    shape, offset = compute_local_shape_and_global_offset(data.shape, data.device_mesh, data.placements)
    return data.to_local(), tuple(slice(start, start + size) for start, size in zip(offset, shape, strict=True))


def _weight_files(directory: Path, weight_map: Mapping[str, str] | None) -> list[Path]:
    if weight_map is not None:
        files = [directory / name for name in sorted(set(weight_map.values()))]
    elif (directory / SINGLE_FILE).is_file():
        files = [directory / SINGLE_FILE]
    else:
        files = sorted(directory.glob("*.safetensors"))
    absent = [file.name for file in files if not file.is_file()]
    if absent:
        raise CheckpointError(
            f"{WEIGHTS_INDEX} of {directory} names {_listed(absent)}, which is missing; fetch the model again", files=absent
        )
    if not files:
        raise CheckpointError(
            f"{directory} has no *.safetensors file; weights in another format must be converted first, for example with "
            "transformers' save_pretrained",
            path=str(directory),
        )
    return files


def _read_weight_map(index: Path) -> dict[str, str]:
    weight_map = _read_json_object(index, "fetch it again").get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{index} has no weight_map; fetch it again, or remove it to read all *.safetensors files")
    for name, file in weight_map.items():
        if not isinstance(file, str) or Path(file).name != file:
            raise CheckpointError(f"{index} places {name!r} in {file!r}; expected the name of a file beside it", tensor=name)
    return weight_map


def _read_json_object(file: Path, remedy: str) -> dict[str, Any]:
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise CheckpointError(f"{file} is missing; {remedy}", path=str(file)) from None
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{file} cannot be read as JSON ({error}); {remedy}", path=str(file)) from None
    if not isinstance(content, dict):
        raise CheckpointError(f"{file} holds a {type(content).__name__}; expected a JSON object; {remedy}", path=str(file))
    return content


@contextmanager
def _open(file: Path) -> Iterator[Any]:
    try:
        with safe_open(file, framework="pt") as opened:
            yield opened
    except (SafetensorError, OSError) as error:
        raise CheckpointError(
            f"{file} is truncated or corrupt, or cannot be read ({error}); fetch or write it again", path=str(file)
        ) from error


def _listed(names: list[str]) -> str:
    return ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")
