"""What ``holdfast plan`` and ``holdfast simulate`` can be told: each option once, with its help."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

MODEL, CLUSTER, SPEEDS, WISHES = "The model", "The cluster", "Speeds", "Wishes"
CONFIG = "[CONFIG.yaml]"
"""The name of what is no option: the file on the command line."""


@dataclass(frozen=True, slots=True)
class Help:
    """How an option is shown.

    Args:
        text: what it means.
        panel: the heading that it stands under.
        example: a value, shown in place of its type.
        name: its name on the command line, if not that of the field.
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
    """What the command line says, as it says it; None is nothing."""

    config: Annotated[Path | None, Help("Take model, servers and workers from here.", MODEL, name=CONFIG)] = (
        None
    )
    size: Annotated[_Text, Help("Size of all tables with their optimizer state.", MODEL, "220GB")] = None
    dim: Annotated[_Count, Help("Weights of a row of the tables.", MODEL)] = None
    optimizer: Annotated[
        _Text, Help("Optimizer whose state the size includes: adagrad, …", MODEL, "NAME")
    ] = None
    dense: Annotated[_Text, Help("Size of the network's gradients.", MODEL, "8MB")] = None
    batch_rows: Annotated[_Number, Help("Different rows that a batch looks up.", MODEL)] = None
    touched: Annotated[_Number, Help("Share of the rows that change in 30 minutes.", MODEL)] = None
    step: Annotated[_Text, Help("Time of a batch at one worker.", MODEL, "50ms")] = None
    hours: Annotated[_Text, Help("Training time if nothing fails.", MODEL, "72h")] = None
    servers: Annotated[_Count, Help("Servers, which hold the tables.", CLUSTER)] = None
    workers: Annotated[_Count, Help("Workers, which compute.", CLUSTER)] = None
    mtbf: Annotated[
        _Text, Help("Mean time between failures that take down one of the servers.", CLUSTER, "20h")
    ] = None
    failure_log: Annotated[
        Path | None,
        Help("Fit the MTBF to a log: lines of 'time,server' or 'hours,failed'.", CLUSTER, "FILE"),
    ] = None
    servers_per_failure: Annotated[_Number, Help("How many servers go down together.", CLUSTER)] = None
    reschedule: Annotated[_Text, Help("Time to replace a failed machine.", CLUSTER, "5m")] = None
    memory: Annotated[_Text, Help("Memory of one server.", CLUSTER, "256GB")] = None
    write: Annotated[_Text, Help("Write speed of the store, all servers together.", SPEEDS, "1GB/s")] = None
    read: Annotated[_Text, Help("Read speed of the store, all servers together.", SPEEDS, "1GB/s")] = None
    copy: Annotated[_Text, Help("Memory copy speed of one server.", SPEEDS, "2GB/s")] = None
    network: Annotated[_Text, Help("Network of one server, each way.", SPEEDS, "25Gbit/s")] = None
    measure: Annotated[
        _Text, Help("Measure what is not given, on this machine, with this store.", SPEEDS, "PATH")
    ] = None
    cost: Annotated[
        list[str] | None,
        Help("What a protection takes from a step: docs/planning.md. Repeatable.", SPEEDS, "NAME=NUMBER"),
    ] = None
    tolerance: Annotated[_Number, Help("AUC that restores and partial recovery may lose.", WISHES)] = None
    save_every: Annotated[
        _Text,
        Help("Checkpoint interval, except behind a code. Default: the computed optimum.", WISHES, "30m"),
    ] = None
    stop_to_write: Annotated[
        bool, Help("Saves stop training until they are written.", WISHES, name="--stop-to-write")
    ] = False
    k: Annotated[_Count, Help("Data records of a stripe of the erasure code.", WISHES, name="-k")] = None
    r: Annotated[_Count, Help("Parity records of a stripe.", WISHES, name="-r")] = None
    target_pls: Annotated[_Number, Help("Portion of lost samples that partial recovery aims at.", WISHES)] = (
        None
    )
    auc_loss_per_pls: Annotated[_Number, Help("Measured AUC loss at a PLS of 1.", WISHES)] = None
