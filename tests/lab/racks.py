"""Where Ray puts a job's machines if its nodes have labels. Runs in a lab of its own, with one host:

python -m tests.lab.racks FOLDER
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import ray
from ray.cluster_utils import Cluster
from ray.util import placement_group_table

from holdfast.cluster.runtime.engines import ray as engines
from holdfast.coding.machines import survives
from holdfast.coding.placement import Placement
from holdfast.errors import ConfigError
from holdfast.options import Ray

NODES = ("a", "a", "a", "b", "c")
"""The rack of each node."""


def main() -> None:
    folder = Path(sys.argv[1])
    here = Path("/tmp/ray")  # where Ray notes its newest cluster
    here.mkdir(exist_ok=True)
    subprocess.run(["mount", "-t", "tmpfs", "tmpfs", str(here)], check=True)
    subprocess.run(["ip", "link", "set", "lo", "up"], check=True)

    small: dict[str, Any] = {"object_store_memory": 80_000_000}
    cluster = Cluster(
        initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": False, **small}
    )
    for rack in NODES:
        cluster.add_node(num_cpus=8, labels={"rack": rack}, **small)
    try:
        check(folder, cluster.address)
    finally:
        ray.shutdown()
        cluster.shutdown()  # type: ignore[no-untyped-call]


def check(folder: Path, address: str) -> None:
    """Jobs' machines are in the racks that are planned, or the user reads why not."""

    def engine(placement: Placement, **options: Any) -> engines.RayEngine:
        return engines.RayEngine(
            folder, Ray(address=address, **{"domain": "rack", **options}), placement, 1, "state"
        )

    engines._PLACE_SECONDS = 2.0
    refused: dict[str, dict[str, Any]] = {
        r"5 of 5 machines of the Ray cluster have no label 'zone'.*ray start --labels zone=VALUE": {
            "domain": "zone"
        },
        r"no room for 5 machines \(3 with rack=a, 1 with rack=b, 1 with rack=c\).*8 CPUs.*, rack=b": {
            "server_cpus": 40.0
        },
        r"no room for 7 machines \(4 with rack=a, 2 with rack=b, 1 with rack=c\)": {"machines": 7},
        r"on 2 machines in 2 domains \(rack\).*use 3 domains": {"machines": 2},
    }
    for says, options in refused.items():
        with pytest.raises(ConfigError, match=says):
            engine(Placement(3, 2, 1), **options)
    with pytest.raises(ConfigError, match=r"use 4 domains or 6 servers"):
        engine(Placement(4, 2, 1))
    assert not placed(), "nothing is left of a job that was refused"

    accepted: list[tuple[Placement, dict[str, Any]]] = [
        (Placement.grouped(6, 2, 1), {}),
        (Placement(3, 2, 1), {"machines": 3, "spares": 1}),
        (Placement(3, 2, 1), {"machines": 3}),
    ]
    for placement, options in accepted:
        with engine(placement, **options) as found:
            rack_of = {node["NodeID"]: node["Labels"].get("rack") for node in ray.nodes()}  # type: ignore[no-untyped-call]
            ((_, nodes),) = placed()
            racks = [rack_of[nodes[machine]] for machine in sorted(nodes)]
            assert racks == ["a", "b", "c", "a", "a"][: len(racks)]
            assert len(racks) == len(set(nodes.values())), "each machine is a node"
            assert survives(placement, found.home, [ord(rack) for rack in racks])
    four = Placement(4, 3, 1)
    with engine(four, spread="prefer") as found:
        assert survives(four, found.home), "there are too few racks, but machines enough"
        assert len(set(found.home)) == 4


def placed() -> list[tuple[str, dict[int, str]]]:
    """The node of each machine, for each job on the cluster."""

    table: dict[str, dict[str, Any]] = placement_group_table()
    return [
        (name, group["bundles_to_node_id"]) for name, group in table.items() if group["state"] == "CREATED"
    ]


if __name__ == "__main__":
    main()
