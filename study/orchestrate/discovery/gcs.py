"""Ask a cluster, before this process joins it, whether it is a Ray, and whether it accepts this user's token.

The GCS (global control service) is the server of a Ray cluster that `HOST:PORT` names. It answers the question whether
a node is alive without a token if it does not authenticate, and refuses it otherwise.
"""

import os
import socket
import threading
from collections.abc import Callable
from dataclasses import replace
from typing import Any, Literal

from study.errors import NO_CLUSTER
from study.orchestrate.discovery.address import (
    ClusterError,
    Target,
    no_cluster_for_auto,
    requested_target,
    split_address,
)
from study.store.redaction import token_path

Say = Callable[[str], None]

ANSWER_TIMEOUT_S = 10.0
SAY_AFTER_S = 2.0

_CHECK_ALIVE = "/ray.rpc.NodeInfoGcsService/CheckAlive"
"""Ray, src/ray/protobuf/gcs_service.proto"""


def reachable_target(address: str | None, say: Say) -> Target:
    """Return the cluster that a command uses. It is there, is a Ray, and lets this process in.

    See `requested_target` for `address`. `say` gets lines about what is being waited for. Raises ClusterError.
    """
    target = requested_target(address)
    if target.address is None:
        return target
    try:
        _require_access(target, say)
    except NoRay as error:
        requested = address or os.environ.get("RAY_ADDRESS")
        if requested and requested != "auto":
            raise
        problem = f"no Ray answers at {target.address} in {target.source}"
        if requested:
            raise no_cluster_for_auto(problem) from error
        return replace(target, address=None, source="", ignored=problem)
    return target


class NoRay(ClusterError):
    """No Ray answers at an address."""

    exit_code = NO_CLUSTER


def _require_access(target: Target, say: Say) -> None:
    """Raise ClusterError unless a Ray answers that accepts this process. Name the cluster before it gets a token."""
    answer = _within_limit(target, _ask, say)
    mode = os.environ.get("RAY_AUTH_MODE")
    if mode not in ("token", "disabled") or os.environ.get("RAY_ENABLE_K8S_TOKEN_AUTH"):
        say(f"joining {target} (from {target.source})")
        return
    if answer == "open":
        _require_token_disabled(target, mode)
        say(f"joining {target} (from {target.source})")
        say(
            f"warning: {target} runs without authentication (RAY_AUTH_MODE=disabled): whoever reaches its ports can "
            "run code on it as its user"
        )
        return
    copy = (
        "copy ~/.ray/auth_token from the cluster's head to this host (chmod 600), "
        "or set RAY_AUTH_TOKEN to what is in it"
    )
    if mode == "disabled":
        raise ClusterError(
            f"{target} wants a token, and RAY_AUTH_MODE=disabled sends none; fix: export RAY_AUTH_MODE=token"
        )
    token = _token()
    if not token:
        raise ClusterError(f"{target} wants a token, and there is none here; fix: {copy}")
    say(f"joining {target} (from {target.source})")
    if _within_limit(target, lambda address: _ask(address, token), say) != "open":
        source = "RAY_AUTH_TOKEN" if os.environ.get("RAY_AUTH_TOKEN") else token_path(os.environ)
        raise ClusterError(f"{target} refuses the token in {source}; fix: {copy}")


def _token() -> str:
    """Return the token that Ray would send, empty without one."""
    try:
        return (os.environ.get("RAY_AUTH_TOKEN") or token_path(os.environ).read_text()).strip()
    except (OSError, ValueError):
        return ""


def _require_token_disabled(target: Target, mode: str | None) -> None:
    """Raise ClusterError with both ways out if a cluster does not authenticate, but this process would."""
    if mode == "disabled":
        return
    raise ClusterError(
        f"{target} runs without authentication: whoever reaches its ports can run code on it; fix: restart it with a "
        "token (ray stop; RAY_AUTH_MODE=token ray start --head, after `ray get-auth-token --generate` if there is no "
        "token yet), or accept the risk with RAY_AUTH_MODE=disabled before this command"
    )


def _within_limit(target: Target, question: Callable[[str], str], say: Say) -> str:
    """Return the answer to a question. Raises NoRay after `ANSWER_TIMEOUT_S`. Ctrl-C ends the wait.

    The question is asked in a thread, because looking up a name cannot be interrupted.
    """
    assert target.address
    import grpc  # noqa: F401  imported here, because it takes a while and is no part of the wait

    answers: list[Any] = []

    def ask() -> None:
        try:
            answers.append(question(target.address or ""))
        except Exception as error:  # noqa: BLE001  raised below, in the caller's thread
            answers.append(error)

    thread = threading.Thread(target=ask, daemon=True, name="ask the cluster")
    thread.start()
    thread.join(SAY_AFTER_S)
    if not answers:
        say(f"waiting up to {ANSWER_TIMEOUT_S:.0f} s for an answer of {target}")
        thread.join(ANSWER_TIMEOUT_S - SAY_AFTER_S)
    answer = answers[0] if answers else TimeoutError(f"no answer within {ANSWER_TIMEOUT_S:.0f} s")
    if isinstance(answer, OSError):
        raise NoRay(
            f"no Ray cluster answers at {target.address} ({answer.strerror or answer}); fix: start it with "
            "`ray up cluster.yaml` or `ray start --head`, check that a firewall lets this host through, or use "
            "--address local"
        )
    if isinstance(answer, Exception):
        raise answer
    return str(answer)


def _ask(address: str, token: str = "") -> Literal["open", "token"]:
    """Return "open" if the GCS answers, "token" if it wants another token. Raises OSError, or NoRay if it is none."""
    import grpc

    socket.create_connection(split_address(address, "--address"), timeout=ANSWER_TIMEOUT_S).close()
    metadata = (("authorization", f"Bearer {token}"),) if token else ()
    with _channel(address) as channel:
        try:
            channel.unary_unary(_CHECK_ALIVE)(b"", timeout=ANSWER_TIMEOUT_S, metadata=metadata)
        except grpc.RpcError as error:
            if error.code() == grpc.StatusCode.UNAUTHENTICATED:
                return "token"
            if error.code() == grpc.StatusCode.DEADLINE_EXCEEDED:
                raise TimeoutError(f"no answer within {ANSWER_TIMEOUT_S:.0f} s") from error
            raise NoRay(
                f"what listens at {address} is not the GCS of a Ray cluster ({error.code().name.lower()}); fix: give "
                "the port of its GCS, 6379 unless `ray start` was given another; the dashboard has another port"
            ) from error
    return "open"


def _channel(address: str) -> Any:
    import grpc

    options = (("grpc.enable_http_proxy", 0),)
    if os.environ.get("RAY_USE_TLS", "0").lower() not in ("1", "true"):
        return grpc.insecure_channel(address, options)
    from ray._common.tls_utils import load_certs_from_env

    certificate, key, authority = load_certs_from_env()
    return grpc.secure_channel(address, grpc.ssl_channel_credentials(authority, key, certificate), options)
