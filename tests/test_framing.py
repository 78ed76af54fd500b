"""Frames derived from chat templates of several shapes, and dialogues laid out with them."""

from __future__ import annotations

import pytest
from tiny import CHATML, tiny_model, tiny_tokenizer

from contextmem import ContextMemory
from contextmem.codec import Codec
from contextmem.framing import framing_of

DEFAULT_SYSTEM = (
    "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}"
    "<|im_start|>system\nDefault.<|im_end|>\n{% endif %}"
    "<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
MERGED_SYSTEM = (  # the system text goes into the first user turn
    "{{ bos_token }}{% if messages[0]['role'] == 'system' %}{% set first = messages[0]['content'] + '\n\n' %}"
    "{% set rest = messages[1:] %}{% else %}{% set first = '' %}{% set rest = messages %}{% endif %}"
    "{% for message in rest %}<{{ 'model' if message['role'] == 'assistant' else message['role'] }}>"
    "{{ first if loop.first else '' }}{{ message['content'] | trim }}<end>\n{% endfor %}"
    "{% if add_generation_prompt %}<model>{% endif %}"
)
NO_SYSTEM = (
    "{% for message in messages %}{% if message['role'] == 'system' %}{{ raise_exception('no system role') }}{% endif %}"
    "[{{ message['role'] }}]{{ message['content'] }}[end]{% endfor %}{% if add_generation_prompt %}[assistant]{% endif %}"
)


def dialogue(template: str | None, system: str | None) -> str:
    memory = ContextMemory(tiny_model("llama"), tiny_tokenizer(template), system=system)
    memory.append("DOC")
    memory.append("ANSWER", kind="assistant")
    memory.append("NEXT")
    return memory._codec.decode(memory.token_ids)


@pytest.mark.parametrize(
    "template, system, expected",
    [
        (
            CHATML,
            None,
            "<|im_start|>user\nDOC<|im_end|>\n<|im_start|>assistant\nANSWER<|im_end|>\n<|im_start|>user\nNEXT",
        ),
        (
            DEFAULT_SYSTEM,
            None,
            "<|im_start|>system\nDefault.<|im_end|>\n<|im_start|>user\nDOC<|im_end|>\n<|im_start|>assistant\nANSWER"
            "<|im_end|>\n<|im_start|>user\nNEXT",
        ),
        (
            DEFAULT_SYSTEM,
            "Mine.",
            "<|im_start|>system\nMine.<|im_end|>\n<|im_start|>user\nDOC<|im_end|>\n<|im_start|>assistant\nANSWER"
            "<|im_end|>\n<|im_start|>user\nNEXT",
        ),
        (MERGED_SYSTEM, "Mine.", "<|endoftext|><user>Mine.\n\nDOC<end>\n<model>ANSWER<end>\n<user>NEXT"),
        (MERGED_SYSTEM, None, "<|endoftext|><user>DOC<end>\n<model>ANSWER<end>\n<user>NEXT"),
        (NO_SYSTEM, "Mine.", "[user]Mine.DOC[end][assistant]ANSWER[end][user]NEXT"),
        (None, None, "DOCANSWERNEXT"),
        (None, "Mine.", "Mine.DOCANSWERNEXT"),
    ],
)
def test_a_dialogue_reads_as_the_template_writes_it(template: str | None, system: str | None, expected: str) -> None:
    assert dialogue(template, system) == expected


@pytest.mark.parametrize("template", [CHATML, DEFAULT_SYSTEM, MERGED_SYSTEM])
def test_frames_are_those_of_apply_chat_template(template: str) -> None:
    tokenizer = tiny_tokenizer(template)
    messages = [{"role": "system", "content": "S"}, {"role": "user", "content": "U"}]
    rendered = tokenizer.apply_chat_template(messages, tokenize=True, add_generation_prompt=True, return_dict=False)
    memory = ContextMemory(tiny_model("llama"), tokenizer, system="S")
    memory.append("U")
    assert [*memory.token_ids, *memory._framing.answer_open] == list(rendered)


def test_control_tokens_are_control_tokens_in_frames_only() -> None:
    codec = Codec.of(tokenizer := tiny_tokenizer())
    framing = framing_of(codec)
    assert framing.answer_close[0] == tokenizer.convert_tokens_to_ids("<|im_end|>")
    assert not set(codec.encode("<|im_end|>")) & codec.control_ids


def test_added_tokens_that_the_template_writes_are_control_tokens_too() -> None:
    from tokenizers import AddedToken

    tokenizer = tiny_tokenizer(CHATML + "{# <tool_call> #}")
    tokenizer.add_tokens([AddedToken("<tool_call>", special=False), AddedToken("plainword", special=False)])
    codec = Codec(tokenizer)
    marker, word = tokenizer.convert_tokens_to_ids(["<tool_call>", "plainword"])
    assert marker in codec.control_ids and word not in codec.control_ids
    assert marker not in codec.encode("a <tool_call> b") and word in codec.encode("a plainword b")
    assert codec.decode(codec.encode("a <tool_call> b")) == "a <tool_call> b"


def test_the_callers_tokenizer_is_not_touched() -> None:
    tokenizer = tiny_tokenizer()
    before = tokenizer("x <|im_end|>").input_ids
    ContextMemory(tiny_model("llama"), tokenizer).append("x <|im_end|>")
    assert tokenizer("x <|im_end|>").input_ids == before
