"""What cannot work is refused before Ray, in one sentence that names the option and a value that works."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import ray
import torch
from safetensors.torch import load_file, save_file

from actors import RLRun, preflight
from actors.checks.model import require_readable_weights
from actors.checks.preflight import findings
from actors.folder.folder import RunFolder
from actors.folder.resume import RunFinishedError, find_start
from examples.demo.task import write_task
from examples.grpo import GRPOConfig
from examples.ppo import PPOConfig
from examples.sft import SFTConfig
from examples.sft import train as train_sft
from rl_backend.checkpoint.hf_reader import SINGLE_FILE
from rl_backend.contracts import CheckpointError, ConfigError, RLBackendError
from tests.support.models import write_tiny

REWARD = "examples.demo.task:compute_score"
OF_MODEL = r"^GRPOConfig\.model='\S+': "


@pytest.fixture(scope="module")
def task(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Model and data of the demo; the model has 64 positions and 4 heads."""
    folder = tmp_path_factory.mktemp("task")
    write_task(folder, seed=0)
    rows = (folder / "train.jsonl").read_text().splitlines(keepends=True)
    (folder / "train.jsonl").write_text("".join(rows[:64]))
    return folder


@pytest.fixture
def options(task: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    return {
        "model": str(task / "model"),
        "dataset": str(task / "train.jsonl"),
        "reward": REWARD,
        "run_dir": str(tmp_path / "run"),
        "max_tokens_per_micro_batch": 1024,
    }


def copy_of(task: Path, path: Path, **config: Any) -> Path:
    """The model with other values in ``config.json``."""
    shutil.copytree(task / "model", path)
    values = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps({**values, **config}))
    return path


def refusal(config: GRPOConfig) -> str:
    """Of a run of the library, which starts nothing and leaves no folder; ``preflight`` says the same."""
    with pytest.raises(RLBackendError) as refused:
        RLRun(config)
    assert not ray.is_initialized()
    assert not Path(config.run_dir).exists()
    with pytest.raises(type(refused.value)) as found:
        preflight(config)
    assert str(found.value) == str(refused.value)
    assert "\n" not in str(refused.value)
    return str(refused.value)


