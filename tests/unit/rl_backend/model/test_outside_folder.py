"""The model folder of ``docs/adding_a_model.md``: it lies outside the package and is used through its plugin alone."""

from __future__ import annotations

import inspect
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from rl_backend.contracts import CheckpointError, NativeConfig, RuntimeConfig, UnsupportedError
from rl_backend.model import find_model
from rl_backend.model.decoder_spec import DecoderSpec
from rl_backend.model.families import dense as variants
from rl_backend.model.feedforward.dense import MLPSpec, SwiGLUSpec
from rl_backend.model.mixers.gqa import GQASpec
from rl_backend.primitive.activation import ACTIVATIONS
from rl_backend.runtime import create_runtime
from tests.support.claims import ROOT
from tests.support.families import load_transformers, run_transformers
from tests.support.models import write_tiny
from tests.support.native import micro_batches, token_loss

PLUGIN = "tests.support.gpt_neox"
FOLDER = ROOT / "tests" / "support" / "gpt_neox"
PAGE = ROOT / "docs" / "adding_a_model.md"
SPLIT = [[3, 0], [1, 7, 2], [6], [4, 5]]


def write(path: Path, **changes: Any) -> Path:
    settings = {"num_attention_heads": 2, "num_key_value_heads": None, "head_dim": None, "tie_word_embeddings": False}
    return write_tiny("gpt_neox", path, max_shard_size="1GB", **{**settings, **changes})


def make_config(path: Path) -> RuntimeConfig:
    return RuntimeConfig(plugins=(PLUGIN,), hf_path=str(path), backend_cfg=NativeConfig(device="cpu"))


