"""Reading Hugging Face directories: configuration, other files, headers, then tensors or parts of them."""

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from rl_backend.checkpoint.confined import name_problem, require_inside_model
from rl_backend.checkpoint.quantisation import BlockFactors, MXFP4Weight, find_factors, find_mxfp4
from rl_backend.contracts import CheckpointError, UnsupportedError, quantisation_problem
from rl_backend.contracts.errors import listed

WEIGHTS_INDEX = "model.safetensors.index.json"
SINGLE_FILE = "model.safetensors"

FLOAT_DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
TORCH_DTYPES = {
    **FLOAT_DTYPES,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E8M0": torch.float8_e8m0fnu,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "BOOL": torch.bool,
    "U64": torch.uint64,
    "U32": torch.uint32,
    "U16": torch.uint16,
    "U8": torch.uint8,
}
"""Those that are written."""


class StoredTensor(NamedTuple):
    """One tensor in a header; ``dtype`` is safetensors' own name unless it is a plain float."""

    shape: tuple[int, ...]
    dtype: torch.dtype | str


def read_hf_config(path: Path | str) -> dict[str, Any]:
    return _read_json_object(
        Path(path) / "config.json", "give the local directory of a Hugging Face model, which has one; download it first"
    )


class HFReader:
    """The tensors of a local Hugging Face directory, in one or several safetensors files, with or without an index.

    Opening checks every file's header against its size. No file stays open between calls.

    Attributes:
        config: ``config.json``.
        files: what is read.
        infos: Hugging Face name -> shape and dtype: of packed experts those of single ones, of a text model its own names.
            Weights that are stored in FP8 or MXFP4 are float32, and their factors no tensors.
        dequantised: names of those weights.

    Raises:
        CheckpointError: a missing directory, ``config.json`` or weight file, a truncated or corrupt one, or an index that
            does not fit the files; a directory of which transformers or vLLM would read other tensors.
    """

    def __init__(self, path: Path | str) -> None:
        self.path = Path(path)
        self.config = read_hf_config(path)
        self.infos: dict[str, StoredTensor] = {}
        self._files: dict[str, Path] = {}
        self._stored: dict[str, str] = {}
        self._parts: dict[str, ExpertPart] = {}
        self._quantised: dict[str, BlockFactors | MXFP4Weight] = {}
        index = self.path / WEIGHTS_INDEX
        weight_map = _read_weight_map(index) if index.is_file() else None
        self.files = _weight_files(self.path, weight_map)
        self._require_named_files()
        for file in self.files:
            self._read_header(file)
        found = {name: file.name for name, file in self._files.items()}
        absent = [f"{name!r} is in {file}" for name, file in sorted((weight_map or {}).items()) if found.get(name) != file]
        if absent:
            raise CheckpointError(
                f"{WEIGHTS_INDEX} of {self.path} says that {absent[0]}, which does not have it ({len(absent)} of these); "
                "the download is mixed or incomplete, fetch it again"
            )
        self._take_own_names()
        self._unpack_experts()
        self._take_quantised()

    @property
    def dequantised(self) -> frozenset[str]:
        return frozenset(self._quantised)

    def read(self, name: str, region: tuple[slice, ...] = ()) -> Tensor:
        """One tensor, or the part of it in ``region``, a slice for each of its first dimensions.

        The result may share the file's memory map, which lives as long as the result does: copy it and let it go.
        """
        if name in self._quantised:
            return self._quantised[name].read(self._read_slice, region)
        if name in self._parts:
            part = self._parts[name]
            with _open(self._files[name]) as file:
                packed = file.get_slice(self._stored.get(part.packed, part.packed))
                return packed[part.place(region)][0]  # type: ignore[no-any-return]
        if not self.infos[name].shape:
            with _open(self._files[name]) as file:
                return file.get_tensor(self._stored.get(name, name))  # type: ignore[no-any-return]
        return self._read_slice(name, region or (slice(None),))

    def _read_slice(self, name: str, region: tuple[slice, ...]) -> Tensor:
        with _open(self._files[name]) as file:
            return file.get_slice(self._stored.get(name, name))[region]  # type: ignore[no-any-return]

    def _take_own_names(self) -> None:
        for stored in list(self.infos):
            name = own_name(self.config.get("model_type"), stored)
            if name not in self.infos:
                self.infos[name], self._files[name] = self.infos.pop(stored), self._files.pop(stored)
                self._stored[name] = stored

    def _unpack_experts(self) -> None:
        for packed, stored in list(self.infos.items()):
            parts = list(expert_parts(self.config.get("model_type"), packed, stored.shape))
            if not parts:
                continue
            del self.infos[packed]
            file = self._files.pop(packed)
            for part in parts:
                self.infos[part.name] = StoredTensor(part.shape, stored.dtype)
                self._files[part.name], self._parts[part.name] = file, part

    def _take_quantised(self) -> None:
        for find in (find_factors, find_mxfp4):
            self._quantised |= find(self.path, self.config, self.infos)
        for name, weight in self._quantised.items():
            self._files.setdefault(name, self._files[weight.stored[0]])
            for stored in weight.stored:
                del self.infos[stored]
            self.infos[name] = StoredTensor(weight.shape, torch.float32)

    def _require_named_files(self) -> None:
        named = self.config.get("transformers_weights")
        if named not in (None, WEIGHTS_INDEX, *(file.name for file in self.files if len(self.files) == 1)):
            raise CheckpointError(
                f"config.json of {self.path} has transformers_weights={named!r}, and {listed([f.name for f in self.files])} "
                "is read; leave the field out, or have the directory hold the weights that it names alone"
            )

    def _read_header(self, file: Path) -> None:
        with _open(file) as opened:
            for name in opened.keys():  # noqa: SIM118 - not a dictionary
                if name in self._files:
                    raise CheckpointError(
                        f"tensor {name!r} is in both {self._files[name].name} and {file.name} of {self.path}; transformers "
                        "and vLLM take that of the file which they read last, whatever an index says; remove the file that "
                        "is out of date, or save the model again"
                    )
                stored = opened.get_slice(name)
                dtype = stored.get_dtype()
                self.infos[name] = StoredTensor(tuple(stored.get_shape()), FLOAT_DTYPES.get(dtype, dtype))
                self._files[name] = file


