"""Keep secrets out of results and messages: secret environment variables, Ray's token, credentials in texts.

The work grows linearly with the length of a text, whatever it contains: an error may echo megabytes of data.
"""

import os
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from study.errors import clipped

REDACTED = "***"
MIN_LENGTH = 8
"""minimum length of a secret in characters; shorter values occur in ordinary words"""

LINE_LENGTH = 300
"""maximum length of an exception's line, in characters"""
REASON_LENGTH = 600
"""maximum length of a trial's reason: an exception's line, and what the study says about it"""
LOG_LENGTH = 1_000_000

_SECRET_NAME = re.compile(
    r"TOKEN|SECRET|PASSWORD|PASSWD|PASSPHRASE|CREDENTIAL|PRIVATE|API_?KEY|ACCESS_?KEY|_KEY(_ID)?$"
    r"|(^|_)(PASS|PAT|DSN|AUTH|JWT|SAS)$|_PWD$|WEBHOOK|COOKIE|DATABASE_URL|CONNECTION_STRING",
    re.IGNORECASE,
)
_USER_OF_ADDRESS = re.compile(
    r"""(?<=s3://)[^\s/?#@'":]+:[^\s?#'"]{1,256}@|(?<=://)[^\s/?#'"]+@|(?<![\w.:/-])[\w.-]{1,64}:[^\s/?#'"]{1,256}@(?=[\w.-])"""
)
"""A password may contain @, and the secret key of S3 may contain a slash."""
# Repetitions are bounded, and none can start within a word that another attempt has scanned.
_NAME = (
    r"(?:token(?!s|iz)|secret|password|passwd|passphrase|credential|signature|webhook|api[_-]?key|access[_-]?key|account[_-]?key"
    r"|private[_-]?key)"
    r"[\w.-]{0,64}"
)
_SECRET_OPTION = re.compile(
    rf"({_NAME}=|(?<![\w.-])--[\w.-]{{0,64}}?{_NAME}\s+|\b(?:Bearer|Basic)\s+|api-key:\s+)[^\s&'\",;]{{{MIN_LENGTH},}}",
    re.IGNORECASE,
)
_QUOTED_OPTION = re.compile(
    rf"""((?:{_NAME}=|(?<![\w.-])--[\w.-]{{0,64}}?{_NAME}\s{{1,8}})(["']))(?:(?!\2)[^\\\n]|\\.)+""", re.IGNORECASE
)

_SHORT_OPTION = re.compile(r"(?<![\w.-])(pwd=(?!/)|key=(?=[\w+/=-]{16}))[^\s&'\",;]{8,}", re.IGNORECASE)
_QUOTED_NAME = rf"(?:{_NAME}|(?<![\w.-])pwd)"
_ENTRY = re.compile(rf"""({_QUOTED_NAME}["']\s{{0,8}}:\s{{0,8}}b?(["']))(?:(?!\2)[^\\\n]|\\.)+""", re.IGNORECASE)
"""an entry of a dict or of JSON"""
_ESCAPED_ENTRY = re.compile(rf"""({_QUOTED_NAME}\\["']\s{{0,8}}:\s{{0,8}}\\["'])[^"'\\\n]+""", re.IGNORECASE)
"""the same in JSON that is itself a string"""
_FORMS = re.compile(
    r"(?<![\w-])(?:gh[oprsu]_\w{30,}|github_pat_\w{22,}|glpat-[\w-]{20,}|hf_[A-Za-z0-9]{20,}|(?:AKIA|ASIA)[0-9A-Z]{16}"
    r"|AIza[\w-]{35}|sk-[\w-]{20,}|[rs]k_(?:live|test)_\w{16,}|xox[a-z]-[\w-]{10,}|npm_\w{30,}|pypi-[\w-]{30,}"
    r"|eyJ[\w-]{8,}\.eyJ[\w-]{8,}\.[\w-]+)|(?<=hooks\.slack\.com/services/)[\w/]+"
    r"|(?<=PRIVATE KEY-----)[^-]{1,10000}"
)
"""tokens of GitHub, GitLab, Hugging Face, AWS, Google, OpenAI, Stripe, Slack, npm, PyPI; JSON web tokens; keys"""

