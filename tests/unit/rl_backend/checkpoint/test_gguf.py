"""GGUF files as Hugging Face directories: their weights, their end token, and what is refused."""

from __future__ import annotations

import itertools
import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from rl_backend.checkpoint.gguf import ImportedModel, _end_token, import_gguf
from rl_backend.contracts import CheckpointError
from tests.support.families import load_native, run_native, run_transformers
from tests.support.gguf_files import CHAT, write_gguf
from tests.support.libraries import smollm2, smollm2_gguf

TOKENS = torch.tensor([[5, 77, 200, 3, 258, 259, 1, 40]])


@pytest.mark.shows("models: a GGUF file becomes a directory whose model computes what transformers computes of the file")
@pytest.mark.parametrize(("half", "dtype"), [(False, torch.float32), (True, torch.float32), (True, torch.bfloat16)])
def test_the_directory_computes_what_the_file_does(tmp_path: Path, half: bool, dtype: torch.dtype) -> None:
    file = write_gguf(tmp_path / "tiny.gguf", half=half)
    found = import_gguf(file, tmp_path / "model", dtype=dtype)
    assert found.stored == ({"F16": 16, "F32": 5} if half else {"F32": 21}) and not found.is_quantised
    config = json.loads((tmp_path / "model" / "config.json").read_text())
    assert (config["model_type"], found.model_type) == ("llama", "llama")
    weights = load_file(tmp_path / "model" / "model.safetensors")
    assert {each.dtype for each in weights.values()} == {dtype}
    assert found.parameters == sum(each.numel() for each in weights.values())
    if dtype == torch.float32:
        theirs = AutoModelForCausalLM.from_pretrained(str(tmp_path), gguf_file="tiny.gguf", dtype=dtype)
        ours = AutoModelForCausalLM.from_pretrained(tmp_path / "model", dtype=dtype)
        assert torch.equal(ours(TOKENS).logits, theirs(TOKENS).logits)
        sequences = [TOKENS[0], TOKENS[0, 2:5]]
        with torch.no_grad():
            expected, native = run_transformers(theirs, sequences), run_native(load_native(tmp_path / "model"), sequences)
        assert native.log_probs is not None and expected.log_probs is not None
        torch.testing.assert_close(native.log_probs, expected.log_probs, rtol=0, atol=1e-5)


@pytest.mark.shows("models: the end token of a GGUF file is the one with which its chat template ends answers")
def test_the_end_token_is_that_of_the_chat_template(tmp_path: Path) -> None:
    found = import_gguf(write_gguf(tmp_path / "tiny.gguf"), tmp_path / "model")
    assert (found.end, found.end_in_file) == ("<|im_end|>", "<|im_start|>")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "model")
    assert (tokenizer.eos_token, tokenizer.eos_token_id) == ("<|im_end|>", 1) and tokenizer.chat_template == CHAT
    for name in ("config.json", "generation_config.json"):
        assert json.loads((tmp_path / "model" / name).read_text())["eos_token_id"] == 1
    assert tokenizer.decode(tokenizer.encode("hello, Äh", add_special_tokens=False)) == "hello, Äh"
    assert tokenizer.clean_up_tokenization_spaces is False, "a warning of transformers in each process otherwise"


def test_without_a_chat_template_the_files_end_token_stands(tmp_path: Path) -> None:
    found = import_gguf(write_gguf(tmp_path / "tiny.gguf", template=None), tmp_path / "model")
    assert found.end == found.end_in_file == AutoTokenizer.from_pretrained(tmp_path / "model").eos_token


@pytest.mark.parametrize(
    ("written", "error", "message"),
    [
        ({"template": "{% for m in messages %}{{ m.content }}\n{% endfor %}"}, CheckpointError, "without a special token"),
        ({"template": "{{ raise_exception('no') }}"}, CheckpointError, "has a chat template that cannot be used"),
        ({"more_tokens": 1000}, CheckpointError, "has a tokenizer that transformers reads wrongly: .* becomes 65 tokens"),
    ],
)
def test_what_would_be_imported_wrongly_is_refused(
    tmp_path: Path, written: dict[str, Any], error: type[Exception], message: str
) -> None:
    file = write_gguf(tmp_path / "tiny.gguf", **written)
    with pytest.raises(error, match=message):
        import_gguf(file, tmp_path / "model")
    assert list(tmp_path.iterdir()) == [file]


