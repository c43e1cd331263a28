"""The model's own chat template: messages to prompt text, in Jinja2's sandbox."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import lru_cache
from typing import Any, NoReturn

from jinja2 import Template, TemplateError, TemplateSyntaxError, nodes
from jinja2.ext import Extension, LoopControlExtension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from .errors import ApiError

Message = Mapping[str, Any]


class _Generation(Extension):
    """``{% generation %}`` marks what a trainer masks; for a prompt its content is simply there."""

    tags = {"generation"}

    def parse(self, parser: Parser) -> nodes.Node | list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _raise_exception(message: str) -> NoReturn:
    raise TemplateError(message)


def _tojson(value: Any, ensure_ascii: bool = False, indent: int | None = None, **options: Any) -> str:
    """Plain JSON: Jinja2's own filter escapes for HTML, which a prompt must not contain."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, **options)


def _strftime_now(form: str) -> str:
    return datetime.now().strftime(form)


@lru_cache(maxsize=8)
def _compiled(source: str) -> Template:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[LoopControlExtension, _Generation]
    )
    environment.filters["tojson"] = _tojson
    environment.globals.update(raise_exception=_raise_exception, strftime_now=_strftime_now)
    return environment.from_string(source)


def check_template(source: str) -> None:
    """Raise ValueError, saying why, for a template that does not compile."""
    if not source.strip():
        raise ValueError("it is empty")
    try:
        _compiled(source)
    except TemplateSyntaxError as error:
        raise ValueError(f"line {error.lineno}: {error.message}") from None
    except (TemplateError, RecursionError) as error:
        raise ValueError(f"{type(error).__name__}: {error}") from None


def render_chat(source: str | None, messages: Sequence[Message], bos_token: str, eos_token: str) -> str:
    """The prompt that asks for the assistant's next message.

    `source`: the template, as ``tokenizer.chat_template`` has it. Raises ApiError (400, param ``messages``) if
    there is none, if it is broken, or if it refuses these messages.
    """
    if not source:
        raise ApiError(
            "This model has no chat template; use /v1/completions.", param="messages", code="no_chat_template"
        )
    try:
        text = _compiled(source).render(
            messages=messages, add_generation_prompt=True, bos_token=bos_token, eos_token=eos_token, tools=None
        )
        text.encode()  # half a surrogate pair has no ids
    except Exception as error:  # a template is the model's code: anything may come out of it
        reason = f"{type(error).__name__}: {error}" if not isinstance(error, TemplateError) else str(error)
        message = f"The model's chat template cannot render these messages: {reason}"
        raise ApiError(message, param="messages", code="chat_template_failed") from None
    return text
