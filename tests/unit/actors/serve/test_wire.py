"""Requests and answers as bytes: what is read back, and what is refused."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from actors.serve import wire
from actors.serve.wire import (
    MOST_WHOLE,
    Datum,
    PassRequest,
    Sampled,
    read_answer,
    read_cells,
    read_header,
    read_json,
    read_number,
    read_object,
    read_pass,
    read_samples,
    read_text,
    read_whole,
    write_pass,
    write_request,
    write_samples,
)
from rl_backend.contracts import BatchError, UnsupportedError


def test_a_training_request_is_read_as_it_was_written() -> None:
    given = PassRequest(
        "a:train:3",
        300,
        [
            Datum(np.array([1, 2, 70_000]), {"target_tokens": np.array([[2, 1 << 40]] * 3), "weights": np.ones(3) / 3}),
            Datum(np.array([5]), {"target_tokens": np.array([6])}),
        ],
        "ppo",
        {"low": 0.5, "zero": 0.0, "kind": "a text", "nothing": ""},
        forward_only=True,
    )
    found = read_pass(write_request(given))
    assert (found.model_id, found.seq_id, found.loss, found.forward_only) == ("a:train:3", 300, "ppo", True)
    assert found.loss_options == given.loss_options and len(found.data) == 2
    for datum, expected in zip(found.data, given.data, strict=True):
        assert datum.tokens.tolist() == expected.tokens.tolist() and datum.tokens.dtype == np.int64
        assert datum.inputs.keys() == expected.inputs.keys()
        assert datum.inputs["target_tokens"].tolist() == expected.inputs["target_tokens"].tolist()
    weights = found.data[0].inputs["weights"]
    assert weights.dtype == np.float32 and weights.tolist() == (np.ones(3, np.float32) / 3).tolist()
    assert not read_pass(write_request(PassRequest("m", 1, [], "ppo", {}, forward_only=False))).forward_only


def message(**datum: Any) -> Any:
    made = wire._MESSAGES["ForwardBackwardRequest"](model_id="m", seq_id=1)
    made.data.add(**datum)
    return made


def test_options_of_numbers_may_stand_in_either_map_and_texts_in_the_second() -> None:
    made = message()
    made.loss_fn_config["a"] = 1.5
    made.loss_fn_config["b"] = 2.5
    made.loss_fn_config_v2["b"].number = 3.5
    made.loss_fn_config_v2["c"].text = "x"
    assert read_pass(made.SerializeToString()).loss_options == {"a": 1.5, "b": 3.5, "c": "x"}


def test_a_datum_may_come_in_chunks_of_text_and_its_arrays_in_each_type() -> None:
    made = message()
    for ids in ([1, 2], [], [3]):
        made.data[0].model_input.add().encoded_text.tokens = np.array(ids, "<i4").tobytes()
    for name, number, dtype in (("f", 1, "<f4"), ("l", 2, "<i8"), ("i", 3, "<i4")):
        tensor = made.data[0].loss_fn_inputs[name]
        tensor.dense, tensor.dtype = np.array([[1, 2], [3, 4]], dtype).tobytes(), number
        tensor.shape.extend((2, 2))
    (datum,) = read_pass(made.SerializeToString()).data
    assert datum.tokens.tolist() == [1, 2, 3] and datum.tokens.dtype == np.int64
    found = {name: (values.tolist(), values.dtype.str) for name, values in datum.inputs.items()}
    assert found == {name: ([[1, 2], [3, 4]], dtype) for name, dtype in (("f", "<f4"), ("l", "<i8"), ("i", "<i4"))}
    assert read_pass(message().SerializeToString()).data[0].tokens.tolist() == []
    made.data[0].model_input.add().image.SetInParent()
    with pytest.raises(UnsupportedError, match="datum 0: model_input has an image or audio"):
        read_pass(made.SerializeToString())


@pytest.mark.parametrize(
    ("dense", "dtype", "shape", "said"),
    [
        (bytes(7), 1, (2,), "x: 7 bytes are no whole number of float32 values"),
        (bytes(8), 2, (2,), "x: 1 values, but the shape is .2,"),
        (bytes(8), 3, (1,), "x: 2 values, but the shape is .1,"),
        (bytes(8), 3, (-1, -2), "x: the shape .-1, -2. has negative sizes"),
        (bytes(8), 4, (2,), "x: dtype 4 is not among"),
        (bytes(8), 0, (2,), "x: dtype 0 is not among"),
    ],
)
def test_arrays_whose_bytes_do_not_fit_are_refused_by_name(
    dense: bytes, dtype: int, shape: tuple[int, ...], said: str
) -> None:
    made = message()
    made.data.add()
    tensor = made.data[1].loss_fn_inputs["x"]
    tensor.dense, tensor.dtype = dense, dtype
    tensor.shape.extend(shape)
    with pytest.raises(BatchError, match=f"^datum 1: {said}"):
        read_pass(made.SerializeToString())


CSR: dict[str, Any] = {"shape": [3, 4], "data": [7, 8, 9], "sparse_crow_indices": [0, 2, 2, 3]}


def test_absent_cells_of_a_sparse_array_have_the_value_that_is_asked_for() -> None:
    found = read_cells("ids", {**CSR, "sparse_col_indices": [0, 3, 1]}, -1)
    assert found.whole.tolist() == [[7, -1, -1, 8], [-1] * 4, [-1, 9, -1, -1]]
    assert found.present is not None and [each.tolist() for each in found.present] == [[0, 0, 2], [0, 3, 1]]
    dense = read_cells("ids", {"shape": [2, 1], "data": [5, 6]}, -1)
    assert dense.whole.tolist() == [[5], [6]] and dense.present is None
    assert read_cells("ids", {"shape": [0, 3], "data": []}, -1).whole.shape == (0, 3)
    empty = read_cells("ids", {"shape": [2, 3], "data": [], "sparse_crow_indices": [0, 0, 0], "sparse_col_indices": []}, -1)
    assert empty.whole.tolist() == [[-1] * 3] * 2


@pytest.mark.parametrize(
    "changed",
    [
        {"sparse_col_indices": [0, 4, 1]},
        {"sparse_col_indices": [0, -1, 1]},
        {"sparse_col_indices": [0, 3]},
        {"sparse_crow_indices": [0, 2, 3]},
        {"sparse_crow_indices": [1, 2, 2, 3]},
        {"sparse_crow_indices": [0, 2, 2, 2]},
        {"sparse_crow_indices": [0, 3, 2, 3]},
        {"sparse_crow_indices": [[0, 2, 2, 3]]},
        {"shape": [3, 4, 1]},
        {"data": [[7, 8, 9]]},
    ],
    ids=str,
)
def test_sparse_rows_and_columns_that_do_not_fit_are_refused(changed: dict[str, Any]) -> None:
    with pytest.raises(BatchError, match=r"^ids: its sparse rows and columns do not fit the shape \("):
        read_cells("ids", {**CSR, "sparse_col_indices": [0, 3, 1], **changed}, -1)


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ({"shape": [2], "data": [1]}, "1 values, but the shape is"),
        ({"shape": [-2], "data": [1]}, "expected sizes from 0"),
        ({"shape": [1 << 27], "data": [1]}, "at most 67108864 cells"),
        ({"data": [1]}, "no array of whole numbers"),
        ([1], "no array of whole numbers"),
        ({"shape": [1], "data": [1 << 64]}, "no array of whole numbers"),
        ({"shape": [1], "data": ["x"]}, "no array of whole numbers"),
        ({**CSR}, "3 values, but the shape is"),
    ],
    ids=str,
)
def test_arrays_of_json_that_are_none_are_refused(asked: Any, said: str) -> None:
    with pytest.raises(BatchError, match=f"^ids: .*{said}"):
        read_cells("ids", asked, -1)


def test_log_probs_of_data_of_several_widths_come_in_their_order() -> None:
    given = [
        np.arange(size, dtype=np.float64).reshape(shape) for size, shape in ((2, (2,)), (3, (3,)), (4, (2, 2)), (1, (1,)))
    ]
    given.append(np.arange(6.0).reshape(2, 3).T)
    log_probs, metrics = read_answer(write_pass(given, {"loss:sum": 1.5, "n": 2.0}))
    assert metrics == {"loss:sum": 1.5, "n": 2.0}
    assert [each.tolist() for each in log_probs] == [each.tolist() for each in given]
    assert all(each.dtype == np.float32 for each in log_probs)
    assert read_answer(write_pass([], {})) == ([], {})


def test_samples_come_with_what_was_asked_for_of_them_and_of_the_prompt() -> None:
    top = np.array([[4, 5], [6, 7], [8, 9]]), -np.arange(6.0).reshape(3, 2)
    given = [Sampled([1, 2, 3], [-0.5, -1.0, -1.5], cut_off=False), Sampled([], [], cut_off=True, top=top)]
    prompt = np.array([np.nan, -2.0], np.float32)
    body = write_samples(given, prompt, (top[0][:1], top[1][:1]))
    samples, of_prompt = read_samples(body)
    assert [(each.tokens, each.log_probs, each.cut_off) for each in samples] == [
        ([1, 2, 3], [-0.5, -1.0, -1.5], False),
        ([], [], True),
    ]
    assert of_prompt is not None and np.isnan(of_prompt[0]) and of_prompt[1] == -2.0
    sent = wire._MESSAGES["SampleResponse"].FromString(body)
    assert not sent.sequences[0].HasField("topk_sampled_logprobs") and not sent.HasField("target_prompt_logprobs")
    found = sent.sequences[1].topk_sampled_logprobs
    assert (found.length, found.k) == (3, 2)
    assert np.frombuffer(found.token_ids, "<i4").tolist() == [4, 5, 6, 7, 8, 9]
    assert np.frombuffer(found.logprobs, "<f4").tolist() == [0.0, -1.0, -2.0, -3.0, -4.0, -5.0]
    assert (sent.topk_prompt_logprobs.length, sent.topk_prompt_logprobs.k) == (1, 2)
    assert read_samples(write_samples(given))[1] is None


def test_log_probs_of_dense_targets_are_sent_dense() -> None:
    body = write_samples([], prompt_targets=wire.Cells(np.arange(6.0).reshape(2, 3)))
    sent = wire._MESSAGES["SampleResponse"].FromString(body).target_prompt_logprobs
    assert (list(sent.shape), sent.dtype, sent.HasField("sparse_csr")) == ([2, 3], 1, False)
    assert np.frombuffer(sent.dense, "<f4").tolist() == [0.0, 1.0, 2.0, 3.0, 4.0, 5.0]


def test_the_number_of_a_request_has_31_bits_and_its_run_is_a_text() -> None:
    def head(name: bytes, number: bytes) -> bytes:
        return b"\x0a" + bytes([len(name)]) + name + b"\x10" + number

    assert read_header(head(b"r", b"\xff\xff\xff\xff\x07")) == ("r", (1 << 31) - 1)
    assert read_header(head(b"\xc3\xa9", b"\x00")) == ("é", 0)
    for wrong in (head(b"r", b"\x80\x80\x80\x80\x08"), head(b"\xff", b"\x01"), head(b"r", b"\xff" * 10), head(b"r", b"")):
        with pytest.raises(BatchError, match="do not begin with a model_id and a seq_id"):
            read_header(wrong)


def test_values_of_json_are_what_they_are_asked_to_be() -> None:
    asked = {"whole": 3, "number": 2, "flag": True, "text": "", "object": {"a": 1}, "none": None, "part": 1.5}
    assert read_whole(asked, "whole", 3, 3) == 3 and read_whole({"x": MOST_WHOLE}, "x") == MOST_WHOLE
    assert read_whole({"x": 0}, "x") == 0 and read_whole({"x": -1}, "x", -1) == -1
    for name, least, most in (
        ("whole", 4, 9),
        ("whole", 0, 2),
        ("flag", 0, 9),
        ("part", 0, 9),
        ("none", 0, 9),
        ("gone", 0, 9),
    ):
        with pytest.raises(BatchError, match=f"^{name}=.*expected a whole number from {least} to {most}$"):
            read_whole(asked, name, least, most)
    number = read_number(asked, "number")
    assert (number, type(number)) == (2.0, float) and read_number(asked, "part") == 1.5
    for name in ("flag", "text", "none"):
        with pytest.raises(BatchError, match=f"^{name}=.*expected a number$"):
            read_number(asked, name)
    assert read_text(asked, "text") == "" and read_object(asked, "object") == {"a": 1}
    assert read_object(asked, "none") == read_object(asked, "gone") == {}
    for name in ("whole", "none", "gone"):
        with pytest.raises(BatchError, match=f"^{name}=.*expected a text$"):
            read_text(asked, name)
    with pytest.raises(BatchError, match=r"^text='': expected an object$"):
        read_object(asked, "text")
    assert read_json(b"") == {} and read_json(b'{"a": 1}') == {"a": 1}
    for wrong, said in (
        (b"[]", "a list; expected an object"),
        (b"{", "not JSON"),
        (b"\xff", "not JSON"),
        (b"null", "a NoneType"),
    ):
        with pytest.raises(BatchError, match=f"^body: {said}"):
            read_json(wrong)
