"""The decode loop: greedy by default, sampling through transformers' logits processors, stopping through its criteria.

`generate` of transformers is never called on an edited cache: it slices its input by the number of cached slots.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from transformers import LogitsProcessorList, StoppingCriteriaList
from transformers.generation import logits_process as lp

from contextmem.backbone import Backbone
from contextmem.cache import SpanCache
from contextmem.codec import Codec, pieces_until_stop
from contextmem.errors import InvalidInput

__all__ = ["Decoding", "Generation", "decode"]

# name -> (processor, needs sampling, value that switches it off)
_PROCESSORS: dict[str, tuple[Callable[[Any], Any], bool, Any]] = {
    "repetition_penalty": (lp.RepetitionPenaltyLogitsProcessor, False, 1.0),
    "no_repeat_ngram_size": (lp.NoRepeatNGramLogitsProcessor, False, 0),
    "temperature": (lambda value: lp.TemperatureLogitsWarper(float(value)), True, 1.0),
    "top_k": (lp.TopKLogitsWarper, True, 0),
    "top_p": (lambda value: lp.TopPLogitsWarper(float(value)), True, 1.0),
    "min_p": (lambda value: lp.MinPLogitsWarper(float(value)), True, 0.0),
    "typical_p": (lambda value: lp.TypicalLogitsWarper(float(value)), True, 1.0),
}


@dataclass(frozen=True)
class Decoding:
    """How to choose tokens and when to stop.

    Attributes:
        max_new_tokens: most tokens generated.
        stop: strings that end the answer and are left out of it.
        do_sample: draw from the distribution instead of taking the most likely token.
        seed: seed of the draw; None draws a new one every time.
        processors: transformers' logits processors, in the order `generate` applies them.
        criteria: transformers' stopping criteria, given the generated ids.
    """

    max_new_tokens: int = 256
    stop: tuple[str, ...] = ()
    do_sample: bool = False
    seed: int | None = None
    processors: Any = field(default_factory=LogitsProcessorList)
    criteria: Any = field(default_factory=StoppingCriteriaList)

    @classmethod
    def of(
        cls,
        max_new_tokens: int = 256,
        stop: str | Sequence[str] | None = None,
        *,
        do_sample: bool | None = None,
        seed: int | None = None,
        logits_processor: Sequence[Any] | None = None,
        stopping_criteria: Sequence[Any] | None = None,
        **sampling: Any,
    ) -> Decoding:
        """From keyword arguments with the names of transformers' `generate`.

        A temperature, top_k, top_p, min_p or typical_p switches sampling on; temperature 0 is greedy.

        Raises:
            InvalidInput: an unknown name or a value out of range.
        """
        if not isinstance(max_new_tokens, int) or isinstance(max_new_tokens, bool) or max_new_tokens < 1:
            raise InvalidInput(f"max_new_tokens must be a positive integer, not {max_new_tokens!r}.")
        stops = (stop,) if isinstance(stop, str) else stop or ()
        if not isinstance(stops, Sequence) or not all(isinstance(s, str) and s for s in stops):
            raise InvalidInput("stop must be a non-empty string or a sequence of them.")
        if seed is not None and not isinstance(seed, int):
            raise InvalidInput(f"seed must be an integer or None, not {seed!r}.")
        if unknown := sorted(set(sampling) - set(_PROCESSORS)):
            raise InvalidInput(f"unknown argument {unknown[0]!r}; sampling takes {', '.join(sorted(_PROCESSORS))}.")
        given = {name: value for name, value in sampling.items() if value is not None}
        if given.get("temperature") == 0:
            given, do_sample = {k: v for k, v in given.items() if not _PROCESSORS[k][1]}, False
        if do_sample is None:
            do_sample = any(_PROCESSORS[name][1] for name in given)
        processors = LogitsProcessorList()
        for name, (make, needs_sampling, off) in _PROCESSORS.items():
            if name in given and given[name] != off and (do_sample or not needs_sampling):
                try:
                    processors.append(make(given[name]))
                except (ValueError, TypeError) as error:
                    raise InvalidInput(f"{name}={given[name]!r}: {error}") from None
        processors.extend(logits_processor or ())
        criteria = StoppingCriteriaList(stopping_criteria or ())
        return cls(max_new_tokens, tuple(stops), bool(do_sample), seed, processors, criteria)


@dataclass
class Generation:
    """What a decode loop produced so far.

    Attributes:
        token_ids: generated ids, without the end-of-turn token; those after a stop string are dropped.
        text: their text, up to the stop string.
        finish_reason: "stop" (end of turn, stop string or a stopping criterion), "length" (`max_new_tokens`), or
            "context_length" (no position left).
        n_cached: how many of `token_ids` the cache holds.
    """

    token_ids: list[int] = field(default_factory=list)
    text: str = ""
    finish_reason: str = "length"
    n_cached: int = 0


def decode(
    backbone: Backbone,
    codec: Codec,
    cache: SpanCache,
    logits: Tensor,
    decoding: Decoding,
    *,
    history: Sequence[int],
    end_ids: frozenset[int],
    limit: int,
    check: Callable[[], None],
) -> Iterator[tuple[str, Generation]]:
    """Generate after `logits` and yield pieces of text; joined they are the text of the last `Generation`.

    Args:
        cache: extended in place by the tokens that were fed back.
        logits: (vocab,) after the prompt.
        history: ids before the answer, for processors such as a repetition penalty.
        end_ids: ids that end the answer and are left out of it.
        limit: first position that no token of the answer may take.
        check: called before every token; raises to cancel.
    """
    result = Generation()
    tokens = _tokens(backbone, cache, logits, decoding, result, history, end_ids, limit, check)
    for piece, stopped in pieces_until_stop(_texts(codec, tokens), decoding.stop):
        result.text += piece
        if stopped:
            result.finish_reason = "stop"
            _drop_after_stop(codec, result)
        yield piece, result


def _texts(codec: Codec, tokens: Iterator[int]) -> Iterator[str]:
    stream = codec.stream()
    for token in tokens:
        yield stream.push(token)
    yield stream.finish()


def _tokens(
    backbone: Backbone,
    cache: SpanCache,
    logits: Tensor,
    decoding: Decoding,
    result: Generation,
    history: Sequence[int],
    end_ids: frozenset[int],
    limit: int,
    check: Callable[[], None],
) -> Iterator[int]:
    choose = _chooser(decoding, history)
    for count in range(decoding.max_new_tokens):
        check()
        if count:
            logits = backbone.forward(result.token_ids[-1:], cache)
            result.n_cached = count
        token = choose(logits, result.token_ids)
        if token in end_ids:
            result.finish_reason = "stop"
            return
        result.token_ids.append(token)
        yield token
        if decoding.criteria and bool(decoding.criteria(torch.tensor([result.token_ids]), None).all()):
            result.finish_reason = "stop"
            return
        if cache.next_position + 1 >= limit:
            result.finish_reason = "context_length"
            return


def _chooser(decoding: Decoding, history: Sequence[int]) -> Callable[[Tensor, list[int]], int]:
    if not decoding.processors and not decoding.do_sample:
        return lambda logits, _: int(logits.argmax())
    generator = torch.Generator()
    if decoding.seed is None:
        generator.seed()
    else:
        generator.manual_seed(decoding.seed)

    seen = torch.empty((1, len(history) + decoding.max_new_tokens), dtype=torch.long)
    seen[0, : len(history)] = torch.tensor(history)

    def choose(logits: Tensor, generated: list[int]) -> int:
        n_seen = len(history) + len(generated)
        if generated:
            seen[0, n_seen - 1] = generated[-1]
        scores = decoding.processors(seen[:, :n_seen].to(logits.device), logits[None])[0]
        if not decoding.do_sample:
            return int(scores.argmax())
        return int(torch.multinomial(scores.softmax(-1).cpu(), 1, generator=generator))

    return choose


def _drop_after_stop(codec: Codec, result: Generation) -> None:
    """Keep the shortest run of ids whose text covers the text before the stop string."""
    for n in range(len(result.token_ids) + 1):
        if codec.decode(result.token_ids[:n], skip_special_tokens=True).startswith(result.text):
            del result.token_ids[n:]
            break
    result.n_cached = min(result.n_cached, len(result.token_ids))
