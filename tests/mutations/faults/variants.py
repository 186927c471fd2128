"""Activations, norms, scales and biases of a decoder's specification; where modules of two sides end."""

from __future__ import annotations

from tests.mutations.fault import Fault

_EQUAL = "test_variants.py::test_log_probs_and_gradients_equal_transformers"
_LAYOUTS = "test_variants_train_in_every_layout_as_on_one_rank"
_PARITY = "test_a_module_whose_results_differ_stays_a_divergence"

FAULTS = [
    Fault(
        "norms-from-one-without-the-one",
        "rl_backend.primitive.norm:RMSNorm.forward",
        "weight = _wide(self.weight) + 1.0 if self.from_one else self.weight",
        "weight = self.weight",
        (f"{_EQUAL}[gemma]",),
        "Gemma's norms would give almost nothing",
    ),
    Fault(
        "joint-norm-counts-copies-of-a-head",
        "rl_backend.parallel.tensor:TensorParallel.norm_over_heads",
        "norm.sum_over_ranks = lambda squares: all_reduce(squares, self.group) / copies",
        "norm.sum_over_ranks = lambda squares: all_reduce(squares, self.group)",
        (f"{_LAYOUTS}[olmo2]",),
        "keys would be too small where several ranks have a copy of a head",
    ),
    Fault(
        "joint-norm-of-a-ranks-own-heads",
        "rl_backend.primitive.norm:RMSNorm.forward",
        "squares = self.sum_over_ranks(wide.square().sum(-1, keepdim=True))",
        "squares = wide.square().sum(-1, keepdim=True)",
        (f"{_LAYOUTS}[olmo2]",),
        "tensor-parallel ranks would normalise their own heads only",
    ),
    Fault(
        "logits-scaled-the-other-way",
        "rl_backend.model.decoder:Decoder.forward",
        "temperature=inputs.temperature / self.spec.logit_scale,",
        "temperature=inputs.temperature * self.spec.logit_scale,",
        (f"{_EQUAL}[granite]",),
        "Granite's log-probs would be those of another temperature",
    ),
    Fault(
        "blocks-added-unscaled",
        "rl_backend.model.decoder_layer:DecoderLayer._added",
        "return normed if scale == 1.0 else normed * scale",
        "return normed",
        (f"{_EQUAL}[granite]",),
        "Granite's residual stream would grow too fast",
    ),
    Fault(
        "scores-with-the-usual-scale",
        "rl_backend.model.mixers.gqa:GroupedQueryAttention.forward",
        "query = query * (self.spec.scale * self.spec.head_dim**0.5)",
        "pass",
        (f"{_EQUAL}[granite]",),
        "Granite's attention would be too sharp or too flat",
    ),
    Fault(
        "all-of-a-head-rotated",
        "rl_backend.model.hf_config:_rotated",
        "rotated = int(head_dim * part)",
        "rotated = head_dim",
        (f"{_EQUAL}[phi]",),
        "Phi would see other positions",
    ),
    Fault(
        "bias-of-the-head-from-its-last-chunk",
        "rl_backend.primitive.tiles:gradients_of",
        "grad_bias[words] += exact.sum(0)",
        "grad_bias[words] = exact.sum(0)",
        ("test_a_bias_of_the_head_is_added_before_the_temperature_and_has_its_gradient",),
        "the bias would learn from the last tokens of a batch",
    ),
    Fault(
        "exact-gelu-for-its-tanh-form",
        "rl_backend.primitive.activation:",
        'partial(F.gelu, approximate="tanh"),',
        "F.gelu,",
        ("test_activations_are_those_of_transformers[gelu_new]",),
        "Gemma, Phi and StarCoder would differ from what engines compute",
    ),
    Fault(
        "relu-that-is-not-squared",
        "rl_backend.primitive.activation:squared_relu",
        "return F.relu(x).square()",
        "return F.relu(x)",
        ("test_activations_are_those_of_transformers[relu2]",),
        "Nemotron would be another model",
    ),
    Fault(
        "embeddings-not-scaled",
        "rl_backend.model.decoder:Decoder._look_up",
        "if self.spec.embedding_scale == 1.0:",
        "if self.spec.embedding_scale != 0.0:",
        (f"{_EQUAL}[gemma]",),
        "Gemma's tokens would hardly be seen beside what blocks add",
    ),
    Fault(
        "layer-norms-from-one-without-the-one",
        "rl_backend.primitive.norm:LayerNorm.forward",
        "weight = (_wide(self.weight) + 1.0).to(x.dtype) if self.from_one else self.weight",
        "weight = self.weight",
        (f"{_EQUAL}[nemotron]",),
        "Nemotron's norms would give almost nothing",
    ),
    Fault(
        "parallel-blocks-one-after-the-other",
        "rl_backend.model.decoder_layer:DecoderLayer.forward",
        "if not self.decoder.parallel_blocks:",
        "if not self.decoder.parallel_blocks or norms.before_feed_forward is None:",
        (f"{_EQUAL}[phi]",),
        "Phi's feed-forward blocks would read what attention has just written",
    ),
    Fault(
        "windows-in-every-sixth-layer",
        "rl_backend.model.variants:gemma3_text",
        '"sliding_attention" if (layer + 1) % step else "full_attention"',
        '"full_attention" if (layer + 1) % step else "sliding_attention"',
        ("test_published_configurations_are_read_with_their_defaults",),
        "Gemma 3 would see the whole text where it must not, and near tokens alone where it must",
    ),
    Fault(
        "biases-of-projections-not-built",
        "rl_backend.model.variants:granite",
        'config.flag("attention_bias"),',
        "False,",
        (f"{_EQUAL}[granite]",),
        "directories with biases would be refused",
    ),
    Fault(
        "other-gradients-end-elsewhere",
        "rl_backend.lab.parity.compare:_activations",
        "elsewhere = _ending_elsewhere(differences, tolerance, required) if same_results else ()",
        "elsewhere = _ending_elsewhere(differences, tolerance, required)",
        (_PARITY,),
        "a wrong module with wrong gradients would be called a matter of places",
    ),
    Fault(
        "a-wrong-layer-ends-elsewhere",
        "rl_backend.lab.parity.compare:_ending_elsewhere",
        "next_agrees = not difference.over",
        "next_agrees = True",
        (_PARITY,),
        "a wrong module in a wrong layer would be called a matter of places",
    ),
]
