"""``strata-proxy``: the command line. Heavy modules are imported inside `main`, where Ctrl-C ends them quietly."""

from __future__ import annotations

import argparse
import logging
import sys
from collections.abc import Sequence
from pathlib import Path

from strata_engine import __version__
from strata_engine.streams import secure_streams

EXIT_REFUSED = 2
EXIT_INTERRUPTED = 130  # as a shell has it: 128 + SIGINT


def main(argv: Sequence[str] | None = None) -> int:
    """The exit status: 0 ended by a signal, 2 a configuration or an address that cannot be used, 130 Ctrl-C before."""
    try:
        return _run(argv)
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED


def _run(argv: Sequence[str] | None) -> int:
    secure_streams()
    options = vars(_parser().parse_args(argv))
    from .config import ConfigError, load_config
    from .serving import ServeError, run

    try:
        config = load_config(options.pop("config"), options)
        logging.basicConfig(level=config.log_level.upper(), format="%(asctime)s %(levelname)s %(name)s: %(message)s")
        run(config)
    except (ConfigError, ServeError) as error:
        print(f"strata-proxy: {error}", file=sys.stderr)
        return EXIT_REFUSED
    return 0


def _parser() -> argparse.ArgumentParser:
    """What the command line leaves out comes from the configuration file, then from the defaults."""
    from .config import LOG_LEVELS, Config

    own = Config()
    args = argparse.ArgumentParser(prog="strata-proxy", description="OpenAI-style HTTP in front of strata-engine.")
    args.add_argument("--port", type=int, metavar="N", help=f"port to listen on (default {own.port}; 0: any free one)")
    args.add_argument("--host", metavar="ADDRESS", help=f"address to listen on (default {own.host})")
    args.add_argument("--engine", metavar="SOCKET", help=f"the engine's Unix socket (default {own.engine})")
    args.add_argument("--config", type=Path, metavar="FILE.yaml", help="configuration; see configs/default.yaml")
    args.add_argument("--log-level", choices=LOG_LEVELS, help=f"what goes to stderr (default {own.log_level})")
    args.add_argument("--version", action="version", version=f"strata-proxy {__version__}")
    return args


if __name__ == "__main__":
    sys.exit(main())
