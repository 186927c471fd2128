"""Requests and answers as plain values: JSON is read, and Tinker's protobuf messages are read and written.

The schema is our own, by field numbers: what it writes is wire-equal to what the SDK's reads, and the reverse.
"""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from google.protobuf.message import DecodeError

from rl_backend.contracts import BatchError, UnsupportedError

_FIELD = descriptor_pb2.FieldDescriptorProto
_TYPES = {
    name: getattr(_FIELD, f"TYPE_{name.upper()}")
    for name in ("double", "float", "int64", "int32", "bool", "string", "bytes")
}
# A field is number and type; "*" repeats it, a name in capitals is another message, "{...}" a map from text.
_SCHEMA: Mapping[str, Mapping[str, tuple[int, str]]] = {
    "ForwardBackwardRequest": {
        "model_id": (1, "string"),
        "seq_id": (2, "int32"),
        "data": (3, "Datum*"),
        "loss_fn": (4, "string"),
        "loss_fn_config": (5, "{double}"),
        "forward_only": (6, "bool"),
        "loss_fn_config_v2": (7, "{LossConfigValue}"),
    },
    "LossConfigValue": {"number": (1, "double"), "text": (2, "string")},
    "Datum": {"model_input": (1, "Chunk*"), "loss_fn_inputs": (2, "{Tensor}")},
    "Chunk": {"encoded_text": (1, "EncodedTextChunk"), "image": (2, "Other"), "dmel": (3, "Other")},
    "EncodedTextChunk": {"tokens": (1, "bytes")},
    "Other": {},
    "Tensor": {"dense": (1, "bytes"), "sparse_csr": (2, "SparseCsr"), "dtype": (3, "int32"), "shape": (4, "int64*")},
    "SparseCsr": {"values": (1, "bytes"), "crow_indices": (2, "bytes"), "col_indices": (3, "bytes")},
    "BatchedTensor": {"data": (1, "bytes"), "offsets": (2, "bytes"), "dtype": (3, "int32"), "trailing_shape": (4, "int64*")},
    "ArrayRecord": {"type_tag": (1, "string"), "fields": (2, "{BatchedTensor}"), "num_datums": (3, "int64")},
    "ForwardBackwardOutput": {
        "loss_fn_output_type": (1, "string"),
        "loss_fn_outputs": (2, "ArrayRecord*"),
        "metrics": (3, "{double}"),
    },
    "SampledSequence": {
        "stop_reason": (1, "int32"),
        "tokens": (2, "bytes"),
        "logprobs": (3, "bytes"),
        "topk_sampled_logprobs": (4, "TopkLogprobs"),
    },
    "TopkLogprobs": {"token_ids": (1, "bytes"), "logprobs": (2, "bytes"), "k": (3, "int32"), "length": (4, "int32")},
    "SampleResponse": {
        "sequences": (1, "SampledSequence*"),
        "prompt_logprobs": (2, "bytes"),
        "topk_prompt_logprobs": (3, "TopkLogprobs"),
        "target_prompt_logprobs": (5, "Tensor"),
    },
}
_INNER: Mapping[int, Any] = {3: {1: {}, 2: {2: {4: None}}}, 5: {}, 7: {}}
"""Where a training request has fields in fields, by their numbers: data, with chunks and arrays, with sizes; and options."""
_MOST_FIELDS = 1 << 19
"""Of a request, those that nobody knows too. Two bytes make one, which takes a hundred bytes of memory."""
_MOST_CELLS = 1 << 26
"""Of the sparse arrays of a request, when they are dense. A few bytes can ask for many."""
_MOST_DIMENSIONS = 8
"""Of an array. The product of millions of sizes would take hours."""
_FIXED = {1: 8, 5: 4}
"""Wire type -> bytes of a number that has always as many."""
_DTYPES: Mapping[int, np.dtype[Any]] = {1: np.dtype("<f4"), 2: np.dtype("<i8"), 3: np.dtype("<i4")}
MOST_WHOLE = (1 << 63) - 1
"""What the database and samplers hold: 64 bits with a sign."""

type Top = tuple[np.ndarray, np.ndarray]


class Cells(NamedTuple):
    """An array that travels dense, or sparse in CSR form.

    Attributes:
        whole: dense, with the value of absent cells.
        present: rows and columns of those that were sent, row by row; None of a dense one.
    """

    whole: np.ndarray
    present: tuple[np.ndarray, np.ndarray] | None = None


