"""Parts of `ray.init` that a study need not wait for. Ray 2.60 has no options for them.

So functions of Ray are replaced while it starts. docs/performance.md says what this gains.
"""

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

from study.capacity import count_cpus, count_gpus

READY_PROCESSES = 6
"""processes that a study takes besides those of its GPUs: keeper, Ray Train's controller and two more of its actors,
and two of Tune"""

POLL_S = 0.02
NODE_LIMIT_S = 25.0
"""less than the 30 s that Ray waits for a node"""


@contextmanager
def started_sooner() -> Iterator[Callable[[], str | None]]:
    """Shorten a call of `ray.init`. Yields a function that waits for Ray's dashboard and returns its address.

    `ray.init` then returns before the dashboard has started. The function raises what this start raises.
    """
    from ray._private import services
    from ray._private.node import Node

    start_dashboard, wait = _in_a_thread(Node.start_api_server)
    replaced = (
        (Node, "start_api_server", start_dashboard),
        (services, "start_ray_process", _with_few_ready(services.start_ray_process)),
        (services, "get_node", _once_registered(services.get_node)),
    )
    before = [getattr(owner, name) for owner, name, _ in replaced]
    for owner, name, function in replaced:
        setattr(owner, name, function)
    try:
        yield wait
    finally:
        for (owner, name, _), function in zip(replaced, before, strict=True):
            setattr(owner, name, function)


def _in_a_thread(start: Callable[..., None]) -> tuple[Callable[..., None], Callable[[], str | None]]:
    """Return a function that starts the dashboard in a thread, and one that waits for its address.

    Ray would wait for the dashboard before it starts the node, which does not need it.
    """
    started = threading.Event()
    nodes: list[Any] = []
    errors: list[Exception] = []

    def start_later(node: Any, **options: Any) -> None:
        def serve() -> None:
            try:
                start(node, **options)
            except Exception as error:  # Ray raises bare Exceptions
                errors.append(error)
            started.set()
            threading.Event().wait()  # the kernel ends the dashboard together with the thread that started it

        nodes.append(node)
        threading.Thread(target=serve, name="dashboard", daemon=True).start()

    def wait() -> str | None:
        started.wait()
        if errors:
            raise errors[0]
        return nodes[0].webui_url

    return start_later, wait


def _with_few_ready(start_process: Callable[..., Any]) -> Callable[..., Any]:
    """Let the node start as many processes ahead as a study takes, not one per CPU core.

    All of them import Ray at the same time, so on a host with many cores the others delay these.
    """
    option, most = "--num_prestart_python_workers=", READY_PROCESSES + max(2, count_gpus())

    def start(command: Sequence[Any], *arguments: Any, **options: Any) -> Any:
        ready = f"{option}{min(count_cpus(), most)}"
        command = [ready if str(word).startswith(option) else word for word in command]
        return start_process(command, *arguments, **options)

    return start


def _once_registered(get_node: Callable[[str, str], Any]) -> Callable[[str, str], Any]:
    """Call `get_node` once the node has registered: it looks only once per second."""

    def get(gcs_address: str, node_id: str) -> Any:
        from ray._private.services import GcsClient

        ends_s = time.monotonic() + NODE_LIMIT_S
        with suppress(Exception):  # then `get_node` finds out by itself
            client = GcsClient(address=gcs_address)
            while time.monotonic() < ends_s:
                if any(node.hex() == node_id for node in client.get_all_node_info(timeout=NODE_LIMIT_S)):
                    break
                time.sleep(POLL_S)
        return get_node(gcs_address, node_id)

    return get
