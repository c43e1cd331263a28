"""strata-engine: the command line. Heavy modules are imported only once the socket is ours."""

from __future__ import annotations

import argparse
import gc
import logging
import os
import resource
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from . import __version__
from .cores import usable_cores
from .listener import ListenError, listen
from .params import DRAFT_MAX
from .paths import DEFAULT_MODEL, default_model
from .progress import StderrHandler, open_progress, show_cursor
from .replies import Info
from .streams import secure_streams

if TYPE_CHECKING:
    from .daemon import Engine
    from .model import Model

log = logging.getLogger("strata_engine")

DEFAULT_SOCKET = "/tmp/strata.sock"
DEFAULT_CONTEXT = 8192
DEFAULT_QUEUE = 64
SLOTS_MAX = 512  # each running request has one row of a step at least
THREADS_MAX = 1024
CHUNK_MAX = 4096
QUEUE_MAX = 100_000
EXIT_REFUSED = 2
EXIT_INTERRUPTED = 130  # as a shell has it: 128 + SIGINT


class StartError(Exception):
    """The engine cannot start; the message is one line for a person."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the engine; the exit status: 0 ended by a signal, 2 could not start, 70 the GPU failed while serving,
    130 Ctrl-C before it listened."""
    try:
        secure_streams()
        args = _parser().parse_args(argv)
        form = "%(asctime)s %(levelname)s %(name)s: %(message)s"
        logging.basicConfig(handlers=[StderrHandler()], level=args.log_level.upper(), format=form)
        loaded = _run(args)
    except (ListenError, StartError) as error:
        print(f"strata-engine: {error}", file=sys.stderr)
        return EXIT_REFUSED
    except KeyboardInterrupt:  # later ones are the daemon's to handle
        return EXIT_INTERRUPTED
    if not loaded:
        # A compiler may still run in the loading thread; it has nothing to save and cannot be interrupted.
        show_cursor()
        logging.shutdown()
        os._exit(0)
    return 0


def _run(args: argparse.Namespace) -> bool:
    import asyncio

    from .daemon import serve_until_signal

    path = _model_file(args.model)
    _raise_file_limit()
    listener = listen(args.socket)
    return asyncio.run(serve_until_signal(listener, lambda: _load(path, args)))


def _model_file(given: str | None) -> str:
    path = default_model() if given is None else Path(given)
    if path.is_file():
        return os.path.abspath(path)
    if path.is_dir():
        raise StartError(f"{path} is a directory, not a model file")
    if given is not None:
        raise StartError(f"no model file {path}")
    raise StartError(f"the default model is missing: `make model` puts it at {path}; or name another with --model")


def _raise_file_limit() -> None:
    """Each client is a file descriptor; the usual soft limit of 1,024 is for programs that use select()."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def _load(path: str, args: argparse.Namespace) -> Engine:
    """Load, compile, warm up. Raises StartError."""
    from .backends import BackendError, open_backend
    from .daemon import Engine
    from .model import ModelError, load_model
    from .scheduler import Scheduler

    try:
        model = load_model(path)
        context = _context(args.max_context, model)
        backend = open_backend(
            model,
            device=args.device,
            context=context,
            slots=args.slots,
            threads=args.threads,
            kv=args.kv,
            progress=open_progress(),
        )
    except (ModelError, BackendError) as error:
        raise StartError(" ".join(str(error).split())) from error
    try:
        scheduler = Scheduler(
            backend, eos=model.eos, queue=args.queue, chunk=args.chunk or backend.chunk, draft=args.draft
        )
    except ValueError as error:
        raise StartError(str(error)) from error
    if args.draft:
        scheduler.time_windows()
    gc.collect()
    gc.freeze()  # what loading built stays: later collections need not look at it
    scheduler.start()
    return Engine(_info(model, backend.device, context, args.slots), scheduler, backend.close)


def _context(asked: int | None, model: Model) -> int:
    if asked is None:
        return min(DEFAULT_CONTEXT, model.context_length)
    if asked > model.context_length:
        raise StartError(f"--max-context {asked}: the model was made for at most {model.context_length}")
    return asked


def _info(model: Model, device: str, context: int, slots: int) -> Info:
    return Info(
        engine=f"strata/{__version__}",
        model=str(model.path),
        arch=model.arch,
        vocab=model.vocab,
        context=context,
        bos=model.bos,
        eos=tuple(sorted(model.eos)),
        device=device,
        slots=slots,
    )


def _whole(low: int, high: int | None = None) -> Callable[[str], int]:
    """An argparse type: a whole number from `low` to `high`."""

    def parse(text: str) -> int:
        value = int(text)
        if value < low or (high is not None and value > high):
            rule = f"at least {low}" if high is None else f"in {low}..{high}"
            raise argparse.ArgumentTypeError(f"must be {rule}, got {value}")
        return value

    parse.__name__ = "whole number"  # what argparse calls it in its message
    return parse


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="strata-engine",
        description="Load a GGUF language model and answer generation requests on a Unix socket (see protocol.md).",
    )
    add = parser.add_argument
    add("--socket", metavar="PATH", default=DEFAULT_SOCKET, help="the Unix socket to listen on (default: %(default)s)")
    add("--model", metavar="FILE.gguf", help=f"the model (default: {DEFAULT_MODEL} in the cache, see `make model`)")
    add("--device", choices=("auto", "cuda", "cpu"), default="auto", help="auto takes the GPU if one answers")
    add(
        "--max-context",
        metavar="N",
        type=_whole(1),
        help=f"most tokens of prompt and answer together (default: the model's, at most {DEFAULT_CONTEXT})",
    )
    add(
        "--slots",
        metavar="N",
        type=_whole(1, SLOTS_MAX),
        default=4,
        help=f"requests computed at once, at most {SLOTS_MAX} (default: %(default)s)",
    )
    add(
        "--queue",
        metavar="N",
        type=_whole(0, QUEUE_MAX),
        default=DEFAULT_QUEUE,
        help="requests that may wait for a slot; past it ERR BUSY (default: %(default)s)",
    )
    add(
        "--threads",
        metavar="N",
        type=_whole(1, THREADS_MAX),
        default=min(usable_cores(), THREADS_MAX),
        help="CPU threads (default: the physical cores this process may use, here %(default)s)",
    )
    add(
        "--kv",
        choices=("f32", "f16"),
        default="f32",
        help="type of the cached keys and values; f16 halves their memory"
        " and costs some exactness (default: %(default)s)",
    )
    add(
        "--chunk",
        metavar="N",
        type=_whole(1, CHUNK_MAX),
        help="most prompt tokens read in one step: small keeps other requests' tokens flowing, large reads faster;"
        " the tokens are the same (default: what suits the device, 64 on the CPU, 512 on a GPU)",
    )
    add(
        "--draft",
        metavar="N",
        type=_whole(0, DRAFT_MAX),
        default=DRAFT_MAX,
        help="most tokens drafted ahead by prompt lookup, 0 is off; the tokens are the same (default: %(default)s)",
    )
    add(
        "--log-level",
        choices=("debug", "info", "warning", "error"),
        default="info",
        help="what is logged on stderr (default: %(default)s)",
    )
    add("--version", action="version", version=f"strata-engine {__version__}")
    return parser


if __name__ == "__main__":
    sys.exit(main())
