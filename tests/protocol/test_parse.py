"""Request lines: what is taken, and what is refused by which name. Derived from the table of keys where it can be."""

import math
import subprocess
import sys
import time

import pytest

from strata_engine.params import KEY_BY_NAME, KEYS, SEED_MAX, GenParams
from strata_engine.protocol import (
    BARE_MAX,
    ERROR_CODES,
    LINE_MAX,
    Gen,
    Limits,
    Ping,
    ProtocolError,
    Quit,
    Stats,
    Stop,
    gen_line,
    parse_line,
)
from strata_engine.request import Request

LIMITS = Limits(vocab=1000, context=64)
NUMBERS = [key for key in KEYS if key.kind in ("float", "int", "flag")]
FLOATS = [key for key in KEYS if key.kind == "float"]


def parse(line: str) -> object:
    return parse_line(line.encode(), LIMITS)


def params(pairs: str) -> GenParams:
    return parse(f"GEN 5 {pairs} 1,2").request.params


def refusal(line: str | bytes, limits: Limits = LIMITS) -> ProtocolError:
    with pytest.raises(ProtocolError) as caught:
        parse_line(line if isinstance(line, bytes) else line.encode(), limits)
    assert caught.value.code in ERROR_CODES
    assert str(caught.value).isascii() and "\n" not in str(caught.value) and len(str(caught.value)) < 250
    return caught.value


def key_refusal(pairs: str) -> str:
    """The code; the text must name the key."""
    error = refusal(f"GEN 5 {pairs} 1,2")
    assert pairs.split("=")[0] in error.text
    return error.code


def step(key, toward: float) -> str:
    """The nearest value outside a bound, as text."""
    bound = key.low if toward < 0 else key.high
    return (
        str(int(bound) + int(math.copysign(1, toward)))
        if key.kind != "float"
        else repr(math.nextafter(bound, toward * math.inf))
    )


def test_gen_without_keys_is_neutral():
    assert parse("GEN 5 1,2,3") == Gen(Request(5, GenParams(), (1, 2, 3)))


@pytest.mark.parametrize("line, command", [("STOP", Stop()), ("PING", Ping()), ("STATS", Stats()), ("QUIT", Quit())])
def test_bare_commands(line, command):
    assert parse(line) == command
    assert parse(f"{line}\r") == command
    assert parse(f"{line}  ") == command


@pytest.mark.parametrize("key", NUMBERS, ids=lambda key: key.name)
def test_bounds_are_taken(key):
    low = math.nextafter(key.low, math.inf) if key.low_open else key.low
    for bound in (low, key.high):
        assert getattr(params(f"{key.name}={bound!r}"), key.name) == bound


@pytest.mark.parametrize("key", NUMBERS, ids=lambda key: key.name)
def test_outside_the_bounds_is_refused(key):
    below = repr(key.low) if key.low_open else step(key, -1)
    for text in (below, step(key, +1), "-99999999", "9" * 40):
        assert key_refusal(f"{key.name}={text}") == "OUT_OF_RANGE"


@pytest.mark.parametrize("key", KEYS, ids=lambda key: key.name)
@pytest.mark.parametrize(
    "text",
    [
        "",
        "x",
        "nan",
        "NaN",
        "inf",
        "-inf",
        "Infinity",
        "0x10",
        "1_0",
        "+1",
        "--1",
        "1e",
        "true",
        "None",
        ".",
        "1,",
        "'1'",
    ],
)
def test_what_does_not_parse_is_refused(key, text):
    assert key_refusal(f"{key.name}={text}") == "BAD_VALUE"


@pytest.mark.parametrize("key", [key for key in KEYS if key.kind in ("int", "flag")], ids=lambda key: key.name)
@pytest.mark.parametrize("text", ["1.0", "1e0", "1."])
def test_whole_numbers_are_whole(key, text):
    assert key_refusal(f"{key.name}={text}") == "BAD_VALUE"


@pytest.mark.parametrize("key", FLOATS, ids=lambda key: key.name)
def test_overflow_to_infinity_is_out_of_range(key):
    assert key_refusal(f"{key.name}=1e999") == "OUT_OF_RANGE"


@pytest.mark.parametrize(
    "text, value", [("0.7", 0.7), ("1e-9", 1e-9), ("1E+2", 100.0), (".5", 0.5), ("2.", 2.0), ("007", 7.0)]
)
def test_spellings_of_a_number(text, value):
    assert params(f"temperature={text}").temperature == value


