"""How many threads by default."""

import os

import pytest

from strata_engine.cores import usable_cores


@pytest.fixture
def machine(tmp_path, monkeypatch):
    """machine(cores, quota): a machine with one processor for each entry, which names its (package, core)."""

    def build(cores, quota=None):
        monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(len(cores))), raising=False)
        for cpu, (package, core) in enumerate(cores):
            folder = tmp_path / f"sys/devices/system/cpu/cpu{cpu}/topology"
            folder.mkdir(parents=True)
            (folder / "physical_package_id").write_text(f"{package}\n")
            (folder / "core_id").write_text(f"{core}\n")
        if quota:
            (tmp_path / "sys/fs/cgroup").mkdir(parents=True)
            (tmp_path / "sys/fs/cgroup/cpu.max").write_text(quota)
        return tmp_path

    return build


@pytest.mark.parametrize(
    ("cores", "quota", "count"),
    [
        ([(0, 0), (0, 1)], None, 2),
        ([(0, 0), (0, 1), (0, 0), (0, 1)], None, 2),  # hyperthreads
        ([(0, 0), (1, 0)], None, 2),  # two sockets
        ([(0, i) for i in range(8)], "200000 100000\n", 2),
        ([(0, i) for i in range(8)], "150000 100000\n", 2),
        ([(0, i) for i in range(8)], "max 100000\n", 8),
        ([(0, 0)], "10000 100000\n", 1),
    ],
)
def test_cores_of_a_machine(machine, cores, quota, count):
    assert usable_cores(machine(cores, quota)) == count


def test_processors_count_where_the_system_says_nothing(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1, 2}, raising=False)
    assert usable_cores(tmp_path) == 3
