"""``rl-backend parity``: trains with two runtimes from one checkpoint and names the first place where they part."""

from __future__ import annotations

import argparse
import json
import math
from pathlib import Path
from typing import Any, get_args

from rl_backend.cli.command import SIZES, CommandError, check_output, exit_on_sigterm, given, in_flags, json_object
from rl_backend.contracts import BACKEND_CONFIGS, CheckpointError, ConfigError, ParallelConfig
from rl_backend.contracts.runtime_config import import_plugins
from rl_backend.lab.parity import TRANSFORMERS, ParityConfig, ParitySide, Tolerances, run_parity
from rl_backend.lab.parity.config import DType, SideName
from rl_backend.lab.parity.run import SIDES, ParityResult
from rl_backend.lab.parity.text import as_json, as_text
from rl_backend.runtime import check_config

EXIT_DIVERGED = 1
LAYOUT = {**SIZES, "dp": "data-parallel ranks (default: the fewest that the layout allows)"}
DTYPES: tuple[DType, ...] = get_args(DType.__value__)
DEFAULTS = ParityConfig.model_fields


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.epilog = (
        "Exit status: 0 all differences are within the tolerances, 1 one is not, 2 a side could not be run. "
        "docs/parity.md says what is compared and what the tolerances are."
    )
    parser.add_argument("--model", required=True, metavar="DIR", help="local Hugging Face directory that both sides load")
    parser.add_argument(
        "--reference", default=TRANSFORMERS, metavar="RUNTIME", help=f"a runtime, or {TRANSFORMERS} (default)"
    )
    parser.add_argument(
        "--candidate", default="native", metavar="RUNTIME", help=f"a runtime (default native), or {TRANSFORMERS}"
    )
    parser.add_argument(
        "--steps", type=int, default=DEFAULTS["steps"].default, metavar="N", help="optimizer steps (default 5)"
    )
    parser.add_argument("--lr", type=float, default=DEFAULTS["lr"].default, metavar="X", help="learning rate (default 1e-4)")
    parser.add_argument(
        "--dtype",
        default="float32",
        choices=[*DTYPES, "both"],
        help="of parameters in forward and backward; both reports bfloat16 beside float32",
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="where the whole result goes")
    for name, side in (("candidate", ""), ("reference", "reference-")):
        group = parser.add_argument_group(f"layout of the {name}", "Sizes not given are 1; each rank is a process.")
        for size, meaning in LAYOUT.items():
            group.add_argument(f"--{side}{size}", type=int, metavar="N", help=meaning)
        group.add_argument(
            f"--{name}-options",
            default="{}",
            metavar="JSON",
            help="further fields of the runtime's configuration; those that a flag sets are refused",
        )
    more = parser.add_argument_group("the run")
    more.add_argument("--weight-decay", type=float, metavar="X", help="default 0.1")
    more.add_argument("--sequences", type=int, dest="num_sequences", metavar="N", help="of the batch (default 16)")
    more.add_argument(
        "--micro-batches", type=int, dest="num_micro_batches", metavar="N", help="of each data-parallel rank (default 4)"
    )
    more.add_argument("--max-length", type=int, metavar="TOKENS", help="of the longest sequence (default 48)")
    more.add_argument("--seed", type=int, metavar="N", help="of the batch and the runtimes (default 0)")
    more.add_argument("--device", choices=["auto", "cpu", "cuda"], help="default auto: CUDA when there is a device")
    more.add_argument("--threads", type=int, metavar="N", help="CPU threads of each rank (default 1)")
    more.add_argument("--timeout", type=float, metavar="SECONDS", help="for one side (default 1800)")
    more.add_argument(
        "--tolerance-factor",
        type=float,
        default=1.0,
        metavar="X",
        help="multiplies all tolerances but that of the loaded weights (default 1)",
    )
    more.add_argument(
        "--plugin",
        action="append",
        default=[],
        metavar="MODULE",
        help="module that registers runtimes or model families; may be given several times",
    )


