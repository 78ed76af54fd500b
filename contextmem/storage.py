"""Saving and loading a memory: one safetensors file whose header carries a JSON manifest.

The file holds tensors and JSON, nothing that runs. It is written beside its destination and put in place by one rename,
readable by its owner only. Every tensor and the manifest carry a checksum, and the manifest names the model.
"""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from datetime import datetime
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from contextmem.cache import SpanCache
from contextmem.errors import InconsistentState, StorageError
from contextmem.events import Event, SegmentRecord
from contextmem.ledger import Ledger, Segment
from contextmem.ragged import RaggedCache
from contextmem.state import State

__all__ = ["FORMAT_VERSION", "Saved", "ledger_of", "read", "read_manifest", "segment_of", "tensors_of", "write"]

FORMAT_VERSION = 1


@dataclass(frozen=True)
class Saved:
    """What a file holds besides tensors.

    Attributes:
        model: name or path that `from_pretrained` takes, or None.
        identity: see `identity.identity_of`.
        options: constructor arguments of the memory.
        state: the state, its tensors on the CPU.
        events: the event log.
    """

    model: str | None
    identity: dict[str, str]
    options: dict[str, Any]
    state: State
    events: tuple[Event, ...]


def write(path: str | os.PathLike[str], saved: Saved) -> None:
    """Write `saved` to the file `path`, replacing one that is there only when the new one is complete.

    Raises:
        StorageError: the file cannot be written; an old one is still as it was.
    """
    target = Path(path)
    try:
        tensors = tensors_of(saved.state)
        manifest = json.dumps(_manifest(saved, tensors), ensure_ascii=False)
        metadata = {"format": "contextmem", "manifest": manifest, "manifest_sha256": _digest(manifest.encode())}
        with tempfile.TemporaryDirectory(prefix=f".{target.name}.", dir=target.parent) as staging:  # mode 0700
            draft = Path(staging) / target.name
            save_file({name: tensor.cpu() for name, tensor in tensors.items()}, draft, metadata)
            draft.chmod(0o600)
            with draft.open("rb+") as file:
                os.fsync(file.fileno())
            os.replace(draft, target)
    except (OSError, SafetensorError, UnicodeError, TypeError) as error:
        raise StorageError(f"cannot write {target}: {error}. A file that was there is as it was.") from error


def read(path: str | os.PathLike[str], n_layers: int, device: torch.device | str = "cpu") -> Saved:
    """Read a file that `write` made, tensors onto `device`.

    Raises:
        StorageError: not such a file, another format version, cut off, or altered.
    """
    manifest = read_manifest(path)
    tensors: dict[str, Tensor] = {}
    try:
        with safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118  (safe_open has no __iter__)
                tensors[name] = file.get_tensor(name)
    except (OSError, SafetensorError, RuntimeError, ValueError) as error:
        raise _damaged(path, str(error)) from error
    if set(tensors) != set(manifest["checksums"]):
        raise _damaged(path, "tensors are missing")
    for name, tensor in tensors.items():
        if _tensor_digest(tensor) != manifest["checksums"][name]:
            raise _damaged(path, f"the checksum of {name} does not match")
    try:
        ledger = ledger_of(manifest)
        state = _state(ledger, manifest, tensors, n_layers, device)
        state.check()
        events = tuple(map(_event, manifest["events"]))
    except (InconsistentState, KeyError, TypeError, ValueError) as error:
        raise _damaged(path, f"the manifest does not describe the tensors ({error})") from error
    return Saved(manifest["model"], manifest["identity"], manifest["options"], state, events)


def read_manifest(path: str | os.PathLike[str]) -> dict[str, Any]:
    """The manifest alone, its checksum verified; no tensor is read.

    Raises:
        StorageError: as in `read`.
    """
    try:
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
    except FileNotFoundError:
        raise StorageError(f"there is no file {os.fspath(path)!r}.") from None
    except (OSError, SafetensorError, RuntimeError, ValueError) as error:
        raise _damaged(path, str(error)) from error
    text = metadata.get("manifest", "")
    if metadata.get("format") != "contextmem" or _digest(text.encode()) != metadata.get("manifest_sha256"):
        raise _damaged(path, "its manifest is missing or altered")
    manifest: dict[str, Any] = json.loads(text)
    if manifest.get("version") != FORMAT_VERSION:
        raise StorageError(
            f"{os.fspath(path)} has format version {manifest.get('version')}; this release reads {FORMAT_VERSION}."
        )
    return manifest


