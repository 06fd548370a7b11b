"""What the machine says of itself, read from trees of files made here."""

import os
import platform
from pathlib import Path

import pytest

from colibri_cli import InvalidInput, topology
from colibri_cli.topology import cgroup_cpus, check_threads, default_threads, describe


def tree(root: Path, **files: str) -> Path:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


V2 = "0::/user.slice/app.scope\n"
V1 = "9:name=systemd:/\n4:memory:/box/inner\n1:cpu,cpuacct:/box/inner\n"


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({}, None),
        ({"proc/self/cgroup": V2}, None),
        ({"proc/self/cgroup": V2, "sys/fs/cgroup/user.slice/app.scope/cpu.max": "150000 100000\n"}, 1.5),
        ({"proc/self/cgroup": V2, "sys/fs/cgroup/user.slice/app.scope/cpu.max": "max 100000\n"}, None),
        (
            {
                "proc/self/cgroup": V2,
                "sys/fs/cgroup/user.slice/app.scope/cpu.max": "400000 100000\n",
                "sys/fs/cgroup/user.slice/cpu.max": "200000 100000\n",
            },
            2,
        ),
        # In a container the mount shows this group itself at its root.
        ({"proc/self/cgroup": V2, "sys/fs/cgroup/cpu.max": "50000 100000\n"}, 0.5),
        (
            {
                "proc/self/cgroup": V1,
                "sys/fs/cgroup/cpu,cpuacct/box/inner/cpu.cfs_quota_us": "300000\n",
                "sys/fs/cgroup/cpu,cpuacct/box/inner/cpu.cfs_period_us": "100000\n",
            },
            3,
        ),
        (
            {
                "proc/self/cgroup": V1,
                "sys/fs/cgroup/cpu/box/cpu.cfs_quota_us": "300000\n",
                "sys/fs/cgroup/cpu/box/cpu.cfs_period_us": "200000\n",
                "sys/fs/cgroup/cpu/cpu.cfs_quota_us": "-1\n",
                "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000\n",
            },
            1.5,
        ),
        ({"proc/self/cgroup": "1:cpuset:/a\n", "sys/fs/cgroup/cpu.max": "100000 100000\n"}, None),
        ({"proc/self/cgroup": V2, "sys/fs/cgroup/cpu.max": "garbage\n"}, None),
        ({"proc/self/cgroup": "0::/../outside\n", "sys/fs/cgroup/cpu.max": "100000 100000\n"}, 1),
    ],
)
def test_the_tightest_quota_counts(tmp_path, files, expected):
    assert cgroup_cpus(tree(tmp_path, **files)) == expected


@pytest.mark.parametrize(("quota", "expected"), [(None, 4), (0.5, 1), (1.5, 2), (3, 3), (64, 4)])
def test_threads_are_what_affinity_and_quota_allow(monkeypatch, quota, expected):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 3, 5, 8})
    monkeypatch.setattr(topology, "cgroup_cpus", lambda: quota)
    assert default_threads() == expected
    assert check_threads(None) == expected


def test_threads_asked_for_are_taken_or_refused():
    assert check_threads(1) == 1
    assert check_threads(256) == 256
    for wrong in (0, -1, 257, True):
        with pytest.raises(InvalidInput, match="at threads"):
            check_threads(wrong)


FULL = {
    "proc/cpuinfo": "processor\t: 0\nmodel name\t: Fast CPU @ 3: GHz\nflags\t\t: fma\n\nprocessor\t: 1\n",
    "proc/meminfo": "MemTotal:       2048 kB\nMemFree:         1 kB\nMemAvailable:    1024 kB\nHugePages_Total: 0\n",
    "proc/self/cgroup": V2,
    "sys/fs/cgroup/user.slice/memory.max": "1048576\n",
    "sys/fs/cgroup/user.slice/app.scope/memory.max": "max\n",
    "sys/fs/cgroup/cpu.max": "250000 100000\n",
    "sys/devices/system/node/node0/cpulist": "0-3\n",
    "sys/devices/system/node/node10/cpulist": "8-11\n",
    "sys/devices/system/node/node2/cpulist": "4-7\n",
    "sys/devices/system/node/online": "0,2,10\n",
    "sys/devices/system/cpu/cpu0/cache/index0/size": "32K\n",
    "sys/devices/system/cpu/cpu0/cache/index3/size": "16M\n",
    "sys/devices/system/cpu/cpu0/cpufreq/scaling_governor": "powersave\n",
    "sys/devices/system/cpu/cpu1/cpufreq/scaling_governor": "performance\n",
    "sys/kernel/mm/transparent_hugepage/enabled": "always [madvise] never\n",
}


def test_a_machine_that_tells_all(tmp_path):
    found = describe(tree(tmp_path, **FULL))
    assert found["cpu"] == "Fast CPU @ 3: GHz"
    assert found["cgroup_cpus"] == 2.5
    assert found["numa_nodes"] == {"0": "0-3", "2": "4-7", "10": "8-11"}
    assert list(found["numa_nodes"]) == ["0", "2", "10"]
    assert found["last_level_cache"] == 16 << 20
    assert found["governor"] == "performance, powersave"
    assert found["thp"] == "madvise"
    assert (found["memory"], found["memory_available"], found["memory_limit"]) == (2048 << 10, 1024 << 10, 1 << 20)


def test_a_machine_that_tells_nothing(tmp_path):
    found = describe(tmp_path)
    silent = {key for key, value in found.items() if value is None}
    assert silent == {
        *("cpu", "cgroup_cpus", "last_level_cache", "governor", "thp", "memory", "memory_available", "memory_limit"),
    }
    assert found["numa_nodes"] == {}
    assert found["affinity"] == sorted(os.sched_getaffinity(0))
    assert found["python"] == platform.python_version()


def test_an_arm_cpu_is_named_by_its_numbers(tmp_path):
    text = "processor\t: 0\nCPU implementer\t: 0x41\nCPU part\t: 0xd40\n"
    assert describe(tree(tmp_path, **{"proc/cpuinfo": text}))["cpu"] == "Arm implementer 0x41, part 0xd40"


@pytest.mark.parametrize(("limit", "expected"), [("9223372036854771712", None), ("1048576", 1 << 20), ("-1", None)])
def test_version_1_says_no_limit_by_a_large_one(tmp_path, limit, expected):
    files = {"proc/self/cgroup": V1, "proc/meminfo": FULL["proc/meminfo"]}
    root = tree(tmp_path, **files, **{"sys/fs/cgroup/memory/box/inner/memory.limit_in_bytes": f"{limit}\n"})
    assert describe(root)["memory_limit"] == expected


def test_this_machine():
    found = describe()
    assert found["architecture"] == platform.machine()
    assert found["logical_cpus"] >= len(found["affinity"]) >= 1
    assert found["cgroup_cpus"] == cgroup_cpus()
