from __future__ import annotations

import inspect
import subprocess
import sys

import holdfast


def test_public_names() -> None:
    """A name added here is a promise to users; one taken away breaks them."""
    assert sorted(holdfast.__all__) == [
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
        "DLRM",
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
        "PNN",
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


def test_every_public_name_is_there_and_documented() -> None:
    for name in holdfast.__all__:
        value = getattr(holdfast, name)
        if name != "__version__":
            assert inspect.getdoc(value), name


def test_every_error_is_a_holdfast_error() -> None:
    from holdfast import errors

    for value in vars(errors).values():
        if isinstance(value, type):
            assert issubclass(value, errors.HoldfastError)
            assert value.__name__ in (errors.__doc__ or ""), f"{value.__name__} is missing in the drawing"


def test_importing_holdfast_does_not_import_torch() -> None:
    code = "import sys, holdfast, holdfast.data.synthetic; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
