"""Defaults of megatron-core 0.19's configurations, for machines without it. A test compares them with its classes.

Values that are no literals stand as text: a dtype, a member of an enumeration or a function.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def _of(value: Any, names: str) -> dict[str, Any]:
    return dict.fromkeys(names.split(), value)


TRANSFORMER: Mapping[str, Any] = {
    **_of(
        None,
        """
        tensor_parallel_num_weight_shards pipeline_model_parallel_comm_backend virtual_pipeline_model_parallel_size
        hierarchical_context_parallel_sizes max_seqlen_per_dp_cp_rank expert_tensor_parallel_size
        expert_tensor_parallel_num_weight_shards timers finalize_model_grads_func grad_scale_func moe_grad_scale_func
        mtp_grad_scale_func no_sync_func grad_sync_func param_sync_func autocast_dtype
        num_microbatches_with_partial_activation_checkpoints pipeline_dtype microbatch_group_size_per_vp_stage
        _cpu_offloading_context mtp_num_layers mtp_hybrid_override_pattern num_layers_in_first_pipeline_stage
        num_layers_in_last_pipeline_stage pipeline_model_parallel_layout flash_attention_version softmax_scale
        num_query_groups ffn_hidden_size kv_channels activation_func_clamp_value num_moe_experts window_size
        window_attn_skip_freq no_rope_freq experimental_attention_variant
        experimental_attention_variant_loss_scale_func dsa_indexer_n_heads dsa_indexer_head_dim dsa_indexer_topk
        dsa_indexer_loss_coeff dsa_indexer_k_norm_epsilon linear_attention_freq init_method output_layer_init_method
        embedding_init_method embedding_init_method_std mup_base_hidden_size mup_base_head_dim recompute_granularity
        recompute_method recompute_num_layers recompute_modules fp8 fp8_quantizer_factory fp4 fp4_quantizer_factory
        moe_shared_expert_intermediate_size moe_shared_expert_glu_interleave_size moe_ffn_hidden_size
        moe_router_topk_limited_devices moe_router_num_groups moe_router_group_topk moe_router_topk_scaling_factor
        moe_router_dtype moe_router_force_biased moe_z_loss_coeff moe_input_jitter_eps moe_expert_capacity_factor
        moe_latent_size moe_flex_dispatcher_num_sms moe_deepep_num_sms moe_hybridep_num_sms
        moe_hybridep_num_blocks_permute moe_hybridep_num_blocks_unpermute moe_mlp_glu_interleave_size
        moe_expert_rank_capacity_factor cp_comm_type inference_cuda_graph_scope cuda_graph_scope symmetric_ar_type
        mrope_section mamba_num_heads mamba_training_ssm_states_dtype quant_recipe
        fine_grained_offloading_max_inflight_offloads
        """,
    ),
    **_of(
        False,
        """
        sequence_parallel hybrid_context_parallel use_cpu_initialization fp16 bf16 deterministic_mode enable_autocast
        gradient_accumulation_fusion use_te_rng_tracker tp_comm_overlap tp_comm_overlap_rs_dgrad tp_comm_atomic_ag
        tp_comm_atomic_rs cross_entropy_loss_fusion tp_comm_overlap_disable_qkv tp_comm_overlap_disable_fc1
        overlap_moe_expert_parallel_comm delay_wgrad_compute overlap_dispatch_backward_with_experts_wgrad
        ep_overlap_early_attn_memory_release variable_seq_lengths overlap_p2p_comm use_ring_exchange_p2p
        deallocate_pipeline_outputs defer_embedding_wgrad_compute overlap_p2p_comm_warmup_flush mtp_standalone
        cpu_offloading cpu_offloading_weights cpu_offloading_double_buffering cpu_offloading_retain_pinned_cpu_buffers
        mtp_use_repeated_layer mtp_detach_heads account_for_embedding_in_pipeline_split
        account_for_loss_in_pipeline_split fp32_residual_connection apply_residual_connection_post_layernorm
        layernorm_zero_centered_gamma add_qkv_bias gated_linear_unit activation_func_fp8_input_store
        rotary_interleaved qk_layernorm qk_l2_norm qk_clip log_max_attention_logit attention_output_gate test_mode
        calculate_per_token_loss multi_latent_attention dsa_indexer_use_sparse_loss dsa_indexer_rope_interleaved
        dsa_indexer_k_norm_fp32 init_model_with_meta_device use_mup apply_query_key_layer_scaling
        disable_bf16_reduced_precision_matmul bias_activation_fusion masked_softmax_fusion persist_layer_norm
        memory_efficient_layer_norm bias_dropout_fusion apply_rope_fusion use_fused_weighted_squared_relu
        fused_single_qkv_rope fused_residual_rmsnorm use_transformer_engine_op_fuser distribute_saved_activations
        fp8_param fp8_output_proj fp8_dot_product_attention fp8_multi_head_attention tp_only_amax_red
        first_last_layers_bf16 use_kitchen use_kitchen_attention fp4_param high_priority_a2a_comm_stream
        moe_shared_expert_gate moe_shared_expert_overlap use_grouped_gemm_for_shared_expert moe_enable_routing_replay
        moe_router_padding_for_quantization moe_router_padding_for_fp8 moe_router_pre_softmax
        moe_router_enable_expert_bias moe_router_force_load_balancing use_grouped_gemm_for_dense_mlp moe_grouped_gemm
        moe_single_grouped_weight moe_single_grouped_bias moe_token_dropping moe_enable_deepep
        moe_permute_fusion_into_hybridep moe_hybridep_pad_uneven_dispatch_inputs moe_per_layer_logging
        moe_pad_expert_input_to_capacity moe_pad_experts_for_cuda_graph_inference moe_layer_recompute
        moe_permute_fusion moe_router_fusion moe_apply_probs_on_input moe_ncclep_static_shape moe_ncclep_zero_copy
        enable_cuda_graph cuda_graph_retain_backward_graph external_cuda_graph disable_parameter_transpose_cache
        flash_decode batch_invariant_mode use_te_activation_func inference_rng_tracker nccl_all_reduce_for_prefill
        use_inference_optimized_layers inference_fuse_tp_communication inference_disable_triton_nvls_kernels
        inference_moe_disable_fused_quant_kernels is_hybrid_model heterogeneous_block_specs
        hetereogenous_dist_checkpoint fine_grained_activation_offloading delay_offload_until_cuda_graph
        moe_paged_stash
        """,
    ),
    **_of(
        True,
        """
        perform_initialization tp_comm_bulk_wgrad tp_comm_bulk_dgrad tp_comm_overlap_ag tp_comm_overlap_rs
        tp_comm_split_ag tp_comm_split_rs batch_p2p_comm batch_p2p_sync cpu_offloading_activations
        barrier_with_L1_time add_bias_linear dsa_indexer_rotate_activation dsa_indexer_scoring_relu
        attention_softmax_in_fp32 fp8_wgrad cuda_graph_use_single_mempool clone_scatter_output_in_embedding
        use_mamba_mem_eff_path
        """,
    ),
    "tensor_model_parallel_size": 1,
    "gtp_weight_remat_size": 1,
    "pipeline_model_parallel_size": 1,
    "context_parallel_size": 1,
    "expert_model_parallel_size": 1,
    "expert_gtp_weight_remat_size": 1,
    "params_dtype": "torch.float32",
    "cross_entropy_fusion_impl": "native",
    "tp_comm_bootstrap_backend": "nccl",
    "wgrad_deferral_limit": 0,
    "cpu_offloading_num_layers": 0,
    "num_layers": 0,
    "mtp_loss_scaling_factor": 0.1,
    "hidden_size": 0,
    "num_attention_heads": 0,
    "attention_backend": "auto",
    "softmax_type": "vanilla",
    "hidden_dropout": 0.1,
    "attention_dropout": 0.1,
    "layernorm_epsilon": 1e-05,
    "activation_func": "gelu",
    "glu_linear_offset": 0.0,
    "normalization": "LayerNorm",
    "qk_clip_alpha": 0.5,
    "qk_clip_threshold": 100,
    "dsa_indexer_topk_freq": 1,
    "dsa_indexer_skip_topk_offset": 0,
    "dsa_kernel_backend": "none",
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "init_method_std": 0.02,
    "mup_width_mult": 1.0,
    "mup_embedding_mult": 1.0,
    "mup_output_mult": 1.0,
    "mup_attn_scale_power": 1.0,
    "fp8_recipe": "delayed",
    "fp8_margin": 0,
    "fp8_interval": 1,
    "fp8_amax_history_len": 1,
    "fp8_amax_compute_algo": "most_recent",
    "num_layers_at_start_in_bf16": 1,
    "num_layers_at_end_in_bf16": 1,
    "kitchen_attention_backend": "sdpa",
    "fp4_recipe": "nvfp4",
    "moe_layer_freq": 1,
    "moe_router_load_balancing_type": "aux_loss",
    "moe_router_topk": 2,
    "moe_router_score_function": "softmax",
    "moe_router_bias_update_rate": 0.001,
    "moe_router_quantile_balancing_ema": 0.0,
    "moe_aux_loss_coeff": 0.0,
    "moe_token_dispatcher_type": "allgather",
    "moe_flex_dispatcher_backend": "deepep",
    "moe_token_drop_policy": "probs",
    "moe_hybridep_num_sms_preprocessing": 108,
    "cuda_graph_warmup_steps": 3,
    "cuda_graph_impl": "none",
    "cuda_graph_modules": "full",
    "config_logger_dir": "",
    "inference_sampling_seed": 42,
    "inference_grouped_gemm_backend": "vllm",
    "inference_moe_token_dispatcher_type": "nvls",
    "mamba_state_dim": 128,
    "mamba_head_dim": 64,
    "mamba_num_groups": 8,
    "mlp_chunks_for_prefill": 1,
    "mlp_chunks_for_training": 1,
    "transformer_impl": "transformer_engine",
    "offload_modules": [],
    "min_offloaded_tensor_size": 1048576,
    "delta_offload_bytes_across_pp_ranks": 0,
    "activation_offload_fraction": 1.0,
    "moe_paged_stash_page_size": 64,
    "moe_paged_stash_buffer_size_factor_cuda": 1.1,
    "moe_paged_stash_buffer_size_factor_cpu": 0.0,
}
"""Of ``TransformerConfig``."""

DDP: Mapping[str, Any] = {
    **_of(
        False,
        """
        grad_reduce_in_fp32 overlap_grad_reduce overlap_param_gather align_param_gather use_distributed_optimizer
        check_for_nan_in_grad check_for_large_grads pad_buckets_for_high_nccl_busbw
        reduce_scatter_with_fp32_accumulation average_in_collective fp8_param_gather fp4_param_gather
        reuse_grad_buf_for_mxfp8_param_ag use_megatron_fsdp use_custom_fsdp keep_fp8_transpose_cache nccl_ub
        fsdp_double_buffer fsdp_db_use_persist_buf_on_alloc_fail disable_symmetric_registration
        fsdp_manual_registration delay_wgrad_compute megatron_fsdp_use_decoupled_grad megatron_fsdp_cuda_graph_mode
        megatron_fsdp_enable_fine_grained_param_gather megatron_fsdp_max_pool_double_buffer
        """,
    ),
    **_of(
        None,
        """
        bucket_size num_buckets suggested_communication_unit_size megatron_fsdp_main_grads_dtype
        megatron_fsdp_grad_comm_dtype
        """,
    ),
    **_of(
        True,
        """
        gradient_reduce_div_fusion fsdp_all_gather_in_start_param_sync
        """,
    ),
    "num_distributed_optimizer_instances": 1,
    "param_name_patterns_for_fp32_local_accumulation": (),
    "data_parallel_sharding_strategy": "no_shard",
    "outer_dp_sharding_strategy": "no_shard",
    "megatron_fsdp_main_params_dtype": "torch.float32",
}
"""Of ``DistributedDataParallelConfig``."""

OPTIMIZER: Mapping[str, Any] = {
    **_of(
        None,
        """
        lr min_lr decoupled_lr decoupled_min_lr fp8_recipe loss_scale timers
        """,
    ),
    **_of(
        False,
        """
        apply_wd_to_qk_layernorm fp16 bf16 reuse_grad_buf_for_mxfp8_param_ag use_precision_aware_optimizer
        muon_nesterov use_distributed_optimizer use_layer_wise_distributed_optimizer overlap_param_gather
        overlap_param_gather_with_optimizer_step optimizer_cpu_offload use_torch_optimizer_for_cpu_offload
        overlap_cpu_optimizer_d2h_h2d log_num_zeros_in_grad barrier_with_L1_time optimizer_cuda_graph
        """,
    ),
    **_of(
        True,
        """
        store_param_remainders decoupled_weight_decay muon_split_qkv soap_use_kl_shampoo pin_cpu_grads pin_cpu_params
        """,
    ),
    "weight_decay": 0.01,
    "params_dtype": "torch.float32",
    "main_grads_dtype": "torch.float32",
    "main_params_dtype": "torch.float32",
    "exp_avg_dtype": "torch.float32",
    "exp_avg_sq_dtype": "torch.float32",
    "optimizer": "adam",
    "initial_loss_scale": 4294967296,
    "min_loss_scale": 1.0,
    "loss_scale_window": 1000,
    "hysteresis": 2,
    "adam_beta1": 0.9,
    "adam_beta2": 0.999,
    "adam_eps": 1e-08,
    "sgd_momentum": 0.9,
    "muon_momentum": 0.95,
    "muon_scale_mode": "spectral",
    "muon_fp32_matmul_prec": "medium",
    "muon_coefficient_type": "quintic",
    "muon_num_ns_steps": 5,
    "muon_tp_mode": "blockwise",
    "muon_extra_scale_factor": 1.0,
    "muon_scalar_optimizer": "adam",
    "lion_beta1": 0.95,
    "lion_beta2": 0.98,
    "soap_shampoo_beta": 0.95,
    "soap_precondition_frequency": 1,
    "adaptive_muon_moment2_method": "adamuon",
    "adaptive_muon_beta2": 0.95,
    "adaptive_muon_eps": 1e-08,
    "optimizer_offload_fraction": 0.0,
    "clip_grad": 1.0,
    "grad_norm_skip_threshold": float("inf"),
    "config_logger_dir": "",
}
"""Of ``OptimizerConfig``."""