def test_files_and_places_that_cannot_be_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = write_gguf(tmp_path / "tiny.gguf")
    whole = file.read_bytes()
    for content in (whole[:3000], whole[:-4000], b"no model" * 100, b""):
        (tmp_path / "cut.gguf").write_bytes(content)
        with pytest.raises(CheckpointError, match=r"cut\.gguf cannot be read as GGUF .*fetch it again"):
            import_gguf(tmp_path / "cut.gguf", tmp_path / "model")
    with pytest.raises(CheckpointError, match=r"absent\.gguf cannot be read as GGUF .*No such file"):
        import_gguf(tmp_path / "absent.gguf", tmp_path / "model")
    with pytest.raises(CheckpointError, match="exists already"):
        import_gguf(file, tmp_path)
    with pytest.raises(CheckpointError, match="is not a directory; create it first"):
        import_gguf(file, tmp_path / "absent" / "model")
    monkeypatch.setitem(sys.modules, "gguf", None)
    with pytest.raises(ModuleNotFoundError, match="gguf"):
        import_gguf(file, tmp_path / "model")
    assert not (tmp_path / "model").exists()


def test_a_directory_that_cannot_be_finished_is_not_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = write_gguf(tmp_path / "tiny.gguf")

    def full(path: Path) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("rl_backend.checkpoint.durable_commit.sync_tree", full)
    with pytest.raises(CheckpointError, match=r"could not be written: .*No space left"):
        import_gguf(file, tmp_path / "model")
    assert list(tmp_path.iterdir()) == [file]


TEXTS = (
    "The capital of France is Paris.",
    "def add(a, b):\n    return a + b\n",
    "12 + 30 = 42, 7 * 8 = 56, and 100 - 1 = 99.",
    "<|im_start|>user\nWhat is 3 - 5?<|im_end|>\n<|im_start|>assistant\n-2<|im_end|>\n",
    "Äpfel, 你好, naïve café, \u200b and \U0001f600!",
)


@pytest.mark.long
@pytest.mark.shows("models: log-probs of SmolLM2-135M are those of transformers on its GGUF file, of twenty texts")
def test_log_probs_of_a_pretrained_model_are_those_of_transformers_on_its_file() -> None:
    gguf, model = smollm2_gguf(), smollm2()
    tokenizer = AutoTokenizer.from_pretrained(model)
    texts = [f"{first}{second}" for first, second in itertools.permutations(TEXTS, 2)]
    sequences = [torch.tensor(tokenizer.encode(text)) for text in texts]
    assert len(sequences) == 20

    def log_probs(dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        file = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=dtype)
        directory = load_native(model, chunk_tokens=256).to(dtype)
        with torch.no_grad():
            found = run_transformers(file, sequences).log_probs, run_native(directory, sequences).log_probs
        assert found[0] is not None and found[1] is not None
        return found[0].double(), found[1].double()

    exact, ours = log_probs(torch.float64)
    torch.testing.assert_close(ours, exact, rtol=0, atol=1e-5)
    # In float32 the order of sums alone moves log-probs of real weights by more than 1e-5, transformers' own too.
    theirs, ours = log_probs(torch.float32)
    assert (ours - exact).abs().max() < 2 * (theirs - exact).abs().max() < 1e-4


def test_a_model_is_quantised_where_any_tensor_is() -> None:
    for stored, expected in (({"F32": 3, "BF16": 1, "F16": 2}, False), ({"F32": 3, "Q8_0": 1}, True), ({"Q4_1": 9}, True)):
        assert ImportedModel("llama", 7, stored, None, None).is_quantised is expected


@pytest.mark.parametrize("end", [None, "</s>"])
def test_a_tokenizer_without_a_template_has_its_own_end_or_none(end: str | None) -> None:
    assert _end_token(Path("tiny.gguf"), SimpleNamespace(chat_template=None, eos_token=end)) == end
