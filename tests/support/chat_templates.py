"""Chat templates that behave as those of model families do, and tiny tokenizers with their special tokens."""

from __future__ import annotations

from typing import Any

CHATML = """{%- if tools %}{{- '<|im_start|>system\\n# Tools\\n' }}{%- for tool in tools %}{{- tool | tojson }}{{- '\\n' }}{%- endfor %}
{{- 'Write <tool_call>{"name": ..., "arguments": ...}</tool_call>.<|im_end|>\\n' }}{%- endif %}
{%- for message in messages %}
{%- if message.role == 'tool' %}
{%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}{{- '<|im_start|>user' }}{%- endif %}
{{- '\\n<tool_response>\\n' + message.content + '\\n</tool_response>' }}
{%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{- '<|im_end|>\\n' }}{%- endif %}
{%- else %}
{{- '<|im_start|>' + message.role + '\\n' }}{%- set text = message.content or '' %}
THINKING
{{- text }}
{%- for call in message.tool_calls or [] %}{{- '\\n<tool_call>\\n{"name": "' + call.function.name + '", "arguments": ' }}
{{- call.function.arguments | tojson }}{{- '}\\n</tool_call>' }}{%- endfor %}
{{- '<|im_end|>\\n' }}
{%- endif %}{%- endfor %}{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"""
KEPT = """{%- if message.reasoning_content %}{{- '<think>\\n' + message.reasoning_content + '\\n</think>\\n\\n' }}{%- endif %}"""
# thinking stays in the turns after the user's last message alone
DROPPED = """{%- set asked = namespace(at=0) %}{%- for other in messages %}{%- if other.role == 'user' %}
{%- set asked.at = loop.index0 %}{%- endif %}{%- endfor %}
{%- if message.role == 'assistant' %}{%- set thought = message.reasoning_content or '' %}
{%- if '</think>' in text %}{%- set thought = text.split('</think>')[0].split('<think>')[-1].strip('\\n') %}
{%- set text = text.split('</think>')[-1].lstrip('\\n') %}{%- endif %}
{%- if loop.index0 > asked.at %}{{- '<think>\\n' + thought + '\\n</think>\\n\\n' }}{%- endif %}{%- endif %}"""
LLAMA3 = """{{- '<|begin_of_text|>' }}{%- if tools %}{{- '<|start_header_id|>system<|end_header_id|>\\n\\n' }}
{%- for tool in tools %}{{- tool | tojson }}{%- endfor %}
{{- 'Respond with {"name": ..., "parameters": ...}.<|eot_id|>' }}{%- endif %}
{%- for message in messages %}
{%- if message.tool_calls %}
{%- if message.tool_calls | length != 1 %}{{- raise_exception('one call at a time') }}{%- endif %}
{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n{"name": "' + message.tool_calls[0].function.name + '", "parameters": ' }}
{{- message.tool_calls[0].function.arguments | tojson }}{{- '}<|eot_id|>' }}
{%- elif message.role == 'tool' %}{{- '<|start_header_id|>ipython<|end_header_id|>\\n\\n' + message.content + '<|eot_id|>' }}
{%- else %}{{- '<|start_header_id|>' + message.role + '<|end_header_id|>\\n\\n' + message.content | trim + '<|eot_id|>' }}{%- endif %}
{%- endfor %}{%- if add_generation_prompt %}{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{%- endif %}"""
GLM4 = """{{- '[gMASK]<sop>' }}{%- if tools %}{{- '<|system|>\\n' }}{%- for tool in tools %}{{- tool | tojson }}{%- endfor %}
{{- '<tool_call>{name}\\n<arg_key>{key}</arg_key>' }}{%- endif %}
{%- for message in messages %}
{%- if message.role == 'tool' %}
{%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}{{- '<|observation|>' }}{%- endif %}
{{- '\\n<tool_response>\\n' + message.content + '\\n</tool_response>' }}
{%- elif message.role == 'assistant' %}{{- '<|assistant|>\\n' + (message.content or '') | trim }}
{%- for call in message.tool_calls or [] %}{{- '\\n<tool_call>' + call.function.name }}
{%- for key, value in call.function.arguments.items() %}{{- '\\n<arg_key>' + key + '</arg_key>\\n<arg_value>' }}
{{- value if value is string else value | tojson }}{{- '</arg_value>' }}{%- endfor %}{{- '\\n</tool_call>' }}{%- endfor %}
{%- else %}{{- '<|' + message.role + '|>\\n' + message.content }}{%- endif %}
{%- endfor %}{%- if add_generation_prompt %}{{- '<|assistant|>\\n' }}{%- endif %}"""
DEEPSEEK = """{{- '<｜begin▁of▁sentence｜>' }}{%- if tools %}{%- for tool in tools %}{{- tool | tojson }}{%- endfor %}{%- endif %}
{%- for message in messages %}
{%- if message.role == 'user' %}{{- '<｜User｜>' + message.content + '<｜Assistant｜>' }}
{%- elif message.role == 'tool' %}
{%- if messages[loop.index0 - 1].role != 'tool' %}{{- '<｜tool▁outputs▁begin｜>' }}{%- endif %}
{{- '<｜tool▁output▁begin｜>' + message.content + '<｜tool▁output▁end｜>' }}
{%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{- '<｜tool▁outputs▁end｜>' }}{%- endif %}
{%- else %}{{- (message.content or '').split('</think>')[-1] }}
{%- if message.tool_calls %}{{- '<｜tool▁calls▁begin｜>' }}{%- for call in message.tool_calls %}
{{- '<｜tool▁call▁begin｜>function<｜tool▁sep｜>' + call.function.name + '\\n```json\\n' }}{{- call.function.arguments | tojson }}
{{- '\\n```<｜tool▁call▁end｜>' }}{%- endfor %}{{- '<｜tool▁calls▁end｜>' }}{%- endif %}{{- '<｜end▁of▁sentence｜>' }}{%- endif %}
{%- endfor %}"""

SPECIAL = {
    "chatml": ["<|im_end|>", "<|im_start|>", "<|endoftext|>"],
    "qwen3": ["<|im_end|>", "<|im_start|>", "<|endoftext|>"],
    "llama3": ["<|eot_id|>", "<|eom_id|>", "<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>"],
    "glm4": [
        "<|endoftext|>",
        "<|user|>",
        "<|assistant|>",
        "<|observation|>",
        "<|system|>",
        "[gMASK]",
        "<sop>",
    ],
    "deepseek": ["<｜end▁of▁sentence｜>", "<｜begin▁of▁sentence｜>", "<｜User｜>", "<｜Assistant｜>"],
}
TEMPLATES = {
    "chatml": CHATML.replace("THINKING", KEPT),
    "qwen3": CHATML.replace("THINKING", DROPPED),
    "llama3": LLAMA3,
    "glm4": GLM4,
    "deepseek": DEEPSEEK,
}
TOOL = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Add two numbers.",
        "parameters": {
            "type": "object",
            "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
            "required": ["a", "b"],
        },
    },
}


def tokenizer_of(family: str) -> Any:
    """A byte-level tokenizer with a few merges, the family's special tokens and its chat template."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    corpus = [
        "the answer is 4 because two and two",
        "<tool_call> name arguments </tool_call>",
        "\n\n  12 345",
    ]
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=SPECIAL[family],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    made.train_from_iterator(corpus * 20, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=made,
        eos_token=SPECIAL[family][0],
        additional_special_tokens=SPECIAL[family][1:],
        chat_template=TEMPLATES[family],
        clean_up_tokenization_spaces=False,
    )
