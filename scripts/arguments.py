"""What the scripts here share: arguments that are checked before any work, and faults that end in one line."""

from __future__ import annotations

import argparse
import importlib.util
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from strata_engine.backends import why_no_cuda

HUGE = 1 << 31


class UsageError(Exception):
    """What was asked for cannot be done; the message says why and what would help."""


def count(low: int = 1, high: int = HUGE) -> Callable[[str], int]:
    """An argparse type: a whole number from `low` to `high`."""

    def parse(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            value = low - 1
        if not low <= value <= high:
            limit = f"from {low} to {high}" if high < HUGE else f"of {low} or more"
            raise argparse.ArgumentTypeError(f"{text!r} is not a whole number {limit}")
        return value

    return parse


def counts(low: int = 1, high: int = HUGE) -> Callable[[str], list[int]]:
    """An argparse type: such numbers with commas between them."""
    one = count(low, high)
    return lambda text: [one(part) for part in text.split(",")]


def out_file(text: str) -> Path:
    """An argparse type: a file that can be written once the work is done."""
    path = Path(text)
    if path.is_dir() or not path.parent.is_dir() or not os.access(path if path.exists() else path.parent, os.W_OK):
        raise argparse.ArgumentTypeError(f"{text} cannot be written: name a file in a folder of yours")
    return path


def plot_file(text: str) -> Path:
    """An argparse type: `out_file` for a plot."""
    if importlib.util.find_spec("matplotlib") is None:
        raise argparse.ArgumentTypeError("a plot needs matplotlib: pip install matplotlib")
    return out_file(text)


def need_gpu(otherwise: str = "take --device cpu") -> None:
    """UsageError unless a GPU answers and what drives it is installed."""
    if missing := why_no_cuda():
        raise UsageError(f"{missing}; {otherwise}")


def run(main: Callable[[Sequence[str] | None], int | None], *faults: type[Exception]) -> None:
    """Run a script's `main` and exit: with what it gives, or after UsageError, `faults` or too much memory with 2."""
    name = Path(sys.argv[0]).stem.strip("-") or "strata"
    known: tuple[type[Exception], ...] = (UsageError, *faults)
    try:
        status = main(None)
    except known as error:
        print(f"{name}: {error}", file=sys.stderr)
        status = 2
    except MemoryError as error:
        print(f"{name}: that does not fit memory ({error}): ask for less", file=sys.stderr)
        status = 2
    except KeyboardInterrupt:
        status = 130
    sys.exit(status)
