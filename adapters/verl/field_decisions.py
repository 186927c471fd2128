"""Decisions on the fields of verl 0.9.1's configurations, shown by ``docs/reference/verl_fields.md``. A test compares them
with verl's classes; a version of verl with another field fails there.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from rl_backend.contracts import ConfigError

type Kind = Literal["mapped", "refused", "no meaning"]


@dataclass(frozen=True)
class Decision:
    """A decision on one field.

    Attributes:
        kind: ``mapped``: the engine honours it. ``refused``: only ``accepts`` is taken. ``no meaning``: not the engine's to
            honour, or read by verl beside another field only, which is refused.
        text: where it goes, or why not.
        accepts: the values that ask for nothing, verl's defaults among them.
    """

    kind: Kind
    text: str
    accepts: tuple[Any, ...] = ()


def _mapped(text: str) -> Decision:
    return Decision("mapped", text)


def _refused(text: str, *accepts: Any) -> Decision:
    return Decision("refused", text, accepts)


def _no_meaning(text: str) -> Decision:
    return Decision("no meaning", text)


_HYDRA = _no_meaning("Hydra's")
_WORKER_SPLITS = _mapped("verl's worker writes it into each batch, and the engine cuts that into micro-batches by it")
_CHUNKED = _mapped(
    "either way log-probabilities and entropy come from hidden states in chunks; a batch's logits never exist at one time"
)
_PACKED = _no_meaning("sequences are always packed, whose results are those of padded ones")
_PEFT = "LoRA by peft's names where lora.rank is 0"
_MTP = "multi-token prediction is not offered: those layers are not trained, and saved models have them as they were"
_ONLY_WITH_MTP = _no_meaning("read with MTP only, which is refused")
_ONLY_WITH_MUON = _no_meaning("read with optimizer=muon only, which is refused")
_ONLY_WITH_QAT = _no_meaning("read with qat.enable only, which is refused")
_FLOAT32 = ("fp32", "float32", "32")

ENGINE: Mapping[str, Decision] = {
    "_target_": _HYDRA,
    "strategy": _no_meaning("verl's key for the engine; it asserts 'megatron'"),
    "dtype": _mapped("`param_dtype`: `bfloat16`, and `float32` in RLBackendEngineConfig; `float16` is refused"),
    "seed": _mapped("`RuntimeConfig.seed`"),
    "forward_only": _mapped("`build_model(forward_only=)`"),
    "param_offload": _mapped("`Runtime.to` around every call, parameters and gradients"),
    "optimizer_offload": _mapped("`Runtime.to` around training"),
    "full_determinism": _mapped("verl's `enable_full_determinism(seed)`, and Megatron's `deterministic_mode` on the bridge"),
    "use_dynamic_bsz": _WORKER_SPLITS,
    "max_token_len_per_gpu": _WORKER_SPLITS,
    "micro_batch_size_per_gpu": _WORKER_SPLITS,
    "infer_max_token_len_per_gpu": _WORKER_SPLITS,
    "infer_micro_batch_size_per_gpu": _WORKER_SPLITS,
    "use_fused_kernels": _CHUNKED,
    "use_remove_padding": _PACKED,
    "router_replay": _mapped("see its own table"),
    "qat": _mapped("see its own table"),
    "tensor_model_parallel_size": _mapped("`ParallelConfig.tp`"),
    "pipeline_model_parallel_size": _mapped("`ParallelConfig.pp`"),
    "virtual_pipeline_model_parallel_size": _mapped("`ParallelConfig.vpp`; null is 1"),
    "context_parallel_size": _mapped("`ParallelConfig.cp`"),
    "expert_model_parallel_size": _mapped("`ParallelConfig.ep`"),
    "expert_tensor_parallel_size": _mapped("`ParallelConfig.etp`; null is tp for a model with experts"),
    "sequence_parallel": _mapped("on exactly when tp > 1; `False` with tp > 1 is refused"),
    "dynamic_context_parallel": _refused("context-parallel groups have one size", False),
    "max_seqlen_per_dp_cp_rank": _refused("context-parallel groups have one size", None),
    "use_distributed_optimizer": _refused("the optimizer's state is always sharded over data parallelism", True),
    "use_megatron_fsdp": _mapped("with backend=native parameters are sharded in any case; refused with backend=bridge"),
    "entropy_from_logits_with_chunking": _CHUNKED,
    "entropy_from_logits_chunk_size": _mapped("`log_prob_chunk_tokens`, with entropy_from_logits_with_chunking"),
    "pad_bshd_to_minibatch_max": _no_meaning("applies to padded batches, which are never built"),
    "pad_to_length": _refused("packed micro-batches keep their length", False),
    "pad_to_length_bucket": _no_meaning("read with pad_to_length only, which is refused"),
    "use_dist_checkpointing": _mapped(
        "first weights come from dist_checkpointing_path, and `model` in save_contents writes the training state alone"
    ),
    "dist_checkpointing_path": _mapped(
        "a Hugging Face directory, with use_dist_checkpointing; not read without. Megatron's own format is refused"
    ),
    "dist_checkpointing_prefix": _refused("first weights come from model.path, a Hugging Face directory", ""),
    "dist_ckpt_optim_fully_reshardable": _mapped("with either value every checkpoint loads in another layout"),
    "distrib_optim_fully_reshardable_mem_efficient": _refused("checkpoints are written in one way only", False),
    "override_ddp_config": _mapped("see its own table"),
    "override_transformer_config": _mapped("recompute fields: activation checkpointing; others: see their own table"),
    "override_mcore_model_config": _refused("config.json decides what the model is", {}),
    "use_mbridge": _refused("weights are always read and exported with Hugging Face names", True),
    "vanilla_mbridge": _no_meaning("selects the package that converts weights for Megatron; the legacy one is never used"),
}

ROUTER_REPLAY: Mapping[str, Decision] = {
    "_target_": _HYDRA,
    "mode": _mapped("`EngineSettings.router_replay`"),
    "record_file": _refused("routes travel in the batch, never through files (verl reads it nowhere)", None),
    "replay_file": _refused("routes travel in the batch, never through files (verl reads it nowhere)", None),
}

QAT: Mapping[str, Decision] = {
    "_target_": _HYDRA,
    "enable": _refused("training does not simulate quantization", False),
    **dict.fromkeys(
        ("mode", "group_size", "ignore_patterns", "activation_observer", "quantization_config_path"), _ONLY_WITH_QAT
    ),
}

OPTIMIZER: Mapping[str, Decision] = {
    "_target_": _HYDRA,
    "optimizer": _refused(
        "the one optimizer is Adam with decoupled weight decay, AdamW, which is Megatron's `adam`", "adam", "adamw", "AdamW"
    ),
    "lr": _mapped("`OptimizerConfig.lr`"),
    "min_lr": _mapped("`OptimizerConfig.min_lr`; not read by the style constant"),
    "lr_warmup_init": _mapped("`OptimizerConfig.lr_warmup_init`; read by a warm-up"),
    "lr_warmup_steps": _mapped("`OptimizerConfig.lr_warmup_steps`; 0, negative and null delegate to the ratio"),
    "lr_warmup_steps_ratio": _mapped("`OptimizerConfig.lr_warmup_steps`: the ratio of the steps of decay"),
    "lr_decay_steps": _mapped(
        "`OptimizerConfig.lr_decay_steps`; null takes total_training_steps; constant reads it for the warm-up ratio alone"
    ),
    "lr_decay_style": _mapped("`OptimizerConfig.lr_decay_style`; underscores may stand for hyphens"),
    "lr_wsd_decay_style": _mapped("`OptimizerConfig.lr_wsd_decay_style`; read by the style WSD"),
    "lr_wsd_decay_steps": _mapped("`OptimizerConfig.lr_wsd_decay_steps`; read by the style WSD"),
    "total_training_steps": _mapped("`OptimizerConfig.total_training_steps`; verl sets it before initialize()"),
    "weight_decay": _mapped("`OptimizerConfig.weight_decay`"),
    "weight_decay_incr_style": _mapped(
        "`OptimizerConfig.weight_decay_incr_style`, from weight_decay to weight_decay as in verl"
    ),
    "betas": _mapped("`OptimizerConfig.betas` (verl does not give them to Megatron)"),
    "clip_grad": _mapped("`OptimizerConfig.clip_grad`"),
    "grad_clip": _mapped("verl's old name of clip_grad; verl itself replaces it"),
    "use_checkpoint_opt_param_scheduler": _refused(
        "a checkpoint always restores the position in the schedule; its rates are always those of this run", False
    ),
    "use_precision_aware_optimizer": _no_meaning(
        "with the dtypes below at float32 its results are those of the usual optimizer; other dtypes are refused"
    ),
    "main_grads_dtype": _refused("masters, moments and gradients are float32", *_FLOAT32),
    "exp_avg_dtype": _refused("masters, moments and gradients are float32", *_FLOAT32),
    "exp_avg_sq_dtype": _refused("masters, moments and gradients are float32", *_FLOAT32),
    **dict.fromkeys(
        (
            "use_layer_wise_distributed_optimizer",
            "use_layer_wise_param_layout",
            "muon_momentum",
            "muon_nesterov",
            "muon_split_qkv",
            "muon_scale_mode",
            "muon_coefficient_type",
            "muon_num_ns_steps",
            "muon_tp_mode",
            "muon_fp32_matmul_prec",
            "muon_extra_scale_factor",
            "muon_scalar_optimizer",
            "muon_match_adamw_update_rms",
        ),
        _ONLY_WITH_MUON,
    ),
    "override_optimizer_config": _mapped("adam_beta1, adam_beta2, adam_eps: `OptimizerConfig`; others: see their own table"),
}

_TOKENIZER = _no_meaning("configures verl's tokenizer, for its data and rollouts; saved with hf_model")

MODEL: Mapping[str, Decision] = {
    "_target_": _HYDRA,
    "path": _mapped("`RuntimeConfig.hf_path`, through local_path"),
    "local_path": _mapped("`RuntimeConfig.hf_path`"),
    "use_shm": _mapped("verl copies path to local_path"),
    "hf_config_path": _refused("config.json is that of path; null, or path itself, asks for nothing"),
    "local_hf_config_path": _no_meaning("verl's copy of hf_config_path"),
    "tokenizer_path": _TOKENIZER,
    "local_tokenizer_path": _TOKENIZER,
    "load_tokenizer": _TOKENIZER,
    "tokenizer": _TOKENIZER,
    "processor": _TOKENIZER,
    "custom_chat_template": _TOKENIZER,
    "generation_config": _no_meaning("configures verl's rollouts"),
    "trust_remote_code": _no_meaning(
        "configures verl's tokenizer and rollouts; the runtimes run no code of a model's directory"
    ),
    "external_lib": _mapped("verl imports it in every process; it may register model families and runtimes"),
    "model_type": _mapped("`build_model(head=)`"),
    "hf_config": _mapped("whether the model has experts"),
    "architectures": _no_meaning("verl reads it from config.json; so do the runtimes"),
    "override_config": _refused("config.json of path decides what the model is; write the change there", {}),
    "enable_gradient_checkpointing": _mapped(
        "recompute each layer in the backward pass, where override_transformer_config.recompute_granularity is null (verl's "
        "Megatron engine does not read it)"
    ),
    "enable_activation_offload": _refused("activations stay on the device", False),
    "use_remove_padding": _PACKED,
    "use_fused_kernels": _CHUNKED,
    "fused_kernel_options": _refused("log-probabilities have one implementation, in PyTorch", {}, {"impl_backend": "torch"}),
    "use_liger": _refused("models are this package's own", False),
    "tiled_mlp": _refused("models are this package's own; with `enabled=False` it asks for nothing"),
    "lora": _mapped("see its own table"),
    "lora_rank": _mapped(f"{_PEFT}: `LoRAConfig.rank`, with peft's first factors"),
    "lora_alpha": _mapped(f"{_PEFT}: `LoRAConfig.alpha`"),
    **dict.fromkeys(
        ("target_modules", "exclude_modules"),
        _mapped(
            f"{_PEFT}: `LoRAConfig.targets`; a list takes names, a string is a regular expression, `all-linear` takes "
            "every linear layer of attention and of feed-forward blocks, shared experts included"
        ),
    ),
    "target_parameters": _refused("adapters stand beside linear layers; name those of experts in target_modules", None),
    "lora_adapter_path": _mapped("a directory in peft's format that the adapter starts from; the rank must be set too"),
    "mtp": _mapped("see its own table"),
}

MTP: Mapping[str, Decision] = {
    "_target_": _HYDRA,
    "enable": _refused(_MTP, False),
    "enable_train": _refused(_MTP, False),
    "enable_rollout": _refused(_MTP, False),
    **dict.fromkeys(
        (
            "detach_encoder",
            "mtp_loss_scaling_factor",
            "speculative_algorithm",
            "speculative_num_steps",
            "speculative_eagle_topk",
            "speculative_num_draft_tokens",
            "method",
            "num_speculative_tokens",
        ),
        _ONLY_WITH_MTP,
    ),
}

CHECKPOINT: Mapping[str, Decision] = {
    "_target_": _HYDRA,
    "save_contents": _mapped(
        "model: a Hugging Face directory, as in verl (with use_dist_checkpointing only hf_model writes it); optimizer and "
        "extra: the training state, which has the weights too. With LoRA, model: the adapter in peft's format; hf_model: "
        "the merged model; the training state is the adapter's"
    ),
    "load_contents": _mapped(
        "optimizer and extra: the training state; model or hf_model alone: the weights. With LoRA, model alone: the "
        "adapter; hf_model alone is refused"
    ),
    "async_save": _mapped(
        "the training state is written in the background, `huggingface/` before the save returns. With main_ppo, verl's "
        "record names a step once its files are committed, and training ends after the last of them. One of SFT waits, as "
        "its trainer records at once"
    ),
    "strict": _no_meaning("asks to check that an export has every weight; it always has"),
    "save_lora_only": _mapped(
        "with LoRA only, where checkpoints never have the base; refused beside hf_model, which has it"
    ),
    "mbridge_config": _refused("belongs to the legacy package mbridge", {}),
}


def require_supported(where: str, config: Any, decisions: Mapping[str, Decision]) -> None:
    """Raises :class:`ConfigError` for the first field whose value is refused; fields that ``config`` lacks are at rest."""
    for name, decision in decisions.items():
        if not decision.accepts or not hasattr(config, name):
            continue
        value = getattr(config, name)
        if value not in decision.accepts:
            raise refusal(where, name, value, decision)


def refusal(where: str, name: str, value: Any, decision: Decision) -> ConfigError:
    """What to raise for a value that is refused."""
    expected = f"; leave it at {decision.accepts[0]!r}" if decision.accepts else ""
    return ConfigError.of(f"{where}.{name}", value, f"{decision.text}{expected}")
