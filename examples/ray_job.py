"""Submits an example, or a script of your own, to a Ray cluster's job server, and follows it to its end.

    python -m examples.ray_job --address http://HEAD:8265 -- examples.grpo --model /shared/model ...

What stands after ``--`` is a module and its options, run on the head node with ``RAY_ADDRESS`` set; its exit status becomes
this command's. Ctrl-C stops the job: a run finishes its step and commits a checkpoint. See docs/cluster.md.
"""

import asyncio
import json
import logging
import os
import shlex
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import aiohttp
import requests
from pydantic import BeforeValidator, Field, StringConstraints
from ray.exceptions import AuthenticationError
from ray.job_submission import JobDetails, JobStatus, JobSubmissionClient

from actors.run.command_line import run_command
from rl_backend.contracts import BaseConfig, ConfigError, RLBackendError
from rl_backend.options.command_line import ConfigFile, parse_config

NOT_SENT = (".git", ".venv", "runs", "__pycache__", ".*_cache", "*.egg-info")
"""Patterns as in .gitignore; what a .gitignore file names is not sent either."""

KILLED_SECONDS = 30.0
POLL_SECONDS = 0.5
_TOKEN_SOURCES = "RAY_AUTH_TOKEN, the file that RAY_AUTH_TOKEN_PATH names, or ~/.ray/auth_token"


def _split(value: Any) -> Any:
    return tuple(filter(None, value.split(","))) if isinstance(value, str) else value


def _variables(value: Any) -> Any:
    if not isinstance(value, str):
        return value
    # Values with commas need the JSON object.
    return json.loads(value) if value.lstrip().startswith("{") else dict(entry.split("=", 1) for entry in _split(value))


type Names = Annotated[tuple[str, ...], BeforeValidator(_split)]
type VariableName = Annotated[str, StringConstraints(pattern="^[^=]+$")]
type Variables = Annotated[Mapping[VariableName, str], BeforeValidator(_variables)]


class JobServerError(RLBackendError):
    """A job server that cannot be reached, refuses, or is lost."""


class SubmitConfig(BaseConfig):
    """All options."""

    address: str = Field(
        default="http://127.0.0.1:8265", pattern="^https?://", description="job server, on the head node's dashboard port"
    )
    working_dir: str = Field(default=".", description="folder sent to all nodes; the job runs in a copy of it")
    exclude: Names = Field(default=(), description="further .gitignore patterns, by commas, of what is not sent")
    plugins: Names = Field(default=(), description="folders of packages outside working_dir, by commas, sent as well")
    environment: Variables = Field(
        default={}, description='NAME=VALUE, by commas, or {"NAME": "VALUE"} as JSON, set in all of the job\'s processes'
    )
    python: str = Field(default="python", description="interpreter on the head node")
    stop_seconds: int = Field(
        default=600,
        ge=1,
        description="seconds that a job which is stopped has for its step and its checkpoint, then it is killed",
    )
    wait: bool = Field(default=True, description="follow the job to its end; else only submit it")

    def runtime_env(self) -> dict[str, Any]:
        return {
            "working_dir": self.working_dir,
            "excludes": [*NOT_SENT, *self.exclude],
            "env_vars": {"PYTHONUNBUFFERED": "1", "RAY_JOB_STOP_WAIT_TIME_S": str(self.stop_seconds), **self.environment},
            **({"py_modules": list(self.plugins)} if self.plugins else {}),
        }


def submit(config: SubmitConfig, command: Sequence[str]) -> int:
    """Runs ``python -m command`` as a job; its exit status, or 0 when it is only submitted.

    Raises:
        ConfigError: no command, a run folder that would be lost, no token where one is needed.
        JobServerError: the job server cannot be reached or refuses, or is lost while the job runs.
    """
    check_command(command, config.working_dir)
    entrypoint = shlex.join([config.python, "-m", *command])
    client = connect(config.address)
    try:
        job = client.submit_job(entrypoint=entrypoint, runtime_env=config.runtime_env())
    except (RuntimeError, ValueError, AuthenticationError, requests.RequestException) as error:
        raise JobServerError(f"{config.address} did not take the job: {error}") from None
    print(f"job {job}: {entrypoint}", flush=True)
    if not config.wait:
        return 0
    with _naming_the_job(job, config.address):
        try:
            return _follow(client, job)
        except KeyboardInterrupt:
            return _stop(client, job, config.stop_seconds)


@contextmanager
def _naming_the_job(job: str, address: str) -> Iterator[None]:
    try:
        yield
    except (RuntimeError, OSError, AuthenticationError, requests.RequestException, aiohttp.ClientError) as error:
        reason = str(error) or type(error).__name__
        raise JobServerError(
            f"lost the job server at {address} while job {job} ran ({reason}); it may still run: ray job status {job}"
        ) from None


def _follow(client: JobSubmissionClient, job: str) -> int:
    asyncio.run(_print_logs(client, job))
    details = _wait_for_end(client, job, None)
    if details.status == JobStatus.SUCCEEDED:
        return 0
    # Later lines of the message are the end of the log, which has been printed.
    reason = (details.message or "").partition("\n")[0]
    print(f"job {job} {details.status.lower()}: {reason}", file=sys.stderr)
    return details.driver_exit_code or 1


async def _print_logs(client: JobSubmissionClient, job: str) -> None:
    async for text in client.tail_job_logs(job):
        print(text, end="", flush=True)


