"""Chat templates for the tests."""

# As Qwen's, with tools; special tokens <|im_start|> and <|im_end|>.
CHATML = (
    "{%- if tools %}<|im_start|>tools\n{% for t in tools %}{{ t | tojson }}\n{% endfor %}<|im_end|>\n{% endif -%}"
    "{%- for m in messages -%}"
    "{{ '<|im_start|>' + m.role + '\n' + m.content }}"
    "{%- for c in m.tool_calls or [] %}{{ '<call>' }}{{ c.function | tojson }}{{ '</call>' }}{% endfor -%}"
    "{{ '<|im_end|>\n' }}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif -%}"
)

# The same texts, with marks around what the assistant writes, the end of the turn included.
CHATML_MARKED = (
    "{%- if tools %}<|im_start|>tools\n{% for t in tools %}{{ t | tojson }}\n{% endfor %}<|im_end|>\n{% endif -%}"
    "{%- for m in messages -%}"
    "{%- if m.role == 'assistant' -%}"
    "{{ '<|im_start|>assistant\n' }}{% generation %}{{ m.content }}"
    "{%- for c in m.tool_calls or [] %}{{ '<call>' }}{{ c.function | tojson }}{{ '</call>' }}{% endfor -%}"
    "{{ '<|im_end|>' }}{% endgeneration %}{{ '\n' }}"
    "{%- else -%}"
    "{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}"
    "{%- endif -%}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif -%}"
)

# For the tokenizer of bytes: a letter for the speaker, EOS behind answers.
LETTERS = (
    "{{ bos_token }}{% for m in messages %}"
    "{% if m.role == 'assistant' %}{{ 'A:' + m.content + eos_token }}"
    "{% else %}{{ m.role[0] | upper + ':' + m.content + '|' }}{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}A:{% endif %}"
)

# Drops the thoughts of earlier turns, as reasoning models' templates do.
FORGETFUL = (
    "{% for m in messages %}{% set said = m.content if loop.last else m.content.split('</think>')[-1] %}"
    "{{ m.role[0] + ':' + said + eos_token }}{% endfor %}{% if add_generation_prompt %}a:{% endif %}"
)
