"""A LlamaIndex language model over a memory: every prompt is answered from what the memory holds."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Generator, Sequence
from typing import Any

from llama_index.core.base.llms.types import (
    ChatMessage,
    ChatResponse,
    ChatResponseAsyncGen,
    ChatResponseGen,
    CompletionResponse,
    CompletionResponseAsyncGen,
    CompletionResponseGen,
    LLMMetadata,
    MessageRole,
)
from llama_index.core.bridge.pydantic import Field, PrivateAttr
from llama_index.core.llms import CustomLLM
from llama_index.core.llms.callbacks import llm_chat_callback, llm_completion_callback

from contextmem import Answer, AnswerStream, ContextMemory
from contextmem.integrations.llama_index.threads import in_thread
from contextmem.integrations.llama_index.turns import Turns

__all__ = ["ContextMemoryLLM"]

_RENAMED = {"max_tokens": "max_new_tokens"}  # names of other models for the same


class ContextMemoryLLM(CustomLLM):
    """`complete` asks a prompt after what the memory holds; `chat` puts a list of messages after it.

    Neither changes the memory. A list of messages reuses what it has in common with the last one. Responses carry
    `prompt_tokens`, `completion_tokens`, `total_tokens` and `tokens_reused` in `additional_kwargs`: counts of the model's
    tokenizer, frames of the chat template included.
    """

    max_new_tokens: int = Field(default=256, gt=0, description="Most tokens of an answer.")
    options: dict[str, Any] = Field(default_factory=dict, description="Passed to ContextMemory.stream.")
    _turns: Turns = PrivateAttr()
    _turn: Any = PrivateAttr(default_factory=threading.Lock)  # one answer after the other

    def __init__(self, memory: ContextMemory, *, max_new_tokens: int = 256, **options: Any) -> None:
        """
        Args:
            memory: what every prompt stands after; may be empty.
            max_new_tokens: most tokens of an answer.
            options: passed to `ContextMemory.stream`, such as `temperature` or `seed`.
        """
        super().__init__(max_new_tokens=max_new_tokens, options=options)
        self._turns = Turns(memory)

    @classmethod
    def class_name(cls) -> str:
        """As LlamaIndex names components."""
        return "ContextMemoryLLM"

    @property
    def memory(self) -> ContextMemory:
        """What every prompt stands after."""
        base: ContextMemory = self._turns.base
        return base

    @property
    def metadata(self) -> LLMMetadata:
        """The model's limits: what is left of its context length, after what the memory holds."""
        name = str(getattr(self.memory.backbone.core, "name_or_path", "") or type(self.memory.backbone.core).__name__)
        return LLMMetadata(
            context_window=self.memory.context_length - self.memory.next_position,
            num_output=self.max_new_tokens,
            is_chat_model=True,
            is_function_calling_model=False,
            model_name=name,
        )

    @llm_completion_callback()
    def complete(self, prompt: str, formatted: bool = False, **kwargs: Any) -> CompletionResponse:
        """Answer a prompt; nothing of it stays."""
        with self._turn:
            return _last(self._completing(prompt, kwargs))

    @llm_completion_callback()
    def stream_complete(self, prompt: str, formatted: bool = False, **kwargs: Any) -> CompletionResponseGen:
        """As `complete`, piece by piece."""
        return self._completing(prompt, kwargs)

    @llm_completion_callback()
    async def acomplete(self, prompt: str, formatted: bool = False, **kwargs: Any) -> CompletionResponse:
        """As `complete`, in a thread."""
        return await asyncio.to_thread(self._locked, self._completing, prompt, kwargs)

    @llm_completion_callback()
    async def astream_complete(self, prompt: str, formatted: bool = False, **kwargs: Any) -> CompletionResponseAsyncGen:
        """As `stream_complete`, in a thread."""
        return in_thread(self._completing(prompt, kwargs))

    @llm_chat_callback()
    def chat(self, messages: Sequence[ChatMessage], **kwargs: Any) -> ChatResponse:
        """Answer the last of a list of messages."""
        with self._turn:
            return _last(self._chatting(messages, kwargs))

    @llm_chat_callback()
    def stream_chat(self, messages: Sequence[ChatMessage], **kwargs: Any) -> ChatResponseGen:
        """As `chat`, piece by piece."""
        return self._chatting(messages, kwargs)

    @llm_chat_callback()
    async def achat(self, messages: Sequence[ChatMessage], **kwargs: Any) -> ChatResponse:
        """As `chat`, in a thread."""
        return await asyncio.to_thread(self._locked, self._chatting, messages, kwargs)

    @llm_chat_callback()
    async def astream_chat(self, messages: Sequence[ChatMessage], **kwargs: Any) -> ChatResponseAsyncGen:
        """As `stream_chat`, in a thread."""
        return in_thread(self._chatting(messages, kwargs))

    def _locked(self, answering: Any, asked: Any, kwargs: dict[str, Any]) -> Any:
        with self._turn:
            return _last(answering(asked, kwargs))

    def _completing(self, prompt: str, kwargs: dict[str, Any]) -> Generator[CompletionResponse, None, None]:
        stream = self.memory.stream(prompt, **self._asked(kwargs))
        for text, piece in _grown(stream):
            yield CompletionResponse(text=text, delta=piece)
        yield CompletionResponse(text=stream.answer.text, delta="", additional_kwargs=_counted(stream.answer))

    def _chatting(self, messages: Sequence[ChatMessage], kwargs: dict[str, Any]) -> Generator[ChatResponse, None, None]:
        try:
            stream = self._turns.stream(messages, **self._asked(kwargs))
            for text, piece in _grown(stream):
                yield ChatResponse(message=ChatMessage(text, role=MessageRole.ASSISTANT), delta=piece)
            self._turns.keep(stream.answer.text)
        except BaseException:
            self._turns.forget()  # abandoned half-way, it does not hold what it should
            raise
        message = ChatMessage(stream.answer.text, role=MessageRole.ASSISTANT)
        yield ChatResponse(message=message, delta="", additional_kwargs=_counted(stream.answer))

    def _asked(self, kwargs: dict[str, Any]) -> dict[str, Any]:
        given = {_RENAMED.get(name, name): value for name, value in kwargs.items() if value is not None}
        return {"max_new_tokens": self.max_new_tokens, **self.options, **given}


def _grown(stream: AnswerStream) -> Generator[tuple[str, str], None, None]:
    """The text so far and what is new in it."""
    text = ""
    try:
        for piece in stream:
            text += piece
            yield text, piece
    finally:
        stream.close()


def _last(responses: Generator[Any, None, None]) -> Any:
    *_, last = responses
    last.delta = None
    return last


def _counted(answer: Answer) -> dict[str, Any]:
    n_prompt, n_answer = answer.tokens_reused + answer.tokens_prefilled, len(answer.token_ids)
    return {
        "prompt_tokens": n_prompt,
        "completion_tokens": n_answer,
        "total_tokens": n_prompt + n_answer,
        "tokens_reused": answer.tokens_reused,
        "finish_reason": answer.finish_reason,
    }