@pytest.mark.shows(
    "runs: what cannot work is refused before Ray starts, in one sentence with the option and a value that works"
)
@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"max_response_tokens": 100}, r"max_response_tokens=100: \S+ has 64 positions .*; use at most 63$"),
        ({"max_prompt_tokens": 60, "max_response_tokens": 24}, r"max_prompt_tokens=60: .*; use at most 40, or fewer"),
        ({"rollout.max_model_len": 4096}, r"RolloutConfig\.max_model_len=4096: \S+ has 64 positions .*; use at most 64$"),
        ({"tp": 3, "ranks": 3}, r"ParallelConfig\.tp=3: does not divide num_attention_heads=4 .*; use 2 or 4$"),
        ({"ep": 2, "ranks": 2}, r"ParallelConfig\.ep=2: this model has no experts; use 1$"),
        ({"pp": 4, "ranks": 4}, r"ParallelConfig\.pp=4: .* the model has 3; use at most 3 stages$"),
        ({"backend": "bridge", "tp": 8, "ranks": 8}, r"BridgeConfig\.parallel\.tp=8: .*num_attention_heads=4, .*; use 2$"),
        ({"backend": "bridge", "tp": 4, "ranks": 4}, r"BridgeConfig\.parallel\.tp=4: .*num_key_value_heads=2; use 2$"),
        ({"backend": "bridge", "pp": 2, "ranks": 2}, r"BridgeConfig\.parallel\.pp=2: 3 layers do not divide"),
        ({"backend": "bridge", "cp": 2, "ranks": 2}, r"BridgeConfig\.parallel\.cp=2: .*; use 1$"),
        ({"model": "/nowhere"}, r"GRPOConfig\.model='/nowhere': no such folder .*; give a folder with config.json"),
        ({"dataset": "missing.jsonl"}, r"dataset='missing.jsonl': no such file"),
        ({"prompts_per_step": 6000}, r"GRPOConfig\.prompts_per_step=6000: \S+ has 64 prompts; use at most that$"),
        (
            {"reward": "nowhere.py:score"},
            r"RewardConfig\.functions='nowhere.py:score': .*FileNotFoundError",
        ),
        ({"train.backend_cfg.device": "cuda"}, r"NativeConfig\.device='cuda': PyTorch sees 0 GPUs .*; use auto or cpu$"),
        ({"rollout.device": "cuda"}, r"RolloutConfig\.device='cuda': this machine has no GPU .*; use auto or cpu$"),
        (
            {"rollout.gpu_memory_utilization": 0.5},
            r"gpu_memory_utilization=0\.5: applies to GPU engines only",
        ),
        ({"transport": "nccl"}, r"GRPOConfig\.transport='nccl': sends from GPU to GPU; on CPUs use auto"),
        ({"rollout.tensor_parallel": 3}, r"RolloutConfig\.tensor_parallel=3: does not divide num_attention_heads=4"),
        (
            {"rollout.cores_per_engine": 5000},
            r"RolloutConfig\.cores_per_engine=5000: this machine has \d+ cores; use at most",
        ),
        (
            {"rollout.engine_args": {"max_num_seq": 8}},
            r"RolloutConfig\.engine_args=\['max_num_seq'\]: .* mean max_num_seqs\?$",
        ),
        ({"rollout.engine_args": {"unheard_of": 1}}, r"vllm\.EngineArgs has no such argument; leave it out$"),
        ({"rollout.cores": [[4999]]}, r"RolloutConfig\.cores=\[4999\]: this process may only use cores"),
        ({"rollout.kv_cache_gib": 1e6}, r"GRPOConfig\.model=.* take \d+\.\d+ GiB, and this machine has .*; use a smaller"),
        ({"lora.rank": 8, "lora.targets": ["q"]}, r"LoRAConfig\.targets='q': no module of this name"),
        ({"resume": "latest"}, r"^resume='latest': is no folder; give auto, or a checkpoint, such as"),
        ({"router_replay": "R2"}, r"GRPOConfig\.router_replay='R2': .*model is a dense model .*; use off$"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, dict) else "",
)
@pytest.mark.skipif(torch.cuda.is_available(), reason="some of them work with GPUs")
def test_options_that_do_not_fit_model_data_or_machine(
    options: dict[str, Any], changes: dict[str, Any], message: str
) -> None:
    config = GRPOConfig(**{**options, **changes})
    with pytest.raises(RLBackendError, match=message):
        preflight(config)
    assert not ray.is_initialized()


def break_header(model: Path) -> None:
    (model / SINGLE_FILE).write_bytes((model / SINGLE_FILE).read_bytes()[:1000])


def leave_out_the_end(model: Path) -> None:
    file = model / "tokenizer_config.json"
    file.write_text(json.dumps({name: value for name, value in json.loads(file.read_text()).items() if name != "eos_token"}))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda model: (model / "config.json").unlink(), r"GRPOConfig\.model='\S+': has no config.json; give the folder"),
        (
            lambda model: (model / "config.json").rename(model / "adapter_config.json"),
            r"model='\S+': has adapters alone; give",
        ),
        (lambda model: (model / "run.json").write_text("{}"), r"model='\S+': is a run's folder; give \S+/model$"),
        (lambda model: (model / "config.json").write_text("{"), r"GRPOConfig\.model='\S+': \S+ cannot be read as JSON"),
        (lambda model: (model / SINGLE_FILE).unlink(), r"GRPOConfig\.model='\S+': \S+ has no \*\.safetensors file"),
        (break_header, r"GRPOConfig\.model='\S+': \S+ is truncated or corrupt"),
        (
            lambda model: (model / "tokenizer.json").unlink(),
            r"^model='\S+': has no tokenizer \(none of tokenizer\.json, .*; add",
        ),
        (leave_out_the_end, r"^model='\S+': its tokenizer has no eos_token; responses would never end"),
    ],
    ids=[
        "no config",
        "an adapter",
        "a run",
        "damaged config",
        "no weights",
        "half of the weights",
        "no tokenizer",
        "no end of text",
    ],
)
def test_a_model_directory_that_lacks_something(
    task: Path, options: dict[str, Any], tmp_path: Path, change: Callable[[Path], object], message: str
) -> None:
    model = copy_of(task, tmp_path / "model")
    change(model)
    text = refusal(GRPOConfig(**{**options, "model": str(model)}))
    assert re.search(message, text), text


