"""ContextMemory: the one object a user holds. It orchestrates the other rooms and does no tensor work itself."""

from __future__ import annotations

import contextlib
import os
import secrets
import threading
import time
import warnings
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import count
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import networkx as nx
from torch import Tensor, nn

from contextmem import numerics, provenance, storage
from contextmem.answers import AnswerStream
from contextmem.arguments import check_choice, check_label, listed, plain_metadata
from contextmem.backbone import CHUNK, Backbone
from contextmem.budget import Budget, check_eviction
from contextmem.cache import SpanCache
from contextmem.codec import Codec
from contextmem.decoding import Decoding, Generation, decode
from contextmem.dialogue import Dialogue, end_ids, ids_of, span
from contextmem.eraser import KVEraser
from contextmem.errors import (
    Cancelled,
    DependentsWarning,
    DuplicateWarning,
    InvalidInput,
    KeyConflictWarning,
    MemoryBusy,
    MemoryClosed,
)
from contextmem.events import Event, logger, record_of
from contextmem.eviction import Evictor, evictor_named
from contextmem.framing import framing_of
from contextmem.gate import Gate
from contextmem.identity import check_identity, identity_of
from contextmem.ledger import KINDS, STATES, Ledger, Segment
from contextmem.loading import load_pretrained
from contextmem.meaning import Embed, Match, Meanings, embedder, same_words
from contextmem.progress import Progress, ProgressCallback
from contextmem.reports import Answer, Report, SegmentStats, Stats
from contextmem.restorer import RestoreKV
from contextmem.retraction import Edit, Method, Plan, check_cached, choose, method_named
from contextmem.state import State, check_room, extended, rebuilt
from contextmem.targets import Target, known, resolved
from contextmem.tiers import carried, check_budget, n_tokens_held, opened, recalled, shares_held, within
from contextmem.weights import eraser_option, restorer_option

__all__ = ["Checkpoint", "ContextMemory"]

_NEARLY_THE_SAME = 0.9  # cosine similarity of meanings
_SCORED_AT_ONCE = 64  # rows of logits held at a time; a row is as wide as the vocabulary


@dataclass(frozen=True)
class Checkpoint:
    """A state to go back to; made by `ContextMemory.checkpoint`."""

    state: State
    lineage: str


