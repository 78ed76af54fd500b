"""`contextmem eval rag`: queries over a real vector index, and passages with a wrong answer that are retracted again."""

from __future__ import annotations

import random
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import mean
from typing import Any

from llama_index.core import Document, VectorStoreIndex
from llama_index.core.schema import QueryBundle

from contextmem.errors import InvalidInput
from contextmem.evals.distractor_qa.scoring import contains
from contextmem.evals.published import published
from contextmem.evals.rows import RowLog
from contextmem.evals.subject import Subject
from contextmem.integrations.llama_index import ContextMemoryQueryEngine, SentenceEmbedding
from contextmem.training.samples.distractor_qa import Question, questions_of

__all__ = ["run"]

_LONGEST_ANSWER = 40
_PLANTED = "planted"


def run(
    folder: Path,
    qa: Sequence[str | Path],
    *,
    model_name: str = "smollm2-135m-instruct",
    n_passages: int = 220,
    n_queries: int = 20,
    n_planted: int = 40,
    top_k: int = 3,
    seed: int = 0,
    command: str = "contextmem eval rag",
    say: Callable[[str], None] = print,
) -> str:
    """Measure what is missing in `folder`/rows.jsonl and write the report; returns the table.

    Args:
        folder: where rows, metrics and table go; a run resumes from its rows.
        qa: JSONL files with questions and their documents, or Hugging Face datasets.
        n_passages: passages in the index, at least; those of the first questions.
        n_queries: questions asked, one after the other over the same memory.
        n_planted: questions for which a passage with another answer is planted; each begins with an empty memory.
        top_k: passages retrieved for each.

    Raises:
        InvalidInput: there are fewer passages or questions.
    """
    asked, passages = _corpus(questions_of(*qa), n_passages, max(n_queries, n_planted))
    subject = Subject.loaded(model_name)
    settings = subject.identity | {
        "qa": [Path(path).name for path in qa],
        "n_passages": n_passages,
        "top_k": top_k,
        "seed": seed,
    }
    log = RowLog(
        folder / "rows.jsonl", {**settings, "n_queries": n_queries, "n_planted": n_planted}, subject.variants(_PLANTED)
    )
    documents = [Document(text=text, id_=f"passage-{number}") for number, text in enumerate(passages)]
    index = VectorStoreIndex.from_documents(documents, embed_model=SentenceEmbedding())

    def new_engine() -> ContextMemoryQueryEngine:
        memory, retriever = subject.memory(), index.as_retriever(similarity_top_k=top_k)
        return ContextMemoryQueryEngine(retriever, memory, max_new_tokens=_LONGEST_ANSWER, on_full="forget")

    if not all(log.has(str(n), method) for n in range(n_queries) for method in ("one memory", "a new one")):
        lasting = new_engine()
        for number, question in enumerate(asked[:n_queries]):
            for method, engine in (("one memory", lasting), ("a new one", new_engine())):
                _queried(engine, question, str(number), method, log)
            say(f"query {number + 1} of {n_queries}")
    for number in range(n_planted):
        if not log.has(f"{_PLANTED}-{number}", _PLANTED):
            _plant(index, new_engine, asked, number, random.Random(f"{seed}-{number}"), log)
            say(f"planted {number + 1} of {n_planted}")
    return _report(log, folder, command, seed, subject.described, len(passages))


def _corpus(questions: Sequence[Question], n_passages: int, n_queries: int) -> tuple[Sequence[Question], Sequence[str]]:
    """The passages of the first questions, and questions about the same article one after the other."""
    passages: dict[str, None] = {}
    for number, question in enumerate(questions):
        passages |= dict.fromkeys((question.supporting, *question.others))
        if len(passages) >= n_passages and number + 1 >= n_queries:
            by_article = sorted(questions[: number + 1], key=lambda q: q.supporting.partition("\n")[0])
            return by_article[:n_queries], tuple(passages)
    raise InvalidInput(f"these files hold {len(passages)} passages and {len(questions)} questions.")


def _queried(engine: ContextMemoryQueryEngine, question: Question, name: str, method: str, log: RowLog) -> None:
    started = time.perf_counter()
    response = engine.query(question.question)
    seconds = time.perf_counter() - started
    counts = {key: response.metadata[key] for key in ("tokens_reused", "tokens_prefilled", "prompt_tokens")}
    nodes = {f"n_{key}": len(response.metadata[key]) for key in ("new", "resident", "forgotten")}
    if not log.has(name, method):
        right = int(contains(response.response, [question.answer]))
        log.add(name, method, score=right, seconds=round(seconds, 3), **counts, **nodes)