@dataclass(frozen=True, slots=True)
class Datum:
    """One sequence of a training request.

    Attributes:
        tokens: (N,) int64, the model's input.
        inputs: what the loss reads, each of N rows; target_tokens[t] follows tokens[:t+1].
    """

    tokens: np.ndarray
    inputs: Mapping[str, np.ndarray]


@dataclass(frozen=True, slots=True)
class PassRequest:
    """A call of forward_backward, or of forward alone."""

    model_id: str
    seq_id: int
    data: Sequence[Datum]
    loss: str
    loss_options: Mapping[str, float | str]
    forward_only: bool


@dataclass(frozen=True, slots=True)
class Sampled:
    """One response: its tokens, the stop token included, their log-probs, and whether it was cut off.

    Attributes:
        top: (N, k) likeliest tokens at each place, and their log-probs; None where they were not asked for.
    """

    tokens: Sequence[int]
    log_probs: Sequence[float]
    cut_off: bool
    top: Top | None = None


def read_header(body: bytes) -> tuple[str, int]:
    """Model and sequence number of a training request: all that its place in the order needs.

    They are its first two fields, so the beginning of a body will do, and data that are wrong do not matter.

    Raises:
        BatchError: the bytes begin otherwise.
    """
    try:
        tag, at = _number(body, 0)
        size, at = _number(body, at)
        model_id = body[at : at + size].decode()
        next_tag, at = _number(body, at + size)
        if (tag, next_tag) != (0x0A, 0x10) or not model_id:
            raise ValueError("fields 1 and 2 do not come first")
        seq_id, _ = _number(body, at)
        if seq_id >= 1 << 31:
            raise ValueError(f"seq_id {seq_id} has more than 31 bits")
        return model_id, seq_id
    except (IndexError, ValueError) as error:
        raise BatchError(f"body: {len(body)} bytes do not begin with a model_id and a seq_id ({error})") from None


def read_pass(body: bytes) -> PassRequest:
    """Reads a training request.

    Raises:
        BatchError: the bytes are no such message, or an array's size is not its shape's.
        UnsupportedError: an input that is no text.
    """
    try:
        _count(body, 0, len(body), _INNER)
    except (IndexError, ValueError) as error:
        raise BatchError(f"body: {len(body)} bytes are no ForwardBackwardRequest message ({error})") from None
    message = _read("ForwardBackwardRequest", body)
    tensors = [each for datum in message.data for each in datum.loss_fn_inputs.values()]
    for each in tensors:
        _check_dimensions("body", each.shape)
    cells = sum(math.prod(map(abs, each.shape)) for each in tensors if each.HasField("sparse_csr"))
    if cells > _MOST_CELLS:
        raise BatchError(f"body: {cells} cells of sparse arrays; expected at most {_MOST_CELLS}")
    # Numbers stand in both maps, texts in the second alone.
    options: dict[str, float | str] = dict(message.loss_fn_config)
    for name, value in message.loss_fn_config_v2.items():
        options[name] = value.text if value.HasField("text") else value.number
    data = [_datum(f"datum {index}", each) for index, each in enumerate(message.data)]
    return PassRequest(message.model_id, message.seq_id, data, message.loss_fn, options, message.forward_only)


def _count(body: bytes, at: int, end: int, known: Mapping[int, Any], found: int = 0) -> int:
    """Fields of the message in ``body[at:end]``, counted before they are made.

    Raises:
        BatchError: more than :data:`_MOST_FIELDS`.
        IndexError, ValueError: no message, or one with groups, which no field here is.
    """
    while at < end:
        tag, at = _number(body, at)
        number, kind = tag >> 3, tag & 7
        if kind == 0:
            size, (_, after) = 1, _number(body, at)
        elif kind in _FIXED:
            size, after = 1, at + _FIXED[kind]
        elif kind == 2:
            size, at = _number(body, at)
            after = at + size
        else:
            raise ValueError(f"a field of wire type {kind}")
        if after > end:
            raise ValueError("a field that is longer than its message")
        inner = known.get(number, {})
        # Numbers may be packed, of a byte each.
        found += size if inner is None else 1
        if found > _MOST_FIELDS:
            raise BatchError(f"body: more than {_MOST_FIELDS} fields; send fewer data at a time")
        if inner and kind == 2:
            found = _count(body, at, after, inner, found)
        at = after
    return found


