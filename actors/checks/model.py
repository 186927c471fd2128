"""Checks a model's files against the layout and the sequence lengths of a run."""

import importlib.util
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from actors.checks.machine import is_on_cluster
from actors.collect.stop_tokens import disagreement_of_ends
from actors.options.config import RunModel
from actors.options.policy_options import PolicyLoRA
from actors.options.sampled_config import EpisodeConfig, RunConfig, SampledConfig
from actors.rollout.config import more_than, positions_of
from actors.train.model import require_known_end
from rl_backend.checkpoint.hf_reader import HFReader, read_hf_config
from rl_backend.checkpoint.hf_weights import is_tied, require_same_head
from rl_backend.checkpoint.kept_weights import describe_kept, find_kept
from rl_backend.contracts import CheckpointError, ConfigError, RuntimeConfig, UnsupportedError
from rl_backend.data.prompts import load_tokenizer
from rl_backend.lab.text import count
from rl_backend.model import model_kept_prefixes
from rl_backend.runtime import check_config, check_weights


def find_model(config: RunConfig) -> str:
    """Looks for the directory of each model, its ``config.json``, and plugins that its family may come from."""
    texts = []
    for model in config.models():
        option = f"{type(config).__name__}.{model.option}"
        require_whole_model(option, model.path)
        with _named(option, model.path):
            texts.append(f"{read_hf_config(model.path).get('model_type')} in {model.path}")
    for plugin in config.train.plugins:
        spec = importlib.util.find_spec(plugin)
        texts.append(f"plugin {plugin} from {spec and spec.origin}, which every node must have")
    return ", ".join(dict.fromkeys(texts))


def require_whole_model(option: str, path: str) -> None:
    """Refuses folders that are mistaken for a model's."""
    folder = Path(path)
    if (folder / "config.json").is_file():
        # A run's folder also has a config.json, with the options of the run.
        if not (folder / "run.json").is_file():
            return
        problem = f"is a run's folder; give {folder / 'model'}"
    elif (folder / "adapter_config.json").is_file():
        problem = "has adapters alone; give the whole model, which lora.save_merged writes"
    else:
        problem = "has no config.json; give the folder of a Hugging Face model, with *.safetensors and tokenizer.json"
    raise ConfigError.of(option, path, problem)


def require_readable_weights(option: str, path: str) -> None:
    """Refuses weight files that are missing, damaged or not of one model."""
    with _named(option, path):
        require_same_head(path)


def find_layout(config: RunConfig) -> str:
    """Divides the models over the ranks."""
    on_cpu = not is_on_cluster() and not torch.cuda.is_available()
    for model in config.models():
        runtime = runtime_of(config, model)
        if on_cpu and getattr(runtime.backend_cfg, "device", "") == "auto":
            runtime = runtime.replace(backend_cfg=runtime.backend_cfg.replace(device="cpu"))
        with _named(f"{type(config).__name__}.{model.option}", model.path):
            check_config(runtime, config.ranks)
    return config.describe_ranks()


def find_weights(config: RunConfig) -> str:
    """Reads the headers of the weight files, and a head that should be the embeddings."""
    texts = []
    for model in config.models():
        with _named(f"{type(config).__name__}.{model.option}", model.path):
            check_weights(runtime_of(config, model), model.head)
            _require_mergeable(config, model)
            reader = HFReader(model.path)
            size = sum(file.stat().st_size for file in reader.files) / 2**20
            text = f"{count(len(reader.infos), 'tensor')} in {count(len(reader.files), 'file')}, {size:,.1f} MiB"
            prefixes = model_kept_prefixes(reader.config, getattr(config.train.backend_cfg, "model", "auto"))
            kept = find_kept(reader, prefixes, ())
            texts.append(f"{text}, of which {describe_kept(kept)} are kept and not trained" if kept else text)
    return "; ".join(dict.fromkeys(texts))


def _require_mergeable(config: RunConfig, model: RunModel) -> None:
    lora, asked = config.lora, list[tuple[str, Any]]()
    if isinstance(lora, PolicyLoRA) and not config.pushes_adapters:
        asked.append(("push", lora.push))
    if lora.save_merged:
        asked.append(("save_merged", True))
    if lora.rank and asked and lora.at_one_end and model.head == "log_probs" and is_tied(read_hf_config(model.path)):
        raise ConfigError.of(
            f"{type(lora).__name__}.{asked[0][0]}",
            asked[0][1],
            f"lora.targets={list(lora.targets)} has an end of {model.path}, whose head is its embedding: merged weights "
            "could not be those of one alone; leave it out, or the target",
        )


def find_lengths(config: RunConfig) -> str:
    """Compares the longest sequence with the positions of the models."""
    longest, known = config.longest_sequence, list[int]()
    for model in config.models():
        positions = positions_of(model.path, getattr(config.train.backend_cfg, "model", "auto"))
        if positions is None:
            continue
        known.append(positions)
        if isinstance(config, SampledConfig):
            _require_positions(config, model, positions)
    has = f"the model has {min(known)} positions" if known else "nothing limits the model"
    return has if longest is None else f"sequences of up to {longest} tokens, {has}"


def find_tokenizer(config: RunConfig) -> str:
    """Loads the tokenizer, which must name an end of a text that the model knows."""
    tokenizer = load_tokenizer(config.model)
    require_known_end(f"{type(config).__name__}.model", config.model, tokenizer)
    template = "a" if tokenizer.chat_template else "no"
    differs = disagreement_of_ends(config.model, tokenizer, config.data)
    end = f"a text ends with {tokenizer.eos_token} ({tokenizer.eos_token_id})"
    found = f"{len(tokenizer)} tokens, {template} chat template, {end}"
    return f"warning: {found}, {differs}" if differs else found


def runtime_of(config: RunConfig, model: RunModel) -> RuntimeConfig:
    """Of a model of the run, without what only Ray knows."""
    return config.train if model.path == config.model else config.train.replace(hf_path=model.path)


def _require_positions(config: SampledConfig, model: RunModel, positions: int) -> None:
    name, longest, response = type(config).__name__, config.longest_sequence, config.sampling.max_new_tokens
    has = f"{model.path} has {positions} positions for prompt and response together"
    if isinstance(config, EpisodeConfig) and longest > positions:
        raise ConfigError.of(f"{name}.max_episode_tokens", longest, f"{has}; use at most {positions}")
    if response >= positions:
        raise ConfigError.of(f"{name}.max_response_tokens", response, f"{has}; use at most {positions - 1}")
    if longest > positions:
        problem = f"{has}, and max_response_tokens={response}; use at most {positions - response}, or fewer response tokens"
        raise ConfigError.of(f"{name}.max_prompt_tokens", config.max_prompt_tokens, problem)
    if config.rollout.max_model_len > positions:
        problem = more_than(model.path, positions)
        raise ConfigError.of("RolloutConfig.max_model_len", config.rollout.max_model_len, problem)


@contextmanager
def _named(option: str, value: str) -> Iterator[None]:
    """Errors of a model, or of its files, begin with the option that named its directory."""
    try:
        yield
    except (CheckpointError, UnsupportedError) as error:
        raise type(error)(f"{option}={value!r}: {error.message.removeprefix(f'{value}: ')}", **error.details) from error
