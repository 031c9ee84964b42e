"""The server of the ranks' addresses."""

from typing import Any


class RendezvousServer:
    running = 0

    def start(self) -> int:
        RendezvousServer.running += 1
        return 4242

    def init(self, plan: Any) -> None:
        assert len(plan)

    def stop(self) -> None:
        RendezvousServer.running -= 1