class ContextMemory:
    """Segments as addressable spans over one persistent KV cache.

    Every operation is all-or-nothing: it computes the next state and swaps it in at the end. An exception, a
    cancellation or running out of memory leaves the memory as it was. One call works on a memory at a time; a second one
    raises `MemoryBusy` at once. Reading (`segments`, `token_ids`, `stats`, ...) is always possible.

    Attributes:
        backbone: the model, shared by every memory on it.
        chunk_size: tokens a forward while prefilling; smaller needs less memory.
    """

    def __init__(
        self,
        model: nn.Module,
        tokenizer: Any,
        system: str | None = None,
        *,
        budget: int | str | None = None,
        reserve: int | None = None,
        evictor: str | Evictor = "kvzip",
        allocation: str = "global",
        full_tier: str | None = None,
        eraser: KVEraser | str | os.PathLike[str] | None = "auto",
        restorer: RestoreKV | str | os.PathLike[str] | None = "auto",
        embed: Embed | None = None,
        chunk_size: int = CHUNK,
    ) -> None:
        """
        Args:
            model: a transformers causal language model.
            tokenizer: its tokenizer.
            system: system text; prefilled at once. None leaves what the chat template itself puts there.
            budget: most tokens, or bytes as "512MB", that the active cache holds after any call. A context within it is not
                touched; one beyond it is compacted: every layer and head keeps the pairs that matter most. None: no limit.
            reserve: tokens of the budget that a compaction frees for questions and answers; default: a quarter of the
                budget, at most 256.
            evictor: what tells which pairs matter, a name in the registry or an `Evictor`.
            allocation: "global", "layer" or "uniform": what the pairs compete within.
            full_tier: "cpu" keeps everything that is evicted on the host and "disk" in a temporary file, so that later
                retractions edit it in place of reading the text again; None frees it.
            eraser: what `retract` erases with: "auto" finds the weights that were trained for this model, if there are any,
                when they are first needed; a `KVEraser`, a folder or a hub id names them; None switches erasing off.
            restorer: what makes up for evicted text with a few generated slots: "auto" finds the weights that were trained
                for this model and evictor, if there are any; a `RestoreKV`, a folder or a hub id names them; None: nothing.
            embed: from n texts to unit vectors, (n, width), for `find` and duplicates; None: all-MiniLM-L6-v2, loaded when
                it is first needed.
            chunk_size: tokens a forward while prefilling.

        Raises:
            UnsupportedEdit: the model cannot carry an editable cache.
            InvalidInput: an argument has the wrong type.
            ContextOverflow: the budget is too small; the message names the least that would do.
        """
        if not isinstance(model, nn.Module):
            raise InvalidInput(f"model must be a transformers model, not {type(model).__name__}.")
        if not callable(tokenizer):
            raise InvalidInput(f"tokenizer must be a transformers tokenizer, not {type(tokenizer).__name__}.")
        if not isinstance(chunk_size, int) or chunk_size < 1:
            raise InvalidInput(f"chunk_size must be a positive integer, not {chunk_size!r}.")
        self.model, self.tokenizer = model, tokenizer
        self.chunk_size = chunk_size
        self.backbone = Backbone.of(model)
        self._eraser = eraser_option(eraser, self.backbone)
        self._restorer = restorer_option(restorer)
        self._embed = embed
        self._eviction: dict[str, Any] = {"evictor": evictor, "allocation": allocation, "full_tier": full_tier}
        check_eviction(**self._eviction)
        self._budget = self._budget_of(budget, reserve)
        self._codec = Codec.of(tokenizer)
        self._framing = framing_of(self._codec)
        self._end_ids = end_ids(self.backbone, self._codec, self._framing)
        self._begin(State(Ledger(), self.backbone.new_cache(), 0), lineage=secrets.token_hex(4))
        if system is not None:
            self._tell(system)

    def _tell(self, system: str) -> None:
        """Prefill the system text."""
        spans = self._dialogue.system(system, self._codec.encode(system))
        with self._working():
            check_room(self.backbone, self.next_position, _n_tokens(spans), "the system text")
            if self._budget is not None:
                check_budget(self._budget, Ledger().added(spans))
            self._add(self._state, spans, None)
            self._log("append", spans, tokens_computed=self.seq_length)

    @classmethod
    def from_pretrained(
        cls, name: str | os.PathLike[str], *, dtype: Any = None, device: Any = None, **options: Any
    ) -> Self:
        """Load a model and its tokenizer and put a memory on them.

        Args:
            name: "smollm2-135m-instruct" (embedded, no network), a hub id, or a local directory.
            dtype, device: as in transformers; default: the checkpoint's type, the CPU.
            options: as for `ContextMemory`.

        Raises:
            ModelUnavailable: the model cannot be loaded; the message says how to get it.
        """
        model, tokenizer = load_pretrained(name, dtype=dtype, device=device)
        return cls(model, tokenizer, **options)

    def _begin(self, state: State, *, lineage: str, events: tuple[Event, ...] = ()) -> None:
        self._state = state
        self._lineage = lineage
        self._tag = secrets.token_hex(3)  # ids stay unique across memories, forks and reloads
        self._numbers = count(1)
        self._dialogue = Dialogue(self._framing, self._new_id)
        self._events = events
        self._meanings = Meanings()
        self._gate = Gate()
        self._cancel = threading.Event()
        self._editing = threading.RLock()  # held while an edit may write over slots in place
        self._closed = False

    # ------------------------------------------------------------------ reading

    @property
    def token_ids(self) -> tuple[int, ...]:
        """Ids of the live text in order, frames included."""
        return self._state.ledger.token_ids

    @property
    def seq_length(self) -> int:
        """Slots in use."""
        return self._state.n_slots

    @property
    def next_position(self) -> int:
        """Position of the next token; more than `seq_length` where an edit left a gap."""
        return self._state.cache.next_position

    @property
    def nbytes(self) -> int:
        """Bytes of cache capacity held."""
        return self._state.cache.nbytes

    @property
    def budget(self) -> Budget | None:
        """The limit on the active cache, see `set_budget`."""
        return self._budget

    @property
    def context_length(self) -> int:
        """Most positions the model takes."""
        return self.backbone.context_length

    def count_tokens(self, text: str, *, asked: bool = False) -> int:
        """Tokens that `text` takes when it is appended, or `asked`: with the frames that open the answer."""
        return len(self._codec.encode(text)) + (len(self._framing.answer_open) if asked else 0)

    @property
    def events(self) -> tuple[Event, ...]:
        """What happened, oldest first, without any text."""
        return self._events

    @property
    def graph(self) -> nx.DiGraph:
        """Provenance: edges from segments to those derived from them."""
        return provenance.graph(self._state.ledger)

    @property
    def past_key_values(self) -> SpanCache:
        """The KV as a transformers cache. What a forward adds to it is not part of this memory.

        After a compaction it is a `RaggedCache`, which only `backbone.forward` can attend to.
        """
        with self._editing:
            return self._state.cache.view()

    def segments(
        self,
        *,
        key: str | None = None,
        source: str | None = None,
        kind: str | None = None,
        state: str | None = None,
        metadata: Mapping[str, Any] | None = None,
        frames: bool = False,
    ) -> list[Segment]:
        """Segments in order.

        Without `key` and `state`, the live ones. With `key`, every version, retracted ones first. With `state`, those in
        that state.

        Args:
            metadata: pairs that a segment's metadata must contain.
            frames: also list template frames.
        """
        if state is not None and state not in STATES:
            raise InvalidInput(f"state must be one of {', '.join(STATES)}, not {state!r}.")
        ledger = self._state.ledger
        pool = (*ledger.gone, *ledger.spans) if key is not None or state is not None else ledger.spans
        if key is None and state is None:
            state = "live"
        chosen = ledger.select(pool, key=key, source=source, kind=kind, state=state, metadata=metadata)
        return [segment for segment in chosen if frames or kind == "frame" or segment.kind != "frame"]

    def find(self, text: str, top_k: int = 5, *, source: str | None = None, kind: str | None = None) -> list[Match]:
        """Live segments by meaning, the closest to `text` first. Look at them before you retract one.

        Args:
            text: a question, a claim, a few words.
            top_k: most matches.
            source, kind: filters.

        Raises:
            ModelUnavailable: there is no embedding model; the message says how to get one.
        """
        if not isinstance(text, str) or not text.strip():
            raise InvalidInput("find takes a text with words in it.")
        if not isinstance(top_k, int) or top_k < 1:
            raise InvalidInput(f"top_k must be a positive integer, not {top_k!r}.")
        pool = self.segments(source=source, kind=kind)
        return self._ranked(text, pool)[:top_k]

    def stats(self) -> Stats:
        """Tokens and bytes by segment."""
        state = self._state
        each, shares = state.cache.slot_nbytes, shares_held(state)
        rows = tuple(
            SegmentStats(s.id, s.kind, s.key, s.state, s.n_tokens, round(share * s.n_tokens * each), share)
            for s, share in zip(state.ledger.spans, shares, strict=True)
        )
        return Stats(
            segments=rows,
            n_tokens=state.n_slots,
            nbytes_used=sum(row.nbytes for row in rows),
            nbytes_held=state.cache.nbytes,
            next_position=state.cache.next_position,
            context_length=self.context_length,
            exact_tokens=0 if state.is_compacted else state.exact_slots,
            tokens_held=n_tokens_held(state),
            restore_slots=state.n_restore,
            budget=self._budget.n_tokens if self._budget is not None else None,
        )

    def frame_tools(self, call: tuple[str, str], result: tuple[str, str]) -> None:
        """Put a chat template's own markup round tool calls and results from now on, as frames that go with them.

        Args:
            call: what stands before and after a call, inside the assistant's turn.
            result: what stands before and after a result, inside the user turn.
        """
        ids = [self._codec.encode_frame(text) if text else () for text in (*call, *result)]
        names = ("call_open", "call_close", "result_open", "result_close")
        self._framing = replace(self._framing, **dict(zip(names, ids, strict=True)))
        self._dialogue = Dialogue(self._framing, self._new_id)

    # ------------------------------------------------------------------ adding

    def append(
        self,
        text: str,
        *,
        key: str | None = None,
        kind: str = "document",
        source: str | None = None,
        parents: Iterable[Segment | str] = (),
        pinned: bool = False,
        metadata: Mapping[str, Any] | None = None,
        on_conflict: str = "keep",
        on_duplicate: str = "keep",
        overflow: str = "error",
        progress: ProgressCallback | None = None,
    ) -> Segment:
        """Prefill `text` at the end of the context, as data in the open user turn.

        No separator is added. The kinds "assistant" and "tool_call" close the user turn, put the text in a turn of the
        assistant's and open the next user turn.

        Args:
            key: logical name, to find and replace it by.
            kind: document, tool_call, tool_result, user or assistant. Nothing appended can land in the system turn.
            source: where it came from.
            parents: segments this one was derived from.
            pinned: never evict it.
            metadata: JSON-compatible pairs.
            on_conflict: what to do when `key` is live already: "keep" both, with a `KeyConflictWarning` and an event, or
                "replace" the old version (retracted by `auto`, in the same step).
            on_duplicate: "keep" does not look for any; "warn" appends, with a `DuplicateWarning` and an event that name live
                segments of the same words or nearly the same meaning; "share" returns a live segment of the same words,
                kind, source and parents in place of prefilling them again, if its key is the one given or none is given
                and nothing would be lost (no other version to replace, no pin). Nearness of meaning is never enough to
                share: it does not tell 30 days from 14.
            overflow: when the text does not fit: "error", or "truncate" its end (`segment.truncated` says how much).
            progress: called with `ProgressEvent`s.

        Raises:
            ContextOverflow: the text exceeds what is left of the model's context length.
            InvalidInput, MemoryBusy, Cancelled, OutOfMemory: nothing was changed.
        """
        check_choice("kind", kind, [k for k in KINDS if k not in ("system", "frame", "restore")])
        check_choice("on_conflict", on_conflict, ("keep", "replace"))
        check_choice("on_duplicate", on_duplicate, ("keep", "warn", "share"))
        check_choice("overflow", overflow, ("error", "truncate"))
        check_label("key", key)
        check_label("source", source)
        plain = plain_metadata(metadata)
        ids = self._codec.encode(text)
        with self._working():
            state = self._state
            fields: dict[str, Any] = {
                "key": key,
                "source": source,
                "parents": tuple(known(state.ledger, parent).id for parent in listed(parents)),
                "pinned": bool(pinned),
                "metadata": plain,
            }
            rivals = state.ledger.select(state.ledger.content(), key=key, state="live") if key is not None else ()
            twins = self._twins(on_duplicate, text, kind, fields)
            if twins and on_duplicate == "share" and all(rival.id == twins[0].id for rival in rivals):
                self._log("share", twins[:1])
                return twins[0]
            if rivals and on_conflict == "replace":
                paired = provenance.paired(state.ledger, rivals)
                rivals = tuple(s for s in paired if s.id not in fields["parents"])  # the call of the new result stays
                self._warn_of_dependents(state, rivals)
                held = (
                    state.view()
                )  # another reader: the edit works on a copy, and `state` stays whole if the text fails
                edit = self._edit(state, rivals, step=self._step(None))
                method = choose(edit)[0]
                base = state
                excess = state.cache.next_position + len(ids) - self.context_length
                if method.name == "kveraser" and excess > 0:
                    method = method_named("recompute")  # what steers stays in use, and the new text needs all of it
                plan = method.plan(edit)
                state = self._edited(base, edit, method, plan).landed()
                held.cache.release()
            opening = self._dialogue.opened(state.ledger)
            segment = span(self._new_id(), kind, ids, text=text, **fields)
            spans = (*opening, *self._dialogue.placed(segment))
            excess = state.cache.next_position + _n_tokens(spans) - self.context_length
            if overflow == "truncate" and excess > 0:
                kept, kept_ids = self._codec.longest_prefix(text, ids, max(0, len(ids) - excess))
                cut = len(ids) - len(kept_ids)
                segment = span(segment.id, kind, kept_ids, text=kept, truncated=cut, **fields)
                spans = (*opening, *self._dialogue.placed(segment))
            check_room(self.backbone, state.cache.next_position, _n_tokens(spans), f"segment {segment.id!r}")
            if rivals and on_conflict == "keep":
                warnings.warn(
                    f"key {key!r} now has {len(rivals) + 1} live segments; pass on_conflict='replace' to keep the newest.",
                    KeyConflictWarning,
                    stacklevel=2,
                )
            if twins and on_duplicate == "warn":
                names = ", ".join(twin.id for twin in twins)
                warnings.warn(f"live segments say the same or nearly: {names}.", DuplicateWarning, stacklevel=2)
            self._add(state, spans, progress)
            if rivals and on_conflict == "replace":
                why = "replaced by a newer version"
                self._log(
                    "retract",
                    rivals,
                    method=plan.method,
                    guarantee=plan.guarantee,
                    reason=why,
                    tokens_computed=plan.tokens,
                )
            self._log("append", (segment,), tokens_computed=_n_tokens(spans))
            if rivals and on_conflict == "keep":
                self._log("conflict", (*rivals, segment))
            if twins and on_duplicate == "warn":
                self._log("duplicate", (*twins, segment))
            return self._state.ledger.by_id[segment.id]

    # ------------------------------------------------------------------ asking

    def ask(
        self,
        question: str,
        *,
        prefix: str = "",
        keep: bool = False,
        kind: str = "assistant",
        max_new_tokens: int = 256,
        stop: str | Sequence[str] | None = None,
        recall: str | None = None,
        progress: ProgressCallback | None = None,
        **sampling: Any,
    ) -> Answer:
        """Answer `question` from the context.

        Args:
            question: put after the context, in the open user turn; the assistant's turn is opened after it.
            prefix: the answer's given beginning.
            keep: whether question and answer become segments; otherwise the memory stays bit for bit as it was.
            kind: of a kept answer: assistant or tool_call.
            max_new_tokens: most tokens generated.
            stop: string or strings that end the answer and are left out of it.
            recall: "full_tier" answers a compacted memory's question from what it attends to most in the full tier, within
                the budget; what the memory holds stays as it was unless the turn is kept.
            sampling: `do_sample`, `temperature`, `top_k`, `top_p`, `min_p`, `typical_p`, `repetition_penalty`,
                `no_repeat_ngram_size`, `seed`, `logits_processor`, `stopping_criteria`, as in transformers. Greedy by
                default.

        Raises:
            ContextOverflow: the question exceeds what is left of the context length.
            InvalidInput, MemoryBusy, Cancelled, OutOfMemory: nothing was changed.
        """
        stream = self.stream(
            question,
            prefix=prefix,
            keep=keep,
            kind=kind,
            max_new_tokens=max_new_tokens,
            stop=stop,
            recall=recall,
            progress=progress,
            **sampling,
        )
        for _ in stream:
            pass
        return stream.answer

    def stream(
        self,
        question: str,
        *,
        prefix: str = "",
        keep: bool = False,
        kind: str = "assistant",
        max_new_tokens: int = 256,
        stop: str | Sequence[str] | None = None,
        recall: str | None = None,
        progress: ProgressCallback | None = None,
        **sampling: Any,
    ) -> AnswerStream:
        """As `ask`, piece by piece. Joined, the pieces are `stream.answer.text`; none splits a character.

        The memory is busy until the stream ends; one that is abandoned or closed leaves the memory as it was.
        """
        decoding = Decoding.of(max_new_tokens, stop, **sampling)
        asked, begun = (question, self._codec.encode(question)), (prefix, self._codec.encode(prefix))
        check_choice("recall", recall, (None, "full_tier"))
        check_choice("kind", kind, ("assistant", "tool_call"))
        return AnswerStream(self._answering(asked, begun, kind if keep else None, decoding, recall, progress))

    def _answering(
        self,
        question: tuple[str, tuple[int, ...]],
        prefix: tuple[str, tuple[int, ...]],
        kept_as: str | None,
        decoding: Decoding,
        recall: str | None,
        progress: ProgressCallback | None,
    ) -> Generator[str, None, Answer]:
        with self._working():
            base = self._state
            before = [*self._dialogue.opened(base.ledger)]
            if question[1]:
                before.append(span(self._new_id(), "user", question[1], text=question[0]))
            opened, closed = self._framing.round(kept_as or "assistant")
            prompt = [*ids_of(before), *opened, *prefix[1]]
            closing = len(closed) if kept_as is not None else 0
            check_room(self.backbone, base.cache.next_position, len(prompt) + 1 + closing, "the question")
            if recall is not None:
                base = self._recalled(base, tuple(prompt))
            with self._transient(base, prompt) as (cache, feed):
                reused = cache.n_slots
                with Progress("prefill", len(feed), reused, progress) as report:
                    logits = self.backbone.prefill(feed, cache, chunk=self.chunk_size, step=self._step(report))
                result = Generation()
                for piece, result in decode(  # noqa: B007  (the last one is the answer)
                    self.backbone,
                    self._codec,
                    cache,
                    logits,
                    decoding,
                    history=(*base.ledger.token_ids, *prompt),
                    end_ids=self._end_ids,
                    limit=self.context_length - closing,
                    check=self._check_cancelled,
                ):
                    if piece:
                        yield piece
                segment = self._keep(base, before, prefix[1], result, cache, kept_as) if kept_as is not None else None
            return Answer(
                text=result.text,
                token_ids=tuple(result.token_ids),
                finish_reason=result.finish_reason,
                segment=segment,
                prefix=prefix[0],
                tokens_reused=reused,
                tokens_prefilled=len(feed),
            )

    def _keep(
        self,
        base: State,
        before: Sequence[Segment],
        begun: tuple[int, ...],
        result: Generation,
        cache: SpanCache,
        kind: str,
    ) -> Segment:
        """Make segments of a turn; what the cache lacks of it is prefilled together with the closing frame."""
        ids = (*begun, *result.token_ids)
        answer = span(
            self._new_id(),
            kind,
            ids,
            text=self._codec.decode(ids, skip_special_tokens=True),
            parents=tuple(s.id for s in (*base.ledger.content(), *before) if s.kind != "frame" and s.state == "live"),
        )
        spans = (*before, *self._dialogue.placed(answer))
        ledger = base.ledger.added(spans)
        n_cached = ledger.n_slots - len(self._framing.round(kind)[1]) - len(result.token_ids) + result.n_cached
        cache.rewind(n_cached)
        if rest := ledger.token_ids[len(ledger.token_ids) - (ledger.n_slots - n_cached) :]:
            self.backbone.prefill(rest, cache, chunk=self.chunk_size, step=self._step(None))
        exact = ledger.n_slots if base.is_exact else base.exact_slots
        self._commit(replace(base, ledger=ledger, cache=cache.view(), exact_slots=exact))
        self._log("ask", spans, tokens_computed=ledger.n_slots - base.n_slots)
        return self._state.ledger.by_id[answer.id]

    def logits(self, text: str = "") -> Tensor:
        """Next-token logits, (vocab,) float32, after a transient continuation with `text`, put as `append` would put it."""
        ids = self._codec.encode(text)
        with self._working():
            base = self._state
            ids = (*ids_of(self._dialogue.opened(base.ledger)), *ids)
            check_room(self.backbone, base.cache.next_position, len(ids))
            with self._transient(base, ids) as (cache, feed):
                return self.backbone.prefill(feed, cache, chunk=self.chunk_size, step=self._step(None))

    def score(self, text: str, *, question: str | None = None, prefix: str = "") -> float:
        """Log-probability of `text`, in nats, summed over its tokens.

        Args:
            text: the continuation of the context; with `question`, of the answer to it.
            question: asked as by `ask`, transiently.
            prefix: the answer's given beginning.
        """
        ids = self._codec.encode(text)
        if not ids:
            return 0.0
        asked = self._codec.encode(question) if question is not None else ()
        begun = self._codec.encode(prefix)
        with self._working():
            base = self._state
            turn = self._framing.answer_open if question is not None else ()
            before = (*ids_of(self._dialogue.opened(base.ledger)), *asked, *turn, *begun)
            check_room(self.backbone, base.cache.next_position, len(before) + len(ids))
            with self._transient(base, before) as (cache, feed):
                first = self.backbone.prefill(feed, cache, chunk=self.chunk_size, step=self._step(None))
                if not before:
                    cache = base.cache.view()  # with the last token as it was read in its place
                total = float(first.double().log_softmax(-1)[ids[0]])
                for start in range(0, len(ids) - 1, _SCORED_AT_ONCE):
                    part = ids[start : min(start + _SCORED_AT_ONCE, len(ids) - 1)]
                    scores = self.backbone.forward(part, cache, all_logits=True).double().log_softmax(-1)
                    total += sum(float(scores[i, ids[start + i + 1]]) for i in range(len(part)))
                return total

    # ------------------------------------------------------------------ editing

    def retract(
        self,
        target: Target | None = None,
        *,
        method: str | Method = "auto",
        cascade: bool = False,
        reason: str | None = None,
        dry_run: bool = False,
        progress: ProgressCallback | None = None,
        key: str | None = None,
        source: str | None = None,
        kind: str | None = None,
        state: str | None = None,
        metadata: Mapping[str, Any] | None = None,
    ) -> Report:
        """Take segments out of the context. A tool call and its results go together: half of a pair takes the other along.

        Args:
            target: a segment, an id, a key, or a list of them; or None and at least one filter.
            method: "auto", a name in the registry, or a method object such as `SuffixRepair(share=0.3)`.
            cascade: also take what was derived from them; otherwise a `DependentsWarning` names what stays.
            reason: kept in the event log.
            dry_run: only plan: method, guarantee, tokens to recompute and an estimate of the time.
            key, source, kind, state, metadata: filters, all of which must match.

        Returns:
            The report. Retracting what is gone already changes nothing, and the report says so (method "none").

        Raises:
            SegmentNotFound: nothing answers to the target.
            UnsupportedEdit: the method cannot run on this model or these segments.
            InvalidInput: neither a target nor a filter was given (never read as "everything").
        """
        filters = {"key": key, "source": source, "kind": kind, "state": state, "metadata": metadata}
        requested = "auto" if method == "auto" else method_named(method).name
        check_label("reason", reason)
        with self._working():
            base = self._state
            found = resolved(base.ledger, target, filters)
            found = provenance.paired(base.ledger, found) or found
            targets = tuple(segment for segment in found if segment.state in ("live", "evicted"))
            derived = provenance.dependents(base.ledger, [segment.id for segment in found])
            if cascade and derived:
                ids = {segment.id for segment in targets} | set(derived)
                taken = provenance.paired(base.ledger, [s for s in base.ledger.content() if s.id in ids])
                targets = tuple(s for s in taken if s.state in ("live", "evicted"))
                derived = ()
            if not targets:
                why = f"already {found[0].state}: {', '.join(segment.id for segment in found)}"
                return Report("none", requested, why, "none", tokens_reused=base.n_slots, dry_run=dry_run)
            edit = self._edit(base, targets)
            chosen, why = choose(edit) if method == "auto" else (method_named(method), "as requested")
            if edit.state.is_compacted and chosen.name == "recompute":  # computes over what was kept otherwise
                edit = replace(edit, state=opened(self.backbone, base))
            check_cached(edit, chosen)
            plan = chosen.plan(edit)
            removes = plan.guarantee != "none"
            report = Report(
                method=plan.method,
                requested=requested,
                why=plan.why or why,
                guarantee=plan.guarantee,
                segments=tuple(segment.id for segment in targets) if removes else (),
                tokens_removed=edit.n_removed if removes else 0,
                tokens_recomputed=plan.tokens if removes else 0,
                tokens_reused=plan.reused,
                seconds=self._estimate(plan.tokens),
                dependents=derived,
                forced_by=targets[0].id if removes and plan.tokens else None,
                dry_run=dry_run,
            )
            if dry_run:
                return report
            if removes and not cascade:
                self._warn_of_dependents(base, targets)
            seconds = self._take(
                lambda step: self._edited(base, replace(edit, step=step), chosen, plan),
                plan.tokens,
                report.tokens_reused,
                progress,
            )
            report = replace(report, seconds=seconds)
            self._log(
                "retract" if removes else "instruct",
                targets,
                method=report.method,
                guarantee=report.guarantee,
                reason=reason,
                tokens_computed=plan.tokens,
            )
            return report

    def replace(self, target: Target, text: str, *, progress: ProgressCallback | None = None) -> Report:
        """Put `text` in the place of one live segment, which keeps its key, kind and source; what follows is recomputed.

        Raises:
            InvalidInput: the target is not exactly one live segment.
            ContextOverflow: the new text exceeds what is left of the context length.
        """
        ids = self._codec.encode(text)
        with self._working():
            base = opened(self.backbone, self._state)
            found = resolved(base.ledger, target, {})
            if len(found) != 1 or found[0].state != "live":
                raise InvalidInput(
                    f"replace takes exactly one live segment, this target names {len(found)}. Nothing was changed."
                )
            (old,) = found
            new = span(
                self._new_id(),
                old.kind,
                ids,
                text=text,
                key=old.key,
                source=old.source,
                pinned=old.pinned,
                metadata=old.metadata,
                parents=old.parents,
            )
            start = min(old.start, base.exact_slots)
            ledger = base.ledger.swapped(old.id, new).without_erased()
            check_room(self.backbone, ledger.n_slots - len(ids), len(ids), "the new text")
            n_recomputed = ledger.n_slots - start - len(ids)
            self._warn_of_dependents(base, (old,))
            seconds = self._take(
                lambda step: rebuilt(self.backbone, base, ledger, start, chunk=self.chunk_size, step=step),
                ledger.n_slots - start,
                start,
                progress,
            )
            self._log(
                "replace", (old, new), method="recompute", guarantee="exact", tokens_computed=ledger.n_slots - start
            )
            return Report(
                method="recompute",
                requested="replace",
                why=f"{n_recomputed:,} tokens after the new text have seen the old one",
                guarantee="exact",
                segments=(old.id,),
                tokens_removed=old.n_tokens,
                tokens_recomputed=n_recomputed,
                tokens_reused=start,
                seconds=seconds,
                dependents=provenance.dependents(base.ledger, [old.id]),
                forced_by=old.id if n_recomputed else None,
                segment=self._state.ledger.by_id[new.id],
            )

    def settle(self, *, progress: ProgressCallback | None = None) -> Report:
        """Replace every approximate edit by the exact state: recompute from the first one on. Closes position gaps."""
        with self._working():
            base = self._state
            if base.is_exact and base.cache.next_position == base.n_slots:
                return Report("none", "settle", "the memory is exact already", "exact", tokens_reused=base.n_slots)
            edit = self._edit(base, ())
            recompute = method_named("recompute")
            plan = recompute.plan(edit)
            seconds = self._take(
                lambda step: recompute.apply(replace(edit, step=step)), plan.tokens, plan.reused, progress
            )
            self._log("settle", (), method="recompute", guarantee="exact", tokens_computed=plan.tokens)
            return Report(
                method="recompute",
                requested="settle",
                why=f"{plan.tokens:,} tokens stood after the first approximate edit"
                + (", and the budget evicted some of the exact context again" if self._state.is_compacted else ""),
                guarantee="approximate" if self._state.is_compacted else "exact",
                tokens_recomputed=plan.tokens,
                tokens_reused=plan.reused,
                seconds=seconds,
            )

    def compact(self, *, progress: ProgressCallback | None = None) -> Report:
        """Evict down to the budget less its reserve now, in place of when a call next goes beyond the budget.

        Raises:
            InvalidInput: the memory has no budget.
        """
        with self._working():
            if self._budget is None:
                raise InvalidInput(
                    "this memory has no budget to compact to: set_budget(...) first. Nothing was changed."
                )
            before = n_tokens_held(self._state)
            seconds = self._evict(replace(self._budget, n_tokens=self._budget.target, reserve=0), progress)
            evicted = round(before - n_tokens_held(self._state))
            why = f"{self._budget.evictor.name} kept {n_tokens_held(self._state):,.0f} of {before:,.0f} tokens"
            guarantee = "approximate" if self._state.is_compacted else "exact"
            return Report("compact" if evicted else "none", "compact", why, guarantee, seconds=seconds)

    def rehydrate(self, question: str, *, prefix: str = "", progress: ProgressCallback | None = None) -> Report:
        """Bring back from the full tier what `question` attends to most, in the place of what it does not.

        The budget holds. What is held then depends on the question; the next compaction goes by the evictor again.

        Raises:
            UnsupportedEdit: something was evicted and there is no full tier.
        """
        asked, begun = self._codec.encode(question), self._codec.encode(prefix)
        with self._working():
            base, started = self._state, time.perf_counter()
            opening = ids_of(self._dialogue.opened(base.ledger))
            ids = (*opening, *asked, *self._framing.answer_open, *begun)
            check_room(self.backbone, base.cache.next_position, len(ids), "the question")
            after = self._recalled(base, ids)
            if after is base:
                return Report("none", "rehydrate", "nothing was evicted", "exact", tokens_reused=base.n_slots)
            self._commit(after, progress)
            self._log("rehydrate", ())
            seconds = time.perf_counter() - started
            return Report("rehydrate", "rehydrate", "by the attention of the question", "approximate", seconds=seconds)

    def set_budget(
        self, budget: int | str | None, reserve: int | None = None, *, progress: ProgressCallback | None = None
    ) -> None:
        """Change the limit on the active cache, see the constructor; evicts at once what is beyond it.

        Raises:
            InvalidInput: the budget makes no sense.
            ContextOverflow: it is less than what must be kept; the message names the least that would do.
        """
        with self._working():
            wanted = self._budget_of(budget, reserve)
            if wanted is not None:
                self._evict(wanted, progress)
            self._budget = wanted

    def verify(self, *, progress: ProgressCallback | None = None) -> numerics.Verification:
        """Measure the memory against a context rebuilt from its token log, with the numeric noise floor beside it.

        Costs a prefill of the whole context, and of its last 64 tokens in chunks of 1, 16 and 64.
        """
        with self._working():
            state = self._state
            probe = self._framing.answer_open or state.ledger.token_ids[-1:]
            if not probe:
                raise InvalidInput("the memory is empty: there is nothing to verify.")
            n_tokens = len(state.ledger.token_ids)
            with Progress("verify", n_tokens, 0, progress) as bar:
                return numerics.verified(self.backbone, state, probe, step=self._step(bar))

    # ------------------------------------------------------------------ going back, forking

    def fork(self, *, system: str | None = None) -> Self:
        """An independent memory with the same content. Copies nothing; whichever writes first past the other copies.

        Args:
            system: a system text for the fork of an empty memory.

        Raises:
            InvalidInput: this memory is not empty, so that a system text can no longer come first.
        """
        with self._working():
            if system is not None and self._state.ledger.spans:
                raise InvalidInput("a system text comes first: only the fork of an empty memory can be given one.")
            other = object.__new__(type(self))
            other.__dict__.update(self.__dict__)
            other._begin(self._state.view(), lineage=self._lineage, events=self._events)
        if system is not None:
            other._tell(system)
        return other

    def checkpoint(self) -> Checkpoint:
        """The present state, to `restore`. Copies nothing."""
        with self._working():
            return Checkpoint(self._state.view(), self._lineage)

    def restore(self, checkpoint: Checkpoint) -> None:
        """Go back: the checkpoint replaces everything, and what came after it is not reachable any more.

        Raises:
            InvalidInput: the checkpoint belongs to another memory.
        """
        if not isinstance(checkpoint, Checkpoint) or checkpoint.lineage != self._lineage:
            raise InvalidInput("this checkpoint belongs to another memory. Nothing was changed.")
        with self._working():
            self._commit(checkpoint.state.view())
            self._log("restore", ())

    @contextlib.contextmanager
    def transaction(self) -> Iterator[Checkpoint]:
        """All the calls inside, or none: an exception takes the memory back to what it was before, which is yielded.

        Calls of other threads are refused meanwhile. Streams that are begun inside must end inside. Transactions nest.

        Raises:
            MemoryBusy: another call is working on this memory, or another thread is in a transaction.
        """
        with self._gate.reserved():
            mark, before = self.checkpoint(), self._state
            try:
                yield mark
            except BaseException:
                if self._state is not before and not self._closed:
                    self.restore(mark)
                raise

    # ------------------------------------------------------------------ saving

    def save(self, path: str | os.PathLike[str]) -> Path:
        """Write the memory to one file (safetensors with a JSON manifest), atomically, readable by its owner only.

        Raises:
            StorageError: the file cannot be written; one that was there is as it was.
        """
        with self._working():
            name = getattr(self.backbone.core, "name_or_path", None) or None
            identity = identity_of(self.backbone, self._codec)
            options = {
                "chunk_size": self.chunk_size,
                **self._eviction,
                "evictor": evictor_named(self._eviction["evictor"]).name,
            }
            if self._budget is not None:
                options |= {"budget": self._budget.n_tokens, "reserve": self._budget.reserve}
            storage.write(path, storage.Saved(name, identity, options, self._state, self._events))
            return Path(path)

    @classmethod
    def load(
        cls, path: str | os.PathLike[str], model: nn.Module | None = None, tokenizer: Any = None, **options: Any
    ) -> Self:
        """A memory from a file that `save` wrote; nothing is encoded again.

        Args:
            model, tokenizer: what it was made with; without them, they are loaded by the name in the file.
            options: as for `from_pretrained`, when the model is loaded here.

        Raises:
            StorageError: the file is missing, cut off, altered, or of another format version.
            IdentityMismatch: it was made with another model, tokenizer, template, dtype or RoPE.
        """
        manifest = storage.read_manifest(path)
        if (model is None) != (tokenizer is None):
            raise InvalidInput("give both model and tokenizer, or neither to load them by the name in the file.")
        kept = {"chunk_size", "reserve"} if "budget" in options else {"chunk_size"}
        options = {name: value for name, value in manifest["options"].items() if name not in kept} | options
        if model is None:
            options.setdefault("dtype", manifest["identity"]["dtype"])
            memory = cls.from_pretrained(manifest["model"] or "", **options)
        else:
            memory = cls(model, tokenizer, **options)
        check_identity(manifest["identity"], identity_of(memory.backbone, memory._codec), f"the file {os.fspath(path)}")
        saved = storage.read(path, memory.backbone.n_layers, memory.backbone.device)
        memory.chunk_size = options.get("chunk_size", saved.options["chunk_size"])
        memory._begin(saved.state, lineage=secrets.token_hex(4), events=saved.events)
        memory._log("load", ())
        if memory._budget is not None:
            memory._evict(memory._budget, None)
        return memory

    # ------------------------------------------------------------------ control

    def cancel(self) -> None:
        """Make the call that is working on this memory, in another thread, raise `Cancelled` at its next step."""
        self._cancel.set()

    def close(self) -> None:
        """Release every tensor. Later operations raise `MemoryClosed`, reading shows an empty memory; twice is once."""
        if self._closed:
            return
        with self._working():
            self._closed = True
            self._state.cache.release()
            if self._state.full is not None:
                self._state.full.release()
            self._state = State(Ledger(), self.backbone.new_cache(), 0)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with contextlib.suppress(MemoryBusy) if error is not None else contextlib.nullcontext():
            self.close()

    def __repr__(self) -> str:
        return (
            f"{type(self).__name__}({type(self.backbone.core).__name__}, {len(self.segments())} segments, "
            f"{self.seq_length:,} of {self.context_length:,} tokens)"
        )

    # ------------------------------------------------------------------ the rooms, called in order

    @contextlib.contextmanager
    def _working(self) -> Iterator[None]:
        with self._gate.passed():
            if self._closed:
                raise MemoryClosed("this memory was closed.")
            self._cancel.clear()
            yield

    def _take(
        self, compute: Callable[[Any], State], n_tokens: int, reused: int, progress: ProgressCallback | None
    ) -> float:
        """Compute the next state of an edit and take it over; returns seconds."""
        started = time.perf_counter()
        with self._editing:
            with Progress("recompute", n_tokens, reused, progress) as bar:
                next_state = compute(self._step(bar))
            self._note_speed(n_tokens, time.perf_counter() - started)
            self._commit(next_state, progress)
        return time.perf_counter() - started

    def _commit(self, state: State, progress: ProgressCallback | None = None) -> None:
        state.check()
        if self._budget is None or n_tokens_held(state) <= self._budget.n_tokens:
            self._state = state.landed()
            return
        with self._held():
            self._state = self._within(self._budget, state.landed(), progress)

    @contextlib.contextmanager
    def _held(self) -> Iterator[None]:
        """Another reader of the present state: what is written inside lands in a copy, and a failure harms nothing."""
        held = self._state.view()
        yield
        held.cache.release()

    def _within(self, budget: Budget, state: State, progress: ProgressCallback | None) -> State:
        """`state` with what is beyond `budget` evicted, and an event if there was anything."""
        with Progress("compact", state.n_slots, 0, progress) as bar:
            after = within(
                self.backbone,
                self._codec,
                self._framing,
                budget,
                state,
                self._restorer(self.backbone, budget.evictor.name),
                chunk=self.chunk_size,
                step=self._step(bar),
            )
        if after is not state:
            after.check()
            self._log("evict", (), method=budget.evictor.name)
        return after

    def _recalled(self, state: State, question: tuple[int, ...]) -> State:
        if not state.is_compacted:
            return state
        if self._budget is None:
            raise InvalidInput(
                "this memory has no budget any more: settle() brings everything back. Nothing was changed."
            )
        step = self._step(None)
        return recalled(self.backbone, self._codec, self._framing, self._budget, state, question, step)

    def _evict(self, budget: Budget, progress: ProgressCallback | None) -> float:
        started = time.perf_counter()
        self._state = self._within(budget, self._state, progress)
        return time.perf_counter() - started

    def _budget_of(self, budget: int | str | None, reserve: int | None) -> Budget | None:
        if budget is None:
            return None
        wanted = Budget.of(self.backbone, budget, reserve=reserve, **self._eviction)
        check_budget(wanted, Ledger())
        return wanted

    def _log(self, operation: str, segments: Iterable[Segment], **details: Any) -> None:
        records = tuple(record_of(s) for s in segments if s.kind != "frame")
        event = Event(len(self._events) + 1, operation, records, **details)
        self._events = (*self._events, event)
        logger.info("%s %s %s", operation, ", ".join(record.id for record in records), event.method or "")

    def _warn_of_dependents(self, state: State, gone: Sequence[Segment]) -> None:
        """Before anything changes, so that a warning turned into an error changes nothing."""
        derived = provenance.dependents(state.ledger, [segment.id for segment in gone])
        if derived:
            warnings.warn(
                f"{len(derived)} live segments were derived from what is retracted and stay: {', '.join(derived)}. "
                f"Retract them too, by id or with cascade=True.",
                DependentsWarning,
                stacklevel=3,
            )

    def _twins(self, on_duplicate: str, text: str, kind: str, fields: Mapping[str, Any]) -> tuple[Segment, ...]:
        """Live segments that `text` would repeat, in the sense of `append`'s argument."""
        if on_duplicate == "keep" or not text.strip():
            return ()
        live = self.segments(kind=kind)
        same = same_words(text, live)
        if on_duplicate == "share":
            alike = (twin for twin in same if (twin.source, twin.parents) == (fields["source"], fields["parents"]))
            return tuple(t for t in alike if fields["key"] in (None, t.key) and t.pinned >= fields["pinned"])
        close = self._ranked(text, live)
        return (*same, *(m.segment for m in close if m.score >= _NEARLY_THE_SAME and m.segment not in same))

    def _ranked(self, text: str, pool: Sequence[Segment]) -> list[Match]:
        live = {segment.id for segment in self.segments()}
        return self._meanings.ranked(self._embed or embedder(), text, pool, live)

    def _step(self, report: Progress | None) -> Any:
        def step(done: int) -> None:
            self._check_cancelled()
            if report is not None:
                report(done)

        return step

    def _check_cancelled(self) -> None:
        if self._cancel.is_set():
            raise Cancelled("the call was cancelled. Nothing was changed.")

    def _new_id(self) -> str:
        return f"{self._tag}-{next(self._numbers)}"

    def _edit(self, state: State, targets: tuple[Segment, ...], step: Any = None) -> Edit:
        """The edit of a state, or of the dense one that a compacted one goes back to unless only its tail goes."""
        edit = self._edit_of(state, targets, step)
        if state.is_compacted and not (targets and edit.is_tail and edit.start > state.cache.offset):
            return replace(edit, state=opened(self.backbone, state))
        return edit

    def _edited(self, base: State, edit: Edit, method: Method, plan: Plan) -> State:
        after = method.apply(edit)
        if edit.state.is_compacted:  # its tail was cut
            scores = base.scores[..., : after.n_slots] if base.scores is not None else None
            return replace(after, full=base.full, scores=scores)
        return after if plan.guarantee == "exact" else carried(base, after)

    def _edit_of(self, state: State, targets: tuple[Segment, ...], step: Any) -> Edit:
        return Edit(
            state=state,
            targets=targets,
            frames=state.ledger.going_with(targets),
            backbone=self.backbone,
            codec=self._codec,
            new_id=self._new_id,
            chunk=self.chunk_size,
            eraser=self._eraser,
            step=step,
        )

    def _add(self, state: State, spans: Sequence[Segment], progress: ProgressCallback | None) -> None:
        n_new = _n_tokens(spans)
        with Progress("prefill", n_new, state.n_slots, progress) as report:
            step = self._step(report)
            next_state = extended(self.backbone, state, spans, chunk=self.chunk_size, step=step)
        self._commit(next_state, progress)

    @contextlib.contextmanager
    def _transient(self, base: State, ids: Sequence[int]) -> Iterator[tuple[SpanCache, Sequence[int]]]:
        """A cache to continue in without touching `base`, and what to feed: the last token again if nothing is new."""
        if ids:
            cache, feed = base.cache.view(), ids
        elif base.n_slots and base.ledger.spans[-1].state == "live":
            cache, feed = base.cache.view(), base.ledger.token_ids[-1:]
            cache.rewind(base.n_slots - 1)
        else:
            raise InvalidInput("there is no live text to continue from: append or ask something. Nothing was changed.")
        try:
            yield cache, feed
        finally:
            if ids and self._state is base and not base.is_compacted:  # the room it needed would count as held
                base.cache.adopt(cache)  # what the answer had to grow is there for the next one
            cache.release()

    def _estimate(self, n_tokens: int) -> float | None:
        rate = self.backbone.tokens_per_second
        return n_tokens / rate if rate else None if n_tokens else 0.0

    def _note_speed(self, n_tokens: int, seconds: float | None) -> None:
        if n_tokens >= 32 and seconds:
            self.backbone.tokens_per_second = n_tokens / seconds


def _n_tokens(spans: Iterable[Segment]) -> int:
    return sum(new.n_tokens for new in spans)
