"""Training a restorer: the model with a compacted cache and restore slots learns to say what it says with all of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from accelerate import PartialState
from torch import Tensor, nn
from torch.nn import functional as F

from contextmem.backbone import Backbone
from contextmem.cache import Slots, SpanCache
from contextmem.codec import Codec
from contextmem.compaction import chosen, unseen_last
from contextmem.errors import InvalidInput
from contextmem.eviction import Evictor, Reading, evictor_named
from contextmem.eviction.base import N_SINK
from contextmem.framing import framing_of
from contextmem.identity import backbone_identity
from contextmem.ragged import Kept
from contextmem.restorer import RestoreKV
from contextmem.training.compacted import student_logits
from contextmem.training.layout import Layout
from contextmem.training.notes import Notes
from contextmem.training.passes import cache_of
from contextmem.training.plan import Plan, claim, curve
from contextmem.training.prose import TRAIN, prose_of
from contextmem.training.recall import RecallSample, RecallSource
from contextmem.training.samples.distractor_qa import questions_of
from contextmem.training.trainer import Samples, Stage, fit

__all__ = ["LONGEST_ANSWER", "RestorerObjective", "RestorerPlan", "answer_of", "train_restorer"]

LONGEST_ANSWER = 32  # tokens


@dataclass(frozen=True)
class RestorerPlan(Plan):
    """Everything that determines a training run, together with the model. Files hold the same names (TOML).

    Attributes:
        text: files or folders of background text; none: half of the topics of Python's language reference.
        qa: JSONL files with questions and documents; none leaves them out.
        start: folder or hub id of a restorer to train on, in place of a fresh one with `n`, `rank`, `alpha`, `targets`.
        n, rank, alpha: see `RestoreKV.untrained`.
        evictor: what chooses the slots that stay.
        targets: modules to adapt; none: the projections of attention and MLP.
        fixed_embeddings: whether the embeddings stay as they were drawn, and only the LoRA learns.
        steps: optimizer steps.
        contexts_per_step: contexts whose gradients are added up in one step.
        lr: peak learning rate of the LoRA matrices; that of the embeddings is four times as high.
        sizes: (fewest, most) tokens of a context.
        shares: (least, most) part of the pairs that is kept, restore slots included; where a budget keeps more than the
            most, the trained slots are left out (`RestorerConfig.largest_share`).
        pool: different contexts, which are kept prefilled and scored and come again and again; 0: every one is new. Costs
            about 40 kB a token for SmolLM2 in bfloat16, and saves prefill, scoring and the teacher's answers. Their shares
            change.
        save_steps: optimizer steps between checkpoints.
        seed: of initial weights and samples.
    """

    text: tuple[str, ...] = ()
    qa: tuple[str, ...] = ()
    start: str = ""
    n: int = 8
    rank: int = 8
    alpha: int = 16
    evictor: str = "kvzip"
    targets: tuple[str, ...] = ()
    fixed_embeddings: bool = False
    steps: int = 300
    contexts_per_step: int = 2
    lr: float = 5e-4
    sizes: tuple[int, int] = (320, 1024)
    shares: tuple[float, float] = (0.025, 0.25)
    pool: int = 0
    save_steps: int = 25
    seed: int = 42


@dataclass(frozen=True)
class _Prepared:
    """A context, prefilled and scored, and the teacher's answers with their logits."""

    full: SpanCache
    scores: Tensor
    taught: tuple[tuple[Sequence[int], Tensor], ...]


