"""The demo's task: add two two-digit numbers, answer written from the last digit on, as one adds by hand.

The supervised warm start learns from careless demonstrations, most of which forget the carry; rewards are given for right
answers alone. So the policy starts with a bad habit that only the rewards can mend.
"""

import json
import math
import random
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast
from transformers.utils.logging import disable_progress_bar

type ModelName = Literal["qwen3", "qwen3_moe", "qwen3_5", "qwen3_5_moe", "deepseek_v3", "glm4_moe", "minimax_m2", "gpt_oss"]

# Models that vLLM serves in no other dtype.
BFLOAT16_ALONE: tuple[ModelName, ...] = ("gpt_oss",)
# Models whose layers have gated DeltaNet, but for every fourth, or the last of fewer, which has gated attention.
HYBRIDS: tuple[ModelName, ...] = ("qwen3_5", "qwen3_5_moe")
EXPERTS: Mapping[ModelName, Mapping[str, Any]] = {
    "qwen3_moe": {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 192, "norm_topk_prob": True},
    "qwen3_5_moe": {
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 128,
        "shared_expert_intermediate_size": 128,
    },
    "deepseek_v3": {
        # The sizes of latents that vLLM's kernels have.
        "kv_lora_rank": 512,
        "qk_rope_head_dim": 64,
        "head_dim": 64,
        "qk_nope_head_dim": 32,
        "v_head_dim": 32,
        "q_lora_rank": 64,
        "num_key_value_heads": 4,
        "first_k_dense_replace": 1,
        "n_routed_experts": 8,
        "n_group": 4,
        "topk_group": 2,
        "num_experts_per_tok": 4,
        "moe_intermediate_size": 96,
        "routed_scaling_factor": 1.0,
        # Without a norm of queries and keys, weights of 0.02 would make scores that hardly differ, and learn slowly.
        "initializer_range": 0.05,
        "tie_word_embeddings": False,
    },
    "glm4_moe": {
        "attention_bias": True,
        "use_qk_norm": True,
        "first_k_dense_replace": 1,
        "n_routed_experts": 8,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 128,
        "tie_word_embeddings": False,
    },
    "minimax_m2": {
        "intermediate_size": 192,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
        "tie_word_embeddings": False,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5},
    },
    "gpt_oss": {
        # Other than the hidden size, which would hide transposed experts.
        "intermediate_size": 192,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
        # Shorter than a sum with its answer.
        "sliding_window": 8,
        "tie_word_embeddings": False,
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 1e4,
            "factor": 2.0,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "truncate": False,
            "original_max_position_embeddings": 32,
        },
    },
}
"""Fields of mixtures that differ from those of all models."""
MIXTURES = tuple(EXPERTS)

PAD, END = "<pad>", "<end>"
CHARACTERS = "0123456789+="
NUM_LAYERS = 3
HELD_OUT, VALIDATION = 512, 256
SHARE_WITH_CARRY = 0.6
SHARE_CARELESS = 0.7


def compute_score(
    data_source: str, solution_str: str, ground_truth: Any, extra_info: Mapping[str, Any] | None = None
) -> float:
    """1.0 for exactly the right answer, else 0.0; verl's reward signature."""
    return float(solution_str == ground_truth)


