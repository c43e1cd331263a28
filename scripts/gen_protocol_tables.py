"""Write the tables of protocol.md that the code knows better: keys, error codes, STATS, limits.

python scripts/gen_protocol_tables.py           # rewrite protocol.md
python scripts/gen_protocol_tables.py --check   # exit 1 if it is out of date
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Callable, Iterable
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "engine"))

from strata_engine import cli, connection, listener, params, protocol  # noqa: E402

PROTOCOL = ROOT / "protocol.md"
TYPES = {"float": "number", "int": "integer", "flag": "`0` or `1`", "ids": "id-list", "bias": "bias-list"}
CLOSING = {"TOO_LONG", "LOADING", "SHUTDOWN"}


def table(head: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    names = list(head)
    lines = [names, ["---"] * len(names), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def keys() -> str:
    rows = [[f"`{key.name}`", TYPES[key.kind], _range(key), _default(key), key.help] for key in params.KEYS]
    return table(["key", "value", "range", "absent means", "what it does"], rows)


def _range(key: params.Key) -> str:
    if key.kind == "ids":
        return "ids of the vocabulary, none twice"
    if key.kind == "bias":
        return f"ids of the vocabulary, none twice; bias {key.range_text}"
    return key.range_text


def _default(key: params.Key) -> str:
    if key.default is None or key.default == ():
        return "-"
    return f"{key.default:g}"


def errors() -> str:
    rows = [[f"`{code}`", text, "yes" if code in CLOSING else "no"] for code, text in protocol.ERROR_CODES.items()]
    return table(["code", "when", "closes"], rows)


def stats() -> str:
    return table(["key", "value"], [[f"`{name}`", text] for name, text in protocol.STATS_KEYS.items()])


def limits() -> str:
    rows = [
        ["line, LF and CR not counted", f"{protocol.LINE_MAX:,} bytes", "`ERR TOO_LONG`, the connection closes"],
        ["the same, of a line that is no GEN", f"{protocol.BARE_MAX:,} bytes", "`ERR BAD_LINE`"],
        ["number", f"{protocol.NUMBER_MAX} characters", "`ERR BAD_VALUE`"],
        ["id", f"{protocol.ID_DIGITS_MAX} digits", "`ERR BAD_TOKEN`, in a key's value `ERR BAD_VALUE`"],
        ["max_new", "context - prompt", "`ERR CONTEXT_FULL`"],
        ["GENs that wait for a slot, of all connections", f"{cli.DEFAULT_QUEUE} (`--queue`)", "`ERR BUSY`"],
        ["lines that wait for their turn", f"{connection.READ_AHEAD_LINES}", "the engine stops reading the connection"],
        ["their bytes", f"{connection.READ_AHEAD_BYTES:,}", "the same"],
        ["unread replies", f"{connection.OUTPUT_HIGH:,} bytes", "the engine stops reading, and begins no further GEN"],
        ["the same, of one running GEN", f"{connection.OUTPUT_MAX:,} bytes", "it is cancelled, the connection closes"],
        ["connections that wait to be accepted", f"{listener.BACKLOG}", "connecting waits"],
    ]  # fmt: skip
    return table(["what", "limit", "past it"], rows)


SECTIONS: dict[str, Callable[[], str]] = {"keys": keys, "errors": errors, "stats": stats, "limits": limits}


def render(text: str) -> str:
    """`text` with every generated section brought up to date."""
    for name, make in SECTIONS.items():
        parts = re.split(f"(<!-- begin {name}: .*? -->\n|<!-- end {name} -->)", text)
        if len(parts) != 5:
            raise SystemExit(f"protocol.md must have one section {name!r}")
        text = "".join([*parts[:2], make(), "\n", *parts[3:]])
    return text


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="change nothing; exit 1 if protocol.md is out of date")
    check = parser.parse_args().check
    old = PROTOCOL.read_text()
    new = render(old)
    if check and new != old:
        print("protocol.md is out of date: run scripts/gen_protocol_tables.py", file=sys.stderr)
        return 1
    if not check:
        PROTOCOL.write_text(new)
    return 0


if __name__ == "__main__":
    sys.exit(main())