_KEPT = ("trial", "trial_id", "trial_ids", "planned_trials", "status", "versions")
"""names of a record that identify a trial; `secret_in` finds secrets in them before a study starts"""


def redacted(value: Any, environment: Mapping[str, str] | None = None) -> Any:
    """Return a JSON value with every secret in its strings replaced by `***`, in UTF-8 (see `encodable`).

    Keys and the values of `_KEPT` stay.

    Secrets are: values of variables in `environment` (default: this process) with a name such as API_KEY, Ray's token,
    user and password of an address, tokens of well-known forms, and what follows such a name in a command line, a
    query, JSON, a dict or a message.
    """
    return _redact(value, secrets(os.environ if environment is None else environment))


def redacted_line(text: str, length: int = LINE_LENGTH) -> str:
    """Return a text for a message or a record: in one line, without secrets, clipped."""
    return clipped(" ".join(redacted(text[: 2 * LOG_LENGTH]).split()), length)


def redacted_log(text: str) -> str:
    """Return a log without secrets. Of a long one, only the first and the last `LOG_LENGTH / 2` characters stay."""
    if len(text) <= LOG_LENGTH:
        return str(redacted(text))
    note = f"\n... {len(text) - LOG_LENGTH:,} characters left out ...\n"
    half = (LOG_LENGTH - len(note)) // 2
    # redact more than stays, because a cut secret is not recognised
    return f"{redacted(text[:LOG_LENGTH])[:half]}{note}{redacted(text[-LOG_LENGTH:])[-half:]}"


def secret_in(text: str, environment: Mapping[str, str] | None = None) -> str | None:
    """Return what is secret in a value, or None: all of it, one of its words, or a part with the form of a secret."""
    environment = os.environ if environment is None else environment
    words = {text, *re.split(r"[\s=,:'\"]+", text)}
    for name, value in _secret_variables(environment):
        if value in words:
            return f"the value of {name}"
    if words & set(_ray_token(environment)):
        return "Ray's token"
    return "a password, token or key" if _redact(text, []) != encodable(text) else None


def encodable(text: str) -> str:
    """Return a text that UTF-8 can encode. A file name of other bytes has lone surrogates, which become `\\udcff`."""
    return text.encode(errors="backslashreplace").decode()


def secrets(environment: Mapping[str, str]) -> list[str]:
    """Return the values to redact, longest first, because one may contain another."""
    values = {value for _, value in _secret_variables(environment)} | set(_ray_token(environment))
    return sorted(values, key=len, reverse=True)


def _secret_variables(environment: Mapping[str, str]) -> Iterable[tuple[str, str]]:
    """Yield name and value of variables with a secret value. A path that exists is none."""
    for name, value in environment.items():
        if _SECRET_NAME.search(name) and len(value) >= MIN_LENGTH and not os.path.exists(value):
            yield name, value


def token_path(environment: Mapping[str, str]) -> Path:
    """Return the file from which Ray reads its token unless RAY_AUTH_TOKEN is set."""
    return Path(environment.get("RAY_AUTH_TOKEN_PATH") or Path.home() / ".ray" / "auth_token")


def _ray_token(environment: Mapping[str, str]) -> Iterable[str]:
    try:
        token = token_path(environment).read_text().strip()
    except (OSError, ValueError):
        return
    if len(token) >= MIN_LENGTH:
        yield token


def _redact(value: Any, secret_values: list[str]) -> Any:
    if isinstance(value, str):
        for secret in secret_values:
            value = value.replace(secret, REDACTED)
        value = _USER_OF_ADDRESS.sub(f"{REDACTED}@", _FORMS.sub(REDACTED, value))
        for pattern in (_SECRET_OPTION, _QUOTED_OPTION, _SHORT_OPTION, _ENTRY, _ESCAPED_ENTRY):
            value = pattern.sub(rf"\1{REDACTED}", value)
        return encodable(value)
    if isinstance(value, Mapping):
        return {key: item if key in _KEPT else _redact(item, secret_values) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_redact(item, secret_values) for item in value]
    return value
