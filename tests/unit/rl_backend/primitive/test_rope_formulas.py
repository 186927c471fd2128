"""Rotary embeddings by their published formulas, dimension by dimension, and what a micro-batch keeps of them."""

from __future__ import annotations

import math

import pytest
import torch

from rl_backend.primitive.rope import (
    LinearScaling,
    Llama3Scaling,
    Rotary,
    RotaryScaling,
    Rotations,
    YarnScaling,
    apply_rotary,
    rotary_cos_sin,
    yarn_attention_factor,
    yarn_temperature,
)

HEAD_DIM, THETA = 10, 50.0
PLAIN: list[float] = [THETA ** (-2 * place / HEAD_DIM) for place in range(HEAD_DIM // 2)]


def llama3(frequency: float, scaling: Llama3Scaling) -> float:
    rotations = scaling.original_max_position_embeddings * frequency / (2 * math.pi)
    if rotations > scaling.high_freq_factor:
        return frequency
    if rotations < scaling.low_freq_factor:
        return frequency / scaling.factor
    share = (rotations - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    return share * frequency + (1 - share) * frequency / scaling.factor


def yarn(place: int, scaling: YarnScaling) -> float:
    """Equations 13 to 17 of YaRN as its code has them: the ramp is over dimensions."""

    def dimension(rotations: float) -> float:
        length = scaling.original_max_position_embeddings
        return HEAD_DIM * math.log(length / (rotations * 2 * math.pi)) / (2 * math.log(THETA))

    low, high = dimension(scaling.beta_fast), dimension(scaling.beta_slow)
    if scaling.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, HEAD_DIM - 1)
    ramp = min(max((place - low) / ((high - low) or 0.001), 0.0), 1.0)
    return float(PLAIN[place] * (1 - ramp) + PLAIN[place] / scaling.factor * ramp)


@pytest.mark.parametrize("length", [20, 60, 200, 2000])
@pytest.mark.parametrize("factor", [1.0, 2.5, 8.0])
def test_scaled_frequencies_are_those_of_the_formulas(length: int, factor: float) -> None:
    three = Llama3Scaling(factor, 1.5, 4.5, length)
    scalings: list[tuple[RotaryScaling | None, list[float]]] = [
        (None, PLAIN),
        (LinearScaling(factor), [each / factor for each in PLAIN]),
        (three, [llama3(each, three) for each in PLAIN]),
    ]
    for truncate in (True, False):
        for fast, slow in ((32.0, 1.0), (4.0, 2.0), (3.0, 3.0)):
            long = YarnScaling(factor, length, 1.0, fast, slow, truncate)
            scalings.append((long, [yarn(place, long) for place in range(HEAD_DIM // 2)]))
    for scaling, expected in scalings:
        found = Rotary(HEAD_DIM, THETA, scaling).frequencies()
        assert found.dtype == torch.float32
        torch.testing.assert_close(found, torch.tensor(expected), rtol=1e-5, atol=1e-9)


@pytest.mark.parametrize("attention_factor", [1.0, 0.7, 1.3])
def test_cosines_and_sines_are_scaled_and_repeat_in_the_second_half(attention_factor: float) -> None:
    rotary = Rotary(HEAD_DIM, THETA, YarnScaling(2.0, 100, attention_factor))
    positions = torch.tensor([0, 3, 11])
    cos, sin = rotary_cos_sin(positions, rotary, torch.float32)
    assert cos.shape == sin.shape == (3, 1, HEAD_DIM)
    for row, position in enumerate(positions.tolist()):
        for place, frequency in enumerate(rotary.frequencies().tolist()):
            for each in (place, place + HEAD_DIM // 2):
                assert float(cos[row, 0, each]) == pytest.approx(attention_factor * math.cos(position * frequency), abs=1e-6)
                assert float(sin[row, 0, each]) == pytest.approx(attention_factor * math.sin(position * frequency), abs=1e-6)
    rounded = rotary_cos_sin(positions, rotary, torch.bfloat16)
    assert all(torch.equal(low, high.bfloat16()) for low, high in zip(rounded, (cos, sin), strict=True))


def test_far_positions_are_angles_of_float32() -> None:
    """bfloat16 has no 1001, and no angle of it."""
    cos, _ = rotary_cos_sin(torch.tensor([1001]), Rotary(2, 10.0), torch.bfloat16)
    assert float(cos[0, 0, 0]) == pytest.approx(math.cos(1001.0), abs=5e-3)


def test_halves_are_rotated_by_the_angle_and_the_input_stays() -> None:
    x = torch.tensor([[[1.0, 2.0, 3.0, 4.0]]], dtype=torch.float64)
    before = x.clone()
    angles = torch.tensor([0.3, 1.1], dtype=torch.float64).repeat(2).view(1, 1, 4)
    c, s = angles.cos(), angles.sin()
    # A sine of its own for each half shows which is read where.
    s = s * torch.tensor([1.0, 1.0, 2.0, 2.0], dtype=torch.float64)
    found = apply_rotary(x, c, s)[0, 0]
    (c0, c1), (s0, s1, s2, s3) = c[0, 0, :2].tolist(), s[0, 0].tolist()
    expected = [c0 - 3 * s0, 2 * c1 - 4 * s1, 3 * c0 + s2, 4 * c1 + 2 * s3]
    torch.testing.assert_close(found, torch.tensor(expected, dtype=torch.float64))
    assert torch.equal(x, before)


@pytest.mark.parametrize(
    ("factor", "mscale", "mscale_all_dim", "expected"),
    [
        (4.0, None, None, 0.1 * math.log(4) + 1),
        (4.0, 0.7, None, 0.1 * math.log(4) + 1),
        (4.0, 0.0, 0.5, 0.1 * math.log(4) + 1),
        (4.0, 0.7, 0.5, (0.07 * math.log(4) + 1) / (0.05 * math.log(4) + 1)),
        (4.0, 1.0, 1.0, 1.0),
        (1.0, None, None, 1.0),
        (0.5, None, None, 1.0),
        (0.5, 2.0, 3.0, 1.0),
    ],
)
def test_the_factor_of_attention_is_that_of_yarn_or_of_deepseek(
    factor: float, mscale: float | None, mscale_all_dim: float | None, expected: float
) -> None:
    assert yarn_attention_factor(factor, mscale, mscale_all_dim) == pytest.approx(expected, rel=1e-12)


def test_a_temperature_grows_with_the_logarithm_of_the_factor() -> None:
    assert yarn_temperature(math.e**2, 3.0) == pytest.approx(1.6)
    assert yarn_temperature(1.0, 3.0) == yarn_temperature(0.1, 3.0) == 1.0


def test_a_micro_batch_computes_each_embedding_once() -> None:
    rotations = Rotations(torch.arange(4), torch.float64)
    assert rotations.of(None) is None
    one, other = rotations.of(Rotary(4, 10.0)), rotations.of(Rotary(4, 20.0))
    assert one is not None and other is not None and not torch.equal(one[0], other[0])
    assert rotations.of(Rotary(4, 10.0)) is one and rotations.of(Rotary(4, 20.0)) is other
    assert one[0].dtype == torch.float64 and one[0].shape == (4, 1, 4)
    again = Rotations(torch.arange(4) + 1, torch.float64).of(Rotary(4, 10.0))
    assert again is not None and not torch.equal(again[0], one[0]), "positions are a micro-batch's"


def test_a_context_shorter_than_every_wave_leaves_the_first_frequency_alone_as_it_is() -> None:
    """Both of YaRN's dimensions are then the first, between which nothing can be linear."""
    plain = Rotary(8, 1e4).frequencies()
    found = Rotary(8, 1e4, YarnScaling(4.0, 2, 1.0)).frequencies()
    torch.testing.assert_close(found, plain * torch.tensor([1.0, 0.25, 0.25, 0.25]))


def test_angles_in_bfloat16_are_those_of_whole_positions() -> None:
    """In bfloat16 257 is 256."""
    rotary, positions = Rotary(8, 10_000.0), torch.tensor([256, 257])
    found = Rotations(positions, torch.bfloat16).of(rotary)
    assert found is not None
    for mine, expected in zip(found, rotary_cos_sin(positions, rotary, torch.bfloat16), strict=True):
        assert torch.equal(mine, expected) and not torch.equal(mine[0], mine[1])
