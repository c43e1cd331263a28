"""How each kind of BPE vocabulary cuts text into words before the merges.

A kind is a list of regular expressions applied one after another: matches become words of their own, and so does
what lies between them. The kinds and their names are those of the GGUF key ``tokenizer.ggml.pre``.
"""

from __future__ import annotations

from dataclasses import dataclass

from tokenizers import Regex, pre_tokenizers

_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_CONTRACTION = r"(?:'[sS]|'[tT]|'[rR][eE]|'[vV][eE]|'[mM]|'[lL][lL]|'[dD])"
_TAIL = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_LLAMA3 = _CONTRACTION + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}" + _TAIL
_QWEN2 = _CONTRACTION + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}" + _TAIL
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"


def _cased(end: str, digits: str) -> str:
    """Words that break where lower case turns to upper case; `end` may follow, `digits` counts those of a number."""
    head, tail = r"[^\r\n\p{L}\p{N}]?", r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    return rf"{head}{_UPPER}*{_LOWER}+{end}|{head}{_UPPER}+{_LOWER}*{end}|\p{{N}}{digits}" + tail


@dataclass(frozen=True, slots=True)
class Kind:
    """One way to cut words."""

    patterns: tuple[str, ...]
    ignore_merges: bool = False  # a word that is a token as a whole is taken without merging
    add_bos: bool = False  # where the file does not say


_DEFAULT = Kind((r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", r"[0-9][0-9][0-9]"))
_PLAIN = Kind((_GPT2,))
_DIGITS = Kind((r"\p{N}", _GPT2))
_LLAMA = Kind((_LLAMA3,), ignore_merges=True, add_bos=True)
_THREES = Kind((_LLAMA3,))
_ONES = Kind((_QWEN2,))

KINDS: dict[str, Kind] = {
    "default": _DEFAULT,
    **dict.fromkeys(("gpt-2", "phi-2", "mpt", "olmo", "jais", "trillion", "exaone4", "gigachat", "mellum"), _PLAIN),
    **dict.fromkeys(("smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b"), _DIGITS),
    **dict.fromkeys(("llama3", "llama-v3", "llama-bpe", "falcon3", "falcon-h1", "pixtral", "lfm2"), _LLAMA),
    **dict.fromkeys(("dbrx", "smaug-bpe", "glm4", "chatglm-bpe"), _THREES),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen", "stablelm2", "megrez", "hunyuan", "grok-2", "solar-open"), _ONES),
    "falcon": Kind((r"[\p{P}\$\+<=>\^~\|`]+", _GPT2, r"[0-9][0-9][0-9]")),
    "deepseek-coder": Kind(
        (r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", "[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+", r"\p{N}")
    ),
    "tekken": Kind((_cased("", ""),), ignore_merges=True, add_bos=True),
    "gpt-4o": Kind((_cased(_CONTRACTION + "?", "{1,3}"),)),
}


def pre_tokenizer(kind: Kind) -> pre_tokenizers.PreTokenizer:
    """The `tokenizers` object that cuts as `kind` says and writes bytes as printable characters."""
    splits = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in kind.patterns]
    return pre_tokenizers.Sequence([*splits, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])


def byte_of_char() -> dict[str, int]:
    """Printable character -> the byte it stands for in a byte-level vocabulary (GPT-2's table)."""
    kept = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    moved = [byte for byte in range(256) if byte not in kept]
    return {chr(byte): byte for byte in kept} | {chr(256 + n): byte for n, byte in enumerate(moved)}
