"""Reply lines: their exact bytes, and that a client reads back what the engine wrote."""

import math

import pytest

from strata_engine.replies import (
    Info,
    Pong,
    Ready,
    ReplyError,
    StatsReply,
    Unknown,
    format_error,
    format_event,
    format_info,
    format_ready,
    format_stats,
    parse_reply,
)
from strata_engine.request import Choice, Done, Failed, PromptProgress, Reused, Token

INFO = Info("strata/0.1.0", "/models/a b.gguf", "llama", 49152, 8192, 1, (2,), "cpu", 4)
EVENTS = [
    (Reused(12), "REUSED 12"),
    (PromptProgress(512, 2048, 180.25, 2840.5), "PP 512 2048 180.2 2840.5"),
    (Token(Choice(17)), "T 17"),
    (Token(Choice(17, -0.5)), "T 17 lp=-0.5"),
    (Token(Choice(17, -0.5, ((17, -0.5), (4, -1.25)))), "T 17 lp=-0.5 top=17:-0.5,4:-1.25"),
    (Token(Choice(17, -math.inf)), "T 17 lp=-inf"),
    (Done(3, 2, 1.0, 2.0, "length", 4, 5, 6, None), "DONE 3 2 1.0 2.0 length 4 5 6"),
    (Done(3, 2, 1.0, 2.0, "stop", 0, 0, 0, 2**64 - 1), "DONE 3 2 1.0 2.0 stop 0 0 0 seed=18446744073709551615"),
    (Failed("BUSY", "every slot is taken"), "ERR BUSY every slot is taken"),
]


def test_info_line():
    assert format_info(INFO) == (
        "INFO protocol=1 engine=strata/0.1.0 model=/models/a%20b.gguf arch=llama vocab=49152 context=8192 bos=1 eos=2"
        " device=cpu slots=4"
    )


@pytest.mark.parametrize("event, line", EVENTS, ids=[line for _, line in EVENTS])
def test_events(event, line):
    assert format_event(event) == line
    read = parse_reply(f"{line}\n".encode())
    assert read == event or isinstance(event, PromptProgress)


@pytest.mark.parametrize(
    "info",
    [
        INFO,
        Info("strata/0.1.0", "/é\udcff=%/\n.gguf", "llama", 10, 20, None, (), "cuda", 1),
        Info("strata/0.1.0", "m", "llama", 10, 20, 0, (1, 2, 3), "cpu", 1, ("a", "b")),
    ],
    ids=["plain", "odd path, no ids", "features"],
)
def test_info_is_read_back(info):
    line = format_info(info)
    assert line.isascii() and "\n" not in line
    assert parse_reply(line.encode()) == info


def test_the_other_lines_are_read_back():
    assert format_ready(8192) == "READY 8192 stop"
    assert parse_reply(b"READY 8192 stop\n") == Ready(8192)
    assert parse_reply(b"PONG\r\n") == Pong()
    assert format_stats({"slots": 4, "uptime_s": 1.25}) == "STATS slots=4 uptime_s=1.2"
    assert parse_reply(b"STATS slots=4 uptime_s=1.2") == StatsReply({"slots": 4.0, "uptime_s": 1.2})


@pytest.mark.parametrize("value", [-0.1, -1.2345678, -17.0625, -3.4e38])
def test_log_probabilities_keep_every_float32_bit(value):
    np = pytest.importorskip("numpy")
    single = np.float32(value)
    read = parse_reply(format_event(Token(Choice(1, float(single)))).encode())
    assert np.float32(read.choice.logprob) == single


def test_an_error_is_one_ascii_line():
    assert format_error("INTERNAL", "two\nlines, é\r\n") == "ERR INTERNAL two lines, \\xe9"


def test_later_versions_may_add():
    assert parse_reply(b"NEWS of a later version\n") == Unknown("NEWS of a later version")
    assert parse_reply(b"T 5 lp=-1 mood=good extra").choice == Choice(5, -1.0)
    assert parse_reply(b"DONE 1 2 3 4 stop 5 6 7 seed=1 kernel=fast").seed == 1
    assert parse_reply(format_info(INFO).encode() + b" colour=red") == INFO


@pytest.mark.parametrize(
    "line", [b"T", b"T x", b"DONE 1 2", b"DONE 1 2 3 4 done 5 6 7", b"INFO protocol=1", b"PP 1", b"\xff"]
)
def test_a_broken_reply_is_an_error(line):
    with pytest.raises(ReplyError):
        parse_reply(line)
