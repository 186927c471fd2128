"""``rl-backend import``: what it prints."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from rl_backend.checkpoint.hf_reader import HFReader
from rl_backend.cli.main import main
from rl_backend.contracts import dtype_from_name
from tests.support.gguf_files import write_gguf


def test_what_is_written_is_said_in_a_few_lines(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file, out = write_gguf(tmp_path / "tiny.gguf"), tmp_path / "model"
    assert main(["import", "--gguf", str(file), "--out", str(out)]) == 0
    first, end, last = capsys.readouterr().out.splitlines()
    assert first == f"{file}: llama, 32,160 parameters; tensors: 21 F32"
    assert end == "end token: <|im_end|>, as the chat template ends answers; the file's tokenizer says <|im_start|>"
    assert last.startswith(f"{out}: written in ")
    assert main(["import", "--gguf", str(file), "--out", str(out)]) == 2
    assert capsys.readouterr().err == f"error: {out} exists already; choose a new directory\n"


def test_the_same_as_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = write_gguf(tmp_path / "tiny.gguf")
    assert main(["import", "--gguf", str(file), "--out", str(tmp_path / "model"), "--dtype", "bfloat16", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["dtype"] == "bfloat16" and found["dequantised"] is False and found["stored"] == {"F32": 21}
    assert (found["end"], found["end_in_file"]) == ("<|im_end|>", "<|im_start|>")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_weights_that_are_written_have_the_dtype_that_was_asked_for(tmp_path: Path, dtype: str) -> None:
    file, out = write_gguf(tmp_path / "tiny.gguf"), tmp_path / "model"
    assert main(["import", "--gguf", str(file), "--out", str(out), "--dtype", dtype]) == 0
    assert {info.dtype for info in HFReader(out).infos.values()} == {dtype_from_name(dtype)}
