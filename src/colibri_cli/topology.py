"""What this machine gives a process: CPUs, NUMA nodes, quota. Read, never guessed."""

from __future__ import annotations

import math
import os
import platform
import re
from importlib.metadata import version
from pathlib import Path
from typing import TypedDict

from colibri_cli.checks import check_integer

_ROOT = Path("/")  # where proc and sys are mounted


class Topology(TypedDict):
    """What :func:`describe` found; None: this system does not say.

    ``cgroup_cpus`` and ``memory_limit`` are None where no cgroup limits this process; sizes are bytes.
    """

    cpu: str | None
    architecture: str
    logical_cpus: int
    affinity: list[int]
    cgroup_cpus: float | None
    numa_nodes: dict[str, str]
    last_level_cache: int | None
    governor: str | None
    thp: str | None
    memory: int | None
    memory_available: int | None
    memory_limit: int | None
    kernel: str
    python: str
    numpy: str


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
    return check_integer("threads", threads, 1, 256)


def cgroup_cpus(root: Path = _ROOT) -> float | None:
    """CPUs that the cgroup's quota amounts to; None: no quota. The tightest of the nested groups counts."""
    quotas = [quota for folder in _cgroup_folders("cpu", root) if (quota := _quota(folder)) is not None]
    return min(quotas, default=None)


def describe(root: Path = _ROOT) -> Topology:
    """Read what a measurement on this machine depends on.

    Parameters
    ----------
    root : path
        The folder that holds ``proc`` and ``sys``.
    """
    memory = _meminfo(root)
    limits = [limit for folder in _cgroup_folders("memory", root) if (limit := _memory_limit(folder)) is not None]
    limit = min(limits, default=None)
    total = memory.get("MemTotal")
    nodes = sorted((root / "sys/devices/system/node").glob("node[0-9]*"), key=lambda node: int(node.name[4:]))
    return Topology(
        cpu=_cpu_model(root),
        architecture=platform.machine(),
        logical_cpus=os.cpu_count() or 1,
        affinity=sorted(os.sched_getaffinity(0)),
        cgroup_cpus=cgroup_cpus(root),
        numa_nodes={node.name[4:]: cpus for node in nodes if (cpus := _read(node / "cpulist")) is not None},
        last_level_cache=_last_level_cache(root),
        governor=_governor(root),
        thp=_thp(root),
        memory=total,
        memory_available=memory.get("MemAvailable"),
        # Version 1 says "no limit" by a number larger than any memory.
        memory_limit=None if limit is None or (total is not None and limit >= total) else limit,
        kernel=f"{platform.system()} {platform.release()}",
        python=platform.python_version(),
        numpy=version("numpy"),
    )


def _read(path: Path) -> str | None:
    try:
        return path.read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return None


def _cpu_model(root: Path) -> str | None:
    """Give the processor's name; on Arm, where Linux gives numbers alone, those."""
    lines = (_read(root / "proc/cpuinfo") or "").splitlines()
    fields = {key.strip(): value.strip() for key, _, value in (line.partition(":") for line in lines)}
    if "CPU part" in fields:
        return f"Arm implementer {fields.get('CPU implementer', '?')}, part {fields['CPU part']}"
    return fields.get("model name")


def _last_level_cache(root: Path) -> int | None:
    """Bytes of the largest cache that the first CPU sees."""
    units = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30}
    texts = [_read(path) for path in (root / "sys/devices/system/cpu/cpu0/cache").glob("index*/size")]
    sizes = [re.fullmatch(r"(\d+)([KMG])", text) for text in texts if text is not None]
    return max((int(size[1]) * units[size[2]] for size in sizes if size is not None), default=None)


def _governor(root: Path) -> str | None:
    """Name the frequency governor; more than one where CPUs differ."""
    paths = (root / "sys/devices/system/cpu").glob("cpu[0-9]*/cpufreq/scaling_governor")
    found = {text for path in paths if (text := _read(path)) is not None}
    return ", ".join(sorted(found)) or None


def _thp(root: Path) -> str | None:
    """Name the mode of transparent huge pages, which stands in brackets."""
    found = re.search(r"\[(\w+)\]", _read(root / "sys/kernel/mm/transparent_hugepage/enabled") or "")
    return None if found is None else found[1]


def _meminfo(root: Path) -> dict[str, int]:
    found = re.findall(r"^(\w+):\s+(\d+) kB$", _read(root / "proc/meminfo") or "", re.MULTILINE)
    return {name: int(kilobytes) << 10 for name, kilobytes in found}


def _cgroup_folders(controller: str, root: Path) -> list[Path]:
    """Every cgroup folder that limits this process in one respect, innermost first, for cgroup v1 and v2."""
    folders: list[Path] = []
    mount = root / "sys/fs/cgroup"
    for line in (_read(root / "proc/self/cgroup") or "").splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            top = mount
        elif controller in controllers.split(","):
            top = mount / controllers
            top = top if top.is_dir() else mount / controller
        else:
            continue
        # In a container the path is the host's; what the mount shows at its root is then this group itself.
        inner = top / path.lstrip("/")
        while inner != top:
            folders.append(inner)
            inner = inner.parent
        folders.append(top)
    return folders


def _quota(folder: Path) -> float | None:
    """CPUs that one cgroup allows; None: no limit, or no such file."""
    limit = _read(folder / "cpu.max")
    if limit is None:
        limit = f"{_read(folder / 'cpu.cfs_quota_us')} {_read(folder / 'cpu.cfs_period_us')}"
    found = re.fullmatch(r"(\d+) (\d+)", limit)
    return None if found is None else int(found[1]) / int(found[2])


def _memory_limit(folder: Path) -> int | None:
    """Bytes that one cgroup allows; None: no limit, or no such file."""
    limit = _read(folder / "memory.max") or _read(folder / "memory.limit_in_bytes")
    return int(limit) if limit is not None and limit.isdecimal() else None
