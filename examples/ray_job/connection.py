"""Reaching a cluster's job server, with the cluster's token."""

from __future__ import annotations

import os
from pathlib import Path

import requests
from ray.exceptions import AuthenticationError
from ray.job_submission import JobSubmissionClient

from rl_backend.contracts import ConfigError, RLBackendError

_TOKEN_SOURCES = "RAY_AUTH_TOKEN, the file that RAY_AUTH_TOKEN_PATH names, or ~/.ray/auth_token"


class JobServerError(RLBackendError):
    """A job server that cannot be reached, refuses, or is lost."""


def connect(address: str) -> JobSubmissionClient:
    """A client of the job server at ``address``, for example ``http://10.0.0.1:8265``.

    Raises:
        ConfigError: the environment names another server, or a token that cannot be read.
        JobServerError: nothing answers there, or the token is missing or wrong.
    """
    for name in ("RAY_API_SERVER_ADDRESS", "RAY_ADDRESS"):
        # Ray's client takes these in place of the address that it is given.
        if os.environ.get(name, address) != address:
            raise ConfigError.of(name, os.environ[name], f"would replace --address {address}; unset it")
    if not address.startswith(("http://", "https://")):
        raise ConfigError.of("SubmitConfig.address", address, "expected http://HOST:PORT, on the head node's dashboard port")
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
    """The cluster's token, from where Ray itself looks for it; None when there is none or ``RAY_AUTH_MODE=disabled``.

    Raises:
        ConfigError: a file that is named and cannot be read, or no token although ``RAY_AUTH_MODE=token``.
    """
    mode = os.environ.get("RAY_AUTH_MODE", "").lower()
    if mode == "disabled":
        return None
    if os.environ.get("RAY_AUTH_TOKEN"):
        return os.environ["RAY_AUTH_TOKEN"].strip()
    named = os.environ.get("RAY_AUTH_TOKEN_PATH")
    path = Path(named) if named else Path.home() / ".ray" / "auth_token"
    try:
        token = path.read_text().strip()
    except OSError as error:
        if named:
            raise ConfigError.of("RAY_AUTH_TOKEN_PATH", named, f"cannot be read: {error.strerror}") from None
        token = ""
    if not token and (named or mode == "token"):
        raise ConfigError.of("RAY_AUTH_MODE", mode or None, f"no token was found (looked in {_TOKEN_SOURCES})")
    return token or None
