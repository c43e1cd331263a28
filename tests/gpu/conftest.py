from __future__ import annotations

from collections.abc import Iterator

import pytest


def _reason() -> str | None:
    try:
        from strata_engine.gpu.device import why_unavailable
    except ImportError as error:
        return f"needs the cuda extra ({error})"
    return why_unavailable()


REASON = _reason()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if REASON is not None and "gpu" in item.path.parts:
            item.add_marker(pytest.mark.skip(reason=f"no GPU: {REASON}"))


@pytest.fixture(scope="session")
def device() -> Iterator:
    from strata_engine.gpu.device import Device

    opened = Device()
    yield opened
    opened.close()
