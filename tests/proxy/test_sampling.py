"""Every row of the table that turns body fields into the engine's keys."""

from __future__ import annotations

import json
import math

import pytest

from strata_engine.params import KEY_BY_NAME
from strata_proxy.errors import ApiError
from strata_proxy.sampling import FIELDS, check_defaults, number_text, sampling_keys

FORWARDED = [
    ({"temperature": 0.7}, "temperature=0.7"),
    ({"temperature": 1}, "temperature=1"),
    ({"temperature": 1.0}, "temperature=1"),
    ({"temperature": 1e-9}, "temperature=1e-09"),
    ({"temperature": 0.1 + 0.2}, "temperature=0.30000000000000004"),
    ({"top_p": 0.95}, "top_p=0.95"),
    ({"top_p": 0}, "top_p=0"),
    ({"top_k": 1}, "top_k=1"),
    ({"top_k": 64}, "top_k=64"),
    ({"top_k": 20.0}, "top_k=20"),
    ({"min_p": 0.05}, "min_p=0.05"),
    ({"min_p": 1}, "min_p=1"),
    ({"repetition_penalty": 1.1}, "penalty_repeat=1.1 penalty_last_n=64"),
    ({"repetition_penalty": 0.5}, "penalty_repeat=0.5 penalty_last_n=64"),
    ({"frequency_penalty": -2}, "penalty_freq=-2 penalty_last_n=64"),
    ({"presence_penalty": 2.0}, "penalty_present=2 penalty_last_n=64"),
    ({"presence_penalty": 0.5, "penalty_last_n": 128}, "penalty_present=0.5 penalty_last_n=128"),
    ({"presence_penalty": 0.5, "penalty_last_n": 4096.0}, "penalty_present=0.5 penalty_last_n=4096"),
    ({"seed": 0}, "seed=0"),
    ({"seed": 7.0}, "seed=7"),
    ({"seed": 2**64 - 1}, "seed=18446744073709551615"),
]
NEUTRAL = [
    {},
    *({field.name: None} for field in FIELDS),
    {"temperature": 0},
    {"temperature": 0.0},
    {"temperature": -0.0},
    {"top_p": 1},
    {"top_p": 1.0},
    {"top_k": 0},
    {"top_k": -1},
    {"top_k": 65},
    {"top_k": 10**30},
    {"top_k": -5.0},
    {"min_p": 0},
    {"repetition_penalty": 1},
    {"repetition_penalty": 1.0},
    {"frequency_penalty": 0, "presence_penalty": 0.0},
    {"penalty_last_n": 64},
    {"penalty_last_n": 0},
    {"presence_penalty": 1, "repetition_penalty": 2, "penalty_last_n": 0},
    {"seed": -1},
    {"seed": -(2**70)},
]
REFUSED = [
    ("temperature", -0.1),
    ("temperature", 1e7),
    ("temperature", 10**400),
    ("top_p", -0.01),
    ("top_p", 1.01),
    ("top_k", 1.5),
    ("min_p", -1),
    ("min_p", 2),
    ("repetition_penalty", 0),
    ("repetition_penalty", -1),
    ("frequency_penalty", 2.1),
    ("presence_penalty", -2.1),
    ("penalty_last_n", -1),
    ("penalty_last_n", 4097),
    ("penalty_last_n", 1.5),
    ("seed", 1.5),
    ("seed", 2**64),
]
WRONG_TYPES = ["1", "", True, False, [], [1], {}, math.nan, math.inf, -math.inf]


@pytest.mark.parametrize(("body", "keys"), FORWARDED)
def test_forwarded(body, keys):
    assert sampling_keys(body, {}) == keys


@pytest.mark.parametrize("body", NEUTRAL)
def test_neutral_values_are_dropped(body):
    assert sampling_keys(body, {}) == ""


@pytest.mark.parametrize(("name", "value"), REFUSED)
def test_refused_with_the_field_named(name, value):
    with pytest.raises(ApiError) as caught:
        sampling_keys({name: value}, {})
    assert caught.value.status == 400 and caught.value.param == name and name in caught.value.message


@pytest.mark.parametrize("value", WRONG_TYPES, ids=repr)
@pytest.mark.parametrize("name", [field.name for field in FIELDS])
def test_wrong_types_are_refused_and_the_error_is_json(name, value):
    with pytest.raises(ApiError) as caught:
        sampling_keys({name: value}, {})
    assert caught.value.param == name
    json.loads(json.dumps(caught.value.body(), allow_nan=False))


def test_keys_stand_in_one_order():
    body = {"seed": 1, "presence_penalty": 1, "frequency_penalty": 1, "repetition_penalty": 2}
    body |= {"min_p": 0.1, "top_k": 5, "top_p": 0.5, "temperature": 1}
    assert sampling_keys(body, {}) == (
        "temperature=1 top_p=0.5 top_k=5 min_p=0.1 penalty_repeat=2 penalty_freq=1 penalty_present=1"
        " penalty_last_n=64 seed=1"
    )


def test_defaults_stand_in_for_absent_and_null():
    defaults = {"temperature": 0.7, "top_p": 0.9}
    assert sampling_keys({"top_p": None}, defaults) == "temperature=0.7 top_p=0.9"


def test_request_wins_over_defaults_with_neutral_values_too():
    defaults = {"temperature": 0.7, "top_k": 40, "presence_penalty": 1, "seed": 3}
    assert sampling_keys({"temperature": 0, "top_k": 0, "presence_penalty": 0, "seed": -1}, defaults) == ""


def test_default_window_applies_to_a_penalty_of_the_request():
    assert sampling_keys({"presence_penalty": 1}, {"penalty_last_n": 256}) == "penalty_present=1 penalty_last_n=256"


@pytest.mark.parametrize("value", [0.1, 1 / 3, 1e-300, 123456.789, 2.5e15, 1e16, -2.0, 5])
def test_numbers_read_back_equal(value):
    assert float(number_text(value)) == value


def test_every_sampling_key_of_the_engine_has_a_field():
    others = {"logprobs", "logit_bias", "stop", "ignore_eos", "draft"}
    assert {field.key for field in FIELDS} == set(KEY_BY_NAME) - others


@pytest.mark.parametrize(
    ("defaults", "words"),
    [
        ({"temprature": 0.7}, ["temprature", "0.7"]),
        ({"temperature": "hot"}, ["temperature", "hot"]),
        ({"temperature": True}, ["temperature", "true"]),
        ({"top_k": 0}, ["top_k", "0"]),
        ({"top_k": 65}, ["top_k", "65"]),
        ({"top_p": 1.5}, ["top_p", "1.5"]),
        ({"min_p": math.nan}, ["min_p", "NaN"]),
        ({"repetition_penalty": 0}, ["repetition_penalty", "0"]),
        ({"penalty_last_n": 5000}, ["penalty_last_n", "5000"]),
        ({"seed": 1.5}, ["seed", "1.5"]),
        ({"seed": -1}, ["seed", "-1", "0..2^64-1"]),
        ({"seed": 2**64}, ["seed", "18446744073709551616", "0..2^64-1"]),
    ],
)
def test_defaults_that_cannot_be_honoured_are_refused(defaults, words):
    with pytest.raises(ApiError) as caught:
        check_defaults(defaults)
    assert all(word in caught.value.message for word in words)


def test_good_defaults_pass():
    check_defaults({"temperature": 0, "top_p": 1, "top_k": 64, "min_p": 0.05, "seed": None})
