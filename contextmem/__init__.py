"""contextmem: an editable KV-cache memory for language models."""

from contextmem._versions import check_versions

check_versions()

from contextmem.answers import AnswerStream  # noqa: E402
from contextmem.eraser import KVEraser  # noqa: E402
from contextmem.errors import (  # noqa: E402
    Cancelled,
    ContextMemoryError,
    ContextOverflow,
    DependentsWarning,
    DuplicateWarning,
    IdentityMismatch,
    InvalidInput,
    KeyConflictWarning,
    MemoryBusy,
    MemoryClosed,
    ModelUnavailable,
    OutOfMemory,
    SegmentNotFound,
    StorageError,
    UnsupportedEdit,
)
from contextmem.ledger import Segment  # noqa: E402
from contextmem.meaning import Match  # noqa: E402
from contextmem.memory import Checkpoint, ContextMemory  # noqa: E402
from contextmem.numerics import Verification  # noqa: E402
from contextmem.progress import ProgressEvent  # noqa: E402
from contextmem.reports import Answer, Report, Stats  # noqa: E402
from contextmem.restorer import RestoreKV  # noqa: E402
from contextmem.retraction import KVErase, SuffixRepair  # noqa: E402

__version__ = "0.1.0"

__all__ = [
    "Answer",
    "AnswerStream",
    "Cancelled",
    "Checkpoint",
    "ContextMemory",
    "ContextMemoryError",
    "ContextOverflow",
    "DependentsWarning",
    "DuplicateWarning",
    "IdentityMismatch",
    "InvalidInput",
    "KVErase",
    "KVEraser",
    "KeyConflictWarning",
    "Match",
    "MemoryBusy",
    "MemoryClosed",
    "ModelUnavailable",
    "OutOfMemory",
    "ProgressEvent",
    "Report",
    "RestoreKV",
    "Segment",
    "SegmentNotFound",
    "Stats",
    "StorageError",
    "SuffixRepair",
    "UnsupportedEdit",
    "Verification",
]
