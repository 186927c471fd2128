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
from rl_backend.lab.parity.compare import RankRecord, package_versions
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


def record_transformers(config: ParityConfig, side: ParitySide) -> RankRecord:
    trainer, batches = _open(config, side, config.model)
    loaded = trainer.weights()
    activations = trainer.activations(batches)
    loss, log_probs = trainer.forward_backward(batches)
    gradients = trainer.stored_names(trainer.gradients())
    losses, norms = [loss], [trainer.optimizer_step()]
    weights = trainer.weights()
    for _ in range(1, config.steps):
        losses.append(trainer.forward_backward(batches)[0])
        norms.append(trainer.optimizer_step())
    return RankRecord(0, True, activations, log_probs, losses, norms, loaded, gradients, weights, package_versions())


def record_again(config: ParityConfig, side: ParitySide, states: Path) -> RankRecord:
    """Trains with the other attention and sequences in another order; else as :func:`.rank.record_again`."""
    eager = side.options.get("attn_implementation") == "eager"
    options = {"attn_implementation": "sdpa" if eager else "eager"}
    trainer, batches = _open(config, side.replace(options=options), config.model, otherwise=True)
    losses, norms = [], []
    for step in range(config.steps):
        if step and config.lora is None:
            weights = trainer.weights()
            infos = [TensorInfo.of(name, tensor.shape, tensor.dtype) for name, tensor in weights.items()]
            reader = HFReader(config.model)
            kept = find_kept(reader, model_kept_prefixes(reader.config), weights)
            write_hf_directory(states / str(step), infos, iter(weights.items()), config.model, kept=kept)
        elif step:
            torch.save(trainer.stored_names(trainer.masters), states / str(step))
        losses.append(trainer.forward_backward(batches)[0])
        norms.append(trainer.optimizer_step())
    return RankRecord(0, True, (), (), losses, norms)


def record_alone(config: ParityConfig, side: ParitySide, states: Path) -> RankRecord:
    """As :func:`rl_backend.lab.parity.rank.record_alone`."""
    losses, norms = [], []
    for step in range(1, config.steps):
        state = states / str(step)
        trainer, batches = _open(config, side, config.model if config.lora else str(state))
        if config.lora is not None:
            trainer.start_from(torch.load(state, weights_only=True))
        losses.append(trainer.forward_backward(batches)[0])
        norms.append(trainer.optimizer_step())
    return RankRecord(0, True, (), (), losses, norms)


def _open(
    config: ParityConfig, side: ParitySide, model: str, *, otherwise: bool = False
) -> tuple["_Trainer", list[PackedBatch]]:
    torch.manual_seed(config.seed)
    use_cuda = config.device != "cpu" and torch.cuda.is_available()
    trainer = _Trainer(config.replace(model=model), side, torch.device("cuda" if use_cuda else "cpu"))
    sequences = make_sequences(config, read_hf_config(config.model))
    (batches,) = pack_plan(sequences, plan_batch(config, 1, otherwise=otherwise))
    return trainer, [batch.to(trainer.device) for batch in batches]


class _Trainer:
    """A model in the dtype of the comparison, with float32 masters for AdamW."""

    def __init__(self, config: ParityConfig, side: ParitySide, device: torch.device) -> None:
        self.device = device
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

    def activations(self, batches: Sequence[PackedBatch]) -> list[dict[str, Tensor]]:
        hf_names = {name: (stored,) for name, stored in self.hf_names.items()}
        hidden_size = self.model.config.get_text_config().hidden_size
        recorded = []
        self.model.eval()
        for batch in batches:
            for sequence in batch.split(batch.input_ids):
                with torch.no_grad(), record_outputs(self.model, hf_names, hidden_size) as outputs:
                    self.model(sequence[None], use_cache=False)
                flat = {path: output.to("cpu", torch.float32).flatten(0, -2) for path, output in outputs.items()}
                recorded.append({path: output for path, output in flat.items() if len(output) == len(sequence)})
        return recorded

    def forward_backward(self, batches: Sequence[PackedBatch]) -> tuple[float, list[Tensor]]:
        """Loss of all micro-batches, and log-probs by sequence."""
        self.model.train()
        total, outputs = 0.0, []
        for master in self.masters.values():
            master.grad = torch.zeros_like(master)
        gradients = self.gradients()
        for batch in batches:
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
        return {name: master.grad for name, master in self.masters.items() if master.grad is not None}

    def optimizer_step(self) -> float:
        """Clips, steps, and returns the norm before clipping."""
        gradients = self.gradients().values()
        norm = math.sqrt(sum(float(gradient.double().square().sum()) for gradient in gradients))
        whole = torch.tensor(norm, dtype=torch.float64)
        torch.nn.utils.clip_grads_with_norm_(self.masters.values(), self.config.clip_grad, whole, foreach=False)
        self.adamw.step()
        with torch.no_grad():
            for name, parameter in self.trained.items():
                parameter.copy_(self.masters[name])
        return norm

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