class RestorerObjective(nn.Module):
    """One module whose forward takes a sample and returns its loss, so that data-parallel wrappers work.

    The loss is the symmetric KL divergence, halved and averaged over answer tokens, between the model over the full cache
    and over the compacted one with restore slots (RestoreKV). Its parameters are the restorer's alone.

    Args:
        pool: contexts to keep prepared; they must come again to be of use.
        notes: folder in which scores and the teacher's answers are kept, for runs to come; None keeps none.
    """

    def __init__(
        self,
        backbone: Backbone,
        codec: Codec,
        restorer: RestoreKV,
        evictor: Evictor,
        *,
        pool: int = 0,
        notes: Path | None = None,
    ) -> None:
        super().__init__()
        self._pool: dict[RecallSample, _Prepared] = {}
        self._most = pool
        self.embeddings = restorer.embeddings
        adapter = restorer.adapter_for(backbone)
        self.adapter = adapter.module
        framing = framing_of(codec)
        about = (backbone_identity(backbone), str(backbone.dtype), repr(evictor), framing.answer_open, LONGEST_ANSWER)
        self._notes = Notes(notes, about) if notes is not None else None
        self._held = (backbone, codec, adapter, evictor)
        self.seen, self.kept, self.total = 0, 0, 0.0  # questions met and trained on, and their losses; for the log

    def forward(self, sample: RecallSample) -> dict[str, Tensor]:
        """The mean loss over the sample's questions."""
        backbone, prepared = self._held[0], self._prepared(replace(sample, share=0.0))
        full, restored = prepared.full, self._restored(prepared.full)
        kept = self._kept(prepared, sample.share)
        losses = []
        for question, (answer, taught) in zip(sample.questions, prepared.taught, strict=True):
            told = student_logits(backbone, kept, restored, full.next_position, question, answer)
            losses.append(symmetric_kl(taught.float(), told))
        self.seen += len(losses)
        self.kept += len(losses)
        self.total += sum(float(loss.detach()) for loss in losses)
        return {"loss": torch.stack(losses).mean()}

    @torch.no_grad()
    def _prepared(self, sample: RecallSample) -> _Prepared:
        if sample in self._pool:
            return self._pool[sample]
        backbone, codec, _, evictor = self._held
        full = backbone.new_cache()
        backbone.prefill(sample.context, full)
        noted = self._notes.read(sample) if self._notes is not None else None
        if noted is None:
            reading = Reading(backbone, codec, framing_of(codec), full, sample.context, 0)
            asked = zip(sample.questions, sample.drafts, strict=True)
            noted = (
                evictor.scores(reading).float(),
                tuple(answer_of(backbone, full, question, draft, sample.end) for question, draft in asked),
            )
            if self._notes is not None:
                self._notes.write(sample, *noted)
        scores, answers = noted
        pairs = zip(sample.questions, answers, strict=True)
        taught = tuple((answer, _told(backbone, full, question, answer)) for question, answer in pairs)
        scores = unseen_last(scores, full.positions, full.next_position, backbone.windows)
        prepared = _Prepared(full, scores, taught)
        if len(self._pool) < self._most:
            halved = tuple((ids, logits.half()) for ids, logits in taught)
            self._pool[sample] = prepared = _Prepared(full, scores, halved)
        return prepared

    def _kept(self, prepared: _Prepared, share: float) -> list[Kept]:
        """What a compaction to a share of the context keeps beside the restore slots."""
        full, scores = prepared.full, prepared.scores
        protected = torch.zeros(full.n_slots, dtype=torch.bool)
        n_opening = max(N_SINK, len(framing_of(self._held[1]).bare_opening))
        protected[:n_opening] = True
        n_free = max(0, int(share * (full.n_slots - n_opening)) - len(self.embeddings))
        keep = chosen(scores, protected, (n_opening + n_free) * scores.shape[0] * scores.shape[1])
        return [Kept.of(layer.keys, layer.values, keep[index]) for index, layer in enumerate(full.layers)]

    def _restored(self, full: SpanCache) -> Slots:
        """The restore slots, differentiable in embeddings and adapter."""
        backbone, _, adapter, _ = self._held
        n = len(self.embeddings)
        where = torch.arange(full.next_position, full.next_position + n, device=backbone.device)[None]
        with adapter.attached(backbone.core) as core:
            dtype = core.get_input_embeddings().weight.dtype
            cache = cache_of([(layer.keys, layer.values) for layer in full.layers])
            core(
                inputs_embeds=self.embeddings[None].to(dtype),
                position_ids=where,
                use_cache=True,
                logits_to_keep=1,
                **{backbone.cache_argument: cache},
            )
        return [(layer.keys[:, :, -n:], layer.values[:, :, -n:]) for layer in cache.layers]


def answer_of(
    backbone: Backbone, full: SpanCache, question: Sequence[int], draft: Sequence[int], end: int
) -> tuple[int, ...]:
    """The answer that the model gives with the full cache.

    `draft` is read at once; as far as the model would have said the same it is the answer, from there on it is decoded.
    """
    seen, draft = full.view(), list(draft[: LONGEST_ANSWER - 1])
    logits = backbone.forward((*question, *draft), seen, all_logits=True)[len(question) - 1 :]
    said = logits.argmax(-1).tolist()
    n = next((n for n, token in enumerate(draft) if said[n] != token or token == end), len(draft))
    ids = said[: n + 1]
    asked = seen.view(full.n_slots + len(question) + n)
    seen.release()
    while ids[-1] != end and len(ids) < LONGEST_ANSWER:
        ids.append(int(backbone.forward(ids[-1:], asked).argmax()))
    asked.release()
    return tuple(ids)


