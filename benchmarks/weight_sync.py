"""Weights of a 254M-parameter float32 Qwen3 into a running vLLM engine: through memory, through disk, and the limit.

Each run first changes every weight. One side is ``WeightSync.push()``, with all its checks. The other writes one safetensors
file and calls vLLM's ``reload_weights``, in two ways. ``disk`` saves over the same file each time, as a loop does that only
wants the weights in the engine. ``disk_kept`` saves to a new directory and removes the one before afterwards, outside the
timing, as a loop does that must not lose its last save; pages for a second file have to be found then. What the kernel
still has to write to the disk is waited for outside of the timing. The limit is what no
push through memory can do without: one copy of the weights into shared memory and vLLM's own load from it, with nothing
checked. Runs are interleaved and the figures are medians; after every kind of update the engine's log-probs are compared
with the trainer's. ``python -m benchmarks.weight_sync`` writes ``results/weight_sync.json``.
"""

from __future__ import annotations

import argparse
import os
import shutil
import tempfile
import time
from pathlib import Path
from typing import Any

import ray
import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import Qwen3Config, Qwen3ForCausalLM

from actors.cluster.session import init_local_ray
from actors.rollout.config import RolloutConfig, SamplingConfig
from actors.rollout.engine.engine import RolloutEngine
from actors.rollout.group.engines import raise_failures
from actors.rollout.group.group import RolloutGroup
from actors.sync.push import WeightSync
from actors.sync.report import PushReport
from actors.sync.source import WeightSource
from benchmarks.report import interleave, machine, medians, over_machines, require_sleeping_threads, write_result
from rl_backend.contracts import TensorInfo, WeightManifest
from rl_backend.weights.staging import plan_layout, read_tensor

MODEL = {
    "vocab_size": 32_000,
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_hidden_layers": 15,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "max_position_embeddings": 512,
    "tie_word_embeddings": False,
}
LARGEST_GAP = 1e-5
INCLUDES = {
    "memory": "WeightSync.push(): plan, copy to shared memory, xxh3 digests, every check in the engine (version, names, "
    "shapes, dtypes, digests, finite values; of what is staged while more is), prefix cache reset, vLLM's load, "
    "acknowledgement and resume",
    "disk": "safetensors.torch.save_file of the same tensors over the file of the run before (no fsync), prefix cache "
    "reset, vLLM's reload_weights from it; nothing is checked",
    "disk_kept": "as disk, to a new directory each time; the save before is removed, outside the timing, when the new one "
    "is loaded",
    "limit": "copying the same tensors into a shared-memory segment that is there already, prefix cache reset, and vLLM's "
    "load of views of it; nothing is checked",
}


class BenchmarkEngine(RolloutEngine):
    """An engine that can also take weights from disk, and from memory without checks."""

    def reload_from_disk(self, path: str) -> None:
        """vLLM's own reload, which needs no weight-transfer engine."""
        self._vllm.llm.reset_prefix_cache()
        self._vllm.llm.collective_rpc("reload_weights", kwargs={"weights_path": path})

    def load_unchecked(self, manifest: WeightManifest) -> None:
        """vLLM's own load of the segment that the last push used."""
        self._vllm.llm.reset_prefix_cache()
        self._vllm.llm.start_weight_update()
        self._vllm.llm.update_weights({"update_info": {"manifest": manifest.model_dump_json()}})
        self._vllm.llm.finish_weight_update()


class BenchmarkGroup(RolloutGroup):
    """A group of :class:`BenchmarkEngine`."""

    engine_class = BenchmarkEngine


class Trainer:
    """A transformers model in this process and the ways in which its weights leave it."""

    def __init__(self, model: Qwen3ForCausalLM, rollout: RolloutGroup, scratch: Path) -> None:
        self.model = model
        self.rollout = rollout
        self.scratch = scratch
        self.source = WeightSource(self.weights())
        self.sync = WeightSync(self.source, rollout)
        self.reports: list[PushReport] = []
        self.other_phases: dict[str, list[dict[str, float]]] = {"disk": [], "disk_kept": [], "limit": []}
        self.last_save: Path | None = None
        self.same_directory = scratch / "save"
        self.same_directory.mkdir()
        model.config.save_pretrained(self.same_directory)
        infos = [TensorInfo.of(name, tensor.shape, tensor.dtype) for name, tensor in self.weights().items()]
        self.unchecked = WeightManifest(version=0, tensors=plan_layout(infos)[0])

    def weights(self) -> dict[str, Tensor]:
        return {name: tensor.detach() for name, tensor in self.model.state_dict().items()}

    def change(self) -> None:
        """A step of training, as far as a push can tell."""
        self.source.version += 1
        with torch.no_grad():
            for parameter in self.model.parameters():
                parameter.mul_(1.0 + 0.01 * (-1) ** self.source.version)

    def through_memory(self) -> float:
        self.change()
        started = time.perf_counter()
        self.reports.append(self.sync.push())
        return time.perf_counter() - started

    def through_disk(self) -> float:
        """Saves over the save before."""
        self.change()
        return self._save_and_reload("disk", self.same_directory)

    def through_disk_kept(self) -> float:
        """Keeps the save before until this one is loaded."""
        self.change()
        directory = Path(tempfile.mkdtemp(dir=self.scratch))
        self.model.config.save_pretrained(directory)
        seconds = self._save_and_reload("disk_kept", directory)
        if self.last_save is not None:
            shutil.rmtree(self.last_save)
        self.last_save = directory
        return seconds

    def _save_and_reload(self, way: str, directory: Path) -> float:
        started = time.perf_counter()
        save_file(self.weights(), directory / "model.safetensors")
        saved = time.perf_counter()
        raise_failures(self.rollout.engine_set.call("reload_from_disk", str(directory)))
        ended = time.perf_counter()
        # The kernel writes to the disk later, on cores of whatever is measured next.
        os.sync()
        self.other_phases[way].append({"save": saved - started, "reload": ended - saved})
        return ended - started

    def limit(self) -> float:
        """Uses the segment of the last push, which engine and trainer have mapped already."""
        self.change()
        (segment,) = self.source.run_on_ranks(lambda context: list(context.state.values()))[0]
        buffer = segment.buffer
        started = time.perf_counter()
        for info, tensor in zip(self.unchecked.tensors, self.weights().values(), strict=True):
            read_tensor(buffer, info).copy_(tensor)
        copied = time.perf_counter()
        raise_failures(self.rollout.engine_set.call("load_unchecked", self.unchecked))
        ended = time.perf_counter()
        self.other_phases["limit"].append({"copy": copied - started, "load": ended - copied})
        return ended - started

    def gap(self) -> float:
        """Mean absolute difference between the engine's log-probs and this model's."""
        (sample,) = self.rollout.generate([list(range(3, 40))], SamplingConfig(max_new_tokens=8))
        with torch.no_grad():
            logits = self.model(torch.tensor([sample.prompt_ids + sample.response_ids])).logits[0, :-1]
        ours = torch.log_softmax(logits.double(), -1)[-len(sample.response_ids) :]
        chosen = ours.gather(1, torch.tensor(sample.response_ids)[:, None]).flatten()
        return float((chosen - torch.tensor(sample.log_probs, dtype=torch.float64)).abs().mean())