def _number(body: bytes, at: int) -> tuple[int, int]:
    """A number of up to 64 bits, and where what follows it begins."""
    value = 0
    for shift in range(0, 70, 7):
        byte = body[at]
        value, at = value | (byte & 0x7F) << shift, at + 1
        if byte < 0x80:
            return value, at
    raise ValueError("a number of more than 64 bits")


def write_request(request: PassRequest) -> bytes:
    """The bytes of a training request, as a client sends it; arrays are dense."""
    message = _MESSAGES["ForwardBackwardRequest"](
        model_id=request.model_id, seq_id=request.seq_id, loss_fn=request.loss, forward_only=request.forward_only
    )
    for datum in request.data:
        sent = message.data.add()
        sent.model_input.add().encoded_text.tokens = datum.tokens.astype("<i4").tobytes()
        for name, values in datum.inputs.items():
            dtype = 1 if np.issubdtype(values.dtype, np.floating) else 2
            tensor = sent.loss_fn_inputs[name]
            tensor.dense, tensor.dtype = values.astype(_DTYPES[dtype]).tobytes(), dtype
            tensor.shape.extend(values.shape)
    for name, value in request.loss_options.items():
        sent_value = message.loss_fn_config_v2[name]
        if isinstance(value, str):
            sent_value.text = value
        else:
            sent_value.number = value
    return bytes(message.SerializeToString())


def read_answer(body: bytes) -> tuple[list[np.ndarray], dict[str, float]]:
    """Log-probs of every datum and the metrics, of what :func:`write_pass` has written."""
    message = _read("ForwardBackwardOutput", body)
    log_probs: list[np.ndarray] = []
    for record in message.loss_fn_outputs:
        field = record.fields["logprobs"]
        offsets = np.frombuffer(field.offsets, "<i8")
        parts = [field.data[begin:end] for begin, end in itertools.pairwise(offsets)]
        log_probs += [np.frombuffer(part, "<f4").reshape(-1, *field.trailing_shape) for part in parts]
    return log_probs, dict(message.metrics)


def read_samples(body: bytes) -> tuple[list[Sampled], np.ndarray | None]:
    """Responses, and log-probs of the prompt where they were asked for."""
    message = _read("SampleResponse", body)
    found = [
        Sampled(
            np.frombuffer(each.tokens, "<i4").tolist(),
            np.frombuffer(each.logprobs, "<f4").tolist(),
            cut_off=bool(each.stop_reason),
        )
        for each in message.sequences
    ]
    of_prompt = np.frombuffer(message.prompt_logprobs, "<f4") if message.HasField("prompt_logprobs") else None
    return found, of_prompt


def write_pass(log_probs: Sequence[np.ndarray], metrics: Mapping[str, float]) -> bytes:
    """The answer to a training request: log-probs of every datum in the shape of its targets, and metrics."""
    message = _MESSAGES["ForwardBackwardOutput"](loss_fn_output_type="ArrayRecord")
    # A record has arrays of one width; those of a request may differ.
    for width, same in itertools.groupby(log_probs, lambda each: each.shape[1:]):
        arrays = [np.ascontiguousarray(each, "<f4") for each in same]
        record = message.loss_fn_outputs.add(num_datums=len(arrays))
        field = record.fields["logprobs"]
        field.data, field.dtype = b"".join(each.tobytes() for each in arrays), 1
        field.offsets = np.cumsum([0, *(each.nbytes for each in arrays)]).astype("<i8").tobytes()
        field.trailing_shape.extend(width)
    message.metrics.update(metrics)
    return bytes(message.SerializeToString())


def write_samples(
    samples: Sequence[Sampled],
    prompt_log_probs: np.ndarray | None = None,
    prompt_top: Top | None = None,
    prompt_targets: Cells | None = None,
) -> bytes:
    """The answer to a sampling request. Of a prompt of P tokens what was not asked for is None.

    Args:
        prompt_log_probs: (P,), NaN where there is none.
        prompt_top: (P, k) likeliest tokens and their log-probs.
        prompt_targets: (P - 1, K) log-probs; sparse where the ids were.
    """
    message = _MESSAGES["SampleResponse"]()
    for sample in samples:
        written = message.sequences.add(
            stop_reason=int(sample.cut_off),
            tokens=np.asarray(sample.tokens, "<i4").tobytes(),
            logprobs=np.asarray(sample.log_probs, "<f4").tobytes(),
        )
        if sample.top is not None:
            _write_top(written.topk_sampled_logprobs, sample.top)
    if prompt_log_probs is not None:
        message.prompt_logprobs = np.asarray(prompt_log_probs, "<f4").tobytes()
    if prompt_top is not None:
        _write_top(message.topk_prompt_logprobs, prompt_top)
    if prompt_targets is not None:
        _write_cells(message.target_prompt_logprobs, prompt_targets)
    return bytes(message.SerializeToString())


