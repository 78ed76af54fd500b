"""What the documentation shows is what happens."""

from __future__ import annotations

import contextlib
import io
import re
from pathlib import Path

import pytest

from contextmem import ContextMemory
from contextmem.retraction import METHODS

ROOT = Path(__file__).parents[1]


@pytest.mark.smollm2
def test_the_readmes_first_example_prints_what_it_says() -> None:
    readme = (ROOT / "README.md").read_text()
    code, expected = re.findall(r"```python\n(.*?)```\s+```text\n(.*?)```", readme, re.DOTALL)[0]
    assert len(code.strip().splitlines()) <= 15
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        exec(code, {})
    assert printed.getvalue() == expected


def test_every_method_is_in_the_documentation() -> None:
    for page in ("README.md", "docs/methods.md"):
        text = (ROOT / page).read_text()
        assert all(f"`{name}`" in text for name in (*METHODS, "auto"))


def test_every_call_that_the_readme_names_exists() -> None:
    names = set(re.findall(r"memory\.(\w+)", (ROOT / "README.md").read_text()))
    assert names and not [name for name in names if not hasattr(ContextMemory, name)]


def test_links_lead_somewhere() -> None:
    for page in (ROOT / "README.md", *(ROOT / "docs").glob("*.md")):
        for link in re.findall(r"\]\(([^)#:]+)\)", page.read_text()):
            assert (page.parent / link).exists(), f"{page.name}: {link}"
