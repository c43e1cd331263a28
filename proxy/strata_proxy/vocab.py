"""Text to token ids and back, from the vocabulary inside the model file."""

from __future__ import annotations

import codecs
import re
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, models

from .metadata import ModelFileError, read_metadata
from .pretokenizers import KINDS, Kind, byte_of_char, pre_tokenizer
from .spm import SPACE, ScoreMerger

UNKNOWN, CONTROL, USER_DEFINED, BYTE = 2, 3, 4, 6  # values of tokenizer.ggml.token_type; 1 is a normal token
BYTE_OF_CHAR = byte_of_char()
BATCH = 1024  # texts between special tokens that are encoded in one call


class Vocab:
    """The vocabulary of one model file. Immutable; safe to use from several threads."""

    def __init__(self, metadata: Mapping[str, Any]) -> None:
        """`metadata`: the file's keys. Raises ModelFileError for a vocabulary that cannot be served exactly."""
        get = partial(_get, metadata)
        self.tokens: list[str] = [text or f"[EMPTY_{i}]" for i, text in enumerate(get("tokens", list))]
        self.model: str = get("model", str)
        types = metadata.get("tokenizer.ggml.token_type") or [1] * len(self.tokens)
        self._types: list[int] = types
        self._ids = {text: i for i, text in enumerate(self.tokens)}
        if len(self._ids) != len(self.tokens) or len(types) < len(self.tokens):
            raise ModelFileError("the vocabulary is damaged: tokens are repeated or lack a type")
        self.bos = self._named(metadata, "bos_token_id", 1)
        self.eos = self._named(metadata, "eos_token_id", 2)
        self.chat_template: str | None = metadata.get("tokenizer.chat_template")
        self._plain_specials = self._finder(USER_DEFINED)
        self._all_specials = self._finder(USER_DEFINED, CONTROL, UNKNOWN)
        if self.model == "gpt2":
            self._load_bpe(metadata, get)
        elif self.model == "llama":
            self._load_spm(metadata, get)
        else:
            raise ModelFileError(f"tokenizer.ggml.model {self.model!r} is not supported (gpt2 and llama are)")
        self.add_bos: bool = bool(metadata.get("tokenizer.ggml.add_bos_token", self._add_bos_default))
        self.add_bos = self.add_bos and self.bos is not None

    @classmethod
    def load(cls, path: Path) -> Vocab:
        """The vocabulary of the GGUF file at `path`. Raises ModelFileError."""
        try:
            return cls(read_metadata(path))
        except (TypeError, ValueError, AttributeError, IndexError) as error:  # keys of another type than they should be
            raise ModelFileError(f"the vocabulary of {path} is damaged: {error}") from None

    def __len__(self) -> int:
        return len(self.tokens)

    def encode(self, text: str, special: bool) -> list[int]:
        """The ids of `text`; `special`: names of control tokens in it stand for those tokens. No bos is added."""
        finder = self._all_specials if special else self._plain_specials
        parts = finder.split(text) if finder else [text]  # text, special, text, special, ..., text
        words = iter(self._encode_texts(parts))
        ids: list[int] = []
        for n, part in enumerate(parts):
            ids.extend([self._ids[part]] if n % 2 else next(words))
        return ids

    def encode_prompt(self, text: str) -> list[int]:
        """The ids of a whole prompt: special tokens count, and bos comes first if the model wants it, once."""
        ids = self.encode(text, special=True)
        return [self.bos, *ids] if self.add_bos and self.bos is not None and ids[:1] != [self.bos] else ids

    def piece(self, token: int, special: bool = False) -> bytes:
        """The bytes that `token` adds to the text; control tokens add nothing unless `special`."""
        if token >= len(self.tokens):
            return b""  # the head may be wider than the vocabulary
        kind, text = self._types[token], self.tokens[token]
        if kind in (CONTROL, UNKNOWN):
            return text.encode() if special else b""
        if kind == USER_DEFINED:
            return text.encode()
        if self.model == "gpt2":
            return b"".join(bytes([BYTE_OF_CHAR[c]]) if c in BYTE_OF_CHAR else c.encode() for c in text)
        return bytes([int(text[3:5], 16)]) if kind == BYTE else text.replace(SPACE, " ").encode()

    def text_of(self, token: int | None) -> str:
        """The vocabulary's own text for `token`, as chat templates use it; empty for None."""
        return "" if token is None else self.tokens[token]

    def _named(self, metadata: Mapping[str, Any], name: str, usual: int) -> int | None:
        """The id of a special token; `usual` is that of score vocabularies whose file does not say."""
        token = metadata.get(f"tokenizer.ggml.{name}", usual if self.model == "llama" else None)
        if token is not None and not (0 <= token < len(self.tokens)):
            raise ModelFileError(f"the vocabulary is damaged: tokenizer.ggml.{name} is {token}")
        return token

    def _finder(self, *types: int) -> re.Pattern[str] | None:
        names = {text for text, kind in zip(self.tokens, self._types, strict=False) if kind in types}
        longest_first = sorted(names, key=lambda name: (-len(name), name))
        return re.compile(f"({'|'.join(map(re.escape, longest_first))})") if names else None

    def _load_bpe(self, metadata: Mapping[str, Any], get: Any) -> None:
        name = metadata.get("tokenizer.ggml.pre", "default")
        kind: Kind | None = KINDS.get(name)
        if kind is None:
            raise ModelFileError(f"tokenizer.ggml.pre {name!r} is not supported; known: {', '.join(sorted(KINDS))}")
        pairs = [_pair(merge) for merge in get("merges", list)]
        try:
            bpe = models.BPE(vocab=self._ids, merges=pairs, ignore_merges=kind.ignore_merges)
        except Exception as error:  # tokenizers raises bare Exception for a merge outside the vocabulary
            raise ModelFileError(f"the vocabulary is damaged: {error}") from None
        self._bpe = Tokenizer(bpe)
        self._bpe.pre_tokenizer = pre_tokenizer(kind)
        self._encode_texts, self._add_bos_default = self._encode_bpe, kind.add_bos

    def _encode_bpe(self, parts: list[str]) -> list[list[int]]:
        # The batch call lets other threads run meanwhile, which the single one does not; but not while it makes its
        # results, so a batch is small.
        texts, encode = parts[::2], partial(self._bpe.encode_batch_fast, add_special_tokens=False)
        batches = (encode(texts[at : at + BATCH]) for at in range(0, len(texts), BATCH))
        return [encoding.ids for batch in batches for encoding in batch]

    def _load_spm(self, metadata: Mapping[str, Any], get: Any) -> None:
        scores = get("scores", list)
        byte_ids = [
            self._ids.get(f"<0x{byte:02X}>", metadata.get("tokenizer.ggml.unknown_token_id", 0)) for byte in range(256)
        ]
        if len(scores) < len(self.tokens):
            raise ModelFileError("the vocabulary is damaged: tokens lack a score")
        self._merger = ScoreMerger(self._ids, scores, byte_ids)
        self._space_prefix = bool(metadata.get("tokenizer.ggml.add_space_prefix", True))
        self._encode_texts, self._add_bos_default = self._encode_spm, True

    def _encode_spm(self, parts: list[str]) -> list[list[int]]:
        prefix = " " if self._space_prefix else ""
        return [self._merger.encode((prefix + part).replace(" ", SPACE)) if part else [] for part in parts[::2]]


class TextStream:
    """Token bytes to text; an incomplete character waits for its remaining bytes."""

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, piece: bytes) -> str:
        """The text that `piece` completes; bytes that are no UTF-8 become U+FFFD."""
        return self._decoder.decode(piece)

    def flush(self) -> str:
        """U+FFFD if the text ended inside a character, else nothing."""
        return self._decoder.decode(b"", final=True)


def _get(metadata: Mapping[str, Any], name: str, kind: type) -> Any:
    value = metadata.get(f"tokenizer.ggml.{name}")
    if not isinstance(value, kind):
        raise ModelFileError(f"the model file has no usable tokenizer.ggml.{name}")
    return value


def _pair(merge: str) -> tuple[str, str]:
    at = merge.find(" ", 1)  # a piece may itself begin with a space
    if at < 0:
        raise ModelFileError(f"the vocabulary is damaged: tokenizer.ggml.merges holds {merge!r}")
    return merge[:at], merge[at + 1 :]