def ledger_of(manifest: Mapping[str, Any]) -> Ledger:
    """The ledger that a manifest describes."""
    return Ledger(tuple(map(segment_of, manifest["spans"])), tuple(map(segment_of, manifest["gone"])))


def tensors_of(state: State) -> dict[str, Tensor]:
    """Every tensor of a state by name; those of a full tier begin with `full.`."""
    named = state.cache.tensors()
    if state.scores is not None:
        named["scores"] = state.scores.contiguous()
    if state.full is not None:
        named |= {f"full.{name}": tensor.clone() for name, tensor in state.full.tensors().items()}
    return named


def _state(
    ledger: Ledger, manifest: Mapping[str, Any], named: Mapping[str, Tensor], n_layers: int, device: torch.device | str
) -> State:
    """The inverse of `tensors_of`."""
    on_host = ("positions", "turns", "scores", "kept.", "full.")
    kv = {name: tensor if name.startswith(on_host) else tensor.to(device) for name, tensor in named.items()}
    full = {name.removeprefix("full."): tensor for name, tensor in kv.items() if name.startswith("full.")}
    compaction = manifest.get("compaction")
    if compaction is None:
        cache = SpanCache.from_tensors(n_layers, kv, manifest["next_position"])
    else:
        placed = (compaction[name] for name in ("offset", "n_restore", "windows"))
        cache = RaggedCache.from_kept(kv, manifest["next_position"], *placed)
    return State(
        ledger,
        cache,
        manifest["exact_slots"],
        full=SpanCache.from_tensors(n_layers, full, (compaction or {})["full_next_position"]) if full else None,
        scores=kv.get("scores"),
    )


def _compaction(state: State) -> dict[str, Any] | None:
    """What a compacted state needs beside its tensors."""
    if not isinstance(state.cache, RaggedCache):
        return None
    return {
        "n_restore": state.cache.n_restore,
        "offset": state.cache.offset,
        "windows": list(state.cache.windows),
        "full_next_position": state.full.next_position if state.full is not None else None,
    }


def _manifest(saved: Saved, tensors: Mapping[str, Tensor]) -> dict[str, Any]:
    return {
        "version": FORMAT_VERSION,
        "model": saved.model,
        "identity": saved.identity,
        "options": saved.options,
        "next_position": saved.state.cache.next_position,
        "exact_slots": saved.state.exact_slots,
        "compaction": _compaction(saved.state),
        "spans": [_plain(span) for span in saved.state.ledger.spans],
        "gone": [_plain(span) for span in saved.state.ledger.gone],
        "events": [asdict(event) | {"at": event.at.isoformat()} for event in saved.events],
        "checksums": {name: _tensor_digest(tensor) for name, tensor in tensors.items()},
    }


def _plain(segment: Segment) -> dict[str, Any]:
    values = {field.name: getattr(segment, field.name) for field in fields(segment)}
    return values | {"created_at": segment.created_at.isoformat(), "metadata": dict(segment.metadata)}


def segment_of(values: Mapping[str, Any]) -> Segment:
    """A segment from its entry in a manifest."""
    return Segment(
        **{
            **values,
            "token_ids": tuple(values["token_ids"]),
            "parents": tuple(values["parents"]),
            "metadata": MappingProxyType(values["metadata"]),
            "created_at": datetime.fromisoformat(values["created_at"]),
        }
    )


def _event(values: Mapping[str, Any]) -> Event:
    records: Sequence[Mapping[str, Any]] = values["segments"]
    return Event(
        **{
            **values,
            "segments": tuple(SegmentRecord(**record) for record in records),
            "at": datetime.fromisoformat(values["at"]),
        }
    )


def _damaged(path: str | os.PathLike[str], what: str) -> StorageError:
    return StorageError(f"{os.fspath(path)} is not a readable saved memory: {what}. Nothing was changed.")


def _tensor_digest(tensor: Tensor) -> str:
    digest = hashlib.sha256(f"{tensor.dtype} {tuple(tensor.shape)}".encode())
    digest.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy())  # type: ignore[arg-type]
    return digest.hexdigest()


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()
