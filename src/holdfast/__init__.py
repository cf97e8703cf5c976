"""Fault-tolerant training of recommendation models with PyTorch.

Names are imported on first use, so that a server process, which only holds tables, never imports torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from holdfast._version import __version__
from holdfast.errors import (
    AlreadyExists,
    BadLine,
    CheckpointError,
    ConfigError,
    CorruptCheckpoint,
    DataError,
    DataLoss,
    HoldfastError,
    JobFailed,
    ModelMismatch,
    NoSuchVersion,
    ObjectMissing,
    RankLost,
    SaveFailed,
    ServerLost,
    StoreError,
    StoreFull,
    StoreLocked,
    StoreUnreachable,
    TrainingDiverged,
    UnsafeName,
    UnsupportedState,
    WorkerFailed,
    WrongReaderState,
)
from holdfast.options import (
    AutoBits,
    Chunked,
    Differential,
    ErasureCode,
    Full,
    Incremental,
    Local,
    NoProtection,
    PartialRecovery,
    Policy,
    Ray,
    Replication,
    Training,
)

if TYPE_CHECKING:
    from holdfast.checkpoint.checkpointer import Checkpointer
    from holdfast.checkpoint.codecs.quantized import QuantizedRows, quantize
    from holdfast.checkpoint.loading import LoadedVersion, SavedShapes, SavedTensor, load, saved_shapes
    from holdfast.cluster.job import Job
    from holdfast.cluster.report.result import JobResult
    from holdfast.data.criteo import Criteo
    from holdfast.data.prefetch import Prefetch
    from holdfast.data.reader import Batch, Reader
    from holdfast.data.synthetic import Synthetic
    from holdfast.models.deepfm import DeepFM
    from holdfast.models.dlrm import DLRM
    from holdfast.models.pnn import PNN
    from holdfast.models.recommender import Recommender

_HOMES = {
    "Checkpointer": "holdfast.checkpoint.checkpointer",
    "Batch": "holdfast.data.reader",
    "Criteo": "holdfast.data.criteo",
    "DLRM": "holdfast.models.dlrm",
    "DeepFM": "holdfast.models.deepfm",
    "PNN": "holdfast.models.pnn",
    "Job": "holdfast.cluster.job",
    "JobResult": "holdfast.cluster.report.result",
    "LoadedVersion": "holdfast.checkpoint.loading",
    "Prefetch": "holdfast.data.prefetch",
    "QuantizedRows": "holdfast.checkpoint.codecs.quantized",
    "Reader": "holdfast.data.reader",
    "Recommender": "holdfast.models.recommender",
    "SavedShapes": "holdfast.checkpoint.loading",
    "SavedTensor": "holdfast.checkpoint.loading",
    "Synthetic": "holdfast.data.synthetic",
    "load": "holdfast.checkpoint.loading",
    "quantize": "holdfast.checkpoint.codecs.quantized",
    "saved_shapes": "holdfast.checkpoint.loading",
}

__all__ = [
    "DLRM",
    "PNN",
    "AlreadyExists",
    "AutoBits",
    "BadLine",
    "Batch",
    "CheckpointError",
    "Checkpointer",
    "Chunked",
    "ConfigError",
    "CorruptCheckpoint",
    "Criteo",
    "DataError",
    "DataLoss",
    "DeepFM",
    "Differential",
    "ErasureCode",
    "Full",
    "HoldfastError",
    "Incremental",
    "Job",
    "JobFailed",
    "JobResult",
    "LoadedVersion",
    "Local",
    "ModelMismatch",
    "NoProtection",
    "NoSuchVersion",
    "ObjectMissing",
    "PartialRecovery",
    "Policy",
    "Prefetch",
    "QuantizedRows",
    "RankLost",
    "Ray",
    "Reader",
    "Recommender",
    "Replication",
    "SaveFailed",
    "SavedShapes",
    "SavedTensor",
    "ServerLost",
    "StoreError",
    "StoreFull",
    "StoreLocked",
    "StoreUnreachable",
    "Synthetic",
    "Training",
    "TrainingDiverged",
    "UnsafeName",
    "UnsupportedState",
    "WorkerFailed",
    "WrongReaderState",
    "__version__",
    "load",
    "quantize",
    "saved_shapes",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'holdfast' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return __all__
