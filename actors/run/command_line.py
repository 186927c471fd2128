"""A loop as a command: its options, one message for an error, and the exit status."""

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

from actors.cluster.ray_watch import cluster_loss
from actors.cluster.session import EXIT_TERMINATED, RunTerminated
from actors.folder.checkpoints import CHECKPOINTS, RunCheckpoints
from actors.folder.resume import RunFinishedError
from actors.train.outcome import AFTERWARDS
from rl_backend.contracts import BaseConfig, ClusterLostError, EngineDeadError, GroupFailedError, RLBackendError
from rl_backend.options.command_line import in_flags, parse_config
from rl_backend.options.parser import missing_package

RUN_AGAIN = "start the run again"


def run_command(main: Callable[..., None], config_type: type[BaseConfig] | None = None, description: str = "") -> None:
    """Runs ``main`` and ends the process with its status.

    Our errors, and missing packages, become one message and status 2; a run that had finished says so with status 0;
    Ctrl-C is status 130, SIGTERM status 143, also of a run that either ends between two steps.

    Args:
        main: takes the options, if there is a type of them.
        config_type: of the options, which are read from the command line; errors then name flags in place of fields.
    """
    config: BaseConfig | None = None
    try:
        if config_type is None:
            main()
        else:
            main(config := parse_config(config_type, description))
    except RunFinishedError as error:
        # A success: schedulers start a run again that ended with it, until its exit status says that it is done.
        print(f"nothing left to do: {error}")
    except RLBackendError as error:
        message = "; ".join([in_flags(error, config), *getattr(error, "__notes__", ())])
        if isinstance(error, EngineDeadError | GroupFailedError):
            # The loop has ended; an engine or a group alone can only be restarted within one.
            message = message.replace("restart it", RUN_AGAIN).replace(AFTERWARDS, RUN_AGAIN) + _continues(config)
        print(f"error: {message}", file=sys.stderr)
        _leave(2, lost=isinstance(error, ClusterLostError))
    except ModuleNotFoundError as error:
        if not (message := missing_package(error)):
            raise
        print(f"error: {message}", file=sys.stderr)
        _leave(2, lost=False)
    except RunTerminated:
        print("stopped by SIGTERM", file=sys.stderr)
        # 128 + the signal's number, as shells and schedulers expect it.
        _leave(EXIT_TERMINATED, lost=cluster_loss() is not None)
    except KeyboardInterrupt:
        print("stopped", file=sys.stderr)
        _leave(130, lost=cluster_loss() is not None)


def _continues(config: BaseConfig | None) -> str:
    folder = getattr(config, "run_dir", None)
    has_checkpoint = folder and RunCheckpoints(Path(folder) / CHECKPOINTS).steps()
    return "; --resume auto continues from its newest checkpoint" if has_checkpoint else ""


def _leave(status: int, *, lost: bool) -> NoReturn:
    if lost:
        # Ray's own exit handlers wait for what has ended, and end with another status.
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)
    raise SystemExit(status) from None
