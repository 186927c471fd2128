"""A decoder's forward: what each input and each field of the specification changes, against pieces put together by hand."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from rl_backend.contracts import BatchError, Head, ModelOutput
from rl_backend.model import BuildSettings, ModelInput, ModelStage
from rl_backend.model.blocks import LayerSpec, RouterInput
from rl_backend.model.decoder import Decoder, checkpoint_layers
from rl_backend.model.decoder_spec import DecoderSpec, MTPNames, MTPSpec
from rl_backend.model.feedforward.dense import SwiGLUSpec
from rl_backend.model.feedforward.moe import MoESpec
from rl_backend.model.input import SecondTokens, second_labels
from rl_backend.model.mixers.gqa import GQASpec
from rl_backend.model.options import DecoderOptions
from rl_backend.primitive.adapters import AdapterRun, OwnHead
from rl_backend.primitive.attention import Segments
from rl_backend.primitive.norm import NormSpec
from rl_backend.primitive.rope import Rotary, Rotations
from rl_backend.primitive.router import RouterSettings, RowSequences

LENGTHS, VOCABULARY, HIDDEN = (3, 5, 1), 13, 8
TOTAL = sum(LENGTHS)
ATTENTION = GQASpec(num_heads=2, num_kv_heads=1, head_dim=4, rotary=Rotary(4, 10.0))
OTHER = GQASpec(num_heads=2, num_kv_heads=2, head_dim=6, rotary=Rotary(6, 50.0), window=2)
DENSE, MIXTURE = SwiGLUSpec(7), MoESpec(RouterSettings(4, 2), 6)
LAYERS = (LayerSpec(ATTENTION, DENSE), LayerSpec(OTHER, MIXTURE), LayerSpec(ATTENTION, MIXTURE))


def spec_of(**changes: Any) -> DecoderSpec:
    norm, layers = NormSpec(1e-6), changes.pop("layers", LAYERS)
    fields: dict[str, Any] = {"max_length": 5, "norm": norm, "tie_word_embeddings": False, "layers": layers, **changes}
    return DecoderSpec(vocab_size=VOCABULARY, hidden_size=HIDDEN, **fields)


def model_of(
    spec: DecoderSpec, head: Head = "log_probs", stage: ModelStage | None = None, layer_dtype: torch.dtype | None = None
) -> Decoder:
    model = Decoder(spec, BuildSettings(DecoderOptions(), head, 4, stage, layer_dtype)).double()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(0.5 * torch.randn(parameter.shape, generator=generator))
    return model


def inputs_of(**changes: Any) -> ModelInput:
    ids = torch.randint(0, VOCABULARY, (TOTAL,), generator=torch.Generator().manual_seed(3))
    positions = torch.cat([torch.arange(length) for length in LENGTHS])
    starts = torch.tensor([0, *LENGTHS]).cumsum(0)
    labels = torch.cat((ids[1:], ids[:1])).index_fill(0, starts[1:] - 1, -100)
    segments = Segments.of_sequences(starts.to(torch.int32), LENGTHS)
    return ModelInput(ids, positions, segments, max(LENGTHS), labels, 1.0, False)._replace(**changes)


def states(model: Decoder, inputs: ModelInput, scale: float = 1.0) -> Tensor:
    """Before the last norm, layer by layer."""
    assert model.embed_tokens is not None
    hidden = model.embed_tokens.weight[inputs.input_ids] * scale
    rotations = Rotations(inputs.position_ids, hidden.dtype)
    for layer in model.each_layer():
        hidden = layer(hidden, rotations.of(layer.rotary), inputs.segments, RouterInput())
    return hidden


def by_softmax(logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    distribution, kept = logits.log_softmax(-1), labels >= 0
    log_probs = distribution.gather(1, labels.clamp(min=0)[:, None])[:, 0].where(kept, 0.0)
    return log_probs, -(distribution.exp() * distribution).sum(-1).where(kept, 0.0)


def run(model: nn.Module, inputs: ModelInput) -> ModelOutput:
    output = model(inputs)
    assert isinstance(output, ModelOutput)
    return output


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"tie_word_embeddings": True},
        {"embedding_scale": 3.0, "logit_scale": 0.25},
        {"head_bias": True, "logit_scale": 2.0},
        {"norm": NormSpec(1e-5, "layer", bias=True), "embedding_scale": 0.5, "tie_word_embeddings": True},
    ],
    ids=str,
)
@pytest.mark.parametrize("temperature", [1.0, 0.7, torch.linspace(0.5, 1.5, TOTAL, dtype=torch.float64)])
def test_log_probs_and_entropy_are_those_of_the_scaled_logits(changes: dict[str, Any], temperature: Any) -> None:
    spec = spec_of(**changes)
    model, inputs = model_of(spec), inputs_of(temperature=temperature, calculate_entropy=True)
    output = run(model, inputs)
    assert model.norm is not None and model.embed_tokens is not None and output.values is None
    head = model.embed_tokens if model.lm_head is None else model.lm_head
    assert (model.lm_head is None) is spec.tie_word_embeddings
    hidden = model.norm(states(model, inputs, spec.embedding_scale))
    logits = hidden @ head.weight.t() + (head.bias if isinstance(head, nn.Linear) and head.bias is not None else 0.0)
    by_token = temperature[:, None] if isinstance(temperature, Tensor) else temperature
    expected = by_softmax(logits * spec.logit_scale / by_token, inputs.labels)
    torch.testing.assert_close((output.log_probs, output.entropy), expected)
    assert run(model, inputs._replace(calculate_entropy=False)).entropy is None


def test_routes_go_to_the_layers_with_a_router_in_their_order() -> None:
    model, inputs = model_of(spec_of()), inputs_of()
    seen: list[Tensor | None] = []
    for layer in model.each_layer():
        layer.mlp.register_forward_pre_hook(lambda _, args: seen.append(args[1]))
    padding, routes = torch.zeros(TOTAL, dtype=torch.bool), torch.randint(0, 2, (TOTAL, 2, 2))
    run(model, inputs._replace(routes=routes, padding=padding, router_loss_weight=0.25))
    assert [None if each.experts is None else each.experts.tolist() for each in seen] == [  # type: ignore[union-attr]
        None,
        routes[:, 0].tolist(),
        routes[:, 1].tolist(),
    ]
    assert {(each.loss_weight, each.padding is padding) for each in seen} == {(0.25, True)}  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"longest": 6}, "a sequence of 6 tokens is longer than the model's 5 positions"),
        ({"input_ids": torch.full((TOTAL,), VOCABULARY)}, "input_ids reach from 13 to 13; the vocabulary has 13 tokens"),
        ({"input_ids": torch.arange(TOTAL) - 1}, "input_ids reach from -1 to 7; the vocabulary has 13 tokens"),
    ],
)
def test_tokens_that_the_model_does_not_have_are_refused(changes: dict[str, Any], message: str) -> None:
    model = model_of(spec_of())
    with pytest.raises(BatchError, match=message):
        model(inputs_of(**changes))
    run(model, inputs_of(input_ids=torch.arange(TOTAL) % 2 * (VOCABULARY - 1)))


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("head", ["log_probs", "values"])
def test_stages_one_after_the_other_are_the_whole(tied: bool, head: Head) -> None:
    spec = spec_of(tie_word_embeddings=tied, embedding_scale=2.0)
    whole, inputs = model_of(spec, head), inputs_of(calculate_entropy=True)
    weights, hidden = whole.state_dict(), None
    parts = (
        ModelStage(True, range(1), False),
        ModelStage(False, range(1, 2), False),
        ModelStage(False, range(2, 3), True),
    )
    names = set[str]()
    output: Any = None
    for stage in parts:
        part = model_of(spec, head, stage)
        part.load_state_dict({name: weights[name.replace("tied_head", "embed_tokens")] for name in part.state_dict()})
        names |= {name for name, _ in part.named_parameters()}
        output = part(inputs._replace(hidden=hidden))
        hidden = output
    assert names - {"tied_head.weight"} == set(weights) and ("tied_head.weight" in names) is (tied and head == "log_probs")
    expected = run(whole, inputs)
    for found, right in zip(output, expected, strict=True):
        assert (found is None) is (right is None)
        if found is not None and right is not None:
            torch.testing.assert_close(found, right)


def test_values_are_those_of_the_head_of_the_model_and_log_probs_are_not_computed() -> None:
    model, inputs = model_of(spec_of(head_bias=True), "values"), inputs_of(calculate_entropy=True)
    output = run(model, inputs)
    assert model.score is not None and model.norm is not None and model.lm_head is None and model.tied_head is None
    expected = model.norm(states(model, inputs)) @ model.score.weight[0] + model.score.bias
    torch.testing.assert_close(output.values, expected)
    assert output.log_probs is None and output.entropy is None


@pytest.mark.parametrize("heads", [(), ("log_probs",), ("values",), ("log_probs", "values")])
def test_tenants_with_a_head_have_values_in_place_of_log_probs(heads: tuple[Head, ...]) -> None:
    model, inputs = model_of(spec_of()), inputs_of(heads=heads)
    weight, bias = torch.randn(1, HIDDEN, dtype=torch.float64), torch.randn(1, dtype=torch.float64)
    own = OwnHead(weight, bias, torch.zeros_like(weight), torch.zeros_like(bias))
    runs = [AdapterRun(0, 3, {}), AdapterRun(3, 8, {}, head=own)]
    model.requires_grad_(False)
    output, plain = run(model, inputs._replace(adapters=runs)), run(model, inputs._replace(heads=()))
    assert plain.log_probs is not None and plain.values is None and model.norm is not None
    if "log_probs" in (heads or ("log_probs",)):
        expected = plain.log_probs.clone()
        expected[3:8] = 0.0
        assert output.log_probs is not None and output.log_probs.requires_grad
        torch.testing.assert_close(output.log_probs, expected)
    else:
        assert output.log_probs is None
    if "values" in heads:
        values = torch.zeros(TOTAL, dtype=torch.float64)
        values[3:8] = (model.norm(states(model, inputs))[3:8] * weight).sum(-1) + bias
        torch.testing.assert_close(output.values, values)
    else:
        assert output.values is None


MTP = MTPSpec(LayerSpec(OTHER, DENSE), MTPNames.after_layers("model", 3), "joint", 0.3)


@pytest.mark.parametrize("training", ["joint", "detached"])
@pytest.mark.parametrize("changes", [{}, {"tie_word_embeddings": True}, {"head_bias": True, "logit_scale": 0.5}], ids=str)
def test_the_loss_of_the_second_tokens_comes_into_the_gradients(training: Any, changes: dict[str, Any]) -> None:
    spec = spec_of(mtp=replace(MTP, training=training), embedding_scale=1.5, layers=LAYERS[:1], **changes)
    inputs = inputs_of(router_loss_weight=0.5, temperature=0.7)
    second = SecondTokens(inputs.labels, second_labels(inputs.labels), 3, inputs.position_ids, inputs.segments)
    assert second.labels.tolist() == [inputs.input_ids[2], -100, -100, *inputs.input_ids[5:8], -100, -100, -100]
    model, plain = model_of(spec), model_of(replace(spec, mtp=MTP))
    output = run(model, inputs._replace(second=second))
    assert output.log_probs is not None and model.mtp is not None and plain.mtp is not None
    mix = torch.randn(TOTAL, dtype=torch.float64)
    (output.log_probs * mix).sum().backward()
    assert plain.norm is not None and plain.embed_tokens is not None
    hidden = plain.norm(states(plain, inputs, 1.5))
    head: Any = plain.embed_tokens if plain.lm_head is None else plain.lm_head
    weight, bias = head.weight, getattr(head, "bias", None)
    bias = torch.zeros(VOCABULARY, dtype=torch.float64) if bias is None else bias
    log_probs, _ = by_softmax((hidden @ weight.t() + bias) * spec.logit_scale / 0.7, inputs.labels)
    embedding = 1.5 * plain.embed_tokens.weight[inputs.labels.clamp(min=0)]
    if training == "detached":
        hidden, embedding, weight, bias = hidden.detach(), embedding.detach(), weight.detach(), bias.detach()
    both = torch.cat((plain.mtp.embedding_norm(embedding), plain.mtp.hidden_norm(hidden)), -1)
    layer: Any = plain.mtp.layer
    rotation = Rotations(inputs.position_ids, torch.float64).of(layer.rotary)
    predicted = plain.mtp.norm(layer(both @ plain.mtp.projection.weight.t(), rotation, inputs.segments, RouterInput()))
    # The temperature is the caller's distribution's, not this one's.
    of_second, _ = by_softmax((predicted @ weight.t() + bias) * spec.logit_scale, second.labels)
    torch.testing.assert_close(output.log_probs, log_probs)
    ((log_probs * mix).sum() - of_second.sum() * 0.3 * 0.5 / 3).backward()
    for (name, found), expected in zip(model.named_parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(found.grad, expected.grad, msg=name)
    with torch.no_grad():
        torch.testing.assert_close(run(model, inputs).log_probs, log_probs)


def test_only_a_part_may_be_trained_and_a_layer_is_computed_again() -> None:
    model = model_of(spec_of(trained_part="self_attn"))
    trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    assert trained == {name for name, _ in model.named_parameters() if ".self_attn." in name}
    layers, calls = list(model.each_layer()), list[int]()
    for index, layer in enumerate(layers):
        layer.mixer.register_forward_hook(lambda *_, index=index: calls.append(index))
    names = [name for name, _ in model.named_parameters()]
    checkpoint_layers(layers[1:], "full")
    output = run(model, inputs_of()).log_probs
    assert output is not None
    output.sum().backward()
    assert sorted(calls) == [0, 1, 1, 2, 2] and [name for name, _ in model.named_parameters()] == names


FIRST, MIDDLE, LAST = (
    ModelStage(True, range(1), False),
    ModelStage(False, range(1, 2), False),
    ModelStage(False, range(2, 3), True),
)


@pytest.mark.parametrize(
    ("stage", "head", "tied", "ends"),
    [
        (None, "log_probs", False, ["embed_tokens", "lm_head", "mtp", "norm"]),
        (None, "log_probs", True, ["embed_tokens", "mtp", "norm"]),
        (None, "values", True, ["embed_tokens", "norm", "score"]),
        (FIRST, "log_probs", True, ["embed_tokens"]),
        (MIDDLE, "log_probs", True, []),
        # A last stage needs embeddings of its own for the second tokens: its head's, where they are the same.
        (LAST, "log_probs", False, ["lm_head", "mtp", "mtp_embed_tokens", "norm"]),
        (LAST, "log_probs", True, ["mtp", "norm", "tied_head"]),
        (LAST, "values", False, ["norm", "score"]),
    ],
)
def test_a_stage_has_the_ends_that_it_computes_with(
    stage: ModelStage | None, head: Head, tied: bool, ends: list[str]
) -> None:
    spec = spec_of(tie_word_embeddings=tied, mtp=MTP)
    for layer_dtype in (None, torch.bfloat16):
        model = model_of(spec, head, stage, layer_dtype)
        own = {name.partition(".")[0]: getattr(model, name.partition(".")[0]) for name, _ in model.named_parameters()}
        assert sorted(own.keys() - {"layers"}) == ends
        assert list(model.layers) == [str(index) for index in (stage.layers if stage else range(3))]
        wide = {id(own[end]) for end in ends if end != "mtp"} if layer_dtype is not None else set()
        assert {id(end) for end in model.ends_in_float32()} == wide
    kept = model_of(replace(spec, mtp=replace(MTP, training="keep")), head, stage)
    assert sorted({name.partition(".")[0] for name, _ in kept.named_parameters()} - {"layers"}) == [
        end for end in ends if not end.startswith("mtp")
    ]


def routes_seen(model: Decoder, inputs: ModelInput) -> Tensor | None:
    """By the last layer of a model."""
    seen: list[RouterInput] = []
    *_, layer = model.each_layer()
    layer.mlp.register_forward_pre_hook(lambda _, args: seen.append(args[1]))
    model(inputs)
    return seen[0].experts


def test_a_stage_takes_the_routes_of_its_own_layers() -> None:
    routes, hidden = torch.randint(0, 2, (TOTAL, 2, 2)), torch.randn(TOTAL, HIDDEN, dtype=torch.float64)
    for stage, place in ((MIDDLE, 0), (LAST, 1)):
        found = routes_seen(model_of(spec_of(), stage=stage), inputs_of(routes=routes, hidden=hidden))
        assert found is not None and torch.equal(found, routes[:, place])


def test_predictions_of_rows_in_another_order_have_the_heads_of_their_own_labels() -> None:
    """Labels, temperatures and heads go by predictions, what layers adapt by rows."""
    model, plain = model_of(spec_of()).requires_grad_(False), inputs_of()
    weight, bias = torch.randn(1, HIDDEN, dtype=torch.float64), torch.randn(1, dtype=torch.float64)
    own = OwnHead(weight, bias, torch.zeros_like(weight), torch.zeros_like(bias))
    temperature = torch.linspace(0.5, 1.5, TOTAL, dtype=torch.float64)
    whole = plain._replace(
        heads=("log_probs", "values"),
        adapters=[AdapterRun(3, 8, {}, head=own)],
        temperature=temperature,
        calculate_entropy=True,
    )
    expected = run(model, whole)
    turned = whole._replace(
        of_rows=torch.arange(TOTAL).flip(0),
        labels=whole.labels.flip(0),
        temperature=temperature.flip(0),
        head_adapters=[AdapterRun(1, 6, {}, head=own)],
    )
    found = run(model, turned)
    for mine, right in (
        (found.log_probs, expected.log_probs),
        (found.entropy, expected.entropy),
        (found.values, expected.values),
    ):
        assert mine is not None and right is not None and right.any()
        torch.testing.assert_close(mine, right.flip(0))
    critic = model_of(spec_of(), "values")
    values, in_order = run(critic, turned._replace(adapters=(), head_adapters=None)).values, run(critic, plain).values
    assert values is not None and in_order is not None
    torch.testing.assert_close(values, in_order.flip(0))


@pytest.mark.parametrize("layer_dtype", [None, torch.bfloat16], ids=str)
def test_the_scale_of_embeddings_is_rounded_to_their_dtype(layer_dtype: torch.dtype | None) -> None:
    """As transformers' Gemma has it: 45.37 is 45.25 in bfloat16."""
    model = model_of(spec_of(embedding_scale=45.37), layer_dtype=layer_dtype).float()
    ids = torch.arange(VOCABULARY)
    assert model.embed_tokens is not None
    weight = model.embed_tokens.weight.detach().clone()
    if layer_dtype is None:
        torch.testing.assert_close(model._look_up(model.embed_tokens, ids), weight * 45.37)
        model.bfloat16()
    found = model._look_up(model.embed_tokens, ids)
    assert found.dtype == torch.bfloat16
    assert torch.equal(found, (weight.bfloat16().float() * 45.25).bfloat16())
    assert not torch.equal(found, (weight.bfloat16().float() * 45.37).bfloat16()), "it makes a difference"


def test_the_router_of_second_tokens_knows_their_padding_and_sequences() -> None:
    mtp = replace(MTP, layer=LayerSpec(ATTENTION, MIXTURE))
    model, inputs = model_of(spec_of(mtp=mtp, layers=LAYERS[:1])), inputs_of(router_loss_weight=0.25)
    padding, of_rows = torch.zeros(TOTAL, dtype=torch.bool), RowSequences(torch.arange(TOTAL) % 3, 3)
    second = SecondTokens(inputs.labels, second_labels(inputs.labels), 3, inputs.position_ids, inputs.segments)
    seen: list[RouterInput] = []
    assert model.mtp is not None
    layer: Any = model.mtp.layer
    layer.mlp.register_forward_pre_hook(lambda _, args: seen.append(args[1]))
    run(model, inputs._replace(second=second._replace(padding=padding, sequences=of_rows)))
    (router,) = seen
    assert router.padding is padding and router.sequences is of_rows
    assert (router.loss_weight, router.experts, layer.place) == (0.25, None, 0)
