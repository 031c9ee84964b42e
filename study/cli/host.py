"""This host before a run: its load, its GPUs, what else measures or runs on it, and a local Ray."""

import contextlib
import os
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager

from study.cli.progress import waiting
from study.errors import DOES_NOT_FIT, print_to_stderr
from study.orchestrate.cluster import Cluster, held_resources
from study.orchestrate.discovery.address import Target, is_this_host
from study.orchestrate.discovery.neighbours import measuring, other_rays, other_studies, visible_gpus
from trainables.trial import Trial


class HostBusy(Exception):
    """The host is busy, and the user wants no measurement then."""

    exit_code = DOES_NOT_FIT


def busy_lines(on_gpus: bool, gpus: Sequence[str] = (), address: str | None = None) -> list[str]:
    """Return at most three lines: what disturbs timings on this host, other studies, and other Rays.

    The checks are those of `doctor`. gpus: UUIDs of this study's GPUs. address: its cluster, None for a local Ray.
    """
    from study.cli import doctor

    checks = [*doctor.processors(), *(doctor.gpus() if on_gpus else ())]
    problems = [check for check in checks if check.status != "ok" and not check.name.endswith(" links")]
    lines = []
    if problems:
        found = "; ".join(f"{check.name}: {check.message}" for check in problems)
        lines.append(f"this host is busy: {found}; fix: {problems[0].fix}")
    if studies := other_studies(os.getpid(), gpus):
        lines.append(f"another study, {'; another, '.join(studies)}; fix: wait until it ends")
    if rays := other_rays(os.getpid(), address):
        lines.append(
            f"another Ray runs on this host ({'; '.join(rays)}); fix: join it with --address HOST:PORT, or stop it"
        )
    return lines


@contextlib.contextmanager
def watched_host(
    trials: Sequence[Trial], target: Target, cluster: Cluster | None, quiet: bool, strict: bool
) -> Iterator[None]:
    """Warn if something disturbs timings here or holds the cluster, and let other studies know of this one.

    Raises HostBusy instead of warning if `strict`. A host without ranks is not checked. cluster: None for a local Ray.
    """
    with contextlib.ExitStack() as locked:
        lines = []
        if cluster is None or any(node.cpus and is_this_host(node.address) for node in cluster.nodes):
            gpus = visible_gpus()
            lines += busy_lines(any(trial.device == "cuda" for trial in trials), gpus, target.address)
            locked.enter_context(measuring(gpus))
        if cluster is not None and (held := held_resources()):
            lines.append(f"other jobs hold {held} of the cluster; trials wait for them; fix: see ray status")
        if lines and strict:
            raise HostBusy(f"--strict: {'; '.join(lines)}")
        for line in lines if not quiet else ():
            print_to_stderr(f"warning: {line}")
        yield


@contextlib.contextmanager
def started_ray(connection: AbstractContextManager[Cluster], quiet: bool) -> Iterator[Cluster]:
    """Enter a connection, and leave it at the end. Show that both are waited for: a local Ray takes seconds."""
    with contextlib.ExitStack() as to_stop:
        connected = contextlib.ExitStack()
        with waiting("starting Ray", quiet):
            cluster = connected.enter_context(connection)

        def stop() -> None:
            with waiting("stopping Ray", quiet):
                connected.close()

        to_stop.callback(stop)
        yield cluster


def cluster_lines(cluster: Cluster, address: str | None, gpus: int) -> list[str]:
    """Return what a run says of its cluster before it starts. address: as the user gave it."""
    from study.cli.terminal import NO_GPU

    lines = [f"cluster: {cluster.description}"]
    if cluster.is_local and not address:
        lines.append(
            "running on this machine only: no cluster found (no --address, no RAY_ADDRESS, no Ray that answers here)"
        )
    if cluster.dashboard_url:
        lines.append(f"{'dashboard of this study' if cluster.is_local else 'dashboard'}: {cluster.dashboard_url}")
    return lines if gpus else [*lines, f"warning: {NO_GPU}"]