def _write_top(message: Any, top: Top) -> None:
    ids, values = top
    message.token_ids, message.logprobs = ids.astype("<i4").tobytes(), values.astype("<f4").tobytes()
    message.length, message.k = ids.shape


def _write_cells(message: Any, cells: Cells) -> None:
    values = cells.whole.astype("<f4")
    message.dtype = 1
    message.shape.extend(values.shape)
    if cells.present is None:
        message.dense = values.tobytes()
        return
    rows, columns = cells.present
    message.sparse_csr.values = values[rows, columns].tobytes()
    message.sparse_csr.crow_indices = np.searchsorted(rows, np.arange(len(values) + 1)).astype("<i8").tobytes()
    message.sparse_csr.col_indices = columns.astype("<i8").tobytes()


def read_json(body: bytes) -> dict[str, Any]:
    """Raises :class:`BatchError` for what is no JSON object."""
    try:
        value = json.loads(body or b"{}")
    except (ValueError, RecursionError) as error:
        raise BatchError(f"body: not JSON: {error}") from None
    if not isinstance(value, dict):
        raise BatchError(f"body: a {type(value).__name__}; expected an object")
    return value


def read_text(asked: Mapping[str, Any], name: str) -> str:
    """Raises :class:`BatchError` for what is no text."""
    value = asked.get(name)
    if not isinstance(value, str):
        raise BatchError(f"{name}={value!r}: expected a text")
    return value


def read_whole(asked: Mapping[str, Any], name: str, least: int = 0, most: int = MOST_WHOLE) -> int:
    """Raises :class:`BatchError` for what is no whole number, or out of bounds."""
    value = asked.get(name)
    if type(value) is not int or not least <= value <= most:
        raise BatchError(f"{name}={value!r}: expected a whole number from {least} to {most}")
    return value


def read_number(asked: Mapping[str, Any], name: str) -> float:
    """Raises :class:`BatchError` for what is no number."""
    value = asked[name]
    if type(value) not in (int, float):
        raise BatchError(f"{name}={value!r}: expected a number")
    return float(value)