@pytest.mark.parametrize(
    ("backend", "fields", "message"),
    [
        ("native", {"model_type": "mamba"}, rf"{OF_MODEL}model_type='mamba': no registered model family; .*register_model"),
        ("bridge", {"model_type": "gpt_neox"}, rf"{OF_MODEL}Megatron-Bridge has no bridge for model_type='gpt_neox' .* may"),
        ("bridge", {"model_type": "own"}, rf"{OF_MODEL}transformers has no configuration for model_type='own'"),
        ("native", {"hidden_act": "gelu"}, rf"{OF_MODEL}config\.json: hidden_act='gelu'"),
        ("native", {"num_hidden_layers": 4, "layer_types": None}, r"GRPOConfig\.model=.* has no tensor model\.layers\.3"),
        ("native", {"intermediate_size": 256}, r"GRPOConfig\.model=.* of shape .*, not "),
        ("native", {"vocab_size": 1}, r"GRPOConfig\.model=.* of shape"),
    ],
    ids=str,
)
def test_a_config_that_the_runtime_or_the_weights_do_not_fit(
    task: Path, options: dict[str, Any], tmp_path: Path, backend: str, fields: dict[str, Any], message: str
) -> None:
    model = copy_of(task, tmp_path / "model", **fields)
    with pytest.raises(RLBackendError, match=message):
        preflight(GRPOConfig(**{**options, "model": str(model), "backend": backend}))


@pytest.mark.shows("commands: check and eval refuse a directory that says that its head is its embeddings, and has another")
def test_a_head_that_is_not_the_embeddings_is_found_before_anything_is_started(
    task: Path, options: dict[str, Any], tmp_path: Path
) -> None:
    model = copy_of(task, tmp_path / "model", tie_word_embeddings=True)
    weights = load_file(model / SINGLE_FILE)
    weights["lm_head.weight"] = weights["model.embed_tokens.weight"].clone()
    save_file(weights, model / SINGLE_FILE)
    preflight(GRPOConfig(**{**options, "model": str(model)}))
    require_readable_weights("EvalConfig.model", str(model))
    weights["lm_head.weight"][-1, -1] += 1.0
    save_file(weights, model / SINGLE_FILE)
    for backend in ("native", "bridge"):
        with pytest.raises(
            CheckpointError, match=r"^GRPOConfig\.model=.*a lm_head\.weight that differs from its embeddings"
        ):
            preflight(GRPOConfig(**{**options, "model": str(model), "backend": backend}))
    with pytest.raises(CheckpointError, match=r"^EvalConfig\.model=.*a lm_head\.weight that differs from its embeddings"):
        require_readable_weights("EvalConfig.model", str(model))


@pytest.mark.parametrize("merging", [{"push": "merged"}, {"save_merged": True}], ids=str)
def test_merged_weights_of_one_end_of_tied_embeddings_are_refused_before_anything_is_started(
    task: Path, options: dict[str, Any], tmp_path: Path, merging: dict[str, Any]
) -> None:
    untied = write_tiny("qwen3", tmp_path / "model", vocab_size=64, max_position_embeddings=2048, tie_word_embeddings=False)
    for file in (task / "model").glob("token*"):
        shutil.copy(file, untied)
    for model, targets, refused in (
        (task / "model", ("attention", "lm_head"), True),
        (task / "model", ("embedding",), True),
        (task / "model", ("attention",), False),
        (untied, ("head", "embedding"), False),
    ):
        config = GRPOConfig(**{**options, "model": str(model), "lora": {"rank": 4, "targets": targets, **merging}})
        with pytest.raises(ConfigError, match=r"whose head is its embedding") if refused else nullcontext():
            preflight(config)


