"""Which host runs which rank."""

from dataclasses import dataclass


@dataclass
class HostInfo:
    hostname: str
    slots: int


@dataclass
class SlotInfo:
    hostname: str
    rank: int
    local_rank: int
    cross_rank: int
    size: int
    local_size: int
    cross_size: int


def get_host_assignments(hosts: list[HostInfo], min_num_proc: int) -> list[SlotInfo]:
    found: list[SlotInfo] = []
    for number, host in enumerate(hosts):
        for local in range(host.slots):
            found.append(SlotInfo(host.hostname, len(found), local, number, min_num_proc, host.slots, len(hosts)))
    return found