def require_float_weights(path: Path | str) -> None:
    """Raises :class:`UnsupportedError` for weights that are quantised in a way that is not read, by field or tensor."""
    reader = HFReader(path)
    problems = {
        "quantization_config": quantisation_problem(reader.config),
        **{field: "it is not read" for field in ("quantization", "compression_config") if reader.config.get(field)},
    }
    found = [
        *(f"config.json has {field}={reader.config[field]!r} ({problem})" for field, problem in problems.items() if problem),
        *(
            f"tensor {name!r} has dtype {stored.dtype}"
            for name, stored in reader.infos.items()
            if isinstance(stored.dtype, str) and "weight" in name.rpartition(".")[2]
        ),
    ]
    if found:
        remedy = "give the directory of the model as it was before, or dequantise it first"
        raise UnsupportedError(f"{reader.path} is quantised: {listed(found)}; {remedy}")


def _weight_files(directory: Path, weight_map: Mapping[str, str] | None) -> list[Path]:
    if weight_map is not None:
        if (directory / SINGLE_FILE).is_file() and set(weight_map.values()) != {SINGLE_FILE}:
            raise CheckpointError(
                f"{directory} has both {SINGLE_FILE}, which transformers reads, and {WEIGHTS_INDEX} of other files, which "
                "vLLM reads; remove what is out of date"
            )
        files = [require_inside_model(directory, name) for name in sorted(set(weight_map.values()))]
    elif (directory / SINGLE_FILE).is_file():
        files = [directory / SINGLE_FILE]
    else:
        files = sorted(directory.glob("*.safetensors"))
    if not files:
        raise CheckpointError.at(
            directory,
            "has no *.safetensors file; weights in another format must be converted first, for example with "
            "transformers' save_pretrained",
        )
    return files


def _read_weight_map(index: Path) -> dict[str, str]:
    weight_map = _read_json_object(index, "fetch it again").get("weight_map")
    files: dict[str, Any] = weight_map if isinstance(weight_map, dict) else {}
    wrong = [f"{name!r} in {file!r}" for name, file in files.items() if not isinstance(file, str) or name_problem(file)]
    if not files or wrong:
        problem = f"places {listed(wrong)}; expected the name of a file beside it" if wrong else "has no weight_map"
        raise CheckpointError(f"{index} {problem}; fetch it again, or remove it to read all *.safetensors files")
    return files


def _read_json_object(file: Path, remedy: str) -> dict[str, Any]:
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        problem = f"cannot be read ({error})"
    except (ValueError, RecursionError) as error:
        problem = f"cannot be read as JSON ({error})"
    else:
        if isinstance(content, dict):
            return content
        problem = f"holds a {type(content).__name__}; expected a JSON object"
    raise CheckpointError.at(file, f"{problem}; {remedy}")


