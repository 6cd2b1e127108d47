"""Chat templates in the manner of models in use, reduced to what conversations with calls and thoughts need."""

from __future__ import annotations

HERMES = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content or '' }}"
    "{% for call in message.tool_calls or [] %}<tool_call>{{ call.function | tojson }}</tool_call>{% endfor %}"
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
"""calls as JSON after the text"""

QWEN3 = (
    "{% set ns = namespace(last=-1) %}{% for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}"
    "{% endif %}{% endfor %}{% for m in messages %}{% set text = m.content %}{% set thought = '' %}"
    "{% if m.role == 'assistant' %}{% if m.reasoning_content %}{% set thought = m.reasoning_content %}"
    "{% elif '</think>' in text %}"
    "{% set thought = text.split('</think>')[0].rstrip('\n').split('<think>')[-1].lstrip('\n') %}"
    "{% set text = text.split('</think>')[-1].lstrip('\n') %}{% endif %}{% endif %}<|im_start|>{{ m.role }}\n"
    "{% if m.role == 'assistant' and loop.index0 > ns.last and (loop.last or thought) %}"
    "<think>\n{{ thought.strip('\n') }}\n</think>\n\n{% endif %}{{ text }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
"""earlier thoughts are dropped, and the last answer has an empty one at least"""

LLAMA = (
    "{% for m in messages %}<|start|>{{ m.role }}<|end|>\n\n{% if m.tool_calls %}"
    "{% set call = m.tool_calls[0].function %}"
    '{"name": "{{ call.name }}", "parameters": {{ call.arguments | tojson }}}<|eom_id|>'
    "{% else %}{{ m.content | trim }}<|eot_id|>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant<|end|>\n\n{% endif %}"
)
"""calls end with another token than answers"""

GPT_OSS = (
    "{% set ns = namespace(name=none) %}{% for m in messages %}{% if m.role == 'tool' %}{% if ns.name is none %}"
    "{{ raise_exception('a tool that nobody called') }}{% endif %}"
    "<|start|>functions.{{ ns.name }} to=assistant<|message|>{{ m.content | tojson }}<|end|>"
    "{% elif m.tool_calls %}{% set ns.name = m.tool_calls[0].function.name %}<|start|>assistant to=functions."
    "{{ ns.name }}<|channel|>json<|message|>{{ m.tool_calls[0].function.arguments | tojson }}<|call|>"
    "{% elif m.role == 'assistant' %}{% set ns.name = none %}<|start|>assistant<|channel|>final<|message|>"
    "{{ m.content }}{{ '<|return|>' if loop.last and not add_generation_prompt else '<|end|>' }}"
    "{% else %}<|start|>{{ m.role }}<|message|>{{ m.content }}<|end|>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant{% endif %}"
)
"""results of tools need the call before them, and answers end otherwise in history"""

GEMMA = (
    "{% for m in messages %}{% set after_tool = loop.previtem is defined and loop.previtem.role == 'tool' %}"
    "{% if m.role == 'tool' %}response:{{ m.content }}<|tool_response|>{% else %}{% if not after_tool %}<|<turn|>"
    "{{ 'model' if m.role == 'assistant' else m.role }}\n{% endif %}{% if m.tool_calls %}"
    "{% for call in m.tool_calls %}<|tool_call|>{{ call.function.name }}("
    "{% for key, value in call.function.arguments | dictsort %}{{ key }}:{{ value }}{% endfor %}){% endfor %}"
    "<|tool_response|>{% else %}{{ m.content | trim }}<turn|>\n{% endif %}{% endif %}{% endfor %}"
    "{% if add_generation_prompt and messages[-1].role != 'tool' %}<|<turn|>model\n{% endif %}"
)
"""results of tools stand inside the model's turn, which goes on after them"""
