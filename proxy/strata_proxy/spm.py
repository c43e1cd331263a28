"""SentencePiece-style merging by score (``tokenizer.ggml.model = llama``).

The pair whose joined text has the best score is merged first, the leftmost of equals; what is no token in the end
becomes byte tokens. `tokenizers` cannot express it exactly: its BPE ranks pairs, so two ways to form the same text
never tie, and Unigram looks for the likeliest whole segmentation instead.
"""

from __future__ import annotations

import heapq
import re
from collections.abc import Mapping, Sequence
from functools import lru_cache

SPACE = "\u2581"  # stands for a space in the vocabulary
CACHED_WORD = 64  # characters: longer words are rare, and a cache of them would grow large
_WORDS = re.compile(f"{SPACE}*[^{SPACE}]+|{SPACE}+")


class ScoreMerger:
    """Text -> ids by merging the best-scored neighbours."""

    def __init__(self, ids: Mapping[str, int], scores: Sequence[float], byte_ids: Sequence[int]) -> None:
        """`ids`: token text -> id; `scores`: of each id; `byte_ids`: id of each of the 256 bytes."""
        self._ids, self._scores, self._byte_ids = ids, scores, byte_ids
        # Where no token has a space mark behind other text, no merge crosses a word's start, and words stand alone.
        self._by_word = not any(re.search(f"[^{SPACE}]{SPACE}", text) for text in ids)
        self._cached = lru_cache(maxsize=1 << 15)(self._merge)

    def encode(self, text: str) -> list[int]:
        """The ids of `text`, in which spaces are already written as `SPACE`."""
        words = _WORDS.findall(text) if self._by_word else [text]
        return [i for word in words for i in (self._cached(word) if len(word) <= CACHED_WORD else self._merge(word))]

    def _merge(self, word: str) -> tuple[int, ...]:
        parts: list[str | None] = list(word)  # None: merged into a part further left
        left, right = list(range(-1, len(parts) - 1)), list(range(1, len(parts) + 1))
        queue: list[tuple[float, int, int, str]] = []

        def offer(a: int, b: int) -> None:
            if a >= 0 and b < len(parts):
                joined = f"{parts[a]}{parts[b]}"
                if joined in self._ids:
                    heapq.heappush(queue, (-self._scores[self._ids[joined]], a, b, joined))

        for b in range(1, len(parts)):
            offer(b - 1, b)
        while queue:
            _, a, b, joined = heapq.heappop(queue)
            if parts[a] is None or parts[b] is None or f"{parts[a]}{parts[b]}" != joined:
                continue  # one of the two has been merged since
            parts[a], parts[b], right[a] = joined, None, right[b]
            if right[b] < len(parts):
                left[right[b]] = a
            offer(left[a], a)
            offer(a, right[a])
        return tuple(i for part in parts if part is not None for i in self._ids_of(part))

    def _ids_of(self, part: str) -> list[int]:
        found = self._ids.get(part)
        return [found] if found is not None else [self._byte_ids[byte] for byte in part.encode("utf-8")]
