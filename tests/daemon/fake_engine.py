"""strata-engine with a scripted scheduler instead of a model: fake_engine.py [--slow-load] <its options>.

With --slow-load a progress stage runs until the end.
"""

import importlib.util
import sys
import time
from pathlib import Path

from strata_engine import cli
from strata_engine.daemon import Engine
from strata_engine.progress import open_progress
from strata_engine.replies import Info

spec = importlib.util.spec_from_file_location("fakes", Path(__file__).with_name("conftest.py"))
fakes = importlib.util.module_from_spec(spec)
spec.loader.exec_module(fakes)


def load(path, args):
    if SLOW:
        with open_progress().stage("compiling kernels", total=2):
            time.sleep(60)
    scheduler = fakes.FakeScheduler(slots=args.slots, queue=args.queue)
    info = Info("strata/0.1.0", path, "llama", fakes.VOCAB, fakes.CONTEXT, 1, (fakes.EOS,), "cpu", args.slots)
    return Engine(info, scheduler)


SLOW = "--slow-load" in sys.argv
cli._load = load
sys.exit(cli.main([argument for argument in sys.argv[1:] if argument != "--slow-load"]))
