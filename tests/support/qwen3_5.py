"""Small random directories of Qwen3.5 and Qwen3-Next, written by transformers: as text models and as released."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

SIZES: Mapping[str, Any] = {
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 64,
    "linear_value_head_dim": 64,
    "max_position_embeddings": 512,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.25},
    "bos_token_id": None,
    "eos_token_id": 1,
    "pad_token_id": None,
}
"""Heads of 64 features and a rotary embedding of 16 are what every engine of the project takes."""
EXPERTS: Mapping[str, Any] = {
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 48,
}
VISION: Mapping[str, Any] = {
    "depth": 1,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_heads": 2,
    "out_hidden_size": 64,
    "num_position_embeddings": 16,
}
UNKNOWN_TO_TRANSFORMERS: Mapping[str, Any] = {
    "attn_output_gate": True,
    "full_attention_interval": 4,
    "mamba_ssm_dtype": "float32",
    "mtp_num_hidden_layers": 1,
    "mtp_use_dedicated_embeddings": False,
}
"""Fields of a released ``text_config``."""


def write_qwen3_5(
    path: Path,
    *,
    moe: bool = False,
    layers: int = 4,
    seed: int = 0,
    released: bool = False,
    packed: bool = False,
    **fields: Any,
) -> Path:
    """A random float32 model; every fourth layer has attention, the others gated DeltaNet.

    Dense models tie their embeddings, mixtures do not, unless ``tie_word_embeddings`` says otherwise.

    Args:
        released: as Qwen publishes it: the text model nested in one with a vision tower, beside the weights of a layer for
            multi-token prediction, and fields of ``config.json`` that transformers does not know.
        packed: with one tensor for the experts of a layer, as Qwen publishes mixtures in bfloat16.
        fields: of the configuration of the text model; None leaves out one that is set here.
    """
    kind = "qwen3_5_moe" if moe else "qwen3_5"
    sizes = {**SIZES, **(EXPERTS if moe else {}), "num_hidden_layers": layers, "tie_word_embeddings": not moe, **fields}
    if moe:
        del sizes["intermediate_size"]
    text = {name: value for name, value in sizes.items() if value is not None or fields.get(name, "") is not None}
    if not released:
        _write(AutoModelForCausalLM, AutoConfig.for_model(f"{kind}_text", **text), path, seed)
        return _pack_experts(path) if packed else path
    rotary = text["rope_parameters"]
    sections = {"mrope_interleaved": True, "mrope_section": _sections(text["head_dim"], rotary["partial_rotary_factor"])}
    config = AutoConfig.for_model(
        kind,
        text_config={**text, "rope_parameters": {**rotary, **sections}},
        vision_config={**VISION, "out_hidden_size": text["hidden_size"]},
        tie_word_embeddings=text["tie_word_embeddings"],
        image_token_id=text["vocab_size"] - 1,
        video_token_id=text["vocab_size"] - 2,
        vision_start_token_id=text["vocab_size"] - 3,
        vision_end_token_id=text["vocab_size"] - 4,
    )
    _write(AutoModelForImageTextToText, config, path, seed)
    _add_unknown_fields(path)
    _add_prediction_layer(path, seed)
    return _pack_experts(path) if packed else path


def save_text_model(source: Path, path: Path) -> Path:
    """The language model of a released directory, as transformers saves it: its own configuration, nested names."""
    AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32).save_pretrained(path)
    return path


def write_qwen3_next(path: Path, *, layers: int = 4, seed: int = 0, **fields: Any) -> Path:
    """As :func:`write_qwen3_5` with ``moe``, for Qwen3-Next."""
    sizes = {**SIZES, **EXPERTS, "num_hidden_layers": layers, "tie_word_embeddings": False, **fields}
    text = {name: value for name, value in sizes.items() if value is not None or fields.get(name, "") is not None}
    return _write(AutoModelForCausalLM, AutoConfig.for_model("qwen3_next", **text), path, seed)


def _write(kind: Any, config: Any, path: Path, seed: int) -> Path:
    torch.manual_seed(seed)
    model = kind.from_config(config).to(torch.float32)
    _randomise(model)
    model.save_pretrained(path, max_shard_size="100KB")
    return path


@torch.no_grad()
def _randomise(model: nn.Module) -> None:
    """No value is one that hides a mistake, as zeros and ones do; states neither vanish at once nor stay for ever."""
    for name, parameter in model.named_parameters():
        if name.endswith("A_log"):
            parameter.uniform_(-3.0, 1.0)
        elif name.endswith(("dt_bias", ".bias")):
            parameter.normal_(std=0.3)
        elif "norm" in name:
            parameter.add_(0.1 * torch.randn_like(parameter))
        elif name.endswith("conv1d.weight"):
            parameter.normal_(std=0.4)
        else:
            parameter.mul_(4.0)


def _pack_experts(path: Path) -> Path:
    """Puts all weights into one file, in which the experts of a layer are two tensors."""
    files = list(path.glob("*.safetensors"))
    tensors = {name: tensor for file in files for name, tensor in load_file(file).items()}
    for file in [*files, path / "model.safetensors.index.json"]:
        file.unlink(missing_ok=True)
    gates = [name for name in tensors if name.startswith("model.") and name.endswith(".experts.0.gate_proj.weight")]
    for block in [name.removesuffix(".0.gate_proj.weight") for name in gates]:
        count = sum(name.startswith(f"{block}.") and name.endswith(".gate_proj.weight") for name in tensors)
        experts = [
            [tensors.pop(f"{block}.{expert}.{name}_proj.weight") for name in ("gate", "up", "down")]
            for expert in range(count)
        ]
        tensors[f"{block}.gate_up_proj"] = torch.stack([torch.cat((gate, up)) for gate, up, _ in experts])
        tensors[f"{block}.down_proj"] = torch.stack([down for *_, down in experts])
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    return path


def _sections(head_dim: int, part: float) -> list[int]:
    """Frequencies of time, height and width, as Qwen shares them out: 11, 11 and 10 of 32."""
    frequencies = int(head_dim * part) // 2
    third = -(-frequencies // 3)
    return [third, third, frequencies - 2 * third]


def _add_unknown_fields(path: Path) -> None:
    config = json.loads((path / "config.json").read_text())
    config["text_config"] |= UNKNOWN_TO_TRANSFORMERS
    (path / "config.json").write_text(json.dumps(config, indent=2))


def _add_prediction_layer(path: Path, seed: int) -> None:
    """A file with ``mtp.`` weights: a layer with attention, what joins embeddings and states before it, and norms."""
    index_file = path / "model.safetensors.index.json"
    index = json.loads(index_file.read_text())
    config = json.loads((path / "config.json").read_text())["text_config"]
    hidden, dim = config["hidden_size"], config["head_dim"]
    queries, keys = config["num_attention_heads"] * dim, config["num_key_value_heads"] * dim
    shapes: dict[str, tuple[int, ...]] = {
        "fc.weight": (hidden, 2 * hidden),
        "pre_fc_norm_embedding.weight": (hidden,),
        "pre_fc_norm_hidden.weight": (hidden,),
        "norm.weight": (hidden,),
        "layers.0.input_layernorm.weight": (hidden,),
        "layers.0.post_attention_layernorm.weight": (hidden,),
        "layers.0.self_attn.q_proj.weight": (2 * queries, hidden),
        "layers.0.self_attn.k_proj.weight": (keys, hidden),
        "layers.0.self_attn.v_proj.weight": (keys, hidden),
        "layers.0.self_attn.o_proj.weight": (hidden, queries),
        "layers.0.self_attn.q_norm.weight": (dim,),
        "layers.0.self_attn.k_norm.weight": (dim,),
    }

    def feed_forward(block: str, width: int) -> dict[str, tuple[int, ...]]:
        up, down = (width, hidden), (hidden, width)
        return {f"{block}.gate_proj.weight": up, f"{block}.up_proj.weight": up, f"{block}.down_proj.weight": down}

    block = "layers.0.mlp"
    if "num_experts" in config:
        shapes[f"{block}.gate.weight"] = (config["num_experts"], hidden)
        shapes[f"{block}.shared_expert_gate.weight"] = (1, hidden)
        shapes |= feed_forward(f"{block}.shared_expert", config["shared_expert_intermediate_size"])
        for expert in range(config["num_experts"]):
            shapes |= feed_forward(f"{block}.experts.{expert}", config["moe_intermediate_size"])
    else:
        shapes |= feed_forward(block, config["intermediate_size"])
    generator = torch.Generator().manual_seed(seed + 1)
    tensors = {f"mtp.{name}": 0.1 * torch.randn(shape, generator=generator) for name, shape in shapes.items()}
    save_file(tensors, path / "model-mtp.safetensors", metadata={"format": "pt"})
    index["weight_map"] |= dict.fromkeys(tensors, "model-mtp.safetensors")
    index["metadata"]["total_size"] += sum(tensor.nbytes for tensor in tensors.values())
    index_file.write_text(json.dumps(index, indent=2))