@pytest.mark.parametrize("key", KEYS, ids=lambda key: key.name)
def test_a_repeated_key_is_refused(key):
    value = "1:1" if key.kind == "bias" else "1"
    error = refusal(f"GEN 5 {key.name}={value} {key.name}={value} 1")
    assert (error.code, error.text) == ("BAD_KEY", f"{key.name} is given twice")


@pytest.mark.parametrize("name", ["temp", "Temperature", "TOP_K", "", "max_tokens", "x" * 500])
def test_an_unknown_key_is_refused(name):
    assert refusal(f"GEN 5 {name}=1 1").code == "BAD_KEY"


def test_every_key_at_once():
    text = " ".join(f"{key.name}={'3:1.5' if key.kind == 'bias' else '1'}" for key in KEYS)
    assert params(text) == GenParams(1.0, 1.0, 1, 1.0, 1.0, 1.0, 1.0, 1, 1, 1, ((3, 1.5),), (1,), True, 1)


def test_the_largest_seed_is_exact():
    assert params(f"seed={SEED_MAX}").seed == SEED_MAX


def test_logit_bias():
    assert params("logit_bias=5:1.5,999:-2e0").logit_bias == ((5, 1.5), (999, -2.0))


@pytest.mark.parametrize(
    "value, code",
    [
        ("5", "BAD_VALUE"), ("5:", "BAD_VALUE"), (":1", "BAD_VALUE"), ("5:nan", "BAD_VALUE"), ("5:1,", "BAD_VALUE"),
        ("5:1,5:2", "BAD_VALUE"), ("-5:1", "BAD_VALUE"), ("5:1:1", "BAD_VALUE"), ("1000:1", "BAD_TOKEN"),
        ("5:1e7", "OUT_OF_RANGE"), ("5:1e999", "OUT_OF_RANGE"), (",".join(["1:1"] * 2000), "BAD_VALUE"),
    ],
)  # fmt: skip
def test_bad_logit_bias(value, code):
    error = refusal(f"GEN 5 logit_bias={value} 1")
    assert (error.code, error.text.startswith("logit_bias")) == (code, True)


@pytest.mark.parametrize(
    "value, code", [("1,x", "BAD_VALUE"), ("1,,2", "BAD_VALUE"), ("1,1", "BAD_VALUE"), ("1000", "BAD_TOKEN")]
)
def test_bad_stop(value, code):
    assert refusal(f"GEN 5 stop={value} 1").code == code


@pytest.mark.parametrize("ids", ["1,2,3", "1 2 3", "1, 2,3", "1 ,2  3", "1 , 2 , 3", "  1,2,3  ", "001,2,3"])
def test_ids_are_separated_by_commas_or_spaces(ids):
    assert parse(f"GEN 5 {ids}").request.prompt == (1, 2, 3)


@pytest.mark.parametrize(
    "ids", [",1", "1,", "1,,2", "1, ,2", "x", "1,x", "-1", "+1", "1.0", "1_0", "0x1", "1;2", "1:2", "9" * 5000]
)
def test_bad_ids(ids):
    assert refusal(f"GEN 5 {ids}").code == "BAD_TOKEN"


@pytest.mark.parametrize("ids, named", [("1000", "1000"), ("5,1000,6", "1000"), ("5,4294967297", "4294967297")])
def test_ids_outside_the_vocabulary(ids, named):
    error = refusal(f"GEN 5 {ids}")
    assert (error.code, error.text) == ("BAD_TOKEN", f"id {named} is outside the vocabulary 0..999")


def test_keys_behind_the_ids_are_refused():
    error = refusal("GEN 5 1,2 temperature=1")
    assert (error.code, error.text) == ("BAD_KEY", "temperature=1: keys stand before the ids")


@pytest.mark.parametrize(
    "line",
    [
        "GEN",
        "GEN ",
        "GEN 5",
        "GEN 5 ",
        "GEN 5 seed=1",
        "GENERATE 5 1",
        "gen 5 1",
        " GEN 5 1",
        "",
        " ",
        "PING 1",
        "STOP GEN",
    ],
)
def test_no_request(line):
    assert refusal(line).code == "BAD_LINE"


@pytest.mark.parametrize(
    "line",
    [
        b"\x00",
        b"GEN\t5 1",
        b"GEN 5 1\x7f",
        b"\xff\xfe",
        "GEN 5 ١".encode(),
        "GEN ５ 1".encode(),
        b"PING\r\r",
        b"PI\rNG",
        "GEN 5 1\u00a02".encode(),
    ],
)
def test_bytes_outside_printable_ascii(line):
    assert refusal(line).code == "BAD_LINE"


