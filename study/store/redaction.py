"""Keeps secrets out of what is written: values of secret environment variables, Ray's token, credentials in addresses."""

import os
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

REDACTED = "***"
LEAST_LENGTH = 8
"""shorter values are too common as parts of words to be taken out, and too short to be secrets"""

_SECRET_NAME = re.compile(
    r"TOKEN|SECRET|PASSWORD|PASSWD|PASSPHRASE|CREDENTIAL|PRIVATE|API_?KEY|_KEY(_ID)?$", re.IGNORECASE
)
_USER_OF_ADDRESS = re.compile(r"(?<=://)[^\s/?#@'\"]+@")
_TELLING = r"[\w.-]*(?:token|secret|password|passwd|credential|signature|api_?key|access_?key)[\w.-]*"
_SECRET_OPTION = re.compile(
    rf"({_TELLING}=|--{_TELLING}\s+|\b(?:Bearer|Basic)\s+)[^\s&'\",;]{{{LEAST_LENGTH},}}", re.IGNORECASE
)


def redacted(value: Any, environment: Mapping[str, str] | None = None) -> Any:
    """A value of JSON with every secret in its strings replaced by `***`; keys stay.

    A secret is: what a variable of `environment` (left out: this process') with a telling name holds, the token of Ray,
    the user and password of an address, and what follows a telling name in a command line, a query or a message.
    """
    return _without(value, secrets(os.environ if environment is None else environment))


def secrets(environment: Mapping[str, str]) -> list[str]:
    """Values that must not be written, the longest first: one may hold another."""
    found = {value for name, value in environment.items() if _SECRET_NAME.search(name) and not os.path.exists(value)}
    found |= set(_ray_token(environment))
    return sorted((value for value in found if len(value) >= LEAST_LENGTH), key=len, reverse=True)


def token_path(environment: Mapping[str, str]) -> Path:
    """The file that Ray takes its token from, where RAY_AUTH_TOKEN does not hold one."""
    return Path(environment.get("RAY_AUTH_TOKEN_PATH") or Path.home() / ".ray" / "auth_token")


def _ray_token(environment: Mapping[str, str]) -> Iterable[str]:
    try:
        yield token_path(environment).read_text().strip()
    except (OSError, ValueError):
        return


def _without(value: Any, hidden: list[str]) -> Any:
    if isinstance(value, str):
        for secret in hidden:
            value = value.replace(secret, REDACTED)
        return _SECRET_OPTION.sub(rf"\1{REDACTED}", _USER_OF_ADDRESS.sub(f"{REDACTED}@", value))
    if isinstance(value, Mapping):
        return {key: _without(item, hidden) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_without(item, hidden) for item in value]
    return value
