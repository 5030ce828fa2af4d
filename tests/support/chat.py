"""Chat templates, and a model directory that has one."""

import shutil

TEMPLATE = (
    "{% for message in messages %}<{{ message['role'] }}>{{ message['content'] }}</{{ message['role'] }}>{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
NO_SYSTEM = "{% if messages[0]['role'] == 'system' %}{{ raise_exception('no system role') }}{% endif %}" + TEMPLATE
DROPS_SYSTEM = "{% set messages = messages[-1:] %}" + TEMPLATE
# what the sandbox forbids
CHANGES_ITS_INPUT = "{{ messages.append(1) }}" + TEMPLATE


def with_template(directory, target, template=TEMPLATE):
    """A copy of a model directory whose tokenizer has a chat template."""
    shutil.copytree(directory, target)
    (target / "chat_template.jinja").write_text(template)
    return target