@pytest.fixture(params=[True, False], ids=["parallel residual", "sequential residual"])
def model_dir(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    return write(tmp_path / "model", use_parallel_residual=request.param)


@pytest.mark.parametrize("file", ["config.py", "model.py", "parallelize.py", "weights.py", "__init__.py"])
def test_the_code_on_the_page_is_the_code_that_is_tested(file: str) -> None:
    blocks = dict(re.findall(r"`my_models/gpt_neox/([\w.]+)`:\n\n```python\n(.*?)```", PAGE.read_text(), re.DOTALL))
    assert blocks[file] == (FOLDER / file).read_text().replace("tests.support.", "my_models.")


def test_log_probs_and_gradients_equal_transformers(model_dir: Path) -> None:
    data = micro_batches(SPLIT)
    reference = load_transformers(model_dir)
    expected = run_transformers(reference, [part for batch in data for part in batch.split(batch.input_ids)])
    mask = torch.cat([batch.token_field("loss_mask") for batch in data])
    (-(expected.log_probs * mask).sum() / data[0].meta["batch_num_tokens"]).backward()
    runtime = create_runtime(make_config(model_dir))
    try:
        handle = runtime.build_model()
        found = runtime.forward_backward(handle, data, token_loss)
        torch.testing.assert_close(torch.cat(list(found.output("log_probs"))), expected.log_probs, atol=1e-5, rtol=0)
        for name, parameter in handle.parameters.items():
            gradient = reference.get_parameter(handle.weight_names[name]).grad
            scale = float(gradient.abs().max())
            torch.testing.assert_close(parameter.grad, gradient, atol=1e-5 * scale, rtol=0, msg=name)
    finally:
        runtime.close()


@pytest.mark.shows("extending: a third party's model folder trains, is saved and is pushed to vLLM without an edit here")
def test_it_trains_and_is_saved_for_transformers(model_dir: Path, tmp_path: Path) -> None:
    runtime = create_runtime(make_config(model_dir))
    try:
        handle = runtime.build_model()
        stored = load_file(model_dir / "model.safetensors")
        exported = dict(runtime.export_weights(handle))
        assert exported.keys() == stored.keys()
        assert all(torch.equal(exported[name], tensor) for name, tensor in stored.items())
        losses = []
        for _ in range(6):
            runtime.zero_grad(handle)
            losses.append(runtime.forward_backward(handle, micro_batches(SPLIT), token_loss).loss)
            assert runtime.optimizer_step(handle).ok
        assert losses == sorted(losses, reverse=True)
        runtime.save_checkpoint(handle, tmp_path / "saved", hf=True)
        (after,) = micro_batches([[5, 1]])
        result = runtime.forward_backward(handle, [after], None, forward_only=True)
    finally:
        runtime.close()
    with torch.no_grad():
        expected = run_transformers(load_transformers(tmp_path / "saved"), after.split(after.input_ids))
    torch.testing.assert_close(torch.cat(list(result.output("log_probs"))), expected.log_probs, atol=1e-5, rtol=0)


def test_stored_buffers_that_it_names_are_not_read_and_others_are_refused(tmp_path: Path) -> None:
    path = write(tmp_path / "model")
    weights = load_file(path / "model.safetensors")
    mask = {"gpt_neox.layers.0.attention.masked_bias": torch.tensor(-1e9)}
    save_file({**weights, **mask}, path / "model.safetensors")
    runtime = create_runtime(make_config(path))
    try:
        assert isinstance(runtime.build_model().model, nn.Module)
        save_file({**weights, "gpt_neox.extra": torch.zeros(1)}, path / "model.safetensors")
        with pytest.raises(CheckpointError, match=r"gpt_neox.extra"):
            runtime.build_model()
        with pytest.raises(UnsupportedError, match="head='values': model family 'gpt_neox' has only 'log_probs'"):
            runtime.build_model(head="values")
    finally:
        runtime.close()


def test_what_it_does_not_implement_is_refused_by_name(tmp_path: Path) -> None:
    make_config(write(tmp_path / "model"))
    family = find_model("gpt_neox", {})
    for changes in ({"hidden_act": "relu"}, {"rope_scaling": {"type": "linear", "factor": 2.0}}, {"hidden_dropout": 0.1}):
        ((field, _),) = changes.items()
        with pytest.raises(UnsupportedError, match=f"config.json: {field}=.*native gpt_neox family"):
            family.parse_config({"model_type": "gpt_neox", **changes})


def test_sequences_see_each_other_in_no_pack(tmp_path: Path) -> None:
    path = write(tmp_path / "model")
    runtime = create_runtime(make_config(path))
    try:
        handle = runtime.build_model(forward_only=True)
        packed = runtime.forward_backward(handle, micro_batches([[0, 1, 2]]), None, forward_only=True).output("log_probs")
        alone = runtime.forward_backward(handle, micro_batches([[0], [1], [2]]), None, forward_only=True)
        for one, other in zip(packed, alone.output("log_probs"), strict=True):
            torch.testing.assert_close(one, other, atol=1e-6, rtol=1e-6)
    finally:
        runtime.close()


def test_the_comparison_on_the_page_runs_as_it_stands(tmp_path: Path) -> None:
    (code,) = re.findall(r"^## 6\..*?```python\n(.*?)```", PAGE.read_text(), re.DOTALL | re.MULTILINE)
    names = {"model_dir": str(write(tmp_path / "model")), "saved_dir": str(tmp_path / "saved")}
    exec(compile(code.replace("my_models.", "tests.support."), PAGE.name, "exec"), names)
    assert names["losses"] == sorted(names["losses"], reverse=True)


def test_the_page_quotes_qwen2_as_it_is() -> None:
    (code,) = re.findall(r"^## Before you write one.*?```python\n(.*?)```", PAGE.read_text(), re.DOTALL | re.MULTILINE)
    source = (ROOT / "rl_backend" / "model" / "families" / "dense.py").read_text()
    assert [line for line in code.splitlines() if line not in source] == []


def test_the_page_quotes_a_variant_of_llama_and_names_fields_that_there_are() -> None:
    section = PAGE.read_text().split("### Llama, but")[1].split("### Other layers")[0]
    (code,) = re.findall(r"```python\n(.*?)```", section, re.DOTALL)
    assert code.strip() == inspect.getsource(variants.olmo2).strip()
    known = {name for each in (DecoderSpec, GQASpec, SwiGLUSpec, MLPSpec) for name in each.__dataclass_fields__}
    named = re.findall(r"`(?:DecoderSpec\.|GQASpec\.|SwiGLUSpec\.|MLPSpec\.)?([a-z_]+)`", section.split("| field |")[1])
    others = {"default_rotary_part", "read_decoder", *ACTIVATIONS}
    assert [name for name in named if name not in known | others] == []
