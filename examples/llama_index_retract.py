"""A LlamaIndex query engine over one memory: a misleading passage is retracted and stays out."""

from llama_index.core import Document, VectorStoreIndex

from contextmem import ContextMemory
from contextmem.integrations.llama_index import ContextMemoryQueryEngine, SentenceEmbedding

DOCUMENTS = {
    "almanac": "From the county almanac. The yearly fee of the Larkspur library is 35 dollars. Cards are made at the desk, "
    "and children read free.",
    "letter": "From a visitor's letter. The yearly fee of the Larkspur library is 90 dollars. It is described in the guide.",
    "history": "The Larkspur library was built in 1921 from local stone. Its reading room looks over the river, "
    "and its tower holds the old town records.",
    "mill": "The old mill at Larkspur grinds flour on the first Sunday of every month. Visitors may watch.",
    "market": "The market opens at seven. Cheese, bread and honey come from the farms around.",
}
QUESTION = "What is the yearly fee of the Larkspur library?"


def main() -> None:
    index = VectorStoreIndex.from_documents(
        [Document(text=text, id_=name) for name, text in DOCUMENTS.items()], embed_model=SentenceEmbedding()
    )
    memory = ContextMemory.from_pretrained("smollm2-135m-instruct")
    engine = ContextMemoryQueryEngine(index.as_retriever(similarity_top_k=3), memory, max_new_tokens=24)

    response = engine.query(QUESTION)
    print("before: ", response.response)
    print("sources:", ", ".join(source.node.ref_doc_id for source in response.source_nodes))

    report = engine.retract(ref_doc_id="letter", reason="a visitor's mistake")
    print(f"retracted by {report.method}: {report.tokens_removed} tokens, {report.guarantee}")

    response = engine.query(QUESTION)
    counts = response.metadata
    print("after:  ", response.response)
    print(f"prefilled {counts['tokens_prefilled']} tokens, reused {counts['tokens_reused']}")
    print("in the index still, and kept out:", len(counts["retracted"]))


if __name__ == "__main__":
    main()
