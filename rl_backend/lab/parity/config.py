"""Configuration of a comparison, and its common start: the batch, and the numbers of an adapter."""

import hashlib
import itertools
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, Self

import torch
from pydantic import Field, model_validator
from tokenizers import Tokenizer
from torch import Tensor

from rl_backend.contracts import BaseConfig, ConfigError, OptimizerConfig, TokenSequence, text_config
from rl_backend.contracts.lora import LoRAConfig
from rl_backend.contracts.runtime_config import BACKEND_CONFIGS, ParallelConfig, Plugins, RuntimeConfig
from rl_backend.data import MicroBatchPlan

# The side that is no runtime: transformers' own model and torch's AdamW on one rank.
TRANSFORMERS = "transformers"

type DType = Literal["float32", "bfloat16"]
type SideName = Literal["reference", "candidate"]
type Role = Literal["reference", "candidate", "again", "alone"]
"""What is trained: a side; the reference again, in an order that changes only rounding; or the candidate, in which each step
after the first starts from the weights of the reference that runs again."""

SIDES: tuple[SideName, ...] = ("reference", "candidate")
# English text that models with a tokenizer are compared on.
PASSAGE = Path(__file__).with_name("passage.txt")
# A tokenizer that makes fewer different tokens of the passage is a toy, of which little is trained.
_LEAST_TOKENS = 100

_NO_OPTIONS = {
    "parallel": "the layout is ParitySide.parallel (--tp, --pp and so on)",
    "optimizer": "both sides have the same: ParityConfig.lr and weight_decay (--lr, --weight-decay)",
    "param_dtype": "both sides have the same: ParityConfig.dtype (--dtype)",
    "device": "both sides have the same: ParityConfig.device (--device)",
}
"""Fields of a runtime's configuration that are set in one place of the comparison."""


class ParitySide(BaseConfig):
    """One of the two.

    Attributes:
        runtime: name of a registered runtime, or ``transformers``.
        parallel: its layout.
        dp: data-parallel ranks; by default the fewest that the layout allows.
        options: further fields of the runtime's configuration, other than layout, optimizer, dtype and device; for
            transformers ``attn_implementation``.
    """

    runtime: str
    parallel: ParallelConfig = ParallelConfig()
    dp: int | None = Field(default=None, ge=1)
    options: dict[str, Any] = Field(default_factory=dict)

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.runtime == TRANSFORMERS:
            given = {name: size for name, size in self.sizes.items() if size != 1} | self.options
            given.pop("attn_implementation", None)
            if given:
                raise ConfigError(f"transformers runs on one rank, and takes attn_implementation only; leave out {given}")
        else:
            twice = {name: self.options[name] for name in _NO_OPTIONS if name in self.options}
            ConfigError.refuse_all((f"options[{name!r}]", value, _NO_OPTIONS[name]) for name, value in twice.items())
            self.parallel.data_parallel_size(self.world_size)
        return self

    @property
    def data_parallel_size(self) -> int:
        if self.dp is not None:
            return self.dp
        experts, model = self.parallel.ep * self.parallel.etp * self.parallel.pp, self.parallel.model_parallel_size
        # More than one only for expert parallelism.
        return next(copies for copies in range(1, experts + 1) if copies * model % experts == 0)

    @property
    def world_size(self) -> int:
        """Ranks; each is a process."""
        return self.parallel.model_parallel_size * self.data_parallel_size

    @property
    def sizes(self) -> dict[str, int]:
        """Of all dimensions of its layout."""
        return {**self.parallel.model_dump(), "dp": self.data_parallel_size}


