"""The options of ``holdfast plan`` and ``holdfast simulate``, each declared once, with its help."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

MODEL, CLUSTER, SPEEDS, WISHES = "Model", "Cluster", "Speeds", "Requirements"
CONFIG = "[CONFIG.yaml]"
"""The name of the positional argument."""


@dataclass(frozen=True, slots=True)
class Help:
    """The help of an option.

    Args:
        text: its description.
        panel: its heading.
        example: a value, shown instead of its type.
        name: its name on the command line, if it differs from the field's.
    """

    text: str
    panel: str
    example: str | None = None
    name: str | None = None


_Text = str | None
_Number = float | None
_Count = int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Given:
    """The options as given on the command line; None: not given."""

    config: Annotated[
        Path | None, Help("Configuration with model, servers and workers.", MODEL, name=CONFIG)
    ] = None
    size: Annotated[_Text, Help("Size of all tables with their optimizer state.", MODEL, "220GB")] = None
    dim: Annotated[_Count, Help("Embedding dimension.", MODEL)] = None
    optimizer: Annotated[_Text, Help("Optimizer whose state --size includes: adagrad, …", MODEL, "NAME")] = (
        None
    )
    dense: Annotated[_Text, Help("Size of the network's gradients.", MODEL, "8MB")] = None
    batch_rows: Annotated[_Number, Help("Distinct rows that a batch looks up.", MODEL)] = None
    touched: Annotated[_Number, Help("Share of the rows that change in 30 minutes.", MODEL)] = None
    step: Annotated[_Text, Help("Time of a worker's training step.", MODEL, "50ms")] = None
    hours: Annotated[_Text, Help("Training time without failures.", MODEL, "72h")] = None
    servers: Annotated[_Count, Help("Number of servers, which hold the tables.", CLUSTER)] = None
    workers: Annotated[_Count, Help("Number of workers, which compute.", CLUSTER)] = None
    machines: Annotated[
        _Count, Help("Number of machines that run the servers. Default: as many as a code needs.", CLUSTER)
    ] = None
    mtbf: Annotated[_Text, Help("Mean time between failures of any server.", CLUSTER, "20h")] = None
    machine_mtbf: Annotated[
        _Text,
        Help("Mean time between failures of one machine; --mtbf is then of processes.", CLUSTER, "90d"),
    ] = None
    failure_log: Annotated[
        Path | None,
        Help("Fit the MTBF to a log: lines of 'time,server' or 'hours,failed'.", CLUSTER, "FILE"),
    ] = None
    servers_per_failure: Annotated[_Number, Help("Servers that fail together.", CLUSTER)] = None
    reschedule: Annotated[_Text, Help("Time to replace a failed machine.", CLUSTER, "5m")] = None
    memory: Annotated[_Text, Help("Memory of one server.", CLUSTER, "256GB")] = None
    write: Annotated[_Text, Help("Write bandwidth of the store, all servers together.", SPEEDS, "1GB/s")] = (
        None
    )
    read: Annotated[_Text, Help("Read bandwidth of the store, all servers together.", SPEEDS, "1GB/s")] = None
    copy: Annotated[_Text, Help("Memory copy bandwidth of one server.", SPEEDS, "2GB/s")] = None
    network: Annotated[_Text, Help("Network bandwidth of one server, each way.", SPEEDS, "25Gbit/s")] = None
    measure: Annotated[
        _Text,
        Help("Measure the speeds that are not given, on this machine, with this store.", SPEEDS, "PATH"),
    ] = None
    cost: Annotated[
        list[str] | None,
        Help("Cost of a protection per step, see docs/planning.md. Repeatable.", SPEEDS, "NAME=NUMBER"),
    ] = None
    tolerance: Annotated[_Number, Help("AUC that restores and partial recovery may lose.", WISHES)] = None
    save_every: Annotated[
        _Text,
        Help("Checkpoint interval. Default, and always with a code: the optimum.", WISHES, "30m"),
    ] = None
    stop_to_write: Annotated[
        bool, Help("Saves stop training until they are written.", WISHES, name="--stop-to-write")
    ] = False
    k: Annotated[_Count, Help("Data records per stripe of the erasure code.", WISHES, name="-k")] = None
    r: Annotated[_Count, Help("Parity records per stripe.", WISHES, name="-r")] = None
    target_pls: Annotated[
        _Number, Help("Target portion of lost samples (PLS) of partial recovery.", WISHES)
    ] = None
    auc_loss_per_pls: Annotated[_Number, Help("Measured AUC loss at a PLS of 1.", WISHES)] = None
