"""The manifests of ``docs/examples/kuberay.yaml``: they fit together, and the job in them could run."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from holdfast.cluster.runtime.engines.room import room_for
from holdfast.coding.machines import check_spread
from holdfast.coding.placement import Placement
from holdfast.options import ErasureCode, Ray
from holdfast.training.config import Config, load

ROOT = Path(__file__).parents[1]
MANIFESTS: dict[str, Any] = {
    manifest["kind"]: manifest
    for manifest in yaml.safe_load_all((ROOT / "docs/examples/kuberay.yaml").read_text())
}
CLUSTER = MANIFESTS["RayCluster"]["spec"]
HEAD = CLUSTER["headGroupSpec"]
(MACHINES,) = CLUSTER["workerGroupSpecs"]


def container(group: dict[str, Any]) -> dict[str, Any]:
    (found,) = group["template"]["spec"]["containers"]
    return dict(found)


def labels(group: dict[str, Any]) -> dict[str, str]:
    return dict(group["template"]["metadata"]["labels"])


@pytest.fixture
def job(tmp_path: Path) -> Config:
    path = tmp_path / "job.yaml"
    path.write_text(MANIFESTS["ConfigMap"]["data"]["job.yaml"])
    return load(path)


def gigabytes(text: str) -> float:
    (number,) = re.fullmatch(r"(\d+)Gi", text).groups()  # type: ignore[union-attr]
    return int(number) * 1.073741824


def test_the_code_covers_the_loss_of_a_pod(job: Config) -> None:
    code, engine = job.job.protection, job.job.engine
    assert isinstance(code, ErasureCode)
    assert isinstance(engine, Ray)
    machines = MACHINES["replicas"]
    assert engine.machines == machines == MACHINES["minReplicas"]
    check_spread(Placement.grouped(job.job.servers, code.k, code.r), machines)
    terms = MACHINES["template"]["spec"]["affinity"]["podAntiAffinity"]
    (term,) = terms["requiredDuringSchedulingIgnoredDuringExecution"]
    assert term["topologyKey"] == "kubernetes.io/hostname"
    assert term["labelSelector"]["matchLabels"] == labels(MACHINES)


def test_processes_fit_into_pods(job: Config) -> None:
    engine, resources = job.job.engine, container(MACHINES)["resources"]
    assert isinstance(engine, Ray)
    assert resources["requests"] == resources["limits"]
    machines = MACHINES["replicas"]
    servers, workers = -(-job.job.servers // machines), -(-job.job.workers // machines)
    assert servers * engine.server_cpus + workers * engine.worker_cpus <= float(resources["limits"]["cpu"])
    shared = MACHINES["template"]["spec"]["volumes"][0]["emptyDir"]
    assert shared["medium"] == "Memory"
    room = gigabytes(resources["limits"]["memory"]) - gigabytes(shared["sizeLimit"])
    reserved = room_for(engine, servers=servers, workers=workers, machines=machines)
    assert reserved["memory"] == 3 * 35e9 + 3 * 2e9
    assert reserved["memory"] / 1e9 <= room
    assert HEAD["rayStartParams"]["num-cpus"] == "0", "the controller's machine runs nothing else"


def test_the_job_is_started_where_its_file_is() -> None:
    spec = MANIFESTS["RayJob"]["spec"]
    (mount,) = container(HEAD)["volumeMounts"]
    (volume,) = HEAD["template"]["spec"]["volumes"]
    assert mount["name"] == volume["name"]
    assert volume["configMap"]["name"] == MANIFESTS["ConfigMap"]["metadata"]["name"]
    assert spec["entrypoint"] == f"holdfast train {mount['mountPath']}/job.yaml"
    assert spec["clusterSelector"] == {"ray.io/cluster": MANIFESTS["RayCluster"]["metadata"]["name"]}


def test_one_version_of_everything() -> None:
    assert container(HEAD)["image"] == container(MACHINES)["image"]
    (pinned,) = re.findall(r"^ray==(.+)$", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
    assert CLUSTER["rayVersion"] == pinned
    assert f"rayproject/ray:{pinned}-py311" in (ROOT / "docs/examples/kuberay.yaml").read_text()


def test_nobody_else_reaches_the_pods() -> None:
    spec = MANIFESTS["NetworkPolicy"]["spec"]
    chosen = spec["podSelector"]["matchLabels"].items()
    assert all(chosen <= labels(group).items() for group in (HEAD, MACHINES))
    assert {"podSelector": spec["podSelector"]} in spec["ingress"][0]["from"]