def _told(backbone: Backbone, full: SpanCache, question: Sequence[int], answer: Sequence[int]) -> Tensor:
    """Logits, (len(answer), vocab), that the full cache gives for every token of an answer."""
    seen = full.view()
    logits = backbone.forward((*question, *answer[:-1]), seen, all_logits=True)[len(question) - 1 :]
    seen.release()
    return logits


def symmetric_kl(one: Tensor, other: Tensor) -> Tensor:
    """Half the sum of both KL divergences, averaged over rows of logits."""
    p, q = one.log_softmax(-1), other.log_softmax(-1)
    forward = F.kl_div(q, p, log_target=True, reduction="batchmean")
    return (forward + F.kl_div(p, q, log_target=True, reduction="batchmean")) / 2


def train_restorer(
    model: Any,
    tokenizer: Any,
    plan: RestorerPlan,
    folder: str | Path,
    *,
    notes: str | Path | None = None,
    dtype: torch.dtype | str = torch.bfloat16,
) -> RestoreKV:
    """Train a restorer for `model` and save it in `folder`/restorer.

    A run that was stopped goes on from its last checkpoint when it is started again with the same plan and folder.

    Args:
        model: frozen here, cast to `dtype`, and moved to the device of this process. The restorer fits it in any type.
        notes: folder for the evictor's scores and the teacher's answers, which runs may share; default: `folder`/notes.
        dtype: of the frozen weights while training.

    Raises:
        InvalidInput: `folder` holds a run with another plan, or of another model.
    """
    folder = Path(folder)
    prose = prose_of(*plan.text, part=None if plan.text else TRAIN)
    source = RecallSource(prose, questions_of(*plan.qa) if plan.qa else (), plan.sizes, plan.shares)
    model.eval().requires_grad_(False)
    process = PartialState(cpu=not torch.cuda.is_available())
    backbone, codec = Backbone.of(model), Codec.of(tokenizer)
    restorer = _restorer(model, plan)
    before = restorer.config.training
    model.to(process.device, getattr(torch, dtype) if isinstance(dtype, str) else dtype)
    adapter = restorer.adapter_for(backbone)
    adapter.module.float().requires_grad_(True)
    restorer.embeddings.requires_grad_(not plan.fixed_embeddings)
    with process.main_process_first():
        claim(folder, plan, restorer.config.identity)
    objective = RestorerObjective(
        backbone, codec, restorer, evictor_named(plan.evictor), pool=plan.pool, notes=Path(notes or folder / "notes")
    )
    stage = Stage("run", plan.steps, plan.contexts_per_step, plan.lr, {source.name: 1.0}, {"embeddings": 4.0})
    layout = Layout(codec, framing_of(codec))
    if not layout.end:
        raise InvalidInput("the tokenizer's template ends a turn with no token of its own: answers would have no end.")
    n = plan.steps * plan.contexts_per_step * process.num_processes
    samples = Samples(
        layout, {source.name: source}, stage.mix, n, f"{plan.seed}-restorer", plan.pool, source.with_another_share
    )
    log = fit(objective, samples, stage, folder / stage.name, seed=plan.seed, save_steps=plan.save_steps)
    adapter.module.eval().requires_grad_(False)
    restorer.embeddings.requires_grad_(False)
    restorer.config = replace(restorer.config, training=plan.record(before), largest_share=plan.shares[1])
    if process.is_main_process:
        restorer.save_pretrained(folder / "restorer")
        curve({stage.name: log}, folder / "loss.png", "symmetric KL from the full cache, nats")
    return restorer


def _restorer(model: Any, plan: RestorerPlan) -> RestoreKV:
    if not plan.start:
        return RestoreKV.untrained(
            model,
            n=plan.n,
            rank=plan.rank,
            alpha=plan.alpha,
            evictor=plan.evictor,
            targets=plan.targets or None,
            seed=plan.seed,
        )
    restorer, backbone = RestoreKV.from_pretrained(plan.start), Backbone.of(model)
    restorer.adapter_for(backbone)
    restorer.config = replace(restorer.config, evictor=plan.evictor, identity=backbone_identity(backbone))
    return restorer
