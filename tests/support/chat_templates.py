"""Chat templates of the usual kinds, and a tokenizer with their special tokens that merges white space as real ones do."""

from __future__ import annotations

import importlib.util
import re
from functools import cache
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

CHATML = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)

MARKED = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n"
    "{% if message.role == 'assistant' %}{% generation %}{{ message.content }}<|im_end|>{% endgeneration %}{{ '\n' }}"
    "{% else %}{{ message.content }}<|im_end|>\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
"""CHATML, with marks around what the model writes."""

LLAMA = (
    "{{ bos_token }}{% for message in messages %}<|start_header_id|>{{ message.role }}<|end_header_id|>\n\n"
    "{{ message.content | trim }}<|eot_id|>{% endfor %}"
    "{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}"
)

MISTRAL = (
    "{{ bos_token }}{% for message in messages %}"
    "{% if message.role == 'user' %}[INST] {{ message.content }} [/INST]"
    "{% elif message.role == 'assistant' %} {{ message.content }}{{ eos_token }}"
    "{% else %}{{ raise_exception('only user and assistant are known') }}{% endif %}{% endfor %}"
)

PHI = (
    "{% for message in messages %}<|{{ message.role }}|>\n{{ message.content }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>\n{% else %}{{ eos_token }}{% endif %}"
)
"""As Phi 3's, which ends a text behind the end of its last turn."""

THINKING = (
    "{% set last = namespace(user=-1) %}"
    "{% for message in messages %}{% if message.role == 'user' %}{% set last.user = loop.index0 %}{% endif %}{% endfor %}"
    "{% for message in messages %}{% set content = message.content %}"
    "{% if message.role == 'assistant' %}"
    "{% set thought = '' %}{% if '</think>' in content %}"
    "{% set thought = content.split('</think>')[0].split('<think>')[-1].strip('\n') %}"
    "{% set content = content.split('</think>')[-1].lstrip('\n') %}{% endif %}"
    "<|im_start|>assistant\n"
    "{% if loop.index0 > last.user %}<think>\n{{ thought }}\n</think>\n\n{% endif %}{{ content }}<|im_end|>\n"
    "{% else %}<|im_start|>{{ message.role }}\n{{ content }}<|im_end|>\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n"
    "{% if enable_thinking is defined and enable_thinking is false %}<think>\n\n</think>\n\n{% endif %}{% endif %}"
)
"""As Qwen3's: thinking of turns before the last question is left out; the last turn always has some, if only empty."""

_SHUT = "is false %}<think>\n\n</think>\n\n"
OPENED = THINKING.replace(_SHUT, _SHUT + "{% else %}<think>\n")
"""As Qwen3.5's, whose prompt begins the thinking."""

TEMPLATES = {"chatml": CHATML, "marked": MARKED, "llama": LLAMA, "mistral": MISTRAL, "phi": PHI, "thinking": THINKING}

_SPECIAL = ["<|im_start|>", "<|im_end|>", "<|eot_id|>", "<|start_header_id|>", "<|end_header_id|>", "<s>", "</s>", "<|end|>"]
_WORDS = r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
"""Where Qwen's tokenizer splits texts."""
_TEXTS = [
    "user\n\nassistant\n\nsystem\n\n\nWhat is 2+2? It is 4.\n\n\n",
    "<think>\nthink\n</think>\n\n",
    "[INST] a [/INST] b",
]


def chat_tokenizer(template: str | None) -> PreTrainedTokenizerFast:
    """A byte-level BPE tokenizer, of which runs of line ends are single tokens."""
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_str(_trained()),
        bos_token="<s>",
        eos_token="</s>",
        additional_special_tokens=_SPECIAL,
        clean_up_tokenization_spaces=False,
    )
    tokenizer.chat_template = template
    tokenizer.name_or_path = "models/mine"
    return tokenizer


@cache
def _trained() -> str:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_WORDS), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=400, special_tokens=_SPECIAL, initial_alphabet=alphabet, min_frequency=1, show_progress=False
    )
    tokenizer.train_from_iterator(_TEXTS * 4, trainer)
    return str(tokenizer.to_str())


def trl_templates() -> dict[str, str]:
    """The chat templates that TRL ships, by name. TRL itself is not imported."""
    spec = importlib.util.find_spec("trl")
    assert spec is not None and spec.submodule_search_locations
    folder = Path(spec.submodule_search_locations[0]) / "chat_templates"
    return {file.stem: file.read_text() for file in sorted(folder.glob("*.jinja"))}


_MARKERS = re.compile(r"<[|\uff5c][^\s<>{}|\uff5c]+[|\uff5c]?>|<[a-z_]+\|>|\[gMASK\]|<sop>|<(?:start|end)_of_turn>")
_WRITTEN = ("<think>", "</think>", "<tool_call>", "</tool_call>")


def marker_tokenizer(template: str) -> PreTrainedTokenizerFast:
    """A tokenizer whose special tokens are the markers that a template writes."""
    tokenizer = chat_tokenizer(template)
    markers = sorted(set(_MARKERS.findall(template)))
    tokenizer.add_tokens([AddedToken(each, special=True, normalized=False) for each in markers], special_tokens=True)
    tokenizer.add_tokens([AddedToken(each, special=False, normalized=False) for each in _WRITTEN])
    return tokenizer
