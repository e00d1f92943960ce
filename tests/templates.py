"""Chat templates in the shapes of the field, written from each format's description."""

# ruff: noqa: E501  lines as the formats have them

from __future__ import annotations

_TURNS = "{% for m in messages %}"
_PROMPT = "{% if add_generation_prompt %}"
_SYSTEM_FIRST = (
    "{% if messages[0]['role'] == 'system' %}{% set system = messages[0]['content'] %}"
    "{% set messages = messages[1:] %}{% else %}{% set system = false %}{% endif %}"
)
_ALTERNATE = (
    "{% if (m['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('roles must alternate user/assistant') }}{% endif %}"
)

TEMPLATES = {
    "chatml": _TURNS
    + "{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>' + '\n' }}{% endfor %}"
    + _PROMPT
    + "{{ '<|im_start|>assistant\n' }}{% endif %}",
    "chatml_blocks": """{% for message in messages %}
    {%- if loop.first and messages[0].role != 'system' %}
<|im_start|>system
You are helpful.<|im_end|>
    {% endif %}
<|im_start|>{{ message.role }}
{% generation %}{{ message.content | trim }}{% endgeneration %}<|im_end|>
{% endfor %}
{% if add_generation_prompt %}
<|im_start|>assistant
{% endif %}
""",
    "llama2": _SYSTEM_FIRST + _TURNS + _ALTERNATE + "{% if loop.index0 == 0 and system != false %}"
    "{% set content = '<<SYS>>\\n' + system + '\\n<</SYS>>\\n\\n' + m['content'] %}"
    "{% else %}{% set content = m['content'] %}{% endif %}"
    "{% if m['role'] == 'user' %}{{ bos_token + '[INST] ' + content.strip() + ' [/INST]' }}"
    "{% else %}{{ ' ' + content.strip() + ' ' + eos_token }}{% endif %}{% endfor %}",
    "llama3": "{{- bos_token }}"
    + _TURNS
    + "{%- set content = '<|start_header_id|>' + m['role'] + '<|end_header_id|>\n\n'"
    " + m['content'] | trim + '<|eot_id|>' %}{{ content }}{% endfor %}"
    + _PROMPT
    + "{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}",
    "llama3_dated": """{{- bos_token }}
{%- if not date_string is defined %}{%- set date_string = strftime_now("%d %b %Y") %}{%- endif %}
{%- if messages[0]['role'] == 'system' %}
    {%- set system_message = messages[0]['content'] | trim %}{%- set messages = messages[1:] %}
{%- else %}{%- set system_message = "" %}{%- endif %}
{{- "<|start_header_id|>system<|end_header_id|>\\n\\n" }}
{{- "Today Date: " + date_string + "\\n\\n" + system_message + "<|eot_id|>" }}
{%- for message in messages %}
    {{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n' + message['content'] | trim + '<|eot_id|>' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{%- endif %}""",
    "mistral_v1": "{{ bos_token }}"
    + _TURNS
    + "{% if m['role'] == 'user' %}{{ '[INST] ' + m['content'] + ' [/INST]' }}"
    "{% elif m['role'] == 'assistant' %}{{ m['content'] + eos_token + ' ' }}"
    "{% else %}{{ '[INST] ' ~ m['content'] ~ ' [/INST]' }}{% endif %}{% endfor %}",
    "mistral_v3": """{%- if messages[0]["role"] == "system" %}{%- set system_message = messages[0]["content"] %}
{%- set loop_messages = messages[1:] %}{%- else %}{%- set loop_messages = messages %}{%- endif %}
{{- bos_token }}
{%- set ns = namespace(n=0) %}
{%- for message in loop_messages %}
    {%- if message.role == "user" %}{%- set ns.n = ns.n + 1 %}
        {%- if loop.last and system_message is defined %}
            {{- "[INST] " + system_message + "\\n\\n" + message["content"] + "[/INST]" }}
        {%- else %}{{- "[INST] " + message["content"] + "[/INST]" }}{%- endif %}
    {%- else %}{{- " " + message["content"] | trim + eos_token }}{%- endif %}
{%- endfor %}""",
    "mistral_v7": """{{- bos_token }}{%- for m in messages %}
{%- if m.role == 'user' %}[INST]{{ m.content }}[/INST]
{%- elif m.role == 'system' %}{{ '[SYSTEM_PROMPT]' ~ m.content ~ '[/SYSTEM_PROMPT]' }}
{%- else %}{{ m.content ~ eos_token }}{% endif %}{% endfor %}""",
    "gemma": "{{ bos_token }}"
    + _SYSTEM_FIRST
    + _TURNS
    + "{% if m['role'] == 'assistant' %}{% set role = 'model' %}"
    "{% else %}{% set role = m['role'] %}{% endif %}"
    "{{ '<start_of_turn>' + role + '\n' + ((system ~ '\n\n') if loop.first and system else '')"
    " + m['content'] | trim + '<end_of_turn>\n' }}{% endfor %}"
    + _PROMPT
    + "{{'<start_of_turn>model\n'}}{% endif %}",
    "phi3": _TURNS
    + "{{'<|' + m['role'] + '|>' + '\n' + m['content'] + '<|end|>' + '\n'}}{% endfor %}"
    + _PROMPT
    + "{{ '<|assistant|>\n' }}{% else %}{{ eos_token }}{% endif %}",
    "zephyr": "{% for m in messages %}\n{% if m['role'] == 'user' %}\n{{ '<|user|>\n' + m['content'] + eos_token }}\n"
    "{% elif m['role'] == 'system' %}\n{{ '<|system|>\n' + m['content'] + eos_token }}\n"
    "{% elif m['role'] == 'assistant' %}\n{{ '<|assistant|>\n' + m['content'] + eos_token }}\n{% endif %}\n"
    "{% if loop.last and add_generation_prompt %}\n{{ '<|assistant|>' }}\n{% endif %}\n{% endfor %}",
    "vicuna": _SYSTEM_FIRST
    + "{% if system %}{{ system }}{% else %}{{ 'A chat between a user and an assistant.' }}{% endif %}"
    + _TURNS
    + "{{ ' USER: ' if m['role'] == 'user' else ' ASSISTANT: ' }}{{ m['content'] }}"
    "{% if m['role'] == 'assistant' %}{{ eos_token }}{% endif %}{% endfor %}"
    + _PROMPT
    + "{{ ' ASSISTANT:' }}{% endif %}",
    "falcon": _TURNS + "{% if not loop.first %}{{ '\n\n' }}{% endif %}{{ m['role'].capitalize() + ': ' }}"
    "{{ m['content'].replace('\r\n', '\n').replace('\n\n', '\n') }}{% endfor %}"
    + _PROMPT
    + "{{ '\n\nAssistant:' }}{% endif %}",
    "deepseek": """{% if not add_generation_prompt is defined %}{% set add_generation_prompt = false %}{% endif %}
{%- set ns = namespace(system='') %}
{%- for m in messages %}{%- if m['role'] == 'system' %}{%- set ns.system = m['content'] %}{%- endif %}{%- endfor %}
{{- bos_token }}{{ ns.system }}
{%- for m in messages %}
{%- if m['role'] == 'user' %}{{ '<｜User｜>' + m['content'] }}{%- endif %}
{%- if m['role'] == 'assistant' and m['content'] is not none %}
{%- set content = m['content'] %}
{%- if '</think>' in content %}{%- set content = content.split('</think>')[-1] %}{%- endif %}
{{- '<｜Assistant｜>' + content + '<｜end▁of▁sentence｜>' }}{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<｜Assistant｜><think>\\n' }}{% endif %}""",
    "qwen3": """{%- set ns = namespace(last=messages|length - 1, searching=true) %}
{%- for message in messages[::-1] %}
    {%- set index = (messages|length - 1) - loop.index0 %}
    {%- if ns.searching and message.role == "user" and message.content is string %}
        {%- set ns.searching = false %}{%- set ns.last = index %}
    {%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- if message.role == "assistant" %}
        {%- set content = message.content %}
        {%- set reasoning = '' %}
        {%- if message.reasoning_content is string %}{%- set reasoning = message.reasoning_content %}
        {%- elif '</think>' in content %}
            {%- set reasoning = content.split('</think>')[0].rstrip('\\n').split('<think>')[-1].lstrip('\\n') %}
            {%- set content = content.split('</think>')[-1].lstrip('\\n') %}
        {%- endif %}
        {%- if loop.index0 > ns.last and (loop.last or reasoning) %}
            {{- '<|im_start|>' + message.role + '\\n<think>\\n' + reasoning.strip('\\n') + '\\n</think>\\n\\n' + content.lstrip('\\n') }}
        {%- else %}{{- '<|im_start|>' + message.role + '\\n' + content }}{%- endif %}
        {{- '<|im_end|>\\n' }}
    {%- elif message.role == "tool" %}
        {{- '<|im_start|>user\\n<tool_response>\\n' ~ message.content ~ '\\n</tool_response><|im_end|>\\n' }}
    {%- else %}{{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>' + '\\n' }}{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}{{- '<think>\\n\\n</think>\\n\\n' }}{%- endif %}
{%- endif %}""",
    "granite3": """{%- if messages[0]['role'] == 'system' %}{%- set system_message = messages[0]['content'] %}
{%- set loop_messages = messages[1:] %}
{%- else %}{%- set system_message = "Knowledge Cutoff Date: April 2024.\nToday's Date: " + strftime_now('%B %d, %Y') + "." %}
{%- if tools and documents %}{%- set system_message = system_message + " You have tools and documents." %}
{%- elif thinking %}{%- set system_message = system_message + " Think first." %}{%- endif %}
{%- set loop_messages = messages %}{%- endif %}
{{- '<|start_of_role|>system<|end_of_role|>' + system_message + '<|end_of_text|>\n' }}
{%- for message in loop_messages %}
    {{- '<|start_of_role|>' + message['role'] + '<|end_of_role|>' + message['content'] + '<|end_of_text|>\n' }}
    {%- if loop.last and add_generation_prompt %}
        {{- '<|start_of_role|>assistant' }}
        {%- if controls %}{{- ' ' + controls | tojson() }}{%- endif %}
        {{- '<|end_of_role|>' }}
    {%- endif %}
{%- endfor %}""",
    "olmo2": "{{ bos_token }}{% for message in messages %}{% if message['role'] == 'system' %}"
    "{{ '<|system|>\n' + message['content'] + '\n' }}{% elif message['role'] == 'user' %}"
    "{{ '<|user|>\n' + message['content'] + '\n' }}{% elif message['role'] == 'assistant' %}"
    "{% if not loop.last %}{{ '<|assistant|>\n' + message['content'] + eos_token + '\n' }}"
    "{% else %}{{ '<|assistant|>\n' + message['content'] + eos_token }}{% endif %}{% endif %}"
    "{% if loop.last and add_generation_prompt %}{{ '<|assistant|>\n' }}{% endif %}{% endfor %}",
    "smollm3": """{%- set reasoning_mode = "/no_think" if enable_thinking is defined and not enable_thinking else "/think" %}
{{- "<|im_start|>system\n" }}
{%- if messages[0].role == "system" %}{%- set system_message = messages[0].content %}
  {%- if "/no_think" in system_message %}{%- set reasoning_mode = "/no_think" %}{%- endif %}
  {%- set custom = system_message.replace("/no_think", "").replace("/think", "").rstrip() %}{%- endif %}
{{- "## Metadata\n\nToday Date: " ~ strftime_now("%d %B %Y") ~ "\nReasoning Mode: " + reasoning_mode + "\n\n" }}
{{- "## Custom Instructions\n\n" }}{{- custom + "\n\n" if custom else "You are a helpful assistant.\n\n" }}
{{- "<|im_end|>\n" }}
{%- for message in messages %}
    {%- set content = message.content if message.content is string else "" %}
    {%- if message.role == "user" %}{{ "<|im_start|>" + message.role + "\n" + content + "<|im_end|>\n" }}
    {%- elif message.role == "assistant" %}
        {%- if reasoning_mode == "/think" %}{{ "<|im_start|>assistant\n" + content.lstrip("\n") + "<|im_end|>\n" }}
        {%- else %}{{ "<|im_start|>assistant\n<think>\n\n</think>\n" + content.lstrip("\n") + "<|im_end|>\n" }}{%- endif %}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ "<|im_start|>assistant\n" }}{%- endif %}""",
    "command_r": "{{ bos_token }}"
    + _SYSTEM_FIRST
    + "{% if system != false %}{{ '<|START_OF_TURN_TOKEN|><|SYSTEM_TOKEN|>' + system + '<|END_OF_TURN_TOKEN|>' }}{% endif %}"
    + _TURNS
    + _ALTERNATE
    + "{% set content = m['content'] %}{% if m['role'] == 'user' %}"
    "{{ '<|START_OF_TURN_TOKEN|><|USER_TOKEN|>' + content.strip() + '<|END_OF_TURN_TOKEN|>' }}"
    "{% elif m['role'] == 'assistant' %}"
    "{{ '<|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|>' + content.strip() + '<|END_OF_TURN_TOKEN|>' }}{% endif %}{% endfor %}"
    + _PROMPT
    + "{{ '<|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|>' }}{% endif %}",
    "llama4": """{{- bos_token }}
{%- if messages[0]['role'] == 'system' %}
    {%- if messages[0]['content'] is string %}{%- set system_message = messages[0]['content'] | trim %}
    {%- else %}{%- set system_message = messages[0]['content'][0]['text'] | trim %}{%- endif %}
    {%- set messages = messages[1:] %}
    {{- "<|header_start|>system<|header_end|>\n\n" + system_message + "<|eot|>" }}
{%- endif %}
{%- for message in messages %}
    {{- '<|header_start|>' + message['role'] + '<|header_end|>\n\n' }}
    {%- if message['content'] is string %}{{- message['content'] }}
    {%- else %}{%- for content in message['content'] %}
        {%- if content['type'] == 'text' %}{{- content['text'] | trim }}{%- endif %}{%- endfor %}{%- endif %}
    {{- "<|eot|>" }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|header_start|>assistant<|header_end|>\n\n' }}{%- endif %}""",
    "macros": """{%- macro turn(role, text) -%}
<|im_start|>{{ role }}{{ "\\n" }}{{ text }}<|im_end|>
{% endmacro -%}
{%- for m in messages %}{% if m.role == 'skip' %}{% continue %}{% endif %}{{ turn(m.role, m.content) }}{% endfor %}
{%- set closing %}<|im_start|>{{ 'assistant' }}{% endset %}
{%- if add_generation_prompt %}{{ [closing, '\\n'] | join }}{% endif %}""",
    "parts": """{% for m in messages %}<|im_start|>{{ m.role | lower }}
{% if m.content is string %}{{ m.content }}{% else %}{% for c in m.content %}{{ c.text }}{% endfor %}{% endif %}<|im_end|>
{% endfor %}{{ tools | tojson(indent=2) if tools else '' }}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}""",
}
