"""For ``bench scale``: what large servers cost, by size: the hold of workers at a cut, and recovery.

A job with a 2 + 1 code on three servers, dimension 64, Adagrad. The first version is a baseline: workers are
held for the round trip, not for a copy of everything. Then a server is killed while training goes on.
Servers and workers share all processors.
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from pathlib import Path

from msgspec.structs import replace

from holdfast.bench.harness import Report, Spread
from holdfast.bench.live import happened, preset_config, with_servers
from holdfast.bench.recovery import Victims
from holdfast.bench.scale_baseline import max_rows_for
from holdfast.options import ErasureCode
from holdfast.training.saving import CheckpointConfig

SERVERS = 3
_SECONDS = 3.0


def measure_servers(report: Report, *, gigabytes: Sequence[float], kills: int, folder: Path | None) -> None:
    """For each size of a server: the hold at the cut of a baseline, and a recovery under training."""
    report.settings.update(server_gigabytes=list(gigabytes), server_kills=kills, servers=SERVERS, code="2+1")
    for size in gigabytes:
        name = f"scale.servers.gb{size:g}"
        config = preset_config("terabyte", max_rows_for(size * SERVERS))
        config = with_servers(config, SERVERS, workers=1, protection=ErasureCode(2, 1))
        with tempfile.TemporaryDirectory(prefix="holdfast-bench-", dir=folder) as store:
            saving = CheckpointConfig(path=f"{store}/store", every_steps=20, keep=1, when_busy="skip")
            with Victims(replace(config, checkpoint=saving)) as victims:
                victims.job.go_on()
                saved = victims.job.wait(lambda status: bool(status.versions), "a baseline")
                (first, *_) = happened(saved, "checkpoint_saved")
                deaths = [victims.death(_SECONDS) for _ in range(kills)]
        report.raw[name] = {"baseline": first.figures, "deaths": deaths}
        report.figure(
            f"{name}.hold_seconds", float(first.figures["hold_seconds"]), "at the cut of a baseline"
        )
        report.figure(f"{name}.write_seconds", float(first.figures["write_seconds"]))
        report.figure(f"{name}.resume_seconds", Spread.of([d.resume_seconds for d in deaths]), "after a kill")
        full = Spread.of([d.full_seconds for d in deaths])
        report.figure(f"{name}.full_seconds", full, f"until all of {size:g} GB and its parities are back")
        drop = Spread.of([100 * (1 - d.meanwhile / d.before) for d in deaths])
        report.figure(f"{name}.drop_percent", drop, "of the speed until then")
        report.save()