@pytest.mark.parametrize(
    "text, code",
    [
        ("-1", "OUT_OF_RANGE"),
        ("1.0", "BAD_VALUE"),
        ("+1", "BAD_VALUE"),
        ("x", "BAD_VALUE"),
        ("seed=1", "BAD_VALUE"),
        ("1_0", "BAD_VALUE"),
        ("65", "CONTEXT_FULL"),
        ("9" * 64, "CONTEXT_FULL"),
        ("9" * 65, "BAD_VALUE"),
        ("0" * 64 + "1", "BAD_VALUE"),
        ("-" + "9" * 64, "BAD_VALUE"),
    ],
)
def test_bad_max_new(text, code):
    error = refusal(f"GEN {text} 1,2")
    assert (error.code, "max_new" in error.text) == (code, True)


@pytest.mark.parametrize("key", NUMBERS, ids=lambda key: key.name)
def test_a_number_over_64_characters_is_refused_as_such(key):
    error = refusal(f"GEN 5 {key.name}={'1'.zfill(65)} 1")
    assert error.code == "BAD_VALUE" and error.text.endswith("a number has at most 64 characters")
    assert parse(f"GEN 5 {key.name}={'1'.zfill(64)} 1")


@pytest.mark.parametrize("line", [b"PING", b"x", b"gen ", b"GENERATE", b"", b"\xff"])
def test_only_a_gen_may_be_long(line):
    if line == b"PING":
        assert parse_line(line.ljust(BARE_MAX), LIMITS) == Ping()
    error = refusal(line.ljust(BARE_MAX + 1))
    assert (error.code, error.text) == ("BAD_LINE", "a line of 65537 bytes that is no GEN: 65536 are the most")


@pytest.mark.parametrize("max_new", [0, 1, 62])
def test_max_new_up_to_the_context(max_new):
    assert parse(f"GEN {max_new} 1,2").request.max_new == max_new


def test_over_the_context():
    error = refusal("GEN 63 1,2")
    assert (error.code, error.text) == ("CONTEXT_FULL", "prompt (2 ids) + max_new (63) is over the context of 64")


def test_a_million_ids_parse_quickly():
    line = b"GEN 5 " + b",".join(b"%d" % (i % 1000) for i in range(1_000_000))
    began = time.thread_time()
    command = parse_line(line, Limits(1000, 2_000_000))
    assert time.thread_time() - began < 0.5
    assert command.request.prompt[999_999] == 999


@pytest.mark.parametrize(
    "line",
    [
        b"GEN 5 " + b"1," * (LINE_MAX // 2), b" " * LINE_MAX, b"\xff" * LINE_MAX, b"GEN " + b"9" * LINE_MAX,
        b"GEN 5 seed=" + b"9" * LINE_MAX, b"GEN 5 logit_bias=" + b"1:1," * (LINE_MAX // 4), b"x" * LINE_MAX,
        b"GEN 5 " + b"9" * LINE_MAX, b"GEN 5 1" + b" " * LINE_MAX + b",", b"GEN 5 temperature=" + b"0" * LINE_MAX,
        b"GEN 5 " + b"a=1 " * (LINE_MAX // 4), b"GEN 5 1" + b" " * LINE_MAX + b"x", b"GEN 5 stop=" + b"," * LINE_MAX,
    ],
    ids=range(13),
)  # fmt: skip
def test_the_longest_faulty_lines_are_refused_quickly(line):
    began = time.thread_time()
    refusal(line)
    assert time.thread_time() - began < 0.5


def test_a_client_writes_what_the_engine_reads():
    line = gen_line(7, "temperature=0.5 seed=3", [1, 2, 3])
    assert line == b"GEN 7 temperature=0.5 seed=3 1,2,3\n"
    assert parse_line(line.removesuffix(b"\n"), LIMITS).request == Request(
        7, GenParams(temperature=0.5, seed=3), (1, 2, 3)
    )
    assert gen_line(7, "", [1]) == b"GEN 7 1\n"


def test_no_gpu_stack_is_needed():
    code = "import sys, strata_engine.protocol, strata_engine.replies; print(*{'numpy', 'numba'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=20)
    assert done.stdout == "\n"


def test_every_key_is_tested():
    assert {key.kind for key in KEYS} == {"float", "int", "flag", "ids", "bias"}
    assert set(KEY_BY_NAME) == {key.name for key in KEYS}


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("  PING", "must not begin with a space"),
        ("", "must not be empty"),
        ("gen 5 1", "requests are upper case, GEN"),
        ("Stop", "requests are upper case, STOP"),
        ("GEN 5 penalty_repeat=0 1", "penalty_repeat=0: must be over 0 and at most 1e+06"),
    ],
)
def test_a_refusal_says_how_to_write_it(line, words):
    assert words in refusal(line).text
