"""What this machine gives a process: CPUs, NUMA nodes, quota. Read, never guessed."""

from __future__ import annotations

import math
import os
from pathlib import Path

from colibri_cli.errors import InvalidInput


def default_threads() -> int:
    """Threads that can run at once: the CPUs of this process's affinity mask, or its cgroup's quota if smaller.

    The quota is rounded up: a process with 1.5 CPUs has two threads' worth at times.
    """
    cpus = len(os.sched_getaffinity(0))
    quota = cgroup_cpus()
    return max(1, cpus if quota is None else min(cpus, math.ceil(quota)))


def check_threads(threads: int | None) -> int:
    """Resolve a ``threads`` argument; None is what the machine gives this process."""
    if threads is None:
        return default_threads()
    if isinstance(threads, bool) or not 1 <= threads <= 256:
        raise InvalidInput(expected="an integer in 1..256", got=repr(threads), at="threads")
    return threads


def cgroup_cpus() -> float | None:
    """CPUs that the cgroup's quota amounts to; None: no quota. The tightest of the nested groups counts."""
    quotas = [quota for folder in _cgroup_folders() if (quota := _quota(folder)) is not None]
    return min(quotas, default=None)


def _cgroup_folders() -> list[Path]:
    """Every cgroup folder that limits this process's CPU time, innermost first, for cgroup v1 and v2."""
    folders: list[Path] = []
    try:
        lines = Path("/proc/self/cgroup").read_text(encoding="ascii").splitlines()
    except OSError:
        return folders
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            root = Path("/sys/fs/cgroup")
        elif "cpu" in controllers.split(","):
            root = Path("/sys/fs/cgroup") / controllers
            root = root if root.is_dir() else Path("/sys/fs/cgroup/cpu")
        else:
            continue
        # In a container the path is the host's; what the mount shows at its root is then this group itself.
        inner = root / path.lstrip("/")
        while inner != root:
            folders.append(inner)
            inner = inner.parent
        folders.append(root)
    return folders


def _quota(folder: Path) -> float | None:
    """CPUs that one cgroup allows; None: no limit, or no such file."""
    try:
        quota, period = (folder / "cpu.max").read_text(encoding="ascii").split()
    except (OSError, ValueError):
        try:
            quota = (folder / "cpu.cfs_quota_us").read_text(encoding="ascii").strip()
            period = (folder / "cpu.cfs_period_us").read_text(encoding="ascii").strip()
        except OSError:
            return None
    if quota in ("max", "-1"):
        return None
    return int(quota) / int(period)
