"""Small tokenizers of the kinds that transformers has: what they put before and behind a text, and where they see words."""

from __future__ import annotations

import io
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from tempfile import gettempdir
from typing import Any

import pytest
from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

CHARACTERS = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789.,:;?!=+-*/()[]<>|\n"
_MARK = "\u2581"
_BYTES = [f"<0x{byte:02X}>" for byte in range(256)]


def _numbered(*words: str) -> dict[str, int]:
    return {word: place for place, word in enumerate(dict.fromkeys(words))}


def llama(legacy: bool) -> Any:
    from transformers import LlamaTokenizer

    words = ["<unk>", "<s>", "</s>", _MARK, *CHARACTERS, "is", f"{_MARK}is", *_BYTES]
    return LlamaTokenizer(vocab=_numbered(*words), merges=[("i", "s"), (_MARK, "is")], legacy=legacy)


def gemma() -> Any:
    from transformers import GemmaTokenizer

    words = ["<pad>", "<eos>", "<bos>", "<unk>", "<mask>", _MARK, *CHARACTERS, "is", f"{_MARK}is", *_BYTES]
    found = GemmaTokenizer(vocab=_numbered(*words), merges=[("i", "s"), (_MARK, "is")])
    found.add_bos_token = True
    return found


def t5() -> Any:
    from transformers import T5Tokenizer

    words = ["<pad>", "</s>", "<unk>", _MARK, *CHARACTERS.strip(), f"{_MARK}is"]
    return T5Tokenizer(vocab=[(word, -float(place > 2)) for place, word in enumerate(words)], extra_ids=1)


def bert() -> Any:
    """WordPiece; it ends texts with a token that is not its end-of-text token."""
    from transformers import BertTokenizer

    words = [
        "[PAD]",
        "[UNK]",
        "[CLS]",
        "[SEP]",
        "[MASK]",
        *CHARACTERS.strip(),
        *(f"##{each}" for each in CHARACTERS.strip()),
    ]
    return BertTokenizer(vocab=_numbered(*words), eos_token="[EOS]", bos_token="[CLS]")


def byte_level(prefix_space: bool) -> Any:
    from transformers import GPT2Tokenizer

    words = ["<|endoftext|>", *sorted(pre_tokenizers.ByteLevel.alphabet()), "is", "\u0120is"]
    merges = [("i", "s"), ("\u0120", "is")]
    return GPT2Tokenizer(vocab=_numbered(*words), merges=merges, add_prefix_space=prefix_space)


def word_level() -> Any:
    """Whole words; it begins texts with two tokens, as GLM's does."""
    words = ["<unk>", "[GMASK]", "<sop>", "</s>", "2", "+", "=", "4", "5", "it", "is", "so", ":"]
    made = Tokenizer(models.WordLevel(_numbered(*words), unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    made.post_processor = processors.TemplateProcessing(
        single="[GMASK] <sop> $A", pair="[GMASK] <sop> $A $B", special_tokens=[("[GMASK]", 1), ("<sop>", 2)]
    )
    made.add_special_tokens([AddedToken(word, special=True, normalized=False) for word in ("[GMASK]", "<sop>", "</s>")])
    return PreTrainedTokenizerFast(tokenizer_object=made, unk_token="<unk>", bos_token="<sop>", eos_token="</s>")


def byt5() -> Any:
    """Bytes, in Python."""
    from transformers import ByT5Tokenizer

    return ByT5Tokenizer(extra_ids=1)


def sentence_piece(legacy: bool) -> Any:
    """SentencePiece itself, without tokenizers."""
    from transformers import BertGenerationTokenizer

    return BertGenerationTokenizer(vocab_file=_piece_model(), legacy=legacy)


@cache
def _piece_model() -> str:
    import sentencepiece

    made = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(["it is so", "2+2=4", *CHARACTERS] * 3),
        model_writer=made,
        model_type="unigram",
        vocab_size=110,
        hard_vocab_limit=False,
        character_coverage=1.0,
        minloglevel=2,
    )
    path = Path(gettempdir(), "rl_backend_tests_pieces.model")
    path.write_bytes(made.getvalue())
    return str(path)


def translation() -> Any:
    """Unigram; it begins texts with a language, and ends them."""
    from transformers import MBartTokenizer

    words = ["<s>", "<pad>", "</s>", "<unk>", _MARK, *CHARACTERS.strip(), f"{_MARK}is"]
    return MBartTokenizer(vocab=[(word, -float(place > 3)) for place, word in enumerate(words)])


def mistral(file: str) -> Any:
    """Of Mistral's own library, which reads no special tokens in texts."""
    from transformers.tokenization_mistral_common import MistralCommonBackend

    mistral_common = pytest.importorskip("mistral_common", reason="mistral_common is not installed")
    return MistralCommonBackend(tokenizer_path=str(Path(mistral_common.__file__).parent / "data" / file))


KINDS: dict[str, Callable[[], Any]] = {
    "llama, legacy": partial(llama, True),
    "llama": partial(llama, False),
    "gemma": gemma,
    "t5": t5,
    "bert": bert,
    "byte-level": partial(byte_level, False),
    "byte-level, prefix space": partial(byte_level, True),
    "word-level": word_level,
    "byt5": byt5,
    "sentencepiece, legacy": partial(sentence_piece, True),
    "sentencepiece": partial(sentence_piece, False),
    "mbart": translation,
    "mistral": partial(mistral, "mistral_instruct_tokenizer_240323.model.v3"),
}
