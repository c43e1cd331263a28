"""strata-engine with a scripted scheduler instead of a model: fake_engine.py [--slow-load] [--talk] <its options>.

With --slow-load a progress stage runs until the end; with --talk some stages, log lines and a warning come first.
"""

import importlib.util
import logging
import sys
import time
import warnings
from pathlib import Path

from strata_engine import cli
from strata_engine.daemon import Engine
from strata_engine.progress import open_progress
from strata_engine.replies import Info

spec = importlib.util.spec_from_file_location("fakes", Path(__file__).with_name("conftest.py"))
fakes = importlib.util.module_from_spec(spec)
spec.loader.exec_module(fakes)


def talk():
    for name in ("one", "two", "three"):
        with open_progress().stage(name, total=1) as stage:
            stage.advance()
        logging.getLogger("strata_engine").warning("a line of the log")
        warnings.warn("a library's warning", stacklevel=1)
        time.sleep(0.1)  # for the reader of a pipe to go


def load(path, args):
    if SLOW:
        with open_progress().stage("compiling kernels", total=2):
            time.sleep(60)
    if "--talk" in sys.argv:
        talk()
    scheduler = fakes.FakeScheduler(slots=args.slots, queue=args.queue)
    info = Info("strata/0.1.0", path, "llama", fakes.VOCAB, fakes.CONTEXT, 1, (fakes.EOS,), "cpu", args.slots)
    return Engine(info, scheduler)


SLOW = "--slow-load" in sys.argv
cli._load = load
sys.exit(cli.main([argument for argument in sys.argv[1:] if argument not in ("--slow-load", "--talk")]))
