"""The command line, as a new user meets it."""

from __future__ import annotations

import ast
import importlib
import io
import json
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from tiny import tiny_model, tiny_tokenizer
from typer.testing import CliRunner

from contextmem import ContextMemory
from contextmem.chat import Chat
from contextmem.cli import app
from contextmem.commands.options import command

RUN = CliRunner()
COMMANDS = Path(__file__).parent.parent / "contextmem/commands"


def chat(tmp_path: Path) -> tuple[Chat, io.StringIO]:
    memory = ContextMemory(tiny_model("llama"), tiny_tokenizer())
    return Chat(memory, Console(file=(out := io.StringIO()), width=120), max_new_tokens=4), out


@pytest.mark.parametrize("file", sorted(COMMANDS.glob("*.py")), ids=lambda file: file.stem)
def test_what_commands_import_when_they_run_is_there(file: Path) -> None:
    """A name that moved would be told as a missing extra."""
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("contextmem"):
            module = importlib.import_module(str(node.module))
            missing = [alias.name for alias in node.names if not hasattr(module, alias.name)]
            assert not missing, f"{node.module} has no {missing}"


@pytest.mark.parametrize(
    "arguments",
    [
        ["--help"],
        ["demo", "--help"],
        ["chat", "--help"],
        ["inspect", "--help"],
        ["eval", "--help"],
        ["eval", "niah", "--help"],
        ["eval", "span-neighbour", "--help"],
        ["train", "eraser", "--help"],
    ],
)
def test_help(arguments: list[str]) -> None:
    result = RUN.invoke(app, arguments)
    assert result.exit_code == 0 and "Usage" in result.output


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["eval", "niah", "--samples", "many"], "TOKENS=N"),
        (["eval", "niah", "--methods", "forget"], "recompute"),
        (["eval", "distractor-qa", "--qa", "x", "--cases", "y", "--methods", "forget"], "kveraser+64"),
        (["train", "eraser", "--out", "x", "--text", "nowhere"], "no file or folder nowhere"),
        (["train", "eraser", "--out", "x", "--config", "nowhere.toml"], "cannot be read"),
        (["eval", "span-neighbour", "--eraser", "recompute=x"], "no folder"),
    ],
)
def test_what_is_the_users_to_mend_is_said_without_a_traceback(
    arguments: list[str], message: str, monkeypatch: Any, tmp_path: Path
) -> None:
    model, tokenizer = tiny_model("llama"), tiny_tokenizer()
    monkeypatch.setattr("contextmem.loading.load_pretrained", lambda *_, **__: (model, tokenizer))
    monkeypatch.setattr("contextmem.evals.subject.load_pretrained", lambda *_, **__: (model, tokenizer))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.chdir(tmp_path)
    result = RUN.invoke(app, arguments, env={"COLUMNS": "400"})
    assert result.exit_code == 1 and message in " ".join(result.output.split())
    assert not (tmp_path / "x" / "plan.json").exists()


@pytest.mark.parametrize(
    "arguments", [["demo", "--colour"], ["inspect"], ["eval", "speed"], ["chat", "--max-new-tokens", "0"]]
)
def test_wrong_arguments(arguments: list[str]) -> None:
    assert RUN.invoke(app, arguments).exit_code == 2


@pytest.mark.smollm2
def test_demo_on_smollm2() -> None:
    result = RUN.invoke(app, ["demo", "--json"])
    assert result.exit_code == 0
    (line,) = result.stdout.splitlines()
    shown = json.loads(line)
    assert {"question", "expected", "before", "after", "methods"} <= set(shown)
    assert shown["expected"] not in shown["before"] and shown["expected"] in shown["after"]
    for method in shown["methods"].values():
        assert {"answer", "guarantee", "seconds"} <= set(method)
    assert shown["methods"]["recompute"]["answer"] == shown["after"]
    assert 1300 < shown["tokens"] < 1800


def test_inspect(tmp_path: Path) -> None:
    memory = ContextMemory(tiny_model("llama"), tiny_tokenizer(), system="Be brief.")
    memory.append("A passage.", key="k", source="web")
    memory.retract(memory.append("Gone."))
    memory.save(tmp_path / "m.ctx")
    result = RUN.invoke(app, ["inspect", str(tmp_path / "m.ctx")], env={"COLUMNS": "160"})
    assert result.exit_code == 0
    for word in ("LlamaForCausalLM", "A passage.", "web", "retracted"):
        assert word in result.output
    assert "Gone." not in result.output
    shown = json.loads(RUN.invoke(app, ["inspect", str(tmp_path / "m.ctx"), "--json"]).stdout)
    assert [s["text"] for s in shown["spans"] if s["kind"] == "document"] == ["A passage."]


