"""A tool loop whose first tool fails three times: the failures leave the context once it has worked."""

from contextmem.integrations.tool_loop import ToolLoop, pairs_of
from contextmem.loading import load_pretrained

failures = iter(["the directory did not answer, try again"] * 3)


def find_city(person: str) -> str:
    """Find the city in which a person lives."""
    for failure in failures:
        raise ConnectionError(failure)
    return f"{person} lives in Porto."


def get_weather(city: str) -> str:
    """Tell today's weather in a city."""
    return f"The weather in {city} is rain at 14 degrees."


def main() -> None:
    loop = ToolLoop(
        *load_pretrained("smollm2-135m-instruct"),
        [find_city, get_weather],
        required=("find_city", "get_weather"),
        max_turns=12,
        max_new_tokens=60,
        on_step=lambda what, text: print(f"{what:>6}: {text}"),
    )
    report = loop.run("First find the city where Anna lives. Then get the weather in that city.")
    print("answer:", report.answer)
    print(f"{report.n_calls} calls, {report.n_failed} failed; {report.n_kept} pairs in the context at the end")
    print(
        f"{report.count('collapsed')} collapsed, {report.count('retracted')} retracted, {report.tokens_saved} tokens saved"
    )
    print("failed pairs left:", sum(pair.is_error for pair in pairs_of(loop.memory)))


if __name__ == "__main__":
    main()
