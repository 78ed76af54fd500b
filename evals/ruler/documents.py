"""qa_1, qa_2: a question whose one or several documents stand among those of other questions. Needs files of questions."""

from __future__ import annotations

import random
from collections.abc import Sequence

from contextmem.evals.ruler.base import Case, Material, register
from contextmem.training.samples.distractor_qa import Question

__all__ = ["one_document", "several_documents"]


def one_document(material: Material, rng: random.Random, n_tokens: int) -> Case | None:
    """The answer stands in one document."""
    return _asked(material, rng, n_tokens, material.questions)


def several_documents(material: Material, rng: random.Random, n_tokens: int) -> Case | None:
    """The answer takes several documents."""
    return _asked(material, rng, n_tokens, material.hops)


def _asked(material: Material, rng: random.Random, n_tokens: int, pool: Sequence[Question]) -> Case | None:
    if not pool:
        return None
    one = rng.choice(pool)
    documents = [one.supporting, *one.others]
    left = n_tokens - sum(map(material.length, documents))
    others = [other.supporting for other in pool if one.answer.lower() not in other.supporting.lower()]
    while left > 0 and others:
        documents.append(others.pop(rng.randrange(len(others))))
        left -= material.length(documents[-1])
    while len(documents) > 1 and sum(map(material.length, documents)) > n_tokens:
        documents.pop()
    rng.shuffle(documents)
    context = "\n\n".join(f"Document {number}: {text}" for number, text in enumerate(documents, 1))
    question = f"\n\nAnswer from the documents above, with a few words only. {one.question}"
    return Case(context, question, "Answer:", (one.answer,), needs_all=False, longest=32)


register("qa_1", one_document)
register("qa_2", several_documents)