@contextmanager
def _open(file: Path) -> Iterator[Any]:
    try:
        with safe_open(file, framework="pt") as opened:
            yield opened
    except (SafetensorError, OSError) as error:
        raise CheckpointError.at(
            file, f"is truncated or corrupt, or cannot be read ({error}); fetch or write it again"
        ) from error


_SETTINGS = (
    *("generation_config.json", "tokenizer_config.json"),
    *("preprocessor_config.json", "processor_config.json", "video_preprocessor_config.json"),
)
_NAMES = frozenset(
    {
        *_SETTINGS,
        *("tokenizer.json", "special_tokens_map.json", "added_tokens.json", "vocab.json", "vocab.txt", "merges.txt"),
        *("tokenizer.model", "tokenizer.model.v3", "tekken.json", "spiece.model", "sentencepiece.bpe.model", "bpe.codes"),
        *("source.spm", "target.spm", "normalizer.json"),
        *("chat_template.jinja", "chat_template.json"),
        *("README.md", "LICENSE", "LICENSE.txt", "LICENSE.md", "NOTICE", "NOTICE.txt", "NOTICE.md", "USE_POLICY.md"),
    }
)
TEMPLATES = "additional_chat_templates"
"""Folder of a model's named chat templates, beside the default one."""


def other_files(source: Path) -> dict[str, Path]:
    """Tokenizer, chat templates, settings, model card, licence: name below ``source`` -> file, no link out of it."""
    # Every other name is left out: a file beside a model need not be part of it. ``auto_map`` names classes in Python files.
    configs = [require_inside_model(source, name) for name in ("config.json", *_SETTINGS) if (source / name).is_file()]
    has_code = any('"auto_map"' in config.read_text(encoding="utf-8", errors="replace") for config in configs)
    names = [
        entry.name
        for entry in source.iterdir()
        if entry.name in _NAMES or entry.suffix == ".tiktoken" or (has_code and entry.suffix == ".py")
    ]
    names += [f"{TEMPLATES}/{entry.name}" for entry in (source / TEMPLATES).glob("*.jinja")]
    return {name: require_inside_model(source, name) for name in sorted(names) if (source / name).is_file()}


# transformers' AutoModelForCausalLM takes the language model out of a released Qwen3.5, and saves it so: config.json is that
# of the text model alone, the names are nested. transformers and vLLM load it as they load the text model's own names.
_NESTED_TYPES = frozenset({"qwen3_5_text", "qwen3_5_moe_text"})
_NESTED, _OWN = "model.language_model.", "model."


def own_name(model_type: object, name: str) -> str:
    """The name in the text model of a tensor that a directory of this ``model_type`` may hold under a nested one."""
    if model_type in _NESTED_TYPES and name.startswith(_NESTED):
        return _OWN + name.removeprefix(_NESTED)
    return name


# Qwen publishes these with the experts of a layer in one tensor in bfloat16, but in FP8 expert by expert, as transformers
# saves them. Models know the names of single experts: whichever a directory has, they find.
_PACKED_TYPES = frozenset({"qwen3_5_moe", "qwen3_5_moe_text"})
_PROJECTIONS = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}


class ExpertPart(NamedTuple):
    """One tensor of one expert, ``name`` where experts are not packed, inside of ``packed``, (experts, rows, columns)."""

    name: str
    packed: str
    expert: int
    rows: range
    columns: int

    @property
    def shape(self) -> tuple[int, int]:
        return len(self.rows), self.columns

    def place(self, region: tuple[slice, ...]) -> tuple[slice, ...]:
        """``region`` of this tensor, in the packed one; a dimension of one expert comes first."""
        first, *others = region or (slice(None),)
        rows = self.rows[first]
        return slice(self.expert, self.expert + 1), slice(rows.start, rows.stop), *others


def expert_parts(model_type: object, name: str, shape: tuple[int, ...]) -> Iterator[ExpertPart]:
    block, _, last = name.rpartition(".")
    if model_type not in _PACKED_TYPES or last not in _PROJECTIONS or len(shape) != 3:
        return
    # Layers for multi-token prediction have other names, and are left as they are.
    if not (name.startswith("model.") and block.endswith(".mlp.experts")):
        return
    projections = _PROJECTIONS[last]
    size = shape[1] // len(projections)
    for expert in range(shape[0]):
        for number, projection in enumerate(projections):
            rows = range(number * size, (number + 1) * size)
            yield ExpertPart(f"{block}.{expert}.{projection}.weight", name, expert, rows, shape[2])
