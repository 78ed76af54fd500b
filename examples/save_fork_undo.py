"""Save a memory, try something on a fork, go back."""

import tempfile
from pathlib import Path

from contextmem import ContextMemory

QUESTION = "What is the code of the wine cellar?"


def main() -> None:
    memory = ContextMemory.from_pretrained("smollm2-135m-instruct")
    memory.append("Welcome to the house. It has a kitchen, a library and a cellar.\n")
    memory.append("The code of the wine cellar is 4821.\n", key="code", source="the owner")
    print("at first:   ", memory.ask(QUESTION, max_new_tokens=16).text)

    fork = memory.fork()  # copies nothing until one of the two writes
    fork.replace("code", "The code of the wine cellar is 7350.\n")
    print("on the fork:", fork.ask(QUESTION, max_new_tokens=16).text)
    print("here:       ", memory.ask(QUESTION, max_new_tokens=16).text)

    mark = memory.checkpoint()
    memory.append("The code was changed this morning. The code of the wine cellar is 1111.\n")
    memory.retract("code")
    memory.restore(mark)  # replaces everything that came after the mark
    print("after undo: ", memory.ask(QUESTION, max_new_tokens=16).text)

    with tempfile.TemporaryDirectory() as folder:
        path = memory.save(Path(folder) / "house.ctx")
        loaded = ContextMemory.load(path, memory.model, memory.tokenizer)
    answer = loaded.ask(QUESTION, max_new_tokens=16)
    print("loaded:     ", answer.text, f"({answer.tokens_reused} tokens reused)")


if __name__ == "__main__":
    main()
