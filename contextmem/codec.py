"""Text to token ids and back. Text is data: no string inside it ever becomes a control token."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterable, Iterator, Sequence
from typing import Any
from weakref import WeakKeyDictionary, ref

from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream

from contextmem.errors import InvalidInput

__all__ = ["Codec", "TextStream", "pieces_until_stop", "template_text"]

_REGISTRY: WeakKeyDictionary[Any, Codec] = WeakKeyDictionary()
_REGISTRY_LOCK = threading.Lock()


class Codec:
    """A tokenizer, used so that spans are exact.

    Every text is tokenised alone and without special tokens. The backend tokenizer is copied, so neither the caller's
    settings nor other threads' calls change what comes out.

    Attributes:
        control_ids: ids that text never produces: special tokens, and added tokens that the chat template writes.
    """

    @classmethod
    def of(cls, tokenizer: Any) -> Codec:
        """The codec of `tokenizer`; one object a tokenizer, made anew when its template or added tokens change."""
        with _REGISTRY_LOCK:
            codec = _REGISTRY.get(tokenizer)
            if codec is None or codec._made_for != _version_of(tokenizer):
                codec = _REGISTRY[tokenizer] = cls(tokenizer)
            return codec

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = ref(tokenizer)
        self._made_for = _version_of(tokenizer)
        self._lock = threading.Lock()
        backend = getattr(tokenizer, "backend_tokenizer", None)
        template = template_text(tokenizer)
        self._has_unknown = tokenizer.unk_token_id is not None
        self._data = _data_backend(backend, template) if isinstance(backend, Tokenizer) else None
        self.control_ids = frozenset(tokenizer.all_special_ids) | {
            index for index, token in tokenizer.added_tokens_decoder.items() if _is_control(token, template)
        }

    @property
    def tokenizer(self) -> Any:
        """The tokenizer as it was given."""
        return self._tokenizer()

    def encode(self, text: str) -> tuple[int, ...]:
        """Ids of `text` as data.

        Raises:
            InvalidInput: not a string, or holds characters that cannot be encoded (lone surrogates, characters that
                the tokenizer would drop): nothing is lost silently.
        """
        if not isinstance(text, str):
            raise InvalidInput(f"text must be a str, not {type(text).__name__}. Nothing was changed.")
        try:
            text.encode("utf-8")
        except UnicodeEncodeError as error:
            raise InvalidInput(
                f"text holds a lone surrogate at character {error.start:,}: it cannot be encoded. Decode your bytes "
                f"with errors='replace' first. Nothing was changed."
            ) from None
        if self._data is not None:
            ids = tuple(self._data.encode(text, add_special_tokens=False).ids)
        else:
            with self._lock:
                ids = tuple(self.tokenizer(text, add_special_tokens=False, split_special_tokens=True)["input_ids"])
        if self._loses(text, ids):
            raise InvalidInput(
                f"{_first_lost(self, text)} is not in this tokenizer's vocabulary and would be lost. Remove or replace "
                f"it. Nothing was changed."
            )
        return ids

    def encode_frame(self, text: str) -> tuple[int, ...]:
        """Ids of template text, in which control tokens are meant."""
        with self._lock:
            return tuple(self.tokenizer(text, add_special_tokens=False)["input_ids"])

    def start_ids(self) -> tuple[int, ...]:
        """The start token, where the tokenizer puts one before a text of its own accord."""
        with self._lock:
            ids = tuple(self.tokenizer("")["input_ids"])
        return ids if ids == (self.tokenizer.bos_token_id,) else ()

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = False) -> str:
        """Text of `ids`."""
        if self._data is not None:
            return self._data.decode(list(ids), skip_special_tokens=skip_special_tokens)
        with self._lock:
            text: str = self.tokenizer.decode(
                list(ids), skip_special_tokens=skip_special_tokens, clean_up_tokenization_spaces=False
            )
            return text

    def longest_prefix(self, text: str, ids: Sequence[int], limit: int) -> tuple[str, tuple[int, ...]]:
        """As much of `text` as `limit` of its ids hold without splitting a character, and those ids."""
        limit = min(limit, len(ids))
        for n in range(limit, max(limit - 8, 0), -1):  # a character takes a handful of tokens at most
            part = self.decode(ids[:n])
            if part and text.startswith(part):
                return part, tuple(ids[:n])
        if self._data is None:
            return "", ()
        offsets = self._data.encode(text, add_special_tokens=False).offsets  # a normalizer changed the text
        n = next((n for n in range(limit, 0, -1) if n == len(ids) or offsets[n][0] >= offsets[n - 1][1]), 0)
        return (text[: offsets[n - 1][1]], tuple(ids[:n])) if n else ("", ())

    def stream(self) -> TextStream:
        """A decoder that takes ids one at a time."""
        return TextStream(self)

    def _loses(self, text: str, ids: Sequence[int]) -> bool:
        """Whether characters vanished. One with a normalizer, or an unknown-token, alters text by its own rules."""
        if self._data is None or self._data.normalizer is not None or self._has_unknown:
            return False
        decoded = self.decode(ids)
        return decoded != text and len(decoded) < len(text.lstrip())


class TextStream:
    """Decodes ids one at a time; pieces never split a character, and joined they are the text of all ids."""

    def __init__(self, codec: Codec) -> None:
        self._codec = codec
        self._ids: list[int] = []
        self._written = ""
        self._decoder = DecodeStream(skip_special_tokens=True) if codec._data is not None else None

    def push(self, token_id: int) -> str:
        """The text that `token_id` completes; empty while a character is unfinished."""
        self._ids.append(token_id)
        if self._decoder is not None and self._codec._data is not None:
            piece = self._decoder.step(self._codec._data, token_id) or ""
        else:
            text = self._codec.decode(self._ids, skip_special_tokens=True)
            piece = "" if text.endswith("�") else text[len(self._written) :]
        self._written += piece
        return piece

    def finish(self) -> str:
        """What is left: the bytes of a character that was never finished, decoded as they are."""
        text = self._codec.decode(self._ids, skip_special_tokens=True)
        rest = text[len(self._written) :] if text.startswith(self._written) else ""
        self._written += rest
        return rest


def pieces_until_stop(pieces: Iterable[str], stops: Sequence[str]) -> Iterator[tuple[str, bool]]:
    """Pass `pieces` on, holding back what may turn out to be a stop string; ends at the first one, which is left out.

    Yields:
        (text, stopped): `stopped` is True on the last item if a stop string was met.
    """
    held = ""
    for piece in pieces:
        held += piece
        found = min((at for stop in stops if (at := held.find(stop)) >= 0), default=-1)
        if found >= 0:
            yield held[:found], True
            return
        safe = len(held) - max((_overlap(held, stop) for stop in stops), default=0)
        yield held[:safe], False
        held = held[safe:]
    yield held, False


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of `text` that begins `stop`."""
    return next((n for n in range(min(len(text), len(stop) - 1), 0, -1) if text.endswith(stop[:n])), 0)