def _stop(client: JobSubmissionClient, job: str, seconds: float) -> int:
    print(f"stopping job {job}, which may finish its step; Ctrl-C again leaves it to that", file=sys.stderr, flush=True)
    client.stop_job(job)
    details = _wait_for_end(client, job, seconds + KILLED_SECONDS)
    print(f"job {job} {details.status.lower()}", file=sys.stderr)
    return 130


def _wait_for_end(client: JobSubmissionClient, job: str, timeout: float | None) -> JobDetails:
    deadline = None if timeout is None else time.monotonic() + timeout
    while not (details := client.get_job_info(job)).status.is_terminal():
        if deadline is not None and time.monotonic() > deadline:
            raise JobServerError(f"job {job} has not ended {timeout:g} s after it was asked to: see ray job status {job}")
        time.sleep(POLL_SECONDS)
    return details


def connect(address: str) -> JobSubmissionClient:
    """A client of the job server at ``address``; :class:`JobServerError` where none answers, or takes the token."""
    for name in ("RAY_API_SERVER_ADDRESS", "RAY_ADDRESS"):
        # Ray's client takes these in place of the address that it is given.
        if os.environ.get(name, address) != address:
            raise ConfigError.of(name, os.environ[name], f"would replace --address {address}; unset it")
    token = read_token()
    try:
        return JobSubmissionClient(address, headers={"Authorization": f"Bearer {token}"} if token else None)
    except AuthenticationError as error:
        found = "the token found here is not this cluster's" if token else "it wants a token, and none was found here"
        raise JobServerError(
            f"{address} refused this client: {found} (looked in {_TOKEN_SOURCES}); use the token that the head node was "
            "started with",
            reason=error.message,
        ) from None
    except (ConnectionError, RuntimeError, ValueError, requests.RequestException) as error:
        raise JobServerError(f"no Ray job server answers at {address}: {error}") from None


def read_token() -> str | None:
    """The cluster's token, from where Ray itself looks for it; None when there is none, or ``RAY_AUTH_MODE=disabled``.

    Raises:
        ConfigError: no token although ``RAY_AUTH_MODE=token``, or in a file that is named, or one that cannot be read.
    """
    mode, named = os.environ.get("RAY_AUTH_MODE", "").lower(), os.environ.get("RAY_AUTH_TOKEN_PATH")
    if mode == "disabled":
        return None
    if os.environ.get("RAY_AUTH_TOKEN"):
        return os.environ["RAY_AUTH_TOKEN"].strip()
    path = Path(named) if named else Path.home() / ".ray" / "auth_token"
    problem = f"no token was found (looked in {_TOKEN_SOURCES})"
    try:
        token = path.read_text().strip() if named or path.exists() else ""
    except (OSError, UnicodeDecodeError) as error:
        token, problem = None, f"the token cannot be read: {error}"
    if token is None or (not token and (named or mode == "token")):
        option, value = ("RAY_AUTH_TOKEN_PATH", named) if named else ("RAY_AUTH_MODE", mode or None)
        raise ConfigError.of(option, value, problem)
    return token or None


def check_command(command: Sequence[str], working_dir: str = ".") -> None:
    """Raises :class:`ConfigError` unless ``command`` is a module and options whose results a job would keep.

    Args:
        working_dir: what the file of an example's ``--config`` is relative to, as in the job.
    """
    if not command or command[0].startswith("-"):
        raise ConfigError("nothing to run: end the command with -- MODULE [OPTIONS], as in -- examples.grpo --model ...")
    run_dir = _option(command[1:], "--run-dir")
    if run_dir is None and command[0].startswith("examples."):
        saved = _option(command[1:], "--config")
        run_dir = None if saved is None else _saved_run_dir(Path(working_dir, saved))
        if run_dir is None:
            raise ConfigError(
                f"{command[0]} needs --run-dir, a folder on a file system that all nodes share: its default is in the job's "
                "copy of working_dir, which the cluster removes"
                + (f"; no run_dir was found here in --config {saved}, so give it beside it" if saved is not None else "")
            )
    if run_dir is not None and not Path(run_dir).is_absolute():
        raise ConfigError.of(
            "--run-dir", run_dir, "must be absolute: the job runs in a copy of working_dir, which the cluster removes"
        )


def _saved_run_dir(path: Path) -> str | None:
    try:
        run_dir = ConfigFile.read(path).values.get("run_dir")
    except ConfigError:
        return None
    return run_dir if isinstance(run_dir, str) else None


def _option(arguments: Sequence[str], name: str) -> str | None:
    for index, argument in enumerate(arguments):
        flag, equals, value = argument.partition("=")
        # Flags are also taken as options are spelled, such as --run_dir.
        if flag.replace("_", "-") == name:
            return value if equals else next(iter(arguments[index + 1 :]), "")
    return None


def main() -> None:
    arguments = sys.argv[1:]
    end = arguments.index("--") if "--" in arguments else len(arguments)
    config = parse_config(
        SubmitConfig, "Submit a script to a Ray cluster: [OPTIONS] -- MODULE [ITS OPTIONS]", arguments[:end]
    )
    # Ray's packaging reports every .gitignore file that it meets.
    logging.disable(logging.WARNING)
    raise SystemExit(submit(config, arguments[end + 1 :]))


if __name__ == "__main__":
    run_command(main)