def make_model(directory: Path) -> Qwen3ForCausalLM:
    """A random model, also saved to ``directory`` for the engine to start from."""
    torch.manual_seed(0)
    model = Qwen3ForCausalLM(Qwen3Config(**MODEL)).to(torch.float32)
    model.save_pretrained(directory)
    return model


def measure(trainer: Trainer, runs: int) -> dict[str, Any]:
    """The figures; raises when an engine's log-probs are wrong after any kind of update."""
    ways = {
        "memory": trainer.through_memory,
        "disk": trainer.through_disk,
        "disk_kept": trainer.through_disk_kept,
        "limit": trainer.limit,
    }
    gaps = {}
    for name, way in ways.items():
        way()
        gaps[name] = trainer.gap()
        if not gaps[name] <= LARGEST_GAP:
            raise RuntimeError(
                f"after an update through {name} the log-probs differ by {gaps[name]:.2e}; limit {LARGEST_GAP}"
            )
    trainer.reports.clear()
    for phases in trainer.other_phases.values():
        phases.clear()
    seconds = interleave(runs, ways)
    middle = medians(seconds)
    memory_phases = {phase: [report.seconds[phase] for report in trainer.reports] for phase in trainer.reports[0].seconds}
    other_phases = {
        way: medians({phase: [one[phase] for one in runs_of_way] for phase in runs_of_way[0]})
        for way, runs_of_way in trainer.other_phases.items()
    }
    replaced, kept, of_limit = (
        middle[longer] / middle[shorter]
        for longer, shorter in (("disk", "memory"), ("disk_kept", "memory"), ("memory", "limit"))
    )
    return {
        "seconds": seconds,
        "medians": middle,
        "disk_over_memory": replaced,
        "disk_kept_over_memory": kept,
        "memory_over_limit": of_limit,
        "over_machines": over_machines(
            "weight_sync", {"disk_over_memory": (kept, replaced), "memory_over_limit": (of_limit,)}
        ),
        "memory_phases": medians(memory_phases),
        "other_phases": other_phases,
        "mean_log_prob_gaps": gaps,
        "transport": trainer.reports[0].transport,
        "bytes": trainer.reports[0].nbytes,
    }


def main() -> None:
    """Measures, prints and writes the result."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--runs", type=int, default=9)
    arguments = parser.parse_args()
    # This process stands for a rank of training.
    require_sleeping_threads("benchmarks.weight_sync")
    facts = machine()
    init_local_ray(include_dashboard=False, log_to_driver=False, object_store_memory=200 * 2**20)
    try:
        with tempfile.TemporaryDirectory() as scratch:
            directory = Path(scratch) / "model"
            model = make_model(directory)
            config = RolloutConfig(
                model_path=str(directory), device="cpu", dtype="float32", max_model_len=256, kv_cache_gib=0.25
            )
            with BenchmarkGroup(config) as rollout:
                trainer = Trainer(model, rollout, Path(scratch))
                result = measure(trainer, arguments.runs)
    finally:
        ray.shutdown()
    parameters = sum(parameter.numel() for parameter in model.parameters())
    path = write_result(
        "weight_sync",
        {
            "model": {**MODEL, "parameters": parameters, "dtype": "float32"},
            "runs": arguments.runs,
            "includes": INCLUDES,
            **result,
            "machine": facts,
        },
    )
    print(
        f"memory {result['medians']['memory']:.3f} s, disk {result['medians']['disk']:.3f} s "
        f"(the save before kept: {result['medians']['disk_kept']:.3f} s), "
        f"limit {result['medians']['limit']:.3f} s: disk_over_memory {result['disk_over_memory']:.2f}, "
        f"memory_over_limit {result['memory_over_limit']:.2f} -> {path}"
    )


if __name__ == "__main__":
    main()