def test_inspect_of_something_else_says_so_without_a_traceback(tmp_path: Path) -> None:
    (tmp_path / "x").write_text("not a memory")
    for path in ("x", "missing"):
        result = RUN.invoke(app, ["inspect", str(tmp_path / path)])
        assert result.exit_code == 1 and "StorageError" in result.output and "Traceback" not in result.output


def test_chat_adds_asks_retracts_and_undoes(tmp_path: Path) -> None:
    session, out = chat(tmp_path)
    (tmp_path / "note.txt").write_text("A note.")
    session.handle(f"/add {tmp_path / 'note.txt'}")
    session.handle("What does it say?")
    assert [s.kind for s in session.memory.segments()] == ["document", "user", "assistant"]
    before = session.memory.token_ids
    session.handle("/retract 1 delete_and_shift")
    assert "derived from it and still there" in out.getvalue()
    assert len(session.memory.segments()) == 2 and "delete_and_shift (approximate)" in out.getvalue()
    session.handle("/undo")
    assert session.memory.token_ids == before
    session.handle(f"/save {tmp_path / 'm.ctx'}")
    session.handle("/undo")
    assert len(session.memory.segments()) == 1
    session.handle(f"/load {tmp_path / 'm.ctx'}")
    assert session.memory.token_ids == before
    for typed in ("/segments", "/stats", "/help", "/budget", "/budget 30", "/budget off", "/budget 1MB"):
        session.handle(typed)
    assert "no budget" in out.getvalue() and "a budget of 30" in out.getvalue()
    assert "A note." in out.getvalue() and "capacity" in out.getvalue() and "/retract ID" in out.getvalue()


@pytest.mark.parametrize(
    "line",
    [
        "/add",
        "/add nowhere.txt",
        "/retract",
        "/retract nobody",
        "/retract 1 vanish",
        "/undo",
        "/load nowhere",
        "/budget lots",
        "/budget 2",
        "/dance",
    ],
)
def test_chat_shows_errors_and_goes_on(tmp_path: Path, line: str) -> None:
    session, out = chat(tmp_path)
    session.memory.append("text")
    before = session.memory.token_ids
    session.handle(line)
    assert out.getvalue().strip() and "Traceback" not in out.getvalue()
    assert session.memory.token_ids == before


def test_ctrl_c_abandons_an_answer_and_keeps_nothing_of_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    session, out = chat(tmp_path)
    session.memory.append("text")
    before = session.memory.token_ids

    def interrupted(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(session.console, "out", interrupted)
    session.handle("What?")
    assert "abandoned" in out.getvalue() and session.memory.token_ids == before
    monkeypatch.undo()
    session.handle("What?")
    assert len(session.memory.segments()) == 3


def test_eval_latency_on_a_tiny_model(tmp_path: Path) -> None:
    tiny_model("llama").save_pretrained(tmp_path / "model")
    tiny_tokenizer().save_pretrained(tmp_path / "model")
    command = [
        "eval",
        "latency",
        "--quick",
        "--repeats",
        "1",
        "--model",
        str(tmp_path / "model"),
        "--out",
        str(tmp_path / "out"),
    ]
    result = RUN.invoke(app, command)
    assert result.exit_code == 0, result.output
    assert "| 512 |" in result.output and (tmp_path / "out" / "plot.png").stat().st_size > 10_000
    rows = (tmp_path / "out" / "rows.jsonl").read_text()
    assert RUN.invoke(app, command).exit_code == 0
    assert (tmp_path / "out" / "rows.jsonl").read_text() == rows, "a second run measures nothing again"
    assert all({"id", "method", "seconds"} <= set(json.loads(row)) for row in rows.splitlines())


def test_the_command_beside_figures_tells_files_by_their_names(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Where they lie on somebody's machine is not published."""
    words = ["eval", "rag", "--qa", str(tmp_path / "a=b.jsonl"), f"--text={tmp_path}/c.txt", "--top-k", "3"]
    monkeypatch.setattr("sys.argv", ["/usr/bin/contextmem", *words, "--eraser", f"stage 2={tmp_path}/mine"])
    told = "contextmem eval rag --qa a=b.jsonl --text=c.txt --top-k 3 --eraser 'stage 2=mine'"
    assert command() == told