def read_object(asked: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """Empty where the request has none; raises :class:`BatchError` for what is no object."""
    value = asked.get(name)
    if not isinstance(value, Mapping | None):
        raise BatchError(f"{name}={repr(value)[:200]}: expected an object")
    return value or {}


def read_cells(where: str, asked: Any, absent: int) -> Cells:
    """Reads whole numbers that a request has in JSON; ``absent`` stands in cells that a sparse array does not list.

    Raises:
        BatchError: no such array, or values, shape and indices that do not go together.
    """
    try:
        shape = tuple(int(size) for size in asked["shape"])
        values = np.array(asked["data"], np.int64)
        sparse = [asked.get(name) for name in ("sparse_crow_indices", "sparse_col_indices")]
        rows, columns = (None if each is None else np.array(each, np.int64) for each in sparse)
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
        raise BatchError(f"{where}: no array of whole numbers with data and shape ({type(error).__name__})") from None
    _check_dimensions(where, shape)
    if min(shape, default=0) < 0 or math.prod(shape) > _MOST_CELLS:
        raise BatchError(f"{where}: the shape {shape}; expected sizes from 0, at most {_MOST_CELLS} cells")
    if rows is not None and columns is not None:
        return _from_csr(where, shape, values, rows, columns, absent)
    if values.size != math.prod(shape):
        raise BatchError(f"{where}: {values.size} values, but the shape is {shape}")
    return Cells(values.reshape(shape))


def _check_dimensions(where: str, shape: Sequence[int]) -> None:
    if len(shape) > _MOST_DIMENSIONS:
        raise BatchError(f"{where}: an array of {len(shape)} dimensions; expected at most {_MOST_DIMENSIONS}")


def _read(name: str, body: bytes) -> Any:
    try:
        return _MESSAGES[name].FromString(body)
    except DecodeError as error:
        raise BatchError(f"body: {len(body)} bytes are no {name} message ({error})") from None


def _datum(where: str, message: Any) -> Datum:
    tokens = []
    for chunk in message.model_input:
        if not chunk.HasField("encoded_text"):
            raise UnsupportedError(f"{where}: model_input has an image or audio; only text is trained on")
        tokens.append(_array(f"{where}: tokens", chunk.encoded_text.tokens, _DTYPES[3]))
    joined = np.concatenate(tokens).astype(np.int64) if tokens else np.zeros(0, np.int64)
    return Datum(joined, {name: _tensor(f"{where}: {name}", each) for name, each in message.loss_fn_inputs.items()})


def _tensor(where: str, message: Any) -> np.ndarray:
    """Dense, or rows in CSR form where absent cells are 0."""
    shape = tuple(message.shape)
    if min(shape, default=0) < 0:
        raise BatchError(f"{where}: the shape {shape} has negative sizes")
    if message.dtype not in _DTYPES:
        raise BatchError(f"{where}: dtype {message.dtype} is not among {', '.join(map(str, _DTYPES.values()))}")
    dtype = _DTYPES[message.dtype]
    if not message.HasField("sparse_csr"):
        values = _array(where, message.dense, dtype)
        if values.size != math.prod(shape):
            raise BatchError(f"{where}: {values.size} values, but the shape is {shape}")
        return values.reshape(shape)
    sparse = message.sparse_csr
    rows, columns = (_array(where, each, _DTYPES[2]) for each in (sparse.crow_indices, sparse.col_indices))
    return _from_csr(where, shape, _array(where, sparse.values, dtype), rows, columns, 0).whole


def _from_csr(
    where: str, shape: tuple[int, ...], values: np.ndarray, rows: np.ndarray, columns: np.ndarray, absent: int
) -> Cells:
    fits = values.ndim == rows.ndim == columns.ndim == 1 and len(shape) == 2
    fits = fits and len(rows) == shape[0] + 1 and len(columns) == len(values)
    fits = fits and rows[0] == 0 and rows[-1] == len(values) and bool((np.diff(rows) >= 0).all())
    if not fits or (len(columns) and not 0 <= columns.min() <= columns.max() < shape[1]):
        raise BatchError(f"{where}: its sparse rows and columns do not fit the shape {shape}")
    whole, of_row = np.full(shape, absent, values.dtype), np.repeat(np.arange(shape[0]), np.diff(rows))
    whole[of_row, columns] = values
    return Cells(whole, (of_row, columns))


def _array(where: str, data: bytes, dtype: np.dtype[Any]) -> np.ndarray:
    if len(data) % dtype.itemsize:
        raise BatchError(f"{where}: {len(data)} bytes are no whole number of {dtype} values")
    return np.frombuffer(data, dtype)


def _messages() -> dict[str, Any]:
    """Classes of the schema, in a pool of their own: the SDK's may be loaded in the same process.

    proto2, so that every field knows whether it was set; both syntaxes write the same bytes.
    """
    package = "rl_backend_tinker"
    file = descriptor_pb2.FileDescriptorProto(name="rl_backend_tinker.proto", package=package, syntax="proto2")
    for name, fields in _SCHEMA.items():
        message = file.message_type.add(name=name)
        for field, (number, kind) in fields.items():
            if kind.startswith("{"):
                entry = message.nested_type.add(name="".join(part.title() for part in field.split("_")) + "Entry")
                entry.options.map_entry = True
                _add(entry, package, "key", 1, "string")
                _add(entry, package, "value", 2, kind[1:-1])
                _add(message, package, field, number, f"{name}.{entry.name}*")
            else:
                _add(message, package, field, number, kind)
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return {name: message_factory.GetMessageClass(pool.FindMessageTypeByName(f"{package}.{name}")) for name in _SCHEMA}


def _add(message: Any, package: str, name: str, number: int, kind: str) -> None:
    repeated, kind = kind.endswith("*"), kind.rstrip("*")
    label = _FIELD.LABEL_REPEATED if repeated else _FIELD.LABEL_OPTIONAL
    field = message.field.add(name=name, number=number, label=label)
    if kind in _TYPES:
        field.type = _TYPES[kind]
        field.options.packed = repeated and kind not in {"string", "bytes"}
    else:
        field.type, field.type_name = _FIELD.TYPE_MESSAGE, f".{package}.{kind}"


_MESSAGES = _messages()
