"""``rl-backend serve``: models that others train and sample over HTTP, with Tinker's SDK or OpenAI's."""

import argparse
from pathlib import Path

from rl_backend.cli.command import add_plugins, exit_on_sigterm
from rl_backend.contracts import ConfigError, ParallelConfig
from rl_backend.options.parser import CommandError

SIZES = tuple(ParallelConfig.model_fields)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.epilog = "docs/serve.md leads from nothing to a first run, and says what differs from the hosted service."
    add = parser.add_argument
    add(
        "--model",
        action="append",
        metavar="[NAME=]DIR",
        help="Hugging Face directory, or a name on the Hub; several times for several base models",
    )
    add("--name", help="what clients call the only model (default: its directory's absolute path, or its name on the Hub)")
    add(
        "--state",
        type=Path,
        default=Path("serve-state"),
        metavar="DIR",
        help="database and checkpoints (default serve-state)",
    )
    add("--host", default="127.0.0.1", help="address to listen at (default 127.0.0.1; others need keys)")
    add("--port", type=int, default=8765, help="default 8765; 0 takes a free one")
    add("--new-key", metavar="NAME", help="make a key of this name, print it once, and end; from then on keys are required")
    add("--remove-key", metavar="NAME", help="remove the key of this name, and end")
    add("--restart", action="store_true", help="start the server again when its process ends, or ranks or engines for good")
    add(
        "--check", action="store_true", help="start, let a client train, sample and save over HTTP, say what came of it, end"
    )
    ranks = parser.add_argument_group("training and sampling, of each model")
    ranks.add_argument("--runtime", choices=("native", "bridge"), default="native", help="default native")
    ranks.add_argument("--ranks", type=int, default=1, metavar="N", help="training ranks (default 1)")
    ranks.add_argument(
        "--recover",
        choices=("checkpoint", "off"),
        default="checkpoint",
        help="what the death of a rank does: others take the place of all and continue (checkpoint), or training ends (off)",
    )
    ranks.add_argument("--engines", type=int, default=1, metavar="N", help="vLLM engines (default 1)")
    for size in SIZES:
        ranks.add_argument(f"--{size}", type=int, default=1, metavar="N", help=ParallelConfig.documented()[size])
    ranks.add_argument("--dtype", choices=("auto", "float32", "bfloat16"), default="auto", help="auto: bfloat16 with GPUs")
    ranks.add_argument("--kv-cache-gib", type=float, metavar="X", help="memory of each engine for keys and values")
    add_plugins(ranks)
    limits = parser.add_argument_group("limits")
    limits.add_argument("--max-model-len", type=int, metavar="N", help="tokens of prompt and response, and of a datum")
    limits.add_argument("--max-tokens", type=int, default=16384, metavar="N", help="of a micro-batch (default 16384)")
    limits.add_argument("--max-rank", type=int, default=64, metavar="N", help="largest rank of an adapter (default 64)")
    limits.add_argument(
        "--max-runs", type=int, default=32, metavar="N", help="adapters in training at one time (default 32)"
    )
    limits.add_argument("--max-adapters", type=int, default=8, metavar="N", help="sampled in one batch (default 8)")
    limits.add_argument(
        "--session-timeout", type=float, default=300.0, metavar="S", help="without heartbeat (default 300 s)"
    )
    limits.add_argument(
        "--keep-results", type=float, default=3600.0, metavar="S", help="to be fetched again (default 3600 s)"
    )
    limits.add_argument("--disk-gib", type=float, metavar="X", help="of one key's checkpoints and snapshots (default: any)")
    limits.add_argument(
        "--requests-per-second", type=float, metavar="X", help="of one key, which may save up ten seconds' (default: any)"
    )


def run(arguments: argparse.Namespace) -> int:
    """Serves until it is interrupted, or makes or removes a key.

    Raises:
        CommandError, RLBackendError: what was asked for cannot be served.
    """
    try:
        from actors.serve import command
    except ModuleNotFoundError as error:
        if error.name not in ("fastapi", "uvicorn", "sqlalchemy", "zstandard"):
            raise
        raise CommandError(f"{error.name} is not installed; pip install 'rl-backend[ray,vllm,serve]'") from None
    try:
        if arguments.new_key is not None:
            print(command.new_key(arguments.state, arguments.new_key))
            return 0
        if arguments.remove_key is not None:
            command.remove_key(arguments.state, arguments.remove_key)
            return 0
        if arguments.model is None:
            raise CommandError("--model: name the directory of the model")
        with exit_on_sigterm():
            return command.serve(arguments)
    except ConfigError as error:
        raise CommandError(str(error)) from None
    return 0