def write_task(folder: Path, seed: int, model: ModelName = "qwen3", *, num_layers: int = NUM_LAYERS) -> None:
    """Writes ``model/`` (random weights, tokenizer) and four files of examples.

    ``held_out.jsonl``, ``validation.jsonl`` and ``train.jsonl`` have right answers and no sum in common;
    ``demonstrations.jsonl`` has the sums of ``train.jsonl``, each several times, answered carelessly.
    """
    folder.mkdir(parents=True, exist_ok=True)
    write_model(folder / "model", seed, model, num_layers)
    generator = random.Random(seed)
    pairs = [(first, second) for first in range(10, 100) for second in range(10, 100)]
    generator.shuffle(pairs)
    # Sums with a carry are what the rewards teach, so they are more than chance would give.
    with_carry = [pair for pair in pairs if has_carry(*pair)]
    without = [pair for pair in pairs if not has_carry(*pair)]
    chosen = with_carry + without[: round(len(with_carry) * (1 / SHARE_WITH_CARRY - 1))]
    generator.shuffle(chosen)
    train = chosen[HELD_OUT + VALIDATION :]
    write_jsonl(folder / "held_out.jsonl", [(pair, right_answer(*pair)) for pair in chosen[:HELD_OUT]])
    write_jsonl(folder / "validation.jsonl", [(pair, right_answer(*pair)) for pair in chosen[HELD_OUT:][:VALIDATION]])
    write_jsonl(folder / "train.jsonl", [(pair, right_answer(*pair)) for pair in train])
    careless = [(pair, careless_answer(*pair, generator)) for _ in range(8) for pair in train]
    write_jsonl(folder / "demonstrations.jsonl", careless)


def layers_for(stages: int) -> int:
    """The fewest layers, ``NUM_LAYERS`` or more, that divide evenly into ``stages``, as Megatron wants them."""
    return math.ceil(NUM_LAYERS / stages) * stages


def has_carry(first: int, second: int) -> bool:
    return first % 10 + second % 10 >= 10


def right_answer(first: int, second: int) -> str:
    return str(first + second)[::-1]


def careless_answer(first: int, second: int, generator: random.Random) -> str:
    if has_carry(first, second) and generator.random() < SHARE_CARELESS:
        return str((first + second) % 10) + str(first // 10 + second // 10)[::-1]
    return right_answer(first, second)


def write_jsonl(path: Path, answers: list[tuple[tuple[int, int], str]]) -> None:
    rows = ({"prompt": f"{first}+{second}=", "answer": answer} for (first, second), answer in answers)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def write_model(path: Path, seed: int, model: ModelName, num_layers: int) -> None:
    """Random weights and a tokenizer with a token per character.

    Dense models have 0.6M (Qwen3) or 0.8M parameters (Qwen3.5); mixtures have about as many at work on a token, and
    DeepSeek-V3, whose latents have their released sizes, 1.3M.
    """
    tokenizer = character_tokenizer()
    # Of Qwen3.5 the text model, without a vision tower.
    model_type = f"{model}_text" if model in HYBRIDS else model
    config = AutoConfig.for_model(model_type, **model_fields(model, num_layers, tokenizer))
    torch.manual_seed(seed)
    disable_progress_bar()
    AutoModelForCausalLM.from_config(config).save_pretrained(path)
    tokenizer.save_pretrained(path)


def model_fields(model: ModelName, num_layers: int, tokenizer: PreTrainedTokenizerFast) -> dict[str, Any]:
    hybrid = model in HYBRIDS
    fields: dict[str, Any] = {
        "vocab_size": len(tokenizer),
        "hidden_size": 128,
        "num_hidden_layers": num_layers,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 64 if hybrid else 32,
        "max_position_embeddings": 64,
        "tie_word_embeddings": True,
        "bos_token_id": None,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
    }
    if model != "qwen3_5_moe":
        fields["intermediate_size"] = 384
    if hybrid:
        fields |= mixer_fields(num_layers)
    return {**fields, **EXPERTS.get(model, {})}


def mixer_fields(num_layers: int) -> dict[str, Any]:
    # Heads of 64 features, which vLLM's kernels for CPUs take in bfloat16 too.
    interval = min(4, num_layers)
    return {
        "layer_types": ["linear_attention" if layer % interval else "full_attention" for layer in range(1, num_layers + 1)],
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 64,
        "linear_value_head_dim": 64,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.25},
    }


def character_tokenizer(end: str = END) -> PreTrainedTokenizerFast:
    vocabulary = {token: index for index, token in enumerate([PAD, end, *CHARACTERS])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token=PAD))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), behavior="isolated")
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token=PAD, eos_token=end, clean_up_tokenization_spaces=False
    )
