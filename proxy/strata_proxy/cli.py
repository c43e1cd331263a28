"""``strata-proxy``: options, logging, serving until a signal."""

from __future__ import annotations

import argparse
import asyncio
import logging
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

from aiohttp import web

from strata_engine import __version__

from .app import create_app
from .config import LOG_LEVELS, Config, ConfigError, load_config

log = logging.getLogger("strata_proxy")

GRACE_S = 5.0  # running answers may end within this after a signal


def parser() -> argparse.ArgumentParser:
    """The command line; what it leaves out comes from the configuration file, then from the defaults."""
    own = Config()
    args = argparse.ArgumentParser(prog="strata-proxy", description="OpenAI-style HTTP in front of strata-engine.")
    args.add_argument("--port", type=int, metavar="N", help=f"port to listen on (default {own.port}; 0: any free one)")
    args.add_argument("--host", metavar="ADDRESS", help=f"address to listen on (default {own.host})")
    args.add_argument("--engine", metavar="SOCKET", help=f"the engine's Unix socket (default {own.engine})")
    args.add_argument("--config", type=Path, metavar="FILE.yaml", help="configuration; see configs/default.yaml")
    args.add_argument("--log-level", choices=LOG_LEVELS, help=f"what goes to stderr (default {own.log_level})")
    args.add_argument("--version", action="version", version=f"strata-proxy {__version__}")
    return args


def main(argv: Sequence[str] | None = None) -> int:
    """Exit code: 0 after a signal, 1 if the address cannot be used, 2 for a configuration that is refused."""
    options = vars(parser().parse_args(argv))
    try:
        config = load_config(options.pop("config"), options)
        app = create_app(config)
    except ConfigError as error:
        print(f"strata-proxy: {error}", file=sys.stderr)
        return 2
    logging.basicConfig(level=config.log_level.upper(), format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    try:
        asyncio.run(serve(app, config))
    except OSError as error:
        print(f"strata-proxy: cannot listen on {config.host}:{config.port}: {error.strerror}", file=sys.stderr)
        return 1
    return 0


async def serve(app: web.Application, config: Config) -> None:
    """Serve until SIGINT or SIGTERM. Raises OSError if the address cannot be used."""
    runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=GRACE_S)
    await runner.setup()
    try:
        await web.TCPSite(runner, config.host, config.port).start()
        log.info("listening on %s", " and ".join(f"http://{_address(name)}" for name in runner.addresses))
        await _signalled()
    finally:
        await runner.cleanup()


async def _signalled() -> None:
    ended = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, ended.set)
    await ended.wait()


def _address(name: tuple[str, int]) -> str:
    host, port = name[:2]
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


if __name__ == "__main__":
    sys.exit(main())