class ParityConfig(BaseConfig):
    """A comparison.

    Attributes:
        model: local Hugging Face directory; both sides load it.
        steps: optimizer steps.
        lr: learning rate, constant. Differences grow with it from the second step on.
        weight_decay: the default is large enough to show a wrong decay group in the first step.
        dtype: of parameters in forward and backward; optimizers work on float32.
        num_sequences: sequences of the batch, which is the same in every step.
        num_micro_batches: of each data-parallel rank.
        min_length: tokens of the shortest sequence; one of a single token trains nothing, but is in the pass.
        max_length: tokens of the longest sequence.
        seed: of the batch, of the runtimes and of the numbers that an adapter starts from.
        lora: trains a LoRA tenant over the frozen model instead; transformers then trains as peft does.
        device: ``auto`` takes CUDA when there is a device.
        threads: CPU threads of each rank.
        timeout: seconds for one side.
        plugins: as in :class:`~rl_backend.contracts.RuntimeConfig`.
    """

    plugins: Plugins = ()
    model: str = Field(min_length=1)
    reference: ParitySide
    candidate: ParitySide
    steps: int = Field(default=5, ge=1)
    lr: float = Field(default=1e-4, gt=0.0, allow_inf_nan=False)
    weight_decay: float = Field(default=0.1, ge=0.0, allow_inf_nan=False)
    dtype: DType = "float32"
    num_sequences: int = Field(default=16, ge=1)
    num_micro_batches: int = Field(default=4, ge=1)
    min_length: int = Field(default=2, ge=1)
    max_length: int = Field(default=48, ge=2)
    seed: int = 0
    lora: LoRAConfig | None = None
    device: Literal["auto", "cpu", "cuda"] = "auto"
    threads: int = Field(default=1, ge=1)
    timeout: float = Field(default=1800.0, gt=0.0, allow_inf_nan=False)

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.lora is not None and (self.lora.dropout or self.lora.use_dora):
            raise ConfigError("ParityConfig.lora: each side would drop other inputs; leave out dropout and use_dora")
        wrong: list[tuple[str, int, str]] = []
        if self.min_length > self.max_length:
            problem = f"the longest sequence has max_length={self.max_length}"
            wrong.append(("ParityConfig.min_length", self.min_length, problem))
        for name in SIDES:
            side, micro_batches = self.side(name), self.num_micro_batches
            dp, pp, vpp = side.data_parallel_size, side.parallel.pp, side.parallel.vpp
            if self.num_sequences < dp * micro_batches:
                of_rank = f"{micro_batches} micro-batches on each data-parallel rank of the {name} (dp={dp})"
                problem = f"{of_rank} need at least {dp * micro_batches}"
                wrong.append(("ParityConfig.num_sequences", self.num_sequences, problem))
            overrides = side.options.get("override_transformer_config")
            own_groups = isinstance(overrides, dict) and "microbatch_group_size_per_vp_stage" in overrides
            if side.runtime == "bridge" and vpp > 1 and not own_groups and micro_batches % pp:
                problem = f"Megatron's interleaved schedule of the {name} (pp={pp}, vpp={vpp}) takes a multiple of {pp}"
                wrong.append(("ParityConfig.num_micro_batches", micro_batches, problem))
        ConfigError.refuse_all(wrong)
        return self

    @property
    def optimizer(self) -> OptimizerConfig:
        return OptimizerConfig(lr=self.lr, weight_decay=self.weight_decay)

    def side(self, name: SideName) -> ParitySide:
        return self.reference if name == "reference" else self.candidate

    def runtime_config(self, side: ParitySide) -> RuntimeConfig:
        """The configuration of a side that is a runtime.

        Raises:
            RegistryError: no such runtime.
            ConfigError: what the runtime refuses: a layout, an option, or a dtype or device that it has no field for.
        """
        fields = BACKEND_CONFIGS.get(side.runtime).model_fields
        options = {**side.options, "parallel": side.parallel, "optimizer": self.optimizer}
        for name, value, usual in (("param_dtype", self.dtype, "float32"), ("device", self.device, "auto")):
            if name in fields:
                options[name] = value
            elif value not in (usual, "cpu"):
                raise ConfigError.of(name, value, f"the configuration of the runtime {side.runtime!r} has no field {name}")
        return RuntimeConfig(
            plugins=self.plugins,
            backend=side.runtime,
            hf_path=self.model,
            seed=self.seed,
            max_tokens_per_micro_batch=math.ceil(self.num_sequences / self.num_micro_batches) * self.max_length,
            backend_cfg=options,
        )


