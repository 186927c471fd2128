"""The side of a comparison that is no runtime: transformers' model with peft's adapters, and torch's AdamW."""

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion

from rl_backend.algorithm import sft_loss
from rl_backend.checkpoint.hf_reader import HFReader, own_name, read_hf_config
from rl_backend.checkpoint.hf_writer import write_hf_directory
from rl_backend.checkpoint.kept_weights import find_kept
from rl_backend.contracts import ConfigError, ModelOutput, OptimizerConfig, PackedBatch, TensorInfo
from rl_backend.contracts.lora import PEFT_PREFIX, LoRAConfig, LoRAKind
from rl_backend.data import pack_plan
from rl_backend.lab.parity.config import ParityConfig, ParitySide, make_sequences, plan_batch, start_of
from rl_backend.model import model_kept_prefixes
from rl_backend.runtime.recording import record_outputs


def add_peft_adapter(
    model: PreTrainedModel, config: LoRAConfig, seed: int, in_files: Callable[[str], str]
) -> dict[str, nn.Parameter]:
    """Puts peft's adapters into ``model``, frozen itself from now on; name beside those of files -> parameter.

    Args:
        in_files: name of a module in ``model`` -> in the files of its weights.

    Raises:
        ConfigError: targets that the model does not have as modules, such as experts.
    """
    from peft import LoraConfig as PeftConfig
    from peft import inject_adapter_in_model

    kinds = _kinds(model)
    ConfigError.refuse_all(
        ("LoRAConfig.targets", target, "no module of transformers' model; compare two runtimes")
        for target in config.targets
        if not any(config.replace(targets=(target,)).selects(name, kind) for name, kind in kinds.items())
    )
    modules = [name for name, kind in kinds.items() if config.selects(name, kind)]
    inject_adapter_in_model(
        PeftConfig(
            r=config.rank,
            lora_alpha=config.alpha,  # type: ignore[arg-type]  # peft takes any number
            use_rslora=config.use_rslora,
            target_modules=modules,
        ),
        model,
    )
    adapters = {}
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("lora_" in name)
        if parameter.requires_grad:
            stored = PEFT_PREFIX + in_files(name.replace(".default", ""))
            parameter.data = start_of(stored, parameter.shape, seed).to(parameter.device, model.dtype)
            adapters[stored] = parameter
    return adapters


def _kinds(model: PreTrainedModel) -> dict[str, LoRAKind]:
    """Kind of each module that peft adapts as the runtimes do."""
    # Without experts, which transformers keeps as one parameter, and routers.
    found: dict[str, LoRAKind] = {}
    for name, module in model.named_modules():
        parts = name.split(".")
        if module is model.get_input_embeddings():
            found[name] = "embedding"
        elif module is model.get_output_embeddings():
            found[name] = "head"
        elif isinstance(module, nn.Linear) and "experts" not in parts and parts[-1] != "gate":
            found[name] = "feed_forward" if "mlp" in parts else "attention"
    return found


def open_trainer(
    config: ParityConfig, side: ParitySide, state: Path | None = None, *, otherwise: bool = False
) -> "_Trainer":
    """A :class:`~rl_backend.lab.parity.rank.Trainer`; ``otherwise`` takes the other attention too."""
    torch.manual_seed(config.seed)
    if otherwise:
        eager = side.options.get("attn_implementation") == "eager"
        side = side.replace(options={"attn_implementation": "sdpa" if eager else "eager"})
    device = torch.device("cuda" if config.device != "cpu" and torch.cuda.is_available() else "cpu")
    sequences = make_sequences(config, read_hf_config(config.model))
    (batches,) = pack_plan(sequences, plan_batch(config, 1, otherwise=otherwise))
    whole = state is not None and config.lora is None
    trainer = _Trainer(config.replace(model=str(state)) if whole else config, side, [each.to(device) for each in batches])
    if state is not None and config.lora is not None:
        trainer.start_from(torch.load(state, weights_only=True))
    return trainer