def _plant(
    index: VectorStoreIndex,
    new_engine: Callable[[], ContextMemoryQueryEngine],
    asked: Sequence[Question],
    number: int,
    rng: random.Random,
    log: RowLog,
) -> None:
    """Put a twin of the supporting passage with another answer into the index; ask, retract it, ask again, twice.

    Without it means: from the other passages that were retrieved beside it, as if it had never come.
    """
    question = asked[number]
    wrong = _other_answer(question, asked, rng)
    index.insert(Document(text=question.supporting.replace(question.answer, wrong), id_=_PLANTED))
    try:
        fresh = new_engine()  # a retriever knows the nodes that were there when it was made
        bundle = QueryBundle(question.question)
        others = [node for node in fresh.retrieve(bundle) if node.node.ref_doc_id != _PLANTED]
        clean = new_engine().synthesize(bundle, others).response
        misled = fresh.query(question.question)
        is_retrieved = _PLANTED in [source.node.ref_doc_id for source in misled.source_nodes]
        seconds, after, again = 0.0, misled, misled
        method = None
        if is_retrieved:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                report = fresh.retract(ref_doc_id=_PLANTED)
            seconds, method = report.seconds or 0.0, report.method
            after, again = fresh.query(question.question), fresh.query(question.question)
    finally:
        index.delete_ref_doc(_PLANTED, delete_from_docstore=True)
    log.add(
        f"{_PLANTED}-{number}",
        _PLANTED,
        score=int(contains(after.response, [question.answer])),
        seconds=round(seconds, 3),
        retrieved=int(is_retrieved),
        right_without=int(contains(clean, [question.answer])),
        right_with=int(contains(misled.response, [question.answer])),
        wrong_with=int(contains(misled.response, [wrong])),
        wrong_after=int(contains(after.response, [wrong])),
        same_again=int(again.response == after.response),
        put_in_again=len(again.metadata["new"]) if is_retrieved else 0,
        erased_by=method,
    )


def _other_answer(question: Question, asked: Sequence[Question], rng: random.Random) -> str:
    others = [q.answer for q in asked if q.answer.lower() not in question.supporting.lower()]
    alike = [a for a in others if any(map(str.isdigit, a)) == any(map(str.isdigit, question.answer))]
    return rng.choice(alike or others)


def _report(log: RowLog, folder: Path, command: str, seed: int, subject: Mapping[str, str], n_passages: int) -> str:
    lines = [
        f"A `VectorStoreIndex` over {n_passages} passages; questions about one article come one after the other.",
        "`one memory`: nodes stay prefilled; when the context is full, those retrieved longest ago are forgotten.",
        "`a new one`: a new memory for every query.",
        "",
        "| | queries | tokens prefilled a query | tokens reused | prompt tokens | nodes already there | seconds | right |",
        "|---|---|---|---|---|---|---|---|",
    ]
    figures: dict[str, Any] = {}
    for method in ("one memory", "a new one"):
        rows = list(log.of(method=method))
        if not rows:
            continue
        named = ("tokens_prefilled", "tokens_reused", "prompt_tokens", "n_resident", "seconds", "score")
        figures[method] = {name: mean(row[name] for row in rows) for name in named} | {"n": len(rows)}
        f = figures[method]
        lines.append(
            f"| {method} | {f['n']} | {f['tokens_prefilled']:.0f} | {f['tokens_reused']:.0f} | {f['prompt_tokens']:.0f} "
            f"| {f['n_resident']:.2f} | {f['seconds']:.2f} | {f['score']:.2f} |"
        )
    rows = list(log.of(method=_PLANTED))
    right = [row for row in rows if row["right_without"] and row["retrieved"]]
    flipped = [row for row in right if not row["right_with"]]
    figures[_PLANTED] = {
        "n": len(rows),
        "retrieved": sum(row["retrieved"] for row in rows),
        "right_without": len(right),
        "flipped": len(flipped),
        "flipped_back": sum(row["score"] for row in flipped),
        "wrong_after": sum(row["wrong_after"] for row in flipped),
        "put_in_again": sum(row["put_in_again"] for row in rows),
        "same_again": sum(row["same_again"] for row in rows),
    }
    heads = ("questions", "right without it", "wrong with it", "right again", "still its answer", "put in again")
    p = figures[_PLANTED]
    cells = [f"{p['retrieved']} of {p['n']}"]
    cells += [str(p[name]) for name in ("right_without", "flipped", "flipped_back", "wrong_after", "put_in_again")]
    lines += [
        "",
        "## A passage with another answer, retracted",
        "",
        "The supporting passage's twin with the answer to another question is put into the index. Of the questions whose",
        "twin was retrieved: how many are answered rightly from the other passages alone, how many of those wrongly with",
        "it, and of these how many rightly again after `engine.retract`, or still with the twin's answer; and nodes that",
        "the same query put in again.",
        "",
        "| " + " | ".join(heads) + " |",
        "|" + "---|" * len(heads),
        "| " + " | ".join(cells) + " |",
    ]
    table: str = published(
        folder,
        "A LlamaIndex query engine over one memory",
        lines,
        figures,
        command=command,
        seed=seed,
        subject=subject,
    )
    return table
