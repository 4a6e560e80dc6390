"""Prompts that Hugging Face's renderer makes of a few templates: tests/data/chat_golden.json.

Needs: transformers. Usage: python tools/make_chat_golden.py
"""

import json
from pathlib import Path

from transformers.utils.chat_template_utils import render_jinja_template

DATA = Path(__file__).parent.parent / "tests" / "data"

TOOL = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Wetter, 天気 & <weather>",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}
CONVERSATIONS = {
    "one question": [{"role": "user", "content": "Hello"}],
    "white space": [
        {"role": "system", "content": " Be brief.\n"},
        {"role": "user", "content": "\n  two\n lines "},
        {"role": "assistant", "content": " ok ", "reasoning_content": "\nthink\n"},
        {"role": "user", "content": "and 'quotes' & <b>"},
    ],
    "tools": [
        {"role": "user", "content": "Weather in Zürich?"},
        {
            "role": "assistant",
            "content": "",
            "reasoning_content": "ask",
            "tool_calls": [
                {
                    "id": "1",
                    "type": "function",
                    "function": {"name": "get_weather", "arguments": {"city": "Zürich", "days": 2, "at": [1.5, None]}},
                }
            ],
        },
        {"role": "tool", "tool_call_id": "1", "content": "22 °C"},
        {"role": "tool", "tool_call_id": "2", "content": "dry"},
    ],
}
TEMPLATES = {
    "glm like": r"""[gMASK]<sop>
{%- for message in messages %}
  {%- if message.role == "assistant" %}<|assistant|>
<think>{{ (message.reasoning_content or "") | trim }}</think>
{{ message.content | trim }}
    {%- for call in message.tool_calls or [] %}
<tool_call>{{ call.function.name }}
      {%- for key, value in call.function.arguments.items() %}
<arg_key>{{ key }}</arg_key>
<arg_value>{{ value if value is string else value | tojson(ensure_ascii=False) }}</arg_value>
      {%- endfor %}
</tool_call>
    {%- endfor %}
  {%- else %}<|{{ message.role }}|>
{{ message.content }}
  {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}<|assistant|>{{ "\n<think></think>" if enable_thinking is false else "\n<think>" }}
{%- endif %}
""",
    "blocks on lines of their own": """{{ bos_token }}
{% if tools %}
tools: {{ tools | tojson }}
    {% for tool in tools %}
    {{ tool | tojson(indent=2) }}
    {% endfor %}
{% endif %}
{% set ns = namespace(last="") %}
{% macro show(message) %}
[{{ message.role ~ ":" ~ loop_number }}] {{ message["content"] }}
{% endmacro %}
{% for message in messages %}
    {% if message.role == "system" %}{% continue %}{% endif %}
    {% set loop_number = loop.index %}
    {{ show(message) }}
    {% set ns.last = message.role %}
    {% if loop.index > 2 %}
        {% break %}
    {% endif %}
{% endfor %}
{{ ns.last + "!" * 3 }}
""",
}


def main() -> None:
    cases = []
    for template_name, template in TEMPLATES.items():
        for name, messages in CONVERSATIONS.items():
            for options in ({}, {"enable_thinking": False}):
                tools = [TOOL] if name == "tools" else None
                rendered, _ = render_jinja_template(
                    [messages],
                    tools=tools,
                    chat_template=template,
                    add_generation_prompt=True,
                    bos_token="<s>",
                    **options,
                )
                cases.append({"template": template_name, "conversation": name, **options, "prompt": rendered[0]})
    golden = {"templates": TEMPLATES, "conversations": CONVERSATIONS, "tools": [TOOL], "cases": cases}
    (DATA / "chat_golden.json").write_text(json.dumps(golden, ensure_ascii=False, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
