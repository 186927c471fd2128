"""Configurations of rollout engines and of sampling, and lengths within the positions of the engines' model."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator, Mapping
from typing import Annotated, Any, Literal, Self

from pydantic import Field, model_validator

from rl_backend.checkpoint.hf_reader import read_hf_config
from rl_backend.contracts import MAY_CHANGE, BaseConfig, CheckpointError, ConfigError, HasEffect
from rl_backend.model import model_positions

MASKS = "return_sampling_mask"
"""Argument of vLLM, in ``RolloutConfig.engine_args``."""
OWN_ARGUMENTS = {
    "model": "model_path",
    "dtype": "dtype",
    "tensor_parallel_size": "tensor_parallel",
    "max_model_len": "max_model_len",
    "kv_cache_memory_bytes": "kv_cache_gib",
    "gpu_memory_utilization": "gpu_memory_utilization",
    "seed": "seed",
    "enforce_eager": "enforce_eager",
    "load_format": "load_format",
    "enable_sleep_mode": "sleep_mode",
    "skip_tokenizer_init": "load_tokenizer",
    "generation_config": None,
    "logprobs_mode": None,
    "worker_extension_cls": None,
    "weight_transfer_config": None,
    "distributed_executor_backend": None,
    "enable_chunked_prefill": None,
    "mamba_ssm_cache_dtype": None,
    "language_model_only": None,
    "limit_mm_per_prompt": None,
    "max_num_batched_tokens": "max_num_batched_tokens",
    "enable_prefix_caching": "prefix_caching",
    "enable_return_routed_experts": "return_routed_experts",
    "enable_lora": "max_adapters",
    "max_loras": "max_adapters",
    "max_cpu_loras": "max_adapters",
    "max_lora_rank": "max_adapter_rank",
    "lora_dtype": "dtype",
    "enable_moe_shared_loras": None,
    "enable_mixed_moe_lora_format": None,
    "fully_sharded_loras": None,
}
"""Arguments of vLLM that are not given as such -> the field that decides each; None where engines do."""
# vLLM's own bound.
MAX_ADAPTER_RANK = 512
# vLLM seeds numpy, which takes 32 bits.
MOST_SEEDS = 1 << 32
_WITHOUT_ROUTES = {
    "pipeline_parallel_size": "the stages of a pipeline see their own layers alone",
    "decode_context_parallel_size": "its ranks see some of the tokens alone",
    "prefill_context_parallel_size": "its ranks see some of the tokens alone",
    "kv_transfer_config": "keys and values from elsewhere come without their routes",
}


type _Problem = tuple[str, Any, str]
"""Field, value, and what is wrong with it."""


_OF_ALL_MEMORY = HasEffect(
    lambda config: config.kv_cache_gib is None,
    "vLLM would ignore it beside kv_cache_gib={0.kv_cache_gib:g}; give one of them",
)


class RolloutConfig(BaseConfig):
    """One or more equal vLLM engines.

    Attributes:
        model_path: local Hugging Face directory; commands also take a name on the Hub.
        num_engines: engines, each a Ray actor.
        device: ``cpu`` or ``cuda``; ``auto`` takes CUDA when the Ray cluster has a GPU.
        dtype: dtype of weights and activations, and of the weights that a push sends.
        load_format: ``auto`` reads the directory's weights; ``dummy`` starts with random ones and refuses to sample until
            the first push.
        tensor_parallel: GPUs, or groups of cores, over which one engine is sharded.
        cores_per_engine: CPUs that each engine reserves from Ray. A CPU engine runs on as many cores of the node where it
            lands, not used by the engines already there. None reserves none: the engines divide the
            cores of their node evenly, and on a cluster of several nodes CPU engines are refused.
        cores: for CPU engines, in place of ``cores_per_engine``: the core numbers of each engine, reserved from nobody;
            with ``tensor_parallel`` they are divided evenly.
        placement: ``pack`` engines on few nodes, or ``spread`` them; for engines that reserve CPUs or GPUs.
        placement_timeout: seconds to wait for the cluster's resources.
        gpus_per_worker: Ray GPUs that each of the ``tensor_parallel`` workers reserves; less than 1, without tensor
            parallelism, where ranks of a ``TrainGroup`` share the devices with their ``gpus_per_rank``.
        max_model_len: tokens of prompt and response together; by default 2048, or as many as the model has positions.
        max_num_batched_tokens: tokens computed in one engine step; at least ``max_model_len``. None takes 8192 or that.
        kv_cache_gib: memory for keys and values; None takes 1 GiB on a CPU and what ``gpu_memory_utilization`` leaves on a
            GPU.
        gpu_memory_utilization: share of a GPU's memory that vLLM may fill, where ``kv_cache_gib`` does not say how much.
        enforce_eager: no compilation and no CUDA graphs; None for neither on CPUs, and both on GPUs.
        prefix_caching: reuse keys and values, and recurrent states, of equal prompt prefixes; emptied by every push.
        return_routed_experts: samples of a mixture of experts come with the experts of their tokens (``Sample.routes``), for
            router replay.
        load_tokenizer: read the directory's tokenizer too, which ``SamplingConfig.stop_strings`` needs.
        max_adapters: LoRA adapters that are served at one time; more may be pushed, and those not used for longest give way.
            0 serves none. Decoding costs what ``max_adapter_rank`` costs, with every adapter and with none.
        max_adapter_rank: largest rank of an adapter.
        sleep_mode: allow ``sleep()`` and ``wake_up()``. On a CPU they free keys and values; weights stay where they are.
        require_push: refuse to sample until weights have been pushed.
        turns_at_push: what a push of weights does to turns of episodes that are being sampled. ``finish``: it waits for
            their end, so a turn has one weight version. ``pause``: they stop between two tokens, keep what they have sampled
            and continue with the new weights; all keys and values are computed anew, and each token has its own version.
            Either way turns that have not begun wait for the push.
        seed: seed of the engines' own generator, used by requests without a seed of their own.
        py_executable: absolute path of the Python of the engines' processes, the same on every node: of an environment with
            another vLLM, PyTorch or transformers, but the same Python and Ray. None takes that of Ray's other workers.
        start_timeout: seconds that starting may take.
        heartbeat_timeout: seconds in which an engine's process answers a heartbeat, whatever vLLM is doing in it; one that
            does not is ended. One that a signal has stopped is seen within seconds, and not taken for one that is busy.
        max_restarts: how often within an hour an engine that died, hangs or is dirty is started again; once more, and every
            call raises. Meanwhile the others sample, also what it had not answered. A new engine has the weights and
            adapters that the others serve, or waits for the next push. 0 starts none: calls raise the error of a lost
            engine, and ``RolloutGroup.restart`` replaces it.
        call_timeout: seconds that an engine may take for a call that samples nothing, such as loading the weights of a push,
            before it counts as dead; in a push by gloo, also seconds that it and a training rank wait for each other.
        sampling_timeout: seconds in which an engine that serves ends one of its requests. One that does not counts as dead
            and is ended.
        engine_args: further keyword arguments of ``vllm.EngineArgs``; unknown ones are refused before an engine starts, or,
            with ``py_executable``, when it starts. With ``return_sampling_mask`` samples have the words that each token was
            sampled from (``Sample.sampling_mask``), and training takes its log-probs over them; for GPUs, and for samples
            with ``top_k`` at a temperature above 0 alone.
    """

    model_path: str = Field(min_length=1)
    num_engines: Annotated[int, MAY_CHANGE] = Field(default=1, ge=1)
    device: Annotated[Literal["auto", "cpu", "cuda"], MAY_CHANGE] = "auto"
    dtype: Literal["float32", "bfloat16", "float16"] = "bfloat16"
    load_format: Annotated[Literal["auto", "dummy"], MAY_CHANGE] = "auto"
    tensor_parallel: Annotated[int, MAY_CHANGE] = Field(default=1, ge=1)
    cores_per_engine: Annotated[int | None, MAY_CHANGE] = Field(default=None, ge=1)
    cores: Annotated[tuple[tuple[int, ...], ...] | None, MAY_CHANGE] = None
    placement: Annotated[Literal["pack", "spread"], MAY_CHANGE] = "pack"
    placement_timeout: Annotated[float, MAY_CHANGE] = Field(default=10.0, gt=0)
    gpus_per_worker: Annotated[float, MAY_CHANGE] = Field(default=1.0, gt=0, le=1)
    max_model_len: Annotated[int, MAY_CHANGE] = Field(default=2048, ge=2)
    max_num_batched_tokens: Annotated[int | None, MAY_CHANGE] = Field(default=None, ge=1)
    kv_cache_gib: Annotated[float | None, MAY_CHANGE] = Field(default=None, gt=0)
    gpu_memory_utilization: Annotated[float, MAY_CHANGE, _OF_ALL_MEMORY] = Field(default=0.9, gt=0, le=1)
    enforce_eager: Annotated[bool | None, MAY_CHANGE] = None
    prefix_caching: Annotated[bool, MAY_CHANGE] = True
    return_routed_experts: bool = False
    load_tokenizer: Annotated[bool, MAY_CHANGE] = False
    max_adapters: Annotated[int, MAY_CHANGE] = Field(default=0, ge=0)
    max_adapter_rank: Annotated[int, MAY_CHANGE] = Field(default=16, ge=1, le=MAX_ADAPTER_RANK)
    sleep_mode: Annotated[bool, MAY_CHANGE] = False
    require_push: bool = False
    turns_at_push: Literal["finish", "pause"] = "finish"
    seed: int = Field(default=0, ge=0, lt=MOST_SEEDS)
    py_executable: Annotated[str | None, MAY_CHANGE] = None
    start_timeout: Annotated[float, MAY_CHANGE] = Field(default=600.0, gt=0)
    heartbeat_timeout: Annotated[float, MAY_CHANGE] = Field(default=60.0, ge=10)
    max_restarts: Annotated[int, MAY_CHANGE] = Field(default=3, ge=0)
    call_timeout: Annotated[float, MAY_CHANGE] = Field(default=600.0, gt=0)
    sampling_timeout: Annotated[float, MAY_CHANGE] = Field(default=3600.0, gt=0)
    engine_args: dict[str, Any] = Field(default_factory=dict)

    @model_validator(mode="after")
    def _check(self) -> Self:
        wrong = [*self._problems(), *self._problems_of_cores(), *self._problems_of_routes()]
        ConfigError.refuse_all([(f"RolloutConfig.{field}", *rest) for field, *rest in wrong])
        check_engine_device(self, self.device)
        return self

    def _problems(self) -> Iterator[_Problem]:
        for name in self.engine_args.keys() & OWN_ARGUMENTS.keys():
            ours = OWN_ARGUMENTS[name]
            advice = f"use RolloutConfig.{ours}" if ours else "rollout engines set it themselves"
            yield f"engine_args[{name!r}]", self.engine_args[name], advice
        if self.py_executable is not None and not os.path.isabs(self.py_executable):
            problem = "expected an absolute path: engines start in a folder of Ray's"
            yield "py_executable", self.py_executable, problem
        if self.max_num_batched_tokens is not None and self.max_num_batched_tokens < self.max_model_len:
            problem = f"a prompt is computed in one step, so it must be at least max_model_len={self.max_model_len}"
            yield "max_num_batched_tokens", self.max_num_batched_tokens, problem
        if self.gpus_per_worker < 1 and self.tensor_parallel > 1:
            # Ray gives shares of one GPU only.
            problem = (
                f"an engine of several workers takes whole GPUs, and gpus_per_worker={self.gpus_per_worker:g} is a share of "
                "one; use 1, or a GPU for each rank and worker, without gpus_per_worker and colocate"
            )
            yield "tensor_parallel", self.tensor_parallel, problem

    def _problems_of_cores(self) -> Iterator[_Problem]:
        if self.cores_per_engine is not None and self.cores_per_engine % self.tensor_parallel:
            problem = f"must be a multiple of tensor_parallel={self.tensor_parallel}, whose workers divide the cores"
            yield "cores_per_engine", self.cores_per_engine, problem
        if self.cores is None:
            return
        if self.device == "cuda":
            yield "cores", self.cores, "only CPU engines have cores; unset it"
        if self.cores_per_engine is not None:
            problem = "set either cores_per_engine (a count) or cores (core ids), not both"
            yield "cores_per_engine", self.cores_per_engine, problem
        if len(self.cores) != self.num_engines:
            yield "cores", self.cores, f"expected one group of cores for each of the {self.num_engines} engines"
        for group in self.cores:
            if not group or len(set(group)) != len(group) or min(group) < 0 or len(group) % self.tensor_parallel:
                problem = f"a group is different core numbers, a multiple of tensor_parallel={self.tensor_parallel} of them"
                yield "cores", group, problem

    def _problems_of_routes(self) -> Iterator[_Problem]:
        if not self.return_routed_experts:
            return
        if self.turns_at_push == "pause":
            problem = (
                "a turn would have routes of several weight versions, which no replay takes; use 'finish', or "
                "return_routed_experts=False"
            )
            yield "turns_at_push", "pause", problem
        for name, reason in _WITHOUT_ROUTES.items():
            if self.engine_args.get(name) not in (None, 1):
                problem = (
                    f"vLLM returns no routed experts with it: {reason}; leave it out, or use return_routed_experts=False"
                )
                yield f"engine_args[{name!r}]", self.engine_args[name], problem

    @property
    def returns_masks(self) -> bool:
        return bool(self.engine_args.get(MASKS))

    @property
    def batched_tokens(self) -> int:
        return self.max_num_batched_tokens or max(8192, self.max_model_len)


_OF_GPUS = ("gpu_memory_utilization", "gpus_per_worker")


def check_engine_device(config: RolloutConfig, device: str) -> None:
    """Raises :class:`ConfigError` for what engines on ``device``, ``cpu`` or ``cuda``, would ignore or do not have."""
    if device != "cpu":
        return
    problem = "applies to GPU engines only; unset it for engines on a CPU"
    wrong = [(f"RolloutConfig.{name}", getattr(config, name), problem) for name in _OF_GPUS if config.is_set(name)]
    if config.returns_masks:
        problem = (
            "vLLM returns masks from its model runner V2 alone, which needs Triton and so a GPU; leave it out on a CPU: "
            "trainers then say by their own logits which tokens are kept"
        )
        wrong.append((f"RolloutConfig.engine_args[{MASKS!r}]", config.engine_args[MASKS], problem))
    ConfigError.refuse_all(wrong)


_SAMPLES = HasEffect(
    lambda config: config.temperature, "temperature=0 takes the likeliest token whatever else is kept; unset it"
)


class SamplingConfig(BaseConfig):
    """How responses are sampled.

    Engines have no end-of-text token of their own: what ends a response is in ``stop_token_ids`` and ``stop_strings``. The
    latter need ``RolloutConfig.load_tokenizer``. A run gives engines the model's end-of-text tokens and its tokenizer.

    Attributes:
        n: responses of each prompt.
        temperature: 0 takes the likeliest token, and is no temperature to train at. Log-probs are of the distribution that
            was sampled from: logits divided by it, over the tokens that ``min_p``, ``top_k`` and ``top_p`` keep; at
            temperature 0, of the plain softmax. Those of training are of the same kind, over the tokens that the model in
            training would keep.
        top_p: nucleus sampling: keeps the likeliest tokens that together have this probability; 1 keeps all.
        top_k: keeps so many of the likeliest tokens; 0 keeps all.
        min_p: keeps tokens that are at least this share as probable as the likeliest; 0 keeps all.
        max_new_tokens: longest response; also bounded by the engine's ``max_model_len``.
        stop_token_ids: a response ends with the first of them, which belongs to it.
        stop_strings: a response ends with the token that completes the first of them in its text, special tokens included.
            All its tokens belong to it, as they were sampled, and no end-of-text token follows: a policy that is trained on
            it learns to write the string.
        log_probs: return the log-prob of every response token.
    """

    n: int = Field(default=1, ge=1)
    temperature: float = Field(default=1.0, ge=0)
    top_p: Annotated[float, _SAMPLES] = Field(default=1.0, gt=0, le=1)
    top_k: Annotated[int, _SAMPLES] = Field(default=0, ge=0)
    min_p: Annotated[float, _SAMPLES] = Field(default=0.0, ge=0, lt=1)
    max_new_tokens: int = Field(default=128, ge=1)
    stop_token_ids: tuple[int, ...] = ()
    stop_strings: tuple[str, ...] = ()
    log_probs: bool = True

    @model_validator(mode="after")
    def _check(self) -> Self:
        wrong = {}
        if 0 < self.temperature < 0.01:
            wrong["temperature"] = "vLLM would raise it to 0.01; use 0 for greedy sampling"
        if "" in self.stop_strings:
            wrong["stop_strings"] = "an empty string would end every response; remove it"
        if self.temperature == 0 and self.n > 1:
            wrong["n"] = "greedy responses are all the same; raise temperature, or use n=1"
        ConfigError.refuse_all([(f"SamplingConfig.{field}", getattr(self, field), wrong[field]) for field in wrong])
        return self

    @property
    def cuts(self) -> list[str]:
        return [name for name in ("top_p", "top_k", "min_p") if self.is_set(name)]


def positions_of(model: str, family: str = "auto") -> int | None:
    """The longest sequence of the model in a directory, in tokens; None where nothing limits it, or it is not here."""
    try:
        return model_positions(read_hf_config(model), family)
    except CheckpointError:
        return None


def within_model(config: RolloutConfig) -> RolloutConfig:
    """``config`` with a default ``max_model_len`` that the model has positions for; raises where another one is too long."""
    positions = positions_of(config.model_path)
    if positions is None or config.max_model_len <= positions:
        return config
    if config.is_set("max_model_len"):
        raise ConfigError.of("RolloutConfig.max_model_len", config.max_model_len, more_than(config.model_path, positions))
    return config.replace(max_model_len=positions)


def fitting_lengths(asked: Mapping[str, int], left: Collection[str], positions: int) -> dict[str, int]:
    """What the lengths ``left`` to us can be, so that all of ``asked`` fit; empty where they do, or never will."""
    room = positions - sum(tokens for option, tokens in asked.items() if option not in left)
    if room < len(left) or sum(asked.values()) <= positions:
        return {}
    fitting: dict[str, int] = {}
    for number, option in enumerate(sorted(left, key=lambda option: asked[option])):
        fitting[option] = min(asked[option], room // (len(left) - number))
        room -= fitting[option]
    return fitting


def more_than(model: str, positions: int) -> str:
    return f"{model} has {positions} positions for prompt and response together; use at most {positions}"


def require_tokenizer(config: RolloutConfig, sampling: SamplingConfig) -> None:
    """Raises :class:`ConfigError` for stop strings that engines without a tokenizer cannot find."""
    if sampling.stop_strings and not config.load_tokenizer:
        raise ConfigError.of(
            "SamplingConfig.stop_strings",
            sampling.stop_strings,
            "engines find them in text and have no tokenizer; set RolloutConfig.load_tokenizer",
        )


def require_bounded(config: RolloutConfig, sampling: SamplingConfig, owner: str = "SamplingConfig") -> None:
    """Raises :class:`ConfigError` for sampling that vLLM refuses where it returns masks; ``owner`` has the fields."""
    if not config.returns_masks:
        return
    advice = f"with engine_args[{MASKS!r}] vLLM takes no request without it; set it, or leave the argument out"
    needed = ("temperature", "top_k")
    ConfigError.refuse_all((f"{owner}.{name}", 0, advice) for name in needed if not getattr(sampling, name))