def _version_of(tokenizer: Any) -> tuple[Any, ...]:
    return template_text(tokenizer), tuple(sorted(tokenizer.added_tokens_decoder))


def template_text(tokenizer: Any) -> str:
    """Source of the chat template; empty where there is none."""
    template = getattr(tokenizer, "chat_template", None) or ""
    return "".join(template.values()) if isinstance(template, dict) else str(template)


def _is_control(token: Any, template: str) -> bool:
    """Special tokens, and added tokens such as a tool-call marker that carry meaning because the template writes them."""
    content = str(token.content if hasattr(token, "content") else token)
    return bool(getattr(token, "special", False)) or (bool(content.strip()) and content in template)


def _data_backend(backend: Tokenizer, template: str) -> Tokenizer:
    """A copy in which every control token is special, and special tokens in a text are split like any other string."""
    state = json.loads(backend.to_str())
    for token in state.get("added_tokens", []):
        content = token["content"]
        token["special"] = token["special"] or (bool(content.strip()) and content in template)
    copy = Tokenizer.from_str(json.dumps(state))
    copy.no_truncation()
    copy.no_padding()
    copy.encode_special_tokens = True
    return copy


def _first_lost(codec: Codec, text: str) -> str:
    for at, character in enumerate(text):
        assert codec._data is not None
        ids = codec._data.encode(character, add_special_tokens=False).ids
        if codec.decode(ids) != character:
            return f"character U+{ord(character):04X} (at {at:,})"
    return "part of the text"
