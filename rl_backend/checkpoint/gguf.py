"""Models from GGUF files: dequantised and written as Hugging Face directories."""

from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError

from rl_backend.checkpoint.durable_commit import new_directory, require_new
from rl_backend.contracts import BatchError, CheckpointError, UnsupportedError
from rl_backend.data.chat_template import ChatTemplate

_QUESTION = ({"role": "user", "content": "x"},)
_TEXT = "The quick brown fox jumps over the lazy dog, and runs away from it."


class ImportedModel(NamedTuple):
    """What was written.

    Attributes:
        parameters: how many, tied ones once.
        stored: type of the file's tensors, such as ``Q4_1``, -> how many have it.
        end, end_in_file: the token that ends a text or an answer, and the one that the file's tokenizer names.
    """

    model_type: str
    parameters: int
    stored: Mapping[str, int]
    end: str | None
    end_in_file: str | None

    @property
    def is_quantised(self) -> bool:
        """Whether weights are those of a quantised model: near the released ones, and not equal to them."""
        return any(kind not in ("F32", "F16", "BF16") for kind in self.stored)


def import_gguf(file: Path | str, out: Path | str, *, dtype: torch.dtype = torch.float32) -> ImportedModel:
    """Writes a GGUF file as a directory of weights, configuration and tokenizer, through transformers' own reader.

    The end token is that of the chat template, where there is one. The whole model is in memory in ``dtype``, which is
    written. ``out`` must not exist, its parent must; a failure leaves nothing behind.

    Raises:
        UnsupportedError: transformers does not read this kind of model.
        CheckpointError: there is no such file, it is damaged, ``out`` exists or its parent does not, the chat template ends
            answers without a special token, words come out of the tokenizer as single letters, or the disk is full.
    """
    source, target = Path(file).expanduser(), Path(out).expanduser()
    require_new(target)
    from transformers import AutoModelForCausalLM, AutoTokenizer

    stored = _tensor_types(source)
    tokenizer = _read(source, AutoTokenizer)
    _require_words(source, tokenizer)
    named = tokenizer.eos_token
    end = _end_token(source, tokenizer)
    model = _read(source, AutoModelForCausalLM, dtype=dtype)
    # transformers reads the end token wrongly from some files; answers end where the chat template ends them.
    if end is not None:
        tokenizer.eos_token = end
        model.config.eos_token_id = tokenizer.eos_token_id
        model.generation_config.eos_token_id = tokenizer.eos_token_id
    # transformers takes no spaces out of a BPE tokenizer's texts, and warns in each process of a file that asks for it.
    tokenizer.clean_up_tokenization_spaces = tokenizer.init_kwargs["clean_up_tokenization_spaces"] = False
    try:
        with new_directory(target) as draft:
            model.save_pretrained(draft)
            tokenizer.save_pretrained(draft)
    except (OSError, SafetensorError) as error:  # the latter for a full disk
        raise CheckpointError.at(target, f"could not be written: {error}") from error
    return ImportedModel(model.config.model_type, sum(each.numel() for each in model.parameters()), stored, end, named)


def _tensor_types(source: Path) -> Mapping[str, int]:
    from gguf import GGUFReader

    try:
        return Counter(tensor.tensor_type.name for tensor in GGUFReader(source).tensors)
    except (OSError, ValueError, IndexError) as error:  # what the reader raises of a file that is cut or is no GGUF
        raise CheckpointError.at(source, f"cannot be read as GGUF ({error}); fetch it again, or give another") from error


def _read(source: Path, auto_class: Any, **options: Any) -> Any:
    try:
        return auto_class.from_pretrained(str(source.parent), gguf_file=source.name, **options)
    except (ValueError, NotImplementedError, KeyError) as error:  # transformers' errors of what it does not read
        raise UnsupportedError(f"{source}: transformers does not read it: {error}") from error


def _require_words(source: Path, tokenizer: Any) -> None:
    tokens = tokenizer.encode(_TEXT, add_special_tokens=False)
    if len(tokenizer) > 1000 and len(tokens) > len(_TEXT) / 2:
        raise CheckpointError.at(
            source,
            f"has a tokenizer that transformers reads wrongly: {_TEXT!r} becomes {len(tokens)} tokens, nearly one a letter; "
            "take the tokenizer and the weights from the model's own directory",
        )


def _end_token(source: Path, tokenizer: Any) -> str | None:
    if not tokenizer.chat_template:
        return None if tokenizer.eos_token is None else str(tokenizer.eos_token)
    problem = "ends answers without a special token, so nothing says what ends them"
    try:
        end = ChatTemplate(tokenizer).turn_end(_QUESTION)
    except BatchError as error:
        end, problem = None, f"cannot be used: {error}"
    if end is None:
        raise CheckpointError.at(source, f"has a chat template that {problem}; take the model from its own directory")
    return str(tokenizer.convert_ids_to_tokens(end))