def test_a_tokenizer_of_another_model_is_refused(options: dict[str, Any], task: Path, tmp_path: Path) -> None:
    model = write_tiny("qwen3", tmp_path / "model", vocab_size=1)
    for file in (task / "model").glob("token*"):
        shutil.copy(file, model)
    with pytest.raises(ConfigError, match=r"ends a text with token 1 \(<end>\), and the model has 1 tokens"):
        preflight(GRPOConfig(**{**options, "model": str(model)}))


@pytest.mark.parametrize("where", ["file/run", "file"])
def test_a_run_folder_that_cannot_be_made_is_refused(options: dict[str, Any], tmp_path: Path, where: str) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"^run_dir='\S+': cannot be written: .*; make room, or choose a folder that can"):
        preflight(GRPOConfig(**{**options, "run_dir": str(tmp_path / where)}))


def test_a_run_folder_in_use_or_of_another_run_is_refused_and_a_resumed_one_is_taken(options: dict[str, Any]) -> None:
    run_dir = Path(options["run_dir"])
    run_dir.mkdir()
    (run_dir / "metrics.jsonl").write_text('{"step": 1}\n')
    with pytest.raises(ConfigError, match=r"holds another run; .*resume=auto"):
        preflight(GRPOConfig(**options))
    (run_dir / "metrics.jsonl").unlink()
    preflight(GRPOConfig(**options, resume="auto"))
    assert list(run_dir.iterdir()) == []


def test_a_check_counts_the_steps_of_epochs_as_the_run_that_is_resumed(options: dict[str, Any]) -> None:
    del options["reward"]
    config = SFTConfig(**options, batch_size=8, epochs=2, resume="auto")
    with RunFolder(config.run_dir, config.with_known_steps(), start=find_start(config), report_seconds=0) as folder:
        folder.log(16, {"loss": 0.5})
    with pytest.raises(RunFinishedError, match="has finished its 16 steps"):
        preflight(config)


def test_lengths_that_are_not_given_are_what_the_model_has_room_for(options: dict[str, Any]) -> None:
    def lengths(**changes: Any) -> tuple[int, int, int]:
        config = GRPOConfig(**options, **changes)
        assert GRPOConfig.model_validate_json(config.model_dump_json()) == config
        return config.max_prompt_tokens, config.sampling.max_new_tokens, config.rollout.max_model_len

    assert lengths() == (32, 32, 64)
    assert lengths(max_response_tokens=24) == (40, 24, 64)
    assert lengths(max_prompt_tokens=8) == (8, 56, 64)
    assert lengths(max_prompt_tokens=8, max_response_tokens=8) == (8, 8, 16)
    assert "up to 32 + 32 tokens" in GRPOConfig(**options).facts()


@pytest.mark.parametrize(
    ("changes", "facts"),
    [
        ({}, []),
        ({"max_staleness": 1}, ["sampling 1 batch(es) ahead"]),
        ({"max_staleness": 3}, ["sampling 3 batch(es) ahead"]),
        ({"max_staleness": 3, "sample_ahead": 1, "lora.rank": 1}, ["LoRA of rank 1", "sampling 1 batch(es) ahead"]),
    ],
)
def test_the_first_line_says_what_is_asked_for(options: dict[str, Any], changes: dict[str, Any], facts: list[str]) -> None:
    sizes = {"prompts_per_step": 2, "samples_per_prompt": 3, "max_prompt_tokens": 8, "max_response_tokens": 4}
    (ranks,) = (fact for fact in GRPOConfig(**options).facts() if "rank" in fact)
    found = GRPOConfig(**options, **sizes, engines=2, **changes).facts()
    known = ["2 x 3 responses a step", "up to 8 + 4 tokens", ranks, "2 vLLM engine(s)"]
    assert found == [*known, *facts]


