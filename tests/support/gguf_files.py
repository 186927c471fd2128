"""Small GGUF files: Llamas of two layers with random weights and a tokenizer of bytes."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
from transformers.convert_slow_tokenizer import bytes_to_unicode

CHAT = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
START, END = 0, 1
_HIDDEN, _HEADS, _KV_HEADS, _FEED_FORWARD = 32, 4, 2, 48
_CONTROL, _NORMAL = 3, 1


def write_gguf(path: Path, *, template: str | None = CHAT, more_tokens: int = 0, half: bool = False) -> Path:
    """Writes the file.

    Args:
        more_tokens: added to those of bytes and two of two letters and more; no text has them.
        half: matrices are stored in float16.
    """
    tokens = ["<|im_start|>", "<|im_end|>", *bytes_to_unicode().values(), "he", "hel"]
    tokens += [f"<unused{index}>" for index in range(more_tokens)]
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(2)
    writer.add_context_length(64)
    writer.add_embedding_length(_HIDDEN)
    writer.add_feed_forward_length(_FEED_FORWARD)
    writer.add_head_count(_HEADS)
    writer.add_head_count_kv(_KV_HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(10000.0)
    writer.add_vocab_size(len(tokens))
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("default")
    writer.add_token_list(tokens)
    writer.add_token_merges(["h e", "he l"])
    writer.add_token_types([_CONTROL] * 2 + [_NORMAL] * (len(tokens) - 2))
    writer.add_bos_token_id(START)
    writer.add_eos_token_id(END)
    if template is not None:
        writer.add_chat_template(template)
    random = np.random.default_rng(0)
    matrices = {"token_embd": (len(tokens), _HIDDEN), "output": (len(tokens), _HIDDEN)}
    norms = ["output_norm"]
    for layer in range(2):
        kv = _HIDDEN // _HEADS * _KV_HEADS
        shapes = {"attn_q": (_HIDDEN, _HIDDEN), "attn_k": (kv, _HIDDEN), "attn_v": (kv, _HIDDEN)}
        shapes |= {"attn_output": (_HIDDEN, _HIDDEN), "ffn_down": (_HIDDEN, _FEED_FORWARD)}
        shapes |= {"ffn_gate": (_FEED_FORWARD, _HIDDEN), "ffn_up": (_FEED_FORWARD, _HIDDEN)}
        matrices |= {f"blk.{layer}.{name}": shape for name, shape in shapes.items()}
        norms += [f"blk.{layer}.attn_norm", f"blk.{layer}.ffn_norm"]
    for name, shape in matrices.items():
        writer.add_tensor(f"{name}.weight", (random.standard_normal(shape) / 5).astype(np.float16 if half else np.float32))
    for name in norms:
        writer.add_tensor(f"{name}.weight", (1 + random.standard_normal(_HIDDEN) / 5).astype(np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
