"""Every option of sampling reaches vLLM."""

from __future__ import annotations

import pytest

from actors.rollout.config import SamplingConfig

pytest.importorskip("vllm", reason="vLLM is not installed")

from actors.rollout.engine.stepper import sampling_params


def test_every_option_of_sampling_is_vllms() -> None:
    given = {
        "n": 3,
        "temperature": 0.7,
        "top_p": 0.8,
        "top_k": 11,
        "min_p": 0.05,
        "max_new_tokens": 33,
        "stop_token_ids": (5, 9),
        "stop_strings": ("</a>", "."),
        "log_probs": True,
    }
    assert set(given) == set(SamplingConfig.model_fields)
    found = sampling_params(SamplingConfig(**given), 77)  # type: ignore[arg-type]
    assert (found.seed, found.temperature, found.top_p, found.top_k, found.min_p) == (77, 0.7, 0.8, 11, 0.05)
    assert (found.max_tokens, found.stop_token_ids, found.stop) == (33, [5, 9], ["</a>", "."])
    assert (found.n, found.logprobs, found.ignore_eos, found.detokenize) == (1, 0, True, True)
    assert found.include_stop_str_in_output is False and found.skip_special_tokens is False
    plain = sampling_params(SamplingConfig(log_probs=False, temperature=0.0), None)
    assert (plain.seed, plain.logprobs, plain.detokenize, plain.stop, plain.stop_token_ids) == (None, None, False, [], [])
    assert (plain.temperature, plain.top_p, plain.top_k, plain.min_p) == (0.0, 1.0, 0, 0.0)