class _Trainer:
    """A model in the dtype of the comparison, with float32 masters for AdamW."""

    data_parallel_rank, is_source = 0, True

    def __init__(self, config: ParityConfig, side: ParitySide, batches: Sequence[PackedBatch]) -> None:
        self.batches, self.path, device = batches, config.model, batches[0].input_ids.device
        self.config = config.optimizer
        self.model = _load(config.model, getattr(torch, config.dtype), device, side.options)
        loaded = _load(config.model, torch.float32, device, {})
        whole = dict(loaded.named_parameters())
        stored = loaded.state_dict().keys()
        # Biases of routers, which no gradient moves.
        self.buffers = {name: buffer for name, buffer in loaded.named_buffers() if name in stored}
        self.own_name = partial(own_name, read_hf_config(config.model).get("model_type"))
        self.in_files = _path_in_files(self.model, self.own_name)
        self.hf_names = {name: self.in_files(name) for name in whole}
        if config.lora is None:
            self.trained, self.frozen = dict(self.model.named_parameters()), dict[str, Tensor]()
        else:
            self.trained = add_peft_adapter(self.model, config.lora, config.seed, self.in_files)
            self.frozen = {name: parameter.detach() for name, parameter in whole.items()} | self.buffers
            whole = {name: parameter.float() for name, parameter in self.trained.items()}
            names = [name for name, parameter in self.model.named_parameters() if not parameter.requires_grad]
            self.hf_names = {name: self.in_files(name.replace(".base_layer", "")) for name in names}
        self.masters = {name: torch.nn.Parameter(parameter.detach().clone()) for name, parameter in whole.items()}
        self.adamw = torch.optim.AdamW(
            _decay_groups(self.masters, self.config), lr=self.config.lr, betas=self.config.betas, eps=self.config.eps
        )

    def activations(self) -> list[dict[str, Tensor]]:
        hf_names = {name: (stored,) for name, stored in self.hf_names.items()}
        hidden_size = self.model.config.get_text_config().hidden_size
        recorded = []
        self.model.eval()
        for batch in self.batches:
            for sequence in batch.split(batch.input_ids):
                with torch.no_grad(), record_outputs(self.model, hf_names, hidden_size) as outputs:
                    self.model(sequence[None], use_cache=False)
                flat = {path: output.to("cpu", torch.float32).flatten(0, -2) for path, output in outputs.items()}
                recorded.append({path: output for path, output in flat.items() if len(output) == len(sequence)})
        return recorded

    def forward_backward(self) -> tuple[float, list[Tensor]]:
        self.model.train()
        total, outputs = 0.0, []
        for master in self.masters.values():
            master.grad = torch.zeros_like(master)
        gradients = self._gradients()
        for batch in self.batches:
            log_probs = [self._log_probs(sequence) for sequence in batch.split(batch.input_ids)]
            loss, _ = sft_loss(ModelOutput(log_probs=torch.cat(log_probs)), batch)
            loss.backward()
            total += loss.item()
            outputs += [part.detach().cpu() for part in log_probs]
            for name, parameter in self.trained.items():
                if parameter.grad is not None:
                    gradients[name].add_(parameter.grad.float())
                    parameter.grad = None
        return total, outputs

    def gradients(self) -> dict[str, Tensor]:
        return self.stored_names(self._gradients())

    def _gradients(self) -> dict[str, Tensor]:
        return {name: master.grad for name, master in self.masters.items() if master.grad is not None}

    def optimizer_step(self) -> float:
        gradients = self._gradients().values()
        norm = math.sqrt(sum(float(gradient.double().square().sum()) for gradient in gradients))
        whole = torch.tensor(norm, dtype=torch.float64)
        torch.nn.utils.clip_grads_with_norm_(self.masters.values(), self.config.clip_grad, whole, foreach=False)
        self.adamw.step()
        with torch.no_grad():
            for name, parameter in self.trained.items():
                parameter.copy_(self.masters[name])
        return norm

    def save(self, state: Path) -> None:
        if self.frozen:
            torch.save(self.stored_names(self.masters), state)
            return
        weights, reader = self.weights(), HFReader(self.path)
        infos = [TensorInfo.of(name, tensor.shape, tensor.dtype) for name, tensor in weights.items()]
        kept = find_kept(reader, model_kept_prefixes(reader.config), weights)
        write_hf_directory(state, infos, iter(weights.items()), self.path, kept=kept)

    def close(self) -> None:
        """Frees nothing that the end of the process does not."""

    def start_from(self, factors: Mapping[str, Tensor]) -> None:
        """Takes an adapter's factors."""
        with torch.no_grad():
            for name, parameter in self.trained.items():
                self.masters[name].copy_(factors[name])
                parameter.copy_(factors[name])

    def weights(self) -> dict[str, Tensor]:
        if self.frozen:
            return {**self._checkpoint_names(self.frozen), **self.stored_names(self.masters)}
        return self._checkpoint_names({**self.masters, **self.buffers})

    def stored_names(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Copies on the host of what is trained, under the names of files."""
        if self.frozen:
            return {name: tensor.detach().to("cpu", copy=True) for name, tensor in tensors.items()}
        return self._checkpoint_names(tensors)

    def _checkpoint_names(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Copies on the host, under the names of a saved checkpoint."""
        on_host = {name: tensor.detach().to("cpu", copy=True) for name, tensor in tensors.items()}
        # A model may hold many tensors of a file as one.
        converted = {self.own_name(name): tensor for name, tensor in revert_weight_conversion(self.model, on_host).items()}
        paths = [self.in_files(name) for name in tensors]
        order = {prefix: index for index, path in reversed(list(enumerate(paths))) for prefix in _prefixes(path)}
        names = sorted(converted, key=lambda name: next(order[prefix] for prefix in _prefixes(name) if prefix in order))
        return {name: converted[name].contiguous() for name in names}

    def _log_probs(self, sequence: Tensor) -> Tensor:
        logits = self.model(sequence[None], use_cache=False).logits[0].float()
        chosen = logits[:-1].log_softmax(-1).gather(1, sequence[1:, None]).squeeze(1)
        return torch.cat([chosen, chosen.new_zeros(1)])


def _load(path: str, dtype: torch.dtype, device: torch.device, options: Mapping[str, Any]) -> PreTrainedModel:
    # Grouped products of transformers, its default for experts, take rows of multiples of 16 bytes only.
    return AutoModelForCausalLM.from_pretrained(
        path, dtype=dtype, local_files_only=True, experts_implementation="eager", **options
    ).to(device)


def _path_in_files(model: PreTrainedModel, own_name: Callable[[str], str]) -> Callable[[str], str]:
    """Name of a parameter or module in memory -> in files, but for those that files have in parts."""
    # A language model that transformers takes out of a larger one is nested there, unless own_name says otherwise.
    embedding = next(name for name, module in model.named_modules() if module is model.get_input_embeddings())
    (stored,) = revert_weight_conversion(model, {f"{embedding}.weight": torch.empty(0)})
    inside, nested = (name.rpartition(".")[0] for name in (embedding, own_name(stored).removesuffix(".weight")))
    return lambda name: nested + name.removeprefix(inside) if name.startswith(f"{inside}.") else name


def _prefixes(name: str) -> list[str]:
    """``a.b`` -> ``a.b``, ``a`` and an empty one."""
    parts = name.split(".")
    return [".".join(parts[:count]) for count in range(len(parts), -1, -1)]


def _decay_groups(parameters: Mapping[str, Tensor], config: OptimizerConfig) -> list[dict[str, object]]:
    # As Megatron-Core: biases and parameters of one dimension are not decayed.
    exempt = {name for name, value in parameters.items() if name.endswith((".bias", "_bias")) or value.dim() == 1}
    return [
        {"params": [parameters[name] for name in parameters if (name in exempt) == without], "weight_decay": decay}
        for without, decay in ((False, config.weight_decay), (True, 0.0))
    ]
