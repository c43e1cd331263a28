"""From a checked request to the GEN lines that answer it: rendering, tokenizing, and the limits of the context."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from strata_engine.replies import Info

from .body import Ask, Prompt
from .errors import ApiError
from .template import render_chat
from .vocab import Vocab


@dataclass(frozen=True, slots=True)
class Job:
    """One choice's generation."""

    index: int
    prompt: Sequence[int]
    max_new: int
    keys: str
    stops: tuple[str, ...]
    silent: frozenset[int]  # tokens that may end the answer: they add no text
    logprobs: int | None


def plan_jobs(ask: Ask, info: Info, vocab: Vocab, template: str | None) -> list[Job]:
    """One job a choice, `n` for each prompt in turn. Slow for long prompts: run it off the event loop.

    Raises ApiError (400) for a prompt over the context and for ids outside the vocabulary.
    """
    check_ids([token for token, _ in ask.bias], "logit_bias", info.vocab)
    check_ids(ask.stop_ids, "stop_token_ids", info.vocab)
    ends = frozenset(ask.stop_ids) | frozenset(() if ask.ignore_eos else info.eos)
    jobs: list[Job] = []
    for prompt in ask.prompts:
        ids = _ids(ask, prompt, info, vocab, template)
        max_new = _max_new(ask, len(ids), info.context)
        jobs += [Job(len(jobs) + i, ids, max_new, ask.keys[i], ask.stops, ends, ask.logprobs) for i in range(ask.n)]
    return jobs


def _ids(ask: Ask, prompt: Prompt | list[dict[str, str]], info: Info, vocab: Vocab, template: str | None) -> list[int]:
    if ask.chat:
        messages: list[dict[str, str]] = prompt  # type: ignore[assignment]
        ids = vocab.encode_prompt(chat_text(messages, vocab, template))
    elif isinstance(prompt, str):
        ids = vocab.encode_prompt(prompt)
    else:
        ids = prompt  # type: ignore[assignment]
        check_ids(ids, "prompt", info.vocab)
    if not ids:
        raise ApiError("The prompt is empty; it needs at least one token.", param=ask.prompt_field)
    return ids


def chat_text(messages: list[dict[str, str]], vocab: Vocab, template: str | None) -> str:
    """The prompt text of `messages`; `template` stands in for the model's own. Raises ApiError (400)."""
    bos, eos = vocab.text_of(vocab.bos), vocab.text_of(vocab.eos)
    return render_chat(template or vocab.chat_template, messages, bos, eos)


def check_ids(ids: Sequence[int], param: str, vocab: int) -> None:
    """Raise ApiError (400) for an id outside the vocabulary."""
    outside = next((token for token in ids if token >= vocab), None)
    if outside is not None:
        raise ApiError(f"{param}: token id {outside} is outside the vocabulary 0..{vocab - 1}", param=param)


def _max_new(ask: Ask, prompt: int, context: int) -> int:
    if prompt >= context:
        message = f"The prompt has {prompt} tokens; the context holds {context}, with at least one to generate."
        raise ApiError(message, param=ask.prompt_field, code="context_length_exceeded")
    wanted = context - prompt if ask.max_tokens is None else ask.max_tokens
    if prompt + wanted > context:
        message = (
            f"The prompt's {prompt} tokens and {ask.max_tokens_field} = {wanted} are over the context of {context}."
        )
        raise ApiError(message, param=ask.max_tokens_field, code="context_length_exceeded")
    return wanted
