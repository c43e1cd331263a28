"""How many compute threads this process should run."""

from __future__ import annotations

import math
import os
from pathlib import Path

_ROOT = Path("/")


def usable_cores(root: Path = _ROOT) -> int:
    """Physical cores that this process may use, at least 1.

    Of the processors that it is allowed to run on, two that share a core count once: its vector units are busy with
    one. A container's processor quota (cgroup v2, cpu.max) bounds the count. `root`: where /sys is, for tests.
    """
    allowed = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else range(os.cpu_count() or 1)
    cores = {_core(root, cpu) for cpu in allowed}
    return max(1, min(len(cores), _quota(root)))


def _core(root: Path, cpu: int) -> tuple[str, ...]:
    """What tells the core of a processor from others; the processor itself where the system does not say."""
    topology = root / f"sys/devices/system/cpu/cpu{cpu}/topology"
    try:
        return tuple((topology / name).read_text().strip() for name in ("physical_package_id", "core_id"))
    except OSError:
        return (str(cpu),)


def _quota(root: Path) -> int:
    """Whole processors that the cgroup may use; no bound where there is none."""
    try:
        quota, period = (root / "sys/fs/cgroup/cpu.max").read_text().split()
        return max(1, math.ceil(int(quota) / int(period)))
    except (OSError, ValueError):
        return 1 << 16
