"""``rl-backend parity``: trains with two runtimes from one checkpoint and names the first place where they part."""

import argparse
import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, get_args

from rl_backend.cli import command
from rl_backend.contracts import ConfigError, ParallelConfig
from rl_backend.contracts.lora import LoRAConfig
from rl_backend.contracts.runtime_config import import_plugins
from rl_backend.lab.parity.compare import Tolerances
from rl_backend.lab.parity.config import SIDES, TRANSFORMERS, DType, ParityConfig, ParitySide, SideName
from rl_backend.lab.parity.run import as_json, as_text, run_parity
from rl_backend.options.parser import CommandError
from rl_backend.runtime import check_config

EXIT_DIVERGED = 1
STANDARD_OUTPUT = Path("-")
DTYPES: tuple[DType, ...] = get_args(DType.__value__)
SIZES = tuple(ParallelConfig.model_fields)
PREFIXES: dict[SideName, str] = {"candidate": "", "reference": "reference_"}
"""Of the flags for the layout of a side."""

LORA = "lora."
LORA_SIZES = ("rank", "alpha")
TRAINING = ("steps", "lr")
RUN = (
    "weight_decay",
    "num_sequences",
    "num_micro_batches",
    "min_length",
    "max_length",
    "seed",
    "device",
    "threads",
    "timeout",
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.epilog = (
        "Exit status: 0 all differences are within the tolerances, 1 one is not, 2 a side could not be run. "
        "docs/parity.md says what is compared and what the tolerances are."
    )
    add = parser.add_argument
    add("--model", required=True, metavar="DIR", help="local Hugging Face directory that both sides load")
    for name, default in (("reference", TRANSFORMERS), ("candidate", "native")):
        add(f"--{name}", default=default, metavar="RUNTIME", help=f"a runtime, or {TRANSFORMERS} (default {default})")
    command.add_fields(parser, ParityConfig, TRAINING)
    dtypes = "of parameters in forward and backward; both reports bfloat16 beside float32"
    add("--dtype", default="float32", choices=[*DTYPES, "both"], help=dtypes)
    add(
        "--json",
        nargs="?",
        type=Path,
        const=STANDARD_OUTPUT,
        metavar="FILE",
        help="print the whole result as JSON instead of text; with FILE, write it there beside the text",
    )
    lora = parser.add_argument_group("LoRA", "Trains adapters over the frozen model; transformers then takes peft's.")
    command.add_fields(lora, LoRAConfig, LORA_SIZES, LORA)
    documented = LoRAConfig.documented()
    lora.add_argument(f"--{LORA}targets", nargs="+", metavar="NAME", help=documented["targets"])
    lora.add_argument(f"--{LORA}use_rslora", action="store_true", default=None, help=documented["use_rslora"])
    for side, prefix in PREFIXES.items():
        group = parser.add_argument_group(f"layout of the {side}", "Each rank is a process.")
        command.add_fields(group, ParallelConfig, SIZES, prefix)
        command.add_fields(group, ParitySide, ("dp",), prefix)
        further = "further fields of the runtime's configuration; those that a flag sets are refused"
        group.add_argument(f"--{side}-options", type=command.json_object, default={}, metavar="JSON", help=further)
    more = parser.add_argument_group("the run")
    command.add_fields(more, ParityConfig, RUN)
    factor = "multiplies all tolerances but that of the loaded weights (default 1)"
    # With NaN every difference would be within its tolerance.
    more.add_argument("--tolerance-factor", type=command.positive, default=1.0, metavar="X", help=factor)
    command.add_plugins(more)


def run(arguments: argparse.Namespace) -> int:
    to_file = arguments.json not in (None, STANDARD_OUTPUT)
    if to_file:
        command.check_output("json", arguments.json)
    # Standard output is the JSON's alone where that is printed.
    say = partial(print, file=sys.stderr if arguments.json == STANDARD_OUTPUT else sys.stdout, flush=True)
    dtypes = DTYPES if arguments.dtype == "both" else (arguments.dtype,)
    diverged = False
    report: dict[str, Any] = {}
    try:
        # Both are checked before the first trains for minutes.
        configs = [_config(arguments, dtype) for dtype in dtypes]
        with command.exit_on_sigterm():
            for config in configs:
                tolerances = Tolerances.of(config.dtype, arguments.tolerance_factor)
                result = run_parity(config, tolerances, say)
                say(f"\n{as_text(result)}\n")
                diverged |= result.comparison.first_divergence is not None
                # The first dtype's result is the report; another stands in it under its name.
                report |= {config.dtype: as_json(result)} if report else as_json(result)
                if to_file:
                    arguments.json.write_text(json.dumps(report, indent=1, allow_nan=False) + "\n")
        if arguments.json == STANDARD_OUTPUT:
            print(json.dumps(report, indent=1, allow_nan=False))
    except ConfigError as error:
        raise CommandError(command.in_flags(error, "ParityConfig")) from None
    return EXIT_DIVERGED if diverged else 0


def _config(arguments: argparse.Namespace, dtype: DType) -> ParityConfig:
    import_plugins(arguments.plugin)
    config = ParityConfig(
        plugins=tuple(arguments.plugin),
        model=arguments.model,
        dtype=dtype,
        lora=_lora(arguments),
        **{name: _side(arguments, name) for name in SIDES},
        **command.given(arguments, TRAINING + RUN),
    )
    for name in SIDES:
        side = config.side(name)
        with _named(arguments, name):
            if side.runtime != TRANSFORMERS:
                check_config(config.runtime_config(side), side.world_size)
    return config


def _lora(arguments: argparse.Namespace) -> LoRAConfig | None:
    given = command.given(arguments, (*LORA_SIZES, "targets", "use_rslora"), LORA)
    if given and "rank" not in given:
        raise CommandError(f"--{LORA}{next(iter(given))} has no effect without --{LORA}rank")
    try:
        return LoRAConfig(**given) if given else None
    except ConfigError as error:
        raise CommandError(error.told(lambda field: f"--{LORA}{field.removeprefix('LoRAConfig.')}", " ")) from None


def _side(arguments: argparse.Namespace, name: SideName) -> ParitySide:
    with _named(arguments, name):
        return ParitySide(
            runtime=getattr(arguments, name),
            parallel=ParallelConfig(**command.given(arguments, SIZES, PREFIXES[name])),
            options=getattr(arguments, f"{name}_options"),
            **command.given(arguments, ("dp",), PREFIXES[name]),
        )


@contextmanager
def _named(arguments: argparse.Namespace, name: SideName) -> Iterator[None]:
    try:
        yield
    except ConfigError as error:
        sizes = command.given(arguments, (*SIZES, "dp"), PREFIXES[name])
        flags = [f"--{command.flag(PREFIXES[name] + size)} {value}" for size, value in sizes.items()]
        if options := getattr(arguments, f"{name}_options"):
            flags.append(f"--{name}-options '{json.dumps(options)}'")
        raise CommandError(f"{' '.join([f'--{name} {getattr(arguments, name)}', *flags])}: {error}") from None