def make_sequences(config: ParityConfig, hf_config: Mapping[str, Any]) -> list[TokenSequence]:
    """Sequences of mixed lengths, of which all but the first token is trained: text, or random tokens without a tokenizer.

    Raises:
        ConfigError: ``max_length`` is more than the model has positions.
    """
    text = text_config(hf_config)
    positions = text.get("max_position_embeddings")
    if isinstance(positions, int) and config.max_length > positions:
        raise ConfigError.of("ParityConfig.max_length", config.max_length, f"the model has {positions} positions")
    generator = torch.Generator().manual_seed(config.seed)
    passage = passage_tokens(config.model, hf_config)
    tokens = torch.arange(text["vocab_size"])
    # transformers gives the embedding of padding no gradient.
    if (padding := text.get("pad_token_id")) is not None:
        tokens = tokens[tokens != padding]
    lengths = torch.linspace(config.min_length, config.max_length, config.num_sequences).round().long()
    sizes = lengths[torch.randperm(config.num_sequences, generator=generator)].tolist()
    if passage is None:
        rows = [tokens[torch.randint(len(tokens), (length,), generator=generator)] for length in sizes]
    else:
        start = int(torch.randint(len(passage), (), generator=generator))
        places = (start + torch.arange(sum(sizes))) % len(passage)
        rows = list(passage[places].split(sizes))
    return [TokenSequence(row, {"loss_mask": (torch.arange(len(row)) < len(row) - 1).float()}) for row in rows]


def passage_tokens(model: str, hf_config: Mapping[str, Any]) -> Tensor | None:
    """The passage by the model's ``tokenizer.json``; None without one, or where it is of another vocabulary or a toy."""
    file, text = Path(model) / "tokenizer.json", text_config(hf_config)
    if not file.is_file():
        return None
    tokens = torch.tensor(
        Tokenizer.from_file(str(file)).encode(PASSAGE.read_text(encoding="utf-8"), add_special_tokens=False).ids
    )
    tokens = tokens[tokens != padding] if (padding := text.get("pad_token_id")) is not None else tokens
    different = tokens.unique()
    return tokens if len(different) >= _LEAST_TOKENS and int(different[-1]) < text["vocab_size"] else None


def plan_batch(config: ParityConfig, data_parallel_size: int, *, otherwise: bool = False) -> MicroBatchPlan:
    """Micro-batches, as many on every rank.

    Args:
        otherwise: other sequences share a micro-batch, so that sums are rounded differently.
    """
    bins = data_parallel_size * config.num_micro_batches
    sequences = range(config.num_sequences)
    if otherwise:
        ends = [config.num_sequences * index // bins for index in range(bins + 1)]
        dealt = [tuple(reversed(sequences[start:end])) for start, end in itertools.pairwise(ends)]
    else:
        dealt = [tuple(sequences[start::bins]) for start in range(bins)]
    return MicroBatchPlan(tuple(tuple(dealt[rank::data_parallel_size]) for rank in range(data_parallel_size)))


def start_of(name: str, shape: Sequence[int], seed: int) -> Tensor:
    """What an adapter's tensor, by its name in peft's files, starts from; float32."""
    # No factor is 0, so that the first step has gradients of both.
    digest = hashlib.blake2b(f"{seed} {name}".encode(), digest_size=7).digest()
    drawn = torch.randn(tuple(shape), generator=torch.Generator().manual_seed(int.from_bytes(digest))) * 0.05
    return 1.0 + drawn if len(shape) == 1 else drawn
