"""A chat on the terminal whose context can be edited while it goes on."""

from __future__ import annotations

import inspect
import shlex
import warnings
from collections.abc import Callable
from pathlib import Path

from rich.console import Console
from rich.markup import escape

from contextmem.errors import ContextMemoryError, DependentsWarning, InvalidInput
from contextmem.memory import Checkpoint, ContextMemory
from contextmem.render import report_line, segments_table, stats_table

__all__ = ["Chat"]

HELP = """\
Anything else than a command is asked, and question and answer are kept.
  /add FILE               put a text file into the context
  /segments               what stands in the context
  /retract ID [METHOD]    take a segment out; ID is its id, key or number in /segments
  /budget [SIZE|off]      most tokens (or bytes, as 512MB) to hold; alone: what is held
  /undo                   take back the last change
  /save PATH, /load PATH  to a file, from a file
  /stats                  tokens and bytes
  /help, /quit"""


class Chat:
    """Reads lines, asks them or obeys them. Errors are shown and change nothing."""

    def __init__(self, memory: ContextMemory, console: Console, max_new_tokens: int) -> None:
        self.memory, self.console, self.max_new_tokens = memory, console, max_new_tokens
        self._past: list[Checkpoint] = []
        self._commands: dict[str, Callable[..., None]] = {
            "/add": self.add,
            "/segments": self.segments,
            "/retract": self.retract,
            "/budget": self.budget,
            "/undo": self.undo,
            "/save": self.save,
            "/load": self.load,
            "/stats": self.stats,
            "/help": self.help,
        }

    def run(self) -> None:
        """Until /quit or the end of the input."""
        self.console.print(f"{self.memory!r}\n/help lists the commands.", highlight=False)
        while True:
            try:
                line = self.console.input("[bold]> [/bold]").strip()
            except (EOFError, KeyboardInterrupt):
                self.console.print()
                return
            if line in ("/quit", "/exit"):
                return
            if line:
                self.handle(line)

    def handle(self, line: str) -> None:
        """One line of input."""
        try:
            if not line.startswith("/"):
                self.ask(line)
                return
            try:
                name, *arguments = shlex.split(line)
            except ValueError as error:
                raise InvalidInput(f"{error}; quote paths with spaces.") from None
            command = self._commands.get(name)
            if command is None:
                raise InvalidInput(f"unknown command {name}; /help lists them.")
            try:
                inspect.signature(command).bind(*arguments)
            except TypeError:
                raise InvalidInput(f"wrong arguments for {name}; /help shows them.") from None
            command(*arguments)
        except KeyboardInterrupt:
            self.console.print("[dim]interrupted; nothing was changed[/dim]")
        except ContextMemoryError as error:
            self.console.print(f"[red]{escape(str(error))}[/red]", highlight=False)
        except OSError as error:
            self.console.print(f"[red]{escape(f'{error.filename}: {error.strerror}')}[/red]", highlight=False)

    def ask(self, question: str) -> None:
        """Stream an answer; Ctrl-C abandons it and keeps nothing of the turn."""
        mark = self.memory.checkpoint()
        stream = self.memory.stream(question, keep=True, max_new_tokens=self.max_new_tokens)
        try:
            for piece in stream:
                self.console.out(piece, end="", highlight=False)
            self._past.append(mark)
        except KeyboardInterrupt:
            stream.close()
            self.console.print("\n[dim]abandoned; the turn was not kept[/dim]", end="")
        self.console.print()

    def add(self, file: str) -> None:
        """/add FILE"""
        try:
            text = Path(file).read_text(encoding="utf-8")
        except UnicodeDecodeError:
            raise InvalidInput(f"{file} is not UTF-8 text. Nothing was changed.") from None
        mark = self.memory.checkpoint()
        segment = self.memory.append(text, source=file)
        self._past.append(mark)
        self.console.print(f"added as {segment.id}: {segment.n_tokens:,} tokens", highlight=False)

    def segments(self) -> None:
        """/segments"""
        self.console.print(segments_table(self.memory.segments(), "Context", self.console.width))

    def retract(self, target: str, method: str = "auto") -> None:
        """/retract ID [METHOD]"""
        live = self.memory.segments()
        number = int(target) if target.isdecimal() else 0
        mark = self.memory.checkpoint()
        chosen = live[number - 1] if 0 < number <= len(live) else target
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DependentsWarning)  # shown below
            report = self.memory.retract(chosen, method=method)
        self._past.append(mark)
        self.console.print(report_line(report), highlight=False)
        if report.dependents:
            self.console.print(f"[yellow]derived from it and still there: {', '.join(report.dependents)}[/yellow]")

    def budget(self, size: str | None = None) -> None:
        """/budget [SIZE|off]"""
        if size is not None:
            self.memory.set_budget(None if size == "off" else int(size) if size.isdecimal() else size)
        stats = self.memory.stats()
        limit = f"a budget of {stats.budget:,}" if stats.budget is not None else "no budget"
        self.console.print(f"{stats.tokens_held:,.0f} of {stats.n_tokens:,} tokens held, {limit}", highlight=False)

    def undo(self) -> None:
        """/undo"""
        if not self._past:
            raise InvalidInput("there is nothing to undo.")
        self.memory.restore(self._past.pop())
        self.console.print(f"back to {len(self.memory.segments())} segments, {self.memory.seq_length:,} tokens")

    def save(self, path: str) -> None:
        """/save PATH"""
        self.console.print(f"saved to {self.memory.save(path)}", highlight=False)

    def load(self, path: str) -> None:
        """/load PATH"""
        self.memory = ContextMemory.load(path, self.memory.model, self.memory.tokenizer)
        self._past.clear()
        self.console.print(f"{self.memory!r}", highlight=False)

    def stats(self) -> None:
        """/stats"""
        self.console.print(stats_table(self.memory.stats()))

    def help(self) -> None:
        """/help"""
        self.console.print(HELP, highlight=False)
