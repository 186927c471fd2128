"""``rl-backend import``: a Hugging Face directory out of a GGUF file."""

import argparse
import json
import time
from pathlib import Path

from rl_backend.checkpoint.gguf import import_gguf
from rl_backend.cli.command import exit_on_sigterm
from rl_backend.contracts import dtype_from_name


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.epilog = (
        "Exit status: 0 the directory is complete, 2 nothing was written. Weights that the file has quantised are written "
        "as plain numbers: they are near the released ones, not equal to them. docs/real_model.md says more."
    )
    add = parser.add_argument
    add("--gguf", type=Path, required=True, metavar="FILE", help="the model, as llama.cpp stores it")
    add("--out", type=Path, required=True, metavar="DIR", help="the new directory; must not exist")
    dtypes = ("float32", "bfloat16")
    add("--dtype", choices=dtypes, default="float32", help="of the weights (float32 loses nothing)")
    add("--json", action="store_true", help="print what was written as JSON instead of text")


def run(arguments: argparse.Namespace) -> int:
    began = time.monotonic()
    with exit_on_sigterm():
        model = import_gguf(arguments.gguf, arguments.out, dtype=dtype_from_name(arguments.dtype))
    seconds = time.monotonic() - began
    if arguments.json:
        facts = {
            "gguf": str(arguments.gguf),
            "out": str(arguments.out),
            **model._asdict(),
            "dequantised": model.is_quantised,
            "dtype": arguments.dtype,
            "seconds": round(seconds, 3),
        }
        print(json.dumps(facts, indent=1))
        return 0
    kinds = ", ".join(f"{number} {kind}" for kind, number in model.stored.items())
    print(f"{arguments.gguf}: {model.model_type}, {model.parameters:,} parameters; tensors: {kinds}")
    if model.is_quantised:
        print(f"weights are dequantised to {arguments.dtype}: they are near the released ones, not equal to them")
    if model.end != model.end_in_file:
        print(f"end token: {model.end}, as the chat template ends answers; the file's tokenizer says {model.end_in_file}")
    print(f"{arguments.out}: written in {seconds:.1f} s")
    return 0