def run(arguments: argparse.Namespace) -> int:
    """Runs the comparison, prints it and writes the JSON after each dtype; see the command's help for the exit statuses.

    Raises:
        RLBackendError, CommandError: what was asked for cannot be run, or a side did not run to its end.
    """
    if not (arguments.tolerance_factor > 0 and math.isfinite(arguments.tolerance_factor)):
        raise CommandError(f"--tolerance-factor {arguments.tolerance_factor}: must be above 0 and finite")
    if arguments.json is not None:
        check_output("json", arguments.json)
    dtypes = DTYPES if arguments.dtype == "both" else (arguments.dtype,)
    diverged = False
    report: dict[str, Any] = {}
    try:
        configs = [_config(arguments, dtype) for dtype in dtypes]
        with exit_on_sigterm():
            for config in configs:
                result = _compare(config, arguments.tolerance_factor)
                diverged |= result.comparison.first_divergence is not None
                # The first dtype's result is the report; another stands in it under its name.
                report |= {config.dtype: as_json(result)} if report else as_json(result)
                if arguments.json is not None:
                    arguments.json.write_text(json.dumps(report, indent=1, allow_nan=False) + "\n")
    except CheckpointError as error:
        raise CommandError(f"--model {arguments.model}: {error}") from None
    except ConfigError as error:
        raise CommandError(in_flags(str(error), r"ParityConfig\.(\w+)")) from None
    return EXIT_DIVERGED if diverged else 0


def _compare(config: ParityConfig, tolerance_factor: float) -> ParityResult:
    result = run_parity(config, Tolerances.of(config.dtype, tolerance_factor), lambda line: print(line, flush=True))
    print(f"\n{as_text(result)}\n", flush=True)
    return result


def _config(arguments: argparse.Namespace, dtype: DType) -> ParityConfig:
    for module in arguments.plugin:
        try:
            import_plugins([module])
        except ConfigError as error:
            raise CommandError(f"--plugin {module}: {error}") from None
    names = ("weight_decay", "num_sequences", "num_micro_batches", "max_length", "seed", "device", "threads", "timeout")
    config = ParityConfig(
        plugins=tuple(arguments.plugin),
        model=arguments.model,
        steps=arguments.steps,
        lr=arguments.lr,
        dtype=dtype,
        **{name: _side(arguments, name) for name in SIDES},
        **given(arguments, names),
    )
    for name in SIDES:
        side = config.side(name)
        try:
            if side.runtime != TRANSFORMERS:
                check_config(config.runtime_config(side), side.world_size)
        except ConfigError as error:
            raise CommandError(f"{_flags(arguments, name)}: {error}") from None
    return config


def _side(arguments: argparse.Namespace, name: SideName) -> ParitySide:
    runtime = getattr(arguments, name)
    if runtime != TRANSFORMERS and runtime not in BACKEND_CONFIGS:
        known = ", ".join(sorted([TRANSFORMERS, *BACKEND_CONFIGS]))
        raise CommandError(
            f"--{name} {runtime}: unknown runtime; known: {known}; --plugin MODULE adds those that a module registers"
        )
    sizes = _sizes(arguments, name)
    options = json_object(f"{name}-options", getattr(arguments, f"{name}_options"))
    dp = sizes.pop("dp", None)
    try:
        return ParitySide(runtime=runtime, parallel=ParallelConfig(**sizes), dp=dp, options=options)
    except ConfigError as error:
        raise CommandError(f"{_flags(arguments, name)}: {error}") from None


def _sizes(arguments: argparse.Namespace, name: SideName) -> dict[str, int]:
    prefix = "" if name == "candidate" else "reference_"
    return {size: value for size in LAYOUT if (value := getattr(arguments, prefix + size)) is not None}


def _flags(arguments: argparse.Namespace, name: SideName) -> str:
    """What was asked for of a side, as on the command line."""
    prefix = "" if name == "candidate" else "reference-"
    sizes = [f"--{prefix}{size} {value}" for size, value in _sizes(arguments, name).items()]
    options = getattr(arguments, f"{name}_options")
    chosen = [f"--{name}-options '{options}'"] if options != "{}" else []
    return " ".join([f"--{name} {getattr(arguments, name)}", *sizes, *chosen])
