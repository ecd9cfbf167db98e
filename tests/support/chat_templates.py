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

# thinking stays in the turns after the last message of the user alone, and a turn without any has an empty one
GLM45 = """{{- '[gMASK]<sop>' }}{%- if tools %}{{- '<|system|>\\n' }}{%- for tool in tools %}{{- tool | tojson }}{%- endfor %}
{{- '<tool_call>{name}\\n<arg_key>{key}</arg_key>' }}{%- endif %}
{%- set asked = namespace(at=-1) %}{%- for message in messages %}{%- if message.role == 'user' %}{%- set asked.at = loop.index0 %}
{%- endif %}{%- endfor %}
{%- for message in messages %}
{%- if message.role == 'tool' %}
{%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}{{- '<|observation|>' }}{%- endif %}
{{- '\\n<tool_response>\\n' + message.content + '\\n</tool_response>' }}
{%- elif message.role == 'assistant' %}{%- set text = message.content or '' %}{%- set thought = message.reasoning_content or '' %}
{%- if '</think>' in text %}{%- set thought = text.split('</think>')[0].split('<think>')[-1] | trim %}
{%- set text = text.split('</think>')[-1] %}{%- endif %}
{{- '<|assistant|>\\n<think>' + (thought | trim if loop.index0 > asked.at else '') + '</think>' }}
{%- if text | trim %}{{- '\\n' + text | trim }}{%- endif %}
{%- for call in message.tool_calls or [] %}{{- '\\n<tool_call>' + call.function.name }}
{%- for key, value in call.function.arguments.items() %}{{- '\\n<arg_key>' + key + '</arg_key>\\n<arg_value>' }}
{{- value if value is string else value | tojson }}{{- '</arg_value>' }}{%- endfor %}{{- '\\n</tool_call>' }}{%- endfor %}
{%- else %}{{- '<|' + message.role + '|>\\n' + message.content }}
{%- if enable_thinking is defined and not enable_thinking %}{{- '/nothink' }}{%- endif %}{%- endif %}
{%- endfor %}{%- if add_generation_prompt %}{{- '<|assistant|>' }}
{%- if enable_thinking is defined and not enable_thinking %}{{- '\\n<think></think>' }}{%- endif %}{%- endif %}"""
# arguments are text, and a turn after the answers of tools has no mark
DEEPSEEK31 = """{{- '<｜begin▁of▁sentence｜>' }}{%- for tool in tools or [] %}{{- tool | tojson }}{%- endfor %}
{%- for message in messages %}
{%- if message.role == 'user' %}{{- '<｜User｜>' + message.content + '<｜Assistant｜>' }}
{%- if not (loop.last and thinking) %}{{- '</think>' }}{%- else %}{{- '<think>' }}{%- endif %}
{%- elif message.role == 'tool' %}{{- '<｜tool▁output▁begin｜>' + message.content + '<｜tool▁output▁end｜>' }}
{%- else %}{{- (message.content or '').split('</think>')[-1] }}
{%- if message.tool_calls %}{{- '<｜tool▁calls▁begin｜>' }}{%- for call in message.tool_calls %}
{{- '<｜tool▁call▁begin｜>' + call.function.name + '<｜tool▁sep｜>' + call.function.arguments + '<｜tool▁call▁end｜>' }}
{%- endfor %}{{- '<｜tool▁calls▁end｜>' }}{%- endif %}{{- '<｜end▁of▁sentence｜>' }}{%- endif %}
{%- endfor %}"""
# the answer of a tool names its call; thinking stays after the last turn without calls
KIMI_K2 = """{%- if tools %}{{- '<|im_system|>tool_declare<|im_middle|>' + tools | tojson + '<|im_end|>' }}{%- endif %}
{%- set plain = namespace(at=-1) %}{%- for message in messages %}
{%- if message.role == 'assistant' and not message.tool_calls %}{%- set plain.at = loop.index0 %}{%- endif %}{%- endfor %}
{%- for message in messages %}
{%- set mark = {'user': '<|im_user|>', 'assistant': '<|im_assistant|>'}.get(message.role, '<|im_system|>') %}
{{- mark + (message.name or message.role) + '<|im_middle|>' }}
{%- if message.role == 'tool' %}{{- '## Return of ' + message.tool_call_id + '\\n' }}{%- endif %}
{%- if message.role == 'assistant' %}
{{- '<think>' + (message.reasoning_content or '' if loop.index0 > plain.at else '') + '</think>' }}{%- endif %}
{{- message.content or '' }}
{%- if message.tool_calls %}{{- '<|tool_calls_section_begin|>' }}{%- for call in message.tool_calls %}
{{- '<|tool_call_begin|>' + call.id + '<|tool_call_argument_begin|>' + call.function.arguments | tojson + '<|tool_call_end|>' }}
{%- endfor %}{{- '<|tool_calls_section_end|>' }}{%- endif %}{{- '<|im_end|>' }}
{%- endfor %}{%- if add_generation_prompt %}{{- '<|im_assistant|>assistant<|im_middle|>' }}{%- endif %}"""
# every message says its channel; one call a turn; the last answer ends otherwise than one in the history
HARMONY = """{%- if tools %}{{- '<|start|>developer<|message|># Tools\\n' }}{%- for tool in tools %}{{- tool | tojson }}{%- endfor %}
{{- '<|end|>' }}{%- endif %}
{%- set called = namespace(name=none) %}
{%- for message in messages %}
{%- if message.role == 'assistant' and message.tool_calls %}
{%- if message.reasoning_content or message.content %}
{{- '<|start|>assistant<|channel|>analysis<|message|>' + (message.reasoning_content or message.content) + '<|end|>' }}{%- endif %}
{%- set called.name = message.tool_calls[0].function.name %}
{{- '<|start|>assistant to=functions.' + called.name + '<|channel|>commentary json<|message|>' }}
{{- message.tool_calls[0].function.arguments | tojson + '<|call|>' }}
{%- elif message.role == 'assistant' %}
{%- if loop.last and not add_generation_prompt and message.reasoning_content %}
{{- '<|start|>assistant<|channel|>analysis<|message|>' + message.reasoning_content + '<|end|>' }}{%- endif %}
{{- '<|start|>assistant<|channel|>final<|message|>' + (message.content or '') }}
{{- '<|return|>' if loop.last and not add_generation_prompt else '<|end|>' }}
{%- elif message.role == 'tool' %}
{%- if called.name is none %}{{- raise_exception('an answer without a call') }}{%- endif %}
{{- '<|start|>functions.' + called.name + ' to=assistant<|channel|>commentary<|message|>' + message.content | tojson + '<|end|>' }}
{%- else %}{{- '<|start|>' + message.role + '<|message|>' + message.content + '<|end|>' }}{%- endif %}
{%- endfor %}{%- if add_generation_prompt %}{{- '<|start|>assistant' }}{%- endif %}"""
MISTRAL = """{{- '<s>' }}{%- if tools %}{{- '[AVAILABLE_TOOLS]' + tools | tojson + '[/AVAILABLE_TOOLS]' }}{%- endif %}
{%- for message in messages %}
{%- if message.role == 'user' %}{{- '[INST]' + message.content + '[/INST]' }}
{%- elif message.role == 'tool' %}{{- ANSWER_HERE }}
{%- else %}{{- (message.content or '') }}{%- if message.tool_calls %}CALLS_HERE{%- endif %}{{- '</s>' }}{%- endif %}
{%- endfor %}"""
MARKED_CALLS = """{%- for call in message.tool_calls %}
{{- '[TOOL_CALLS]' + call.function.name + '[CALL_ID]' + call.id + '[ARGS]' + call.function.arguments | tojson }}{%- endfor %}"""
MARKED_ANSWER = "'[TOOL_RESULTS]' + message.content + '[/TOOL_RESULTS]'"
LISTED_CALLS = """{{- '[TOOL_CALLS] [' }}{%- for call in message.tool_calls %}
{%- if call.id | length != 9 %}{{- raise_exception('an id of nine characters') }}{%- endif %}
{{- (call.function | tojson)[:-1] + ', "id": "' + call.id + '"}' + ('' if loop.last else ', ') }}{%- endfor %}{{- ']' }}"""
LISTED_ANSWER = """'[TOOL_RESULTS] {"content": ' + message.content | tojson + ', "call_id": "' + message.tool_call_id + '"}[/TOOL_RESULTS]'
if message.tool_call_id | length == 9 else raise_exception('an id of nine characters')"""

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
    "kimi_k2": ["<|im_end|>", "<|im_user|>", "<|im_assistant|>", "<|im_system|>", "<|im_middle|>"],
    "harmony": ["<|return|>", "<|call|>", "<|end|>", "<|start|>", "<|channel|>", "<|message|>"],
    "mistral": ["</s>", "<s>", "[INST]", "[/INST]", "[TOOL_CALLS]", "[TOOL_RESULTS]", "[/TOOL_RESULTS]"],
}
SPECIAL |= {"glm45": SPECIAL["glm4"], "deepseek31": SPECIAL["deepseek"], "mistral_json": SPECIAL["mistral"]}
TEMPLATES = {
    "chatml": CHATML.replace("THINKING", KEPT),
    "qwen3": CHATML.replace("THINKING", DROPPED),
    "llama3": LLAMA3,
    "glm4": GLM4,
    "deepseek": DEEPSEEK,
    "glm45": GLM45,
    "deepseek31": DEEPSEEK31,
    "kimi_k2": KIMI_K2,
    "harmony": HARMONY,
    "mistral": MISTRAL.replace("CALLS_HERE", MARKED_CALLS).replace("ANSWER_HERE", MARKED_ANSWER),
    "mistral_json": MISTRAL.replace("CALLS_HERE", LISTED_CALLS).replace("ANSWER_HERE", LISTED_ANSWER),
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
