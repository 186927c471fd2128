"""``rl-backend plan``: what a model takes on each rank, by purpose and phase, before anything is started."""

import argparse
import json
from pathlib import Path

import torch

from rl_backend.cli.command import add_fields, add_plugins, given, in_flags, json_object, positive
from rl_backend.contracts import BatchError, ConfigError, NativeConfig, ParallelConfig, RuntimeConfig
from rl_backend.contracts.atoms import PARTS
from rl_backend.contracts.lora import LoRAConfig
from rl_backend.lab.plan.make import GIB, as_json, as_text, make_plan, suggest_layout
from rl_backend.lab.plan.memory import Workload
from rl_backend.options.parser import CommandError

EXIT_DOES_NOT_FIT = 1
DTYPES = ("auto", "float32", "bfloat16")
AUTO = "bfloat16 where this machine has a GPU, else float32, as in a run; also of --sync-dtype"
SIZES = tuple(ParallelConfig.model_fields)
NATIVE = ("pipeline_schedule", "activation_checkpointing", "reduce_dtype", "reduce_gradients")
WORK = (
    *("sequence_length", "prompt_length", "samples_per_prompt", "micro_batch_tokens", "num_micro_batches", "head"),
    *("sync_dtype", "byte_budget", "tenants"),
)
_OWNERS = ("ParallelConfig", "BridgeConfig.parallel", "Workload")
"""Configurations whose fields are flags."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.epilog = (
        "Exit status: 0 it fits, or no --device-gib was given, 1 it does not fit, 2 it cannot be planned, as when a size "
        "does not divide the model. docs/plan.md says what is counted and how well."
    )
    add = parser.add_argument
    add("--model", type=Path, required=True, metavar="PATH", help="Hugging Face directory, or its config.json; no weights")
    add("--backend", choices=("native", "bridge"), default="native", help="default native")
    add("--ranks", type=int, required=True, metavar="N", help="of the whole job, one device each")
    add("--device-gib", type=positive, metavar="X", help="memory of a device: does it fit, or what does?")
    links = "GiB/s of links: says what a rank sends in a weight sync over gloo, and for how long; 11.6 is 100 Gbit/s"
    add("--sync", type=positive, nargs="+", default=(), metavar="X", help=links)
    add("--json", action="store_true", help="print bytes per rank and phase as JSON instead of text")
    add_fields(parser.add_argument_group("layout", "The rest of the ranks is data parallel."), ParallelConfig, SIZES)
    runtime = parser.add_argument_group("the runtime")
    runtime.add_argument("--param-dtype", choices=DTYPES, default="auto", help=f"of the passes (default auto: {AUTO})")
    further = "further fields of the runtime's configuration"
    runtime.add_argument("--options", type=json_object, default={}, metavar="JSON", help=further)
    add_plugins(runtime)
    add_fields(parser.add_argument_group("the native runtime"), NativeConfig, NATIVE)
    work = parser.add_argument_group("the work")
    add_fields(work, Workload, WORK)
    work.add_argument("--entropy", action="store_true", help="the loss takes the entropy")
    parts = f"of {','.join(PARTS)}: those in host memory whenever they are not used (default none)"
    add_fields(work, LoRAConfig, ("rank",), "lora.")
    work.add_argument("--lora.targets", metavar="NAMES", help="with commas between: what the tenants adapt")
    work.add_argument("--offload", default="", metavar="PARTS", help=parts)


def run(arguments: argparse.Namespace) -> int:
    if arguments.ranks < 1:
        raise CommandError(f"--ranks {arguments.ranks}: must be at least 1")
    device_bytes = None if arguments.device_gib is None else int(arguments.device_gib * GIB)
    try:
        if arguments.param_dtype == "auto":
            arguments.param_dtype = "bfloat16" if torch.cuda.is_available() else "float32"
        workload = _workload(arguments)
        config = _config(arguments, workload)
        plan = make_plan(config, arguments.ranks, workload)
        fits = device_bytes is None or not plan.phases_over(device_bytes)
        fitting = None if device_bytes is None or fits else suggest_layout(plan, device_bytes)
    except (ConfigError, BatchError) as error:
        raise CommandError(in_flags(error, *_OWNERS)) from None
    found = plan, device_bytes, fitting, arguments.sync
    print(json.dumps(as_json(*found), indent=1) if arguments.json else as_text(*found))
    return 0 if fits else EXIT_DOES_NOT_FIT


def _config(arguments: argparse.Namespace, workload: Workload) -> RuntimeConfig:
    path: Path = arguments.model
    fields = {"param_dtype": arguments.param_dtype, **given(arguments, NATIVE)}
    if twice := sorted({*fields, "parallel"} & arguments.options.keys()):
        raise CommandError(f"--options {json.dumps(arguments.options)}: {twice[0]} has a flag; use that")
    return RuntimeConfig(
        plugins=tuple(arguments.plugin),
        backend=arguments.backend,
        hf_path=str(path.parent if path.name == "config.json" else path),
        max_tokens_per_micro_batch=workload.micro_batch_tokens,
        backend_cfg={**arguments.options, **fields, "parallel": given(arguments, SIZES)},
    )


def _workload(arguments: argparse.Namespace) -> Workload:
    offload = tuple(part for part in arguments.offload.split(",") if part)
    lora = given(arguments, ("rank",), "lora.")
    if (targets := getattr(arguments, "lora.targets")) is not None:
        lora["targets"] = tuple(targets.split(","))
    fields = {"sync_dtype": arguments.param_dtype} | given(arguments, WORK) | ({"lora": lora} if lora else {})
    return Workload(calculate_entropy=arguments.entropy, offload=offload, **fields)
