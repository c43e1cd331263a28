"""The one table of GEN keys: names, types, ranges, defaults.

Parsing, error messages, protocol.md's key table, the proxy's field checks and the tests are all derived from
`KEYS`. This module imports neither numba nor numpy, so the proxy can use it without a GPU stack.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from typing import Any, Literal

SEED_MAX = 2**64 - 1
TOP_K_MAX = 64
PENALTY_LAST_N_MAX = 4096
LOGPROBS_MAX = 20
DRAFT_MAX = 7

Kind = Literal["float", "int", "flag", "ids", "bias"]


@dataclass(frozen=True, slots=True)
class Key:
    """One GEN key. `low`/`high` bound numbers inclusively (`low_open`: low itself is refused)."""

    name: str
    kind: Kind
    low: float
    high: float
    default: Any  # the value that an absent key stands for
    help: str
    low_open: bool = False

    def in_range(self, value: float) -> bool:
        """True if `value` may be used; NaN and infinities never are."""
        above = self.low < value if self.low_open else self.low <= value
        return above and value <= self.high and math.isfinite(value)

    @property
    def range_text(self) -> str:
        """The range as a person reads it, e.g. ``0..1`` or ``over 0 and at most 1e+06``."""
        if self.low_open:
            return f"over {_number(self.low)} and at most {_number(self.high)}"
        return f"{_number(self.low)}..{_number(self.high)}"

    @property
    def rule(self) -> str:
        """The range behind "must be", e.g. ``in 0..1`` or ``over 0 and at most 1e+06``."""
        return self.range_text if self.low_open else f"in {self.range_text}"


def _number(value: float) -> str:
    if value == SEED_MAX:
        return "2^64-1"
    return f"{value:g}" if isinstance(value, float) else str(value)


KEYS: tuple[Key, ...] = (
    Key("temperature", "float", 0.0, 1e6, 0.0, "softmax temperature; 0 is greedy"),
    Key("top_p", "float", 0.0, 1.0, 1.0, "nucleus: cut after the running probability reaches it; 1 is off"),
    Key("top_k", "int", 1, TOP_K_MAX, 20, "how many of the largest logits are kept on a sampled request"),
    Key("min_p", "float", 0.0, 1.0, 0.0, "drop tokens less likely than min_p times the likeliest; 0 is off"),
    Key("penalty_repeat", "float", 0.0, 1e6, 1.0, "divide (multiply if negative) seen tokens' logits; 1 is off", True),
    Key("penalty_freq", "float", -2.0, 2.0, 0.0, "subtract this times the token's count; 0 is off"),
    Key("penalty_present", "float", -2.0, 2.0, 0.0, "subtract this once from every seen token; 0 is off"),
    Key("penalty_last_n", "int", 0, PENALTY_LAST_N_MAX, 64, "how many of the last tokens the penalties look at"),
    Key("seed", "int", 0, SEED_MAX, None, "key of the random draws; absent: fresh entropy, reported in DONE"),
    Key("logprobs", "int", 0, LOGPROBS_MAX, None, "report log-probabilities, with this many alternatives"),
    Key("logit_bias", "bias", -1e6, 1e6, (), "id:bias,... added to the raw logits"),
    Key("stop", "ids", 0, math.inf, (), "further end-of-sequence ids"),
    Key("ignore_eos", "flag", 0, 1, False, "1: the model's own end ids do not end the answer"),
    Key("draft", "int", 0, DRAFT_MAX, None, "most drafted tokens a window, 0 is off; absent: the engine's --draft"),
)
KEY_BY_NAME: dict[str, Key] = {key.name: key for key in KEYS}


@dataclass(frozen=True, slots=True)
class GenParams:
    """The values of one GEN's keys; the defaults are those of `KEYS`."""

    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 20
    min_p: float = 0.0
    penalty_repeat: float = 1.0
    penalty_freq: float = 0.0
    penalty_present: float = 0.0
    penalty_last_n: int = 64
    seed: int | None = None
    logprobs: int | None = None
    logit_bias: tuple[tuple[int, float], ...] = ()
    stop: tuple[int, ...] = ()
    ignore_eos: bool = False
    draft: int | None = None

    @property
    def sampled(self) -> bool:
        """True if tokens are drawn, False if they are the arg-max."""
        return self.temperature > 0.0

    @property
    def penalised(self) -> bool:
        """True if any penalty can change a logit."""
        on = self.penalty_repeat != 1.0 or self.penalty_freq != 0.0 or self.penalty_present != 0.0
        return on and self.penalty_last_n > 0


assert tuple(f.name for f in fields(GenParams)) == tuple(KEY_BY_NAME), "GenParams and KEYS name the same keys"
