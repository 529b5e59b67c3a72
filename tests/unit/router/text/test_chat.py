from __future__ import annotations

import json
from pathlib import Path

import pytest

from core.clock import VirtualClock
from core.errors import ModelError, RequestError
from router.text.chat import ChatTemplate, open_template
from router.text.request import ChatPrompt

CLOCK = VirtualClock()
ECHO = "{% for m in messages %}[{{ m.role }}:{{ m.content }}]{% endfor %}"


def render(source: str, *messages: dict, **template_args: object) -> str:
    template = ChatTemplate(source, {"bos_token": "<s>"}, CLOCK, name="test")
    return template.render(ChatPrompt(messages=messages, template_args=template_args))


def user(content: object) -> dict:
    return {"role": "user", "content": content}


def test_the_template_of_a_model_folder():
    template = open_template(Path("models/tiny-moe"), CLOCK)
    assert template is not None
    assert template.render(ChatPrompt(messages=(user("hi"),))) == (
        "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    )


@pytest.mark.parametrize(
    "declared",
    [
        "{{ eos_token }}!",
        [
            {"name": "tool_use", "template": "no"},
            {"name": "default", "template": "{{ eos_token }}!"},
        ],
    ],
    ids=["string", "list"],
)
def test_the_template_of_the_tokenizer_config(tmp_path, declared):
    config = {"chat_template": declared, "eos_token": {"content": "</s>"}}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    template = open_template(tmp_path, CLOCK)
    assert template is not None
    assert template.render(ChatPrompt(messages=(user("hi"),))) == "</s>!"
    (tmp_path / "chat_template.jinja").write_text("the file goes first")
    template = open_template(tmp_path, CLOCK)
    assert template is not None
    assert template.render(ChatPrompt(messages=(user("hi"),))) == "the file goes first"


def test_a_folder_without_a_template(tmp_path):
    assert open_template(tmp_path, CLOCK) is None


@pytest.mark.parametrize("declared", [7, [], "{% for %}"])
def test_a_broken_template_names_its_file(tmp_path, declared):
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": declared}))
    with pytest.raises(ModelError, match="tokenizer_config"):
        open_template(tmp_path, CLOCK)


def test_text_parts_and_missing_content():
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    assert render(ECHO, user(parts)) == "[user:one\ntwo]"
    assert render(ECHO, {"role": "assistant", "content": None}) == "[assistant:]"


def test_developer_is_system_for_templates_that_do_not_know_it():
    message = {"role": "developer", "content": "x"}
    assert render(ECHO, message) == "[system:x]"
    assert render(ECHO + "{# developer #}", message) == "[developer:x]"


def test_what_templates_expect_of_the_environment():
    assert render("{{ {'a': '<b>é'} | tojson }}", user("")) == '{"a": "<b>é"}'
    assert render("{{ strftime_now('%Y') }}", user("")) in {"1969", "1970"}
    loop = "{% for i in range(9) %}{% if i == 2 %}{% break %}{% endif %}{{ i }}{% endfor %}"
    assert render(loop, user("")) == "01"
    assert render("{% generation %}{{ bos_token }}{% endgeneration %}", user("")) == "<s>"
    assert (
        render("{{ enable_thinking }}{{ add_generation_prompt }}", user(""), enable_thinking=1)
        == "1True"
    )


@pytest.mark.parametrize(
    ("messages", "param"),
    [
        ([], "messages"),
        ([{"role": "robot", "content": "x"}], "messages[0].role"),
        ([{"content": "x"}], "messages[0].role"),
        ([user("a"), user(None)], "messages[1].content"),
        ([user(3)], "messages[0].content"),
        ([user([{"type": "image_url", "image_url": {}}])], "messages[0].content[0]"),
        ([user([{"type": "text"}])], "messages[0].content[0]"),
        ([user(["x"])], "messages[0].content[0]"),
        ([{"role": "assistant", "tool_calls": [{}]}], "messages[0].tool_calls"),
    ],
)
def test_messages_that_cannot_work_are_named(messages, param):
    with pytest.raises(RequestError) as caught:
        render(ECHO, *messages)
    assert caught.value.param == param


@pytest.mark.parametrize(
    "source",
    [
        "{{ raise_exception('roles must alternate') }}",
        "{{ nothing.there }}",
        "{{ 1 + 'a' }}",
        "{{ ''.__class__.__mro__ }}",
        "{{ messages.append(1) }}",
        "{{ [][3].x }}",
        "{{ 1 / 0 }}",
    ],
)
def test_what_a_template_raises_is_the_callers_error(source):
    with pytest.raises(RequestError, match="chat template refuses"):
        render(source, user("x"))


def test_template_args_cannot_replace_the_messages():
    with pytest.raises(RequestError, match="must not set messages"):
        ChatTemplate(ECHO, {}, CLOCK, name="t").render(
            ChatPrompt(messages=(user("x"),), template_args={"messages": []})
        )
