"""Faults in mixtures of other kinds: sinks, clamped gates, biases, MXFP4."""

from tests.mutations.fault import Fault

_BRIDGE = "test_tensor_parallel_ranks_train_as_one"

FAULTS = [
    Fault(
        "gradient-of-sinks-with-the-wrong-sign",
        "rl_backend.primitive.cpu_attention:_gradients",
        "weights.mul_((grad.to(log_sums.dtype) * out).sum(-1)).sum(0).neg_().to(sinks.dtype)",
        "weights.mul_((grad.to(log_sums.dtype) * out).sum(-1)).sum(0).to(sinks.dtype)",
        ("test_a_sink_takes_its_share_of_the_softmax",),
        "sinks would move away from what lowers the loss",
    ),
    Fault(
        "sinks-left-out-of-windows",
        "rl_backend.primitive.attention:windowed_attention",
        "if sinks is None:",
        "if True:",
        ("test_a_sink_takes_its_share_of_the_softmax",),
        "every second layer of gpt-oss would pay attention that it should drop",
    ),
    Fault(
        "gates-clamped-from-below-too",
        "rl_backend.primitive.experts:_Gated.forward",
        "gate, up = gate.clamp(max=LIMIT), up.clamp(-LIMIT, LIMIT)",
        "gate, up = gate.clamp(-LIMIT, LIMIT), up.clamp(-LIMIT, LIMIT)",
        ("test_gates_are_clamped_as_in_transformers",),
        "experts would compute something else where gates are far below 0",
    ),
    Fault(
        "bias-of-experts-counted-by-every-part",
        "rl_backend.parallel.tensor:distribute_experts",
        "counted, views = float(mesh.ndim == 1 or mesh.get_local_rank(1) == 0), dict[str, View]()",
        "counted, views = 1.0, dict[str, View]()",
        ("test_a_mixture_continues_in_another_layout",),
        "with etp=2 the bias of what an expert returns would count twice",
    ),
    Fault(
        "bias-of-a-choice-in-bfloat16",
        "rl_backend.primitive.router:ExpertBias",
        "class ExpertBias(KeptInFloat32):",
        "class ExpertBias(nn.Module):",
        ("test_biases_of_routers_stay_in_float32",),
        "an engine would choose other experts than the trainer",
    ),
    Fault(
        "rotary-dim-ignored",
        "rl_backend.model.families.mixtures:minimax_m2",
        "default_rotary_part=_part_of_head(config),",
        "default_rotary_part=1.0,",
        ("test_a_published_minimax_m2_is_read_with_its_rotary_features",),
        "MiniMax-M2 would rotate whole heads, as in transformers",
    ),
    Fault(
        "high-half-of-a-byte-first",
        "rl_backend.checkpoint.quantisation:dequantised",
        "numbers = torch.stack((blocks & 0xF, blocks >> 4), dim=-1).flatten(-2)",
        "numbers = torch.stack((blocks >> 4, blocks & 0xF), dim=-1).flatten(-2)",
        ("test_mxfp4_is_read_as_transformers_reads_it",),
        "neighbouring inputs of every expert would be exchanged",
    ),
    Fault(
        "ties-to-the-larger",
        "rl_backend.checkpoint.quantisation:",
        """
        _TO_THE_LOWER = (0.25, 1.25, 2.5, 5.0)
        _TO_THE_HIGHER = (0.75, 1.75, 3.5)
        """,
        """
        _TO_THE_LOWER = (0.25,)
        _TO_THE_HIGHER = (0.75, 1.25, 1.75, 2.5, 3.5, 5.0)
        """,
        ("test_numbers_are_rounded_to_the_nearest_and_ties_to_even",),
        "weights would grow a little with every export",
    ),
    Fault(
        "biases-of-experts-added-up",
        "rl_backend.runtime.bridge.megatron.local_layers:CopyingRowParallelLinear.__init__",
        "bias.sequence_parallel = False",
        "pass",
        (f"{_BRIDGE}[2-ranks-tp2-gpt_oss]",),
        "Megatron would count gradients of an expert's bias twice, or those of other experts",
    ),
    Fault(
        "squares-of-other-heads-without-gradient",
        "rl_backend.runtime.bridge.megatron.local_layers:NormOfAllHeads.forward",
        """
        squares = copy_to_tensor_model_parallel_region(squares, group=group)
        squares = reduce_from_tensor_model_parallel_region(squares, group=group)
        """,
        "squares = reduce_from_tensor_model_parallel_region(squares, group=group)",
        (f"{_BRIDGE}[2-ranks-tp2-minimax_m2]",),
        "each rank would have only its outputs' part of the gradient of a norm over all heads",
    ),
    Fault(
        "norms-of-other-heads-added-up",
        "rl_backend.runtime.bridge.engine.handle:_connect",
        "provider.qk_layernorm = False",
        "provider.qk_layernorm = True",
        (f"{_BRIDGE}[2-ranks-tp2-minimax_m2]",),
        "Megatron adds up gradients of whatever is called a norm of queries over the ranks",
    ),
    Fault(
        "sinks-of-the-first-rank",
        "rl_backend.runtime.bridge.engine.optimizer:mark_sinks",
        "vars(parameter).update(tensor_model_parallel=True, partition_dim=0, partition_stride=1)",
        "pass",
        (f"{_BRIDGE}[2-ranks-tp2-gpt_oss]",),
        "the gradient norm would leave out the sinks of all ranks but the first",
    ),
    Fault(
        "no-yarn-is-yarn",
        "rl_backend.runtime.bridge.model.provider:_has_rope",
        'whole = provider.position_embedding_type == "yarn" and provider.rotary_percent == 1.0',
        'whole = provider.position_embedding_type == "yarn"',
        ("test_what_megatron_computes_differently_is_refused[glm4_moe-fields9-which Megatron would compute differently]",),
        "Megatron would rotate a part of a head by other angles",
    ),
    Fault(
        "rounding-without-bound",
        "benchmarks.parity_random:is_rounding",
        "min(most, MOST_OVER_TRANSFORMERS * theirs)",
        "MOST_OVER_TRANSFORMERS * theirs",
        ("test_rounding_is_what_transformers_has_too_within_bounds",),
        "a shape on which nothing can be compared would count as one that agrees",
    ),
]
