"""What vLLM refuses is told in one sentence with our names; its traceback is kept for a file."""

from __future__ import annotations

import json
import shutil
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from pydantic import BaseModel, ValidationError, model_validator
from safetensors.torch import save_file

from actors.rollout.config import RolloutConfig, within_model
from actors.rollout.group import group
from actors.rollout.vllm.process import _check_states, in_our_words, start_vllm
from actors.run import session
from rl_backend.checkpoint.hf_reader import WEIGHTS_INDEX, HFReader
from rl_backend.contracts import CheckpointError, ConfigError, RolloutError
from tests.support.models import write_tiny

SAID = (
    "User-specified max_model_len (536) is greater than the derived max_model_len\n(max_position_embeddings=512.0). "
    "Lower --tensor-parallel-size, or the model does not fit."
)


class Refusing(BaseModel):
    value: int

    @model_validator(mode="after")
    def _refuse(self) -> Refusing:
        raise ValueError(SAID)


def test_a_validation_error_becomes_its_sentence_with_our_fields() -> None:
    with pytest.raises(ValidationError) as refused:
        Refusing(value=1)
    assert in_our_words(refused.value) == (
        "User-specified RolloutConfig.max_model_len (536) is greater than the derived RolloutConfig.max_model_len "
        "(max_position_embeddings=512.0). Lower RolloutConfig.tensor_parallel, or the model does not fit."
    )
    with pytest.raises(ValidationError) as refused:
        Refusing.model_validate({"value": "many"})
    assert in_our_words(refused.value).startswith("value: Input should be a valid integer")
    assert in_our_words(AssertionError()) == "AssertionError"
    assert len(in_our_words(RuntimeError("x" * 9000))) < 500


def test_the_traceback_goes_to_a_file_of_the_run_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run_dir = tmp_path / "new" / "run"

    def start(config: Any) -> None:
        raise RolloutError("engine 0: vLLM does not start", traceback="Traceback: of vLLM")

    monkeypatch.setattr(session, "RolloutGroup", start)
    with (
        pytest.raises(RolloutError, match=rf"does not start; all that vLLM said is in {run_dir}/engines\.log$") as refused,
        session.log_of_engines(str(run_dir)),
    ):
        session.RolloutGroup(RolloutConfig(model_path="m"))
    assert refused.value.__cause__ is None
    assert (run_dir / "engines.log").read_text() == "Traceback: of vLLM"


def test_an_evaluation_that_writes_nothing_keeps_the_traceback_in_a_temporary_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with (
        pytest.raises(RolloutError, match=rf"all that vLLM said is in {tmp_path}/\S+/engines\.log$"),
        session.log_of_engines(None),
    ):
        raise RolloutError("engine 0: vLLM does not start", traceback="Traceback: of vLLM")
    (log,) = tmp_path.rglob("engines.log")
    assert log.read_text() == "Traceback: of vLLM"


def test_engines_take_no_longer_sequences_than_their_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = str(write_tiny("qwen3", tmp_path))
    assert within_model(RolloutConfig(model_path=model)).max_model_len == 512
    assert within_model(RolloutConfig(model_path=model, max_model_len=64)).max_model_len == 64
    assert within_model(RolloutConfig(model_path="elsewhere", max_model_len=9999)).max_model_len == 9999
    monkeypatch.setattr(group.ray, "is_initialized", lambda: True)
    with pytest.raises(ConfigError, match=r"RolloutConfig\.max_model_len=536: \S+ has 512 positions .*; use at most 512$"):
        group.RolloutGroup(RolloutConfig(model_path=model, max_model_len=536))


@pytest.mark.shows("rollout: engines keep recurrent states in float32, or do not start")
def test_an_engine_that_rounds_its_recurrent_states_does_not_start() -> None:
    _check_states(SimpleNamespace(collective_rpc=lambda method: [["float32", "float32"], []]))
    rounding = SimpleNamespace(collective_rpc=lambda method: [["float32"], ["bfloat16"]])
    with pytest.raises(RolloutError, match=r"keeps recurrent states in bfloat16 .*mamba_ssm_cache_dtype='float32'"):
        _check_states(rounding)
    for name in ("mamba_ssm_cache_dtype", "language_model_only"):
        with pytest.raises(ConfigError, match=rf"engine_args\['{name}'\].*rollout engines set it themselves"):
            RolloutConfig(model_path="m", engine_args={name: "bfloat16"})


def test_an_engine_does_not_start_with_a_head_that_is_not_the_embeddings_it_is_tied_to(
    tied_model: Path, tmp_path: Path
) -> None:
    model = shutil.copytree(tied_model, tmp_path / "model")
    head = HFReader(model).read("model.embed_tokens.weight") + 1.0
    index = json.loads((model / WEIGHTS_INDEX).read_text())
    index["weight_map"]["lm_head.weight"] = "head.safetensors"
    (model / WEIGHTS_INDEX).write_text(json.dumps(index))
    save_file({"lm_head.weight": head}, model / "head.safetensors")
    with pytest.raises(CheckpointError, match=r"a lm_head\.weight that differs from its embeddings"):
        start_vllm(RolloutConfig(model_path=str(model)), "cpu")
