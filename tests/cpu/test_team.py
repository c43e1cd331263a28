"""The team of threads."""

import threading

import pytest

from strata_engine.backends.cpu.team import Team


def team_threads() -> int:
    return sum(thread.name.startswith("strata-cpu-") for thread in threading.enumerate())


@pytest.fixture
def team():
    team = Team(3)
    yield team
    team.close()


def test_every_number_runs_on_a_thread_of_its_own(team):
    barrier, seen = threading.Barrier(3), {}

    def work(number):
        seen[number] = threading.get_ident()
        barrier.wait(timeout=10)

    team.run(work)
    assert sorted(seen) == [0, 1, 2] and len(set(seen.values())) == 3
    assert seen[0] == threading.get_ident()


def test_the_same_threads_serve_every_run(team):
    runs = []
    for _ in range(2):
        barrier, seen = threading.Barrier(3), {}

        def work(number, barrier=barrier, seen=seen):
            seen[number] = threading.get_ident()
            barrier.wait(timeout=10)

        team.run(work)
        runs.append(seen)
    assert runs[0] == runs[1]


def test_close_ends_the_threads():
    before = team_threads()
    team = Team(4)
    assert team_threads() == before + 3
    team.close()
    assert team_threads() == before


def test_a_team_of_one_needs_no_threads():
    before, seen = team_threads(), []
    team = Team(1)
    team.run(seen.append)
    assert seen == [0] and team_threads() == before
    team.close()
