"""An agent's memory that never holds more than its budget."""

from contextmem import ContextMemory

NOTES = [f"Note {n}: shelf {n} of the store room holds {10 + 7 * n} boxes, counted on day {n}.\n" for n in range(24)]


def main() -> None:
    memory = ContextMemory.from_pretrained("smollm2-135m-instruct", budget=400)
    memory.append("The code of the wine cellar is 4821.\n", pinned=True)  # pinned: never evicted
    for note in NOTES:
        memory.append(note, source="inventory")
    stats = memory.stats()
    print(f"{stats.n_tokens:,} tokens read, {stats.tokens_held:,.0f} held, budget {stats.budget}")
    full = memory.backbone.slot_nbytes * stats.n_tokens
    print(f"{stats.nbytes_held / 2**20:.0f} MiB held; a full cache would use {full / 2**20:.0f} MiB")
    print(memory.ask("What is the code of the wine cellar?", max_new_tokens=16).text)


if __name__ == "__main__":
    main()
