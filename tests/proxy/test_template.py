"""Chat templates: what the model's own may do, and what it may not."""

from __future__ import annotations

from datetime import datetime

import pytest

from strata_proxy.errors import ApiError
from strata_proxy.template import render_chat

MESSAGES = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Yo"}]


def rendered(source, messages=MESSAGES):
    return render_chat(source, messages, "<s>", "</s>")


def refused(source, messages=MESSAGES):
    with pytest.raises(ApiError) as caught:
        rendered(source, messages)
    assert caught.value.status == 400 and caught.value.param == "messages"
    return caught.value.message


def test_tokens_and_the_generation_prompt():
    assert rendered("{{ bos_token }}{{ eos_token }}{% if add_generation_prompt %}A{% endif %}") == "<s></s>A"


def test_blocks_are_trimmed():
    assert rendered("{% for m in messages %}\n    {% if true %}\n{{ m.content }}\n    {% endif %}\n{% endfor %}") == (
        "Hi\nYo\n"
    )


def test_loop_controls():
    assert rendered("{% for m in messages %}{{ m.role }}{% break %}{% endfor %}") == "user"


def test_tojson_is_plain_json():
    assert rendered("{{ {'a': '<é>'} | tojson }}") == '{"a": "<é>"}'


def test_strftime_now():
    assert rendered("{{ strftime_now('%Y') }}") == str(datetime.now().year)


def test_generation_blocks_are_transparent():
    assert rendered("{% generation %}x{% endgeneration %}y") == "xy"


def test_text_is_not_escaped():
    assert rendered("{{ messages[0].content }}", [{"role": "user", "content": "<&>'{{ 1 }}"}]) == "<&>'{{ 1 }}"


def test_the_templates_own_refusal_is_the_message():
    assert "only user" in refused("{{ raise_exception('only user messages') }}")


@pytest.mark.parametrize("source", [None, ""])
def test_missing_template(source):
    assert "no chat template" in refused(source)


@pytest.mark.parametrize(
    "source",
    ["{% for %}", "{{ nothing.at.all }}", "{{ 1 / 0 }}", "{% include 'x' %}", "{{ 1 + 'a' }}", "{{ '\\ud800' }}"],
)
def test_broken_template(source):
    refused(source)


@pytest.mark.parametrize(
    "source",
    [
        "{{ ''.__class__.__mro__ }}",
        "{{ ''['__class__'] }}{{ ''.__class__.__base__.__subclasses__() }}",
        "{{ raise_exception.__globals__ }}",
        "{{ cycler.__init__.__globals__.os.popen('id').read() }}",
        "{{ ''|attr('__class__')|attr('__mro__') }}",
        "{{ '{0.__class__.__mro__}'.format('') }}",
        "{{ messages.append(1) }}",
        "{{ messages[0].update(role='system') }}",
        "{% for i in range(1000000000) %}{% endfor %}",
    ],
)
def test_sandbox_holds(source):
    try:
        text = rendered(source)
    except ApiError as error:
        assert error.param == "messages"
    else:
        assert "class" not in text and "<function" not in text
    assert MESSAGES[0] == {"role": "user", "content": "Hi"} and len(MESSAGES) == 2
