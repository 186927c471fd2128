"""The tokenizer files in the Hugging Face directories that verl's engines save."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from tests.support.native import open_runtime

TEMPLATE = "{{ messages[0]['content'] }} !"


@pytest.fixture
def model(tied_model: Path, tmp_path: Path) -> Path:
    """The tied model with a tokenizer, and a template in a file of its own."""
    path = tmp_path / "model"
    shutil.copytree(tied_model, path)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(WordLevel({"a": 0, "<eos>": 1}, "a")), eos_token="<eos>")
    tokenizer.chat_template = "old"
    tokenizer.save_pretrained(path)
    return path


@pytest.mark.shows("verl: a saved Hugging Face directory has the run's chat template")
@pytest.mark.parametrize("template", [None, TEMPLATE])
def test_a_saved_model_has_the_chat_template_that_verl_used(model: Path, tmp_path: Path, template: str | None) -> None:
    from verl.workers.config import HFModelConfig

    from adapters.verl.checkpoints import EngineCheckpoints, own_tokenizer

    config = HFModelConfig(path=str(model), custom_chat_template=template)
    contents = frozenset({"hf_model"})
    with open_runtime(model) as runtime:
        handle = runtime.build_model(forward_only=True)
        EngineCheckpoints(contents, contents, own_tokenizer(config)).save(
            runtime, handle, str(tmp_path / "saved"), None, None
        )
    saved = tmp_path / "saved" / "huggingface"
    assert AutoTokenizer.from_pretrained(saved).chat_template == (template or "old")
    if template is None:
        for file in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
            assert (saved / file).read_bytes() == (model / file).read_bytes()
    assert [entry.name for entry in saved.parent.iterdir()] == ["huggingface"]