@pytest.mark.parametrize("kind", [GRPOConfig, PPOConfig])
def test_a_run_that_can_work_passes_every_check_in_both_runtimes(options: dict[str, Any], kind: Any) -> None:
    for backend in ("native", "bridge"):
        found = preflight(kind(**{**options, "backend": backend, "kl_coef": 0.1, "prompts_per_step": 8}))
        texts = {finding.name: finding.text for finding in found}
        assert "1 training rank(s)" in texts["layout"]
        assert "sequences of up to 64 tokens, the model has 64 positions" in texts["lengths"]
        assert "training takes up to" in texts["memory"]
    assert not Path(options["run_dir"]).exists()


def test_messages_need_a_chat_template(options: dict[str, Any], tmp_path: Path) -> None:
    data = tmp_path / "chat.jsonl"
    data.write_text(json.dumps({"prompt": [{"role": "user", "content": "1+1="}], "answer": "2"}) + "\n")
    with pytest.raises(RLBackendError, match=r"no chat template, which messages need: .*chat_template\.jinja; add that"):
        preflight(GRPOConfig(**{**options, "dataset": str(data)}))


def test_rows_that_the_run_could_not_read_refuse_it(options: dict[str, Any], tmp_path: Path) -> None:
    rows = [{"prompt": "1+1=", "answer": "2"}, {"question": "1+1="}]
    (tmp_path / "bad.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "good.jsonl").write_text(json.dumps(rows[0]) + "\n")
    for kind, extra, said in (
        (SFTConfig, {"batch_size": 1}, "1 examples, 1 sequences held out"),
        (GRPOConfig, {"prompts_per_step": 1}, "1 prompts, 1 held out in good, reward"),
    ):
        given = {name: value for name, value in options.items() if name != "reward" or kind is GRPOConfig}
        for bad in ("dataset", "eval_dataset", ""):
            names = {
                name: str(tmp_path / ("bad.jsonl" if name == bad else "good.jsonl")) for name in ("dataset", "eval_dataset")
            }
            found = {each.name: each for each in findings(kind(**{**given, **extra, **names}))}["data"]
            assert (found.error is None) == (not bad)
            assert said in found.text if not bad else "bad.jsonl" in str(found.error)


def test_every_check_is_made_even_after_one_that_refuses(options: dict[str, Any]) -> None:
    found = list(findings(GRPOConfig(**{**options, "tp": 3, "ranks": 3, "dataset": "missing.jsonl"})))
    assert [finding.name for finding in found if finding.error] == ["layout", "data"]
    assert len(found) == 10


def test_supervised_sequences_fit_the_model_and_a_batch(options: dict[str, Any], tmp_path: Path) -> None:
    del options["reward"]
    data = tmp_path / "long.jsonl"
    data.write_text(json.dumps({"prompt": "1+1=", "answer": "1" * 70}) + "\n")
    with pytest.raises(RLBackendError, match=r"more tokens than the model's positions=64 \(.* with 75.*; shorten them"):
        train_sft(SFTConfig(**{**options, "dataset": str(data)}))
    with pytest.raises(ConfigError, match=r"SFTConfig\.batch_size=9000: \S+ has 64 examples; use at most that"):
        train_sft(SFTConfig(**options, batch_size=9000))
    assert not ray.is_initialized()


def test_a_cluster_is_left_to_decide_about_devices_and_memory(
    options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.1:6379")
    config = GRPOConfig(**{**options, "train.backend_cfg.device": "cuda", "rollout.kv_cache_gib": 1e6})
    texts = {finding.name: finding.text for finding in preflight(config)}
    assert all("the cluster's machines" in texts[name] for name in ("packages", "devices", "memory"))
