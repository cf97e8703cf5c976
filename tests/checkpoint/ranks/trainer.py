"""Ranks of real jobs: processes with a gloo process group, which train, save and are killed.

``python -m tests.checkpoint.ranks.trainer`` loads everything once and then forks a rank for each line of its
input. What ranks have to say comes as lines of JSON.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

import holdfast as hf
from holdfast.checkpoint.format.chunk import checksum
from holdfast.checkpoint.memory import copy_on_write
from holdfast.checkpoint.store.local import LocalStore
from holdfast.errors import StoreFull
from tests.checkpoint.test_checkpointer import STRATEGIES

Say = Callable[..., None]
ROWS, SMALL, DIM, BATCH = 301, 7, 4, 8


class Model(nn.Module):
    """Two tables, a network, and noise: it draws random numbers in every step."""

    def __init__(self, sparse: bool, bag: bool, small: int, dropout: float) -> None:
        super().__init__()
        self.small = small
        self.users: nn.Module = nn.Embedding(ROWS, DIM)
        if bag:
            self.users = nn.EmbeddingBag(ROWS, DIM, mode="sum", sparse=sparse)
        self.items = nn.Embedding(small, DIM, sparse=sparse)
        self.top = nn.Sequential(nn.Linear(2 * DIM, 8), nn.ReLU(), nn.Dropout(dropout), nn.Linear(8, 1))

    def forward(self, users: Tensor, items: Tensor) -> Tensor:
        looked_up = self.users(users)
        looked_up = looked_up.sum(1) if looked_up.dim() == 3 else looked_up
        found: Tensor = self.top(torch.cat([looked_up, self.items(items % self.small)], 1))
        return found.squeeze(1)


class Batches:
    """A loader that gives each rank batches of its own."""

    def __init__(self, rank: int, world_size: int) -> None:
        self.at, self.rank, self.world_size = 0, rank, world_size

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        while True:
            draw = torch.Generator().manual_seed(1000 * self.at + 10 * self.rank + self.world_size)
            self.at += 1
            users = torch.randint(ROWS // 4, (BATCH, 3), generator=draw) * (1 + self.rank)
            items = torch.randint(SMALL, (BATCH,), generator=draw)
            yield users, items, torch.rand(BATCH, generator=draw)

    def state_dict(self) -> dict[str, int]:
        return {"at": self.at, "rank": self.rank}

    def load_state_dict(self, state: dict[str, int]) -> None:
        assert state["rank"] == self.rank, "the loader of another rank"
        self.at = state["at"]


class Run:
    """The training run of one rank, the same whenever it is made."""

    def __init__(self, order: dict[str, Any], rank: int, world_size: int, group: Any = None) -> None:
        torch.manual_seed(7)
        kind = order.get("kind", "ddp")
        self.model = Model(
            order.get("sparse", kind == "ddp"),
            kind != "dtensor",
            order.get("small", SMALL),
            order.get("dropout", 0.2),
        )
        sharded = kind in ("fsdp", "dtensor") and world_size > 1
        mesh = init_device_mesh("cpu", (world_size,)) if sharded else None
        if mesh is not None and kind == "fsdp":
            fully_shard(self.model.users, mesh=mesh)
            fully_shard(self.model, mesh=mesh)
        elif mesh is not None:
            style = RowwiseParallel(input_layouts=Replicate(), output_layouts=Replicate())
            parallelize_module(self.model.users, mesh, style)
            rank = 0  # all ranks train the same batches
        if kind == "max-norm":
            self.model.items.max_norm = 1.0
        tables = [*self.model.users.parameters(), *self.model.items.parameters()]
        self.trained: nn.Module = self.model
        if kind == "forgotten":  # to wrap it
            sharded = True
        if not sharded and world_size > 1:
            self.trained = DistributedDataParallel(self.model, process_group=group)
        dense = list(self.model.top.parameters())
        choices: dict[str, Callable[[], list[torch.optim.Optimizer]]] = {
            "adagrad": lambda: [torch.optim.Adagrad(tables, lr=0.1, foreach=False), torch.optim.Adam(dense)],
            "sgd": lambda: [torch.optim.SGD(tables, lr=0.1), torch.optim.SGD(dense, lr=0.1)],
            "adam": lambda: [torch.optim.Adam([*tables, *dense])],
            "sparse-adam": lambda: [torch.optim.SparseAdam(tables), torch.optim.Adam(dense)],
        }
        self.optimizers = choices[order.get("optimizer", "adagrad")]()
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizers[-1], 5)
        self.loader = Batches(rank, world_size)
        torch.manual_seed(100 + rank)

    @property
    def objects(self) -> dict[str, Any]:
        named = {f"optim{i}": o for i, o in enumerate(self.optimizers)}
        return {"model": self.trained, **named, "scheduler": self.scheduler, "loader": self.loader}

    def train(self, batch: tuple[Tensor, Tensor, Tensor]) -> None:
        users, items, labels = batch
        for optimizer in self.optimizers:
            optimizer.zero_grad()
        nn.functional.binary_cross_entropy_with_logits(self.trained(users, items), labels).backward()  # type: ignore[no-untyped-call]
        for optimizer in self.optimizers:
            optimizer.step()
        self.scheduler.step()

    def digests(self) -> dict[str, str]:
        """Of the tables, of what all ranks have, and of everything."""
        states = [o.state_dict() for o in self.optimizers]
        shared = [self.model.state_dict(), states, self.scheduler.state_dict()]
        own = [self.loader.state_dict(), torch.get_rng_state()]
        return {"shared": digest(shared), "all": digest([shared, own])}


def digest(value: Any) -> str:
    hashed = hashlib.sha256()
    _feed(value, hashed.update)
    return hashed.hexdigest()[:16]


def _feed(value: Any, update: Callable[[bytes], object]) -> None:
    if isinstance(value, dict):
        for key, item in value.items():
            update(str(key).encode())
            _feed(item, update)
    elif isinstance(value, list | tuple):
        for item in value:
            _feed(item, update)
    elif isinstance(value, Tensor):
        value = value.full_tensor() if hasattr(value, "full_tensor") else value
        update(checksum(value.detach().contiguous().view(-1).view(torch.uint8).numpy()).encode())
    else:
        update(repr(value).encode())


def die_at(point: str, version: int) -> None:
    """Kill this process at a point of the save of a version."""

    def wrapped(owner: type, name: str, when: Callable[..., bool], *, after: bool = False) -> None:
        real = getattr(owner, name)

        def deadly(self: Any, *arguments: Any, **named: Any) -> Any:
            dies = when(self, *arguments)
            if dies and not after:
                os.kill(os.getpid(), signal.SIGKILL)
            result = real(self, *arguments, **named)
            if dies:
                os.kill(os.getpid(), signal.SIGKILL)
            return result

        setattr(owner, name, deadly)

    from holdfast.checkpoint.ranks.publisher import Follower, Leader
    from holdfast.checkpoint.saving.catalog import Catalog
    from holdfast.checkpoint.saving.writer import Writer

    mine = f"chunks/{version:08}-"
    if point == "before-files":
        wrapped(LocalStore, "put", lambda self, name, parts: name.startswith(mine))
    elif point == "after-files":
        wrapped(LocalStore, "put", lambda self, name, parts: name.startswith(mine), after=True)
    elif point == "snapshot":
        wrapped(Writer, "_snapshot", lambda self, *_: self._next_version == version, after=True)
    elif point == "reported":
        wrapped(Follower, "_report", lambda self, number, report: number == version, after=True)
    elif point == "before-manifest":
        wrapped(Catalog, "commit_version", lambda self, v, *_: v.version == version)
    elif point == "after-manifest":
        wrapped(Catalog, "commit_version", lambda self, v, *_: v.version == version, after=True)
    elif point == "verdict":
        wrapped(Leader, "commit", lambda self, new, *_: new.number == version, after=True)
    elif point == "full":
        wrapped(LocalStore, "put", lambda self, name, parts: name.startswith(mine) and _no_space())
    elif point == "tidying":
        wrapped(Leader, "replace_all", lambda self, number, *_: number == version)
        wrapped(Follower, "replace_all", lambda self, number, *_: number == version)
    else:
        raise AssertionError(point)


def _no_space() -> bool:
    raise StoreFull("there is no space left")


def policy_of(order: dict[str, Any]) -> hf.Policy:
    values = dict(order.get("policy", {}))
    if isinstance(values.get("strategy"), int):
        values["strategy"] = STRATEGIES[values["strategy"]]
    return hf.Policy(**{"every_steps": 3, "every_seconds": None, **values})


def slow_down(seconds: float) -> None:
    """Let every file take so long."""
    real = LocalStore.put

    def put(self: LocalStore, name: str, parts: Any) -> int:
        time.sleep(seconds)
        return real(self, name, parts)

    LocalStore.put = put  # type: ignore[method-assign]


def train(order: dict[str, Any], say: Say) -> None:
    """Restore, train to a step, save in between; say everything."""
    rank, world_size = order["rank"], order["world_size"]
    group: Any = None
    if "group" in order:
        group = dist.new_group(order["group"])
        if rank not in order["group"]:
            return
        rank, world_size = dist.get_rank(group), dist.get_world_size(group)
    run = Run(order, rank, world_size, group)
    policy = policy_of(order)
    if "die" in order and order["die"]["rank"] == rank:
        die_at(order["die"]["point"], order["die"]["version"])
    timeout = order.get("timeout", 20.0)
    if order.get("frozen"):
        copy_on_write.COPIED_BYTES = 0  # even small tables are read while training goes on
    if "slow" in order:
        slow_down(order["slow"])
    with hf.Checkpointer(
        order["path"], run.objects, policy, rank_timeout_seconds=timeout, process_group=group
    ) as ckpt:
        begun = ckpt.restore(order.get("version"))
        said = run.digests()
        say("restored", step=begun, digests=said)
        batches = iter(run.loader)
        for step in range(begun, order["steps"]):
            run.train(next(batches))
            time.sleep(order.get("pause", 0.0))
            try:
                version = ckpt.save(step) if order.get("save_at") == step else ckpt.step(step)
                if version is not None and order.get("wait"):
                    ckpt.wait()
            except hf.SaveFailed as error:
                if not order.get("goes_on"):
                    raise
                version = None
                say("failed", kind=type(error).__name__, error=str(error))
            if version is not None:
                say("saved", version=version, step=step, digests=run.digests())
            if order.get("kill_after") == step:
                ckpt.wait()
                say("killed", digests=run.digests())
                os.kill(os.getpid(), signal.SIGKILL)
    say(
        "trained",
        digests=run.digests(),
        rows=[r.rows for r in ckpt.reports],
        bytes=[r.bytes for r in ckpt.reports],
    )


def lonely(order: dict[str, Any], say: Say) -> None:
    """Make a Checkpointer on rank 0 alone."""
    run = Run(order, order["rank"], order["world_size"])
    if order["rank"] == 0:
        with hf.Checkpointer(order["path"], run.objects, rank_timeout_seconds=order["timeout"]):
            pass
    else:
        time.sleep(order["sleep"])


ROLES = {"train": train, "lonely": lonely}


def work(order: dict[str, Any]) -> NoReturn:
    def say(event: str, **values: Any) -> None:
        line = json.dumps({"rank": order["rank"], "pid": os.getpid(), "event": event, **values}) + "\n"
        os.write(1, line.encode())

    code = 1
    logging.basicConfig(level=logging.WARNING, stream=sys.stderr)
    try:
        torch.set_num_threads(1)
        os.environ["GLOO_SOCKET_IFNAME"] = "lo"
        world_size = order["world_size"]
        if world_size > 1 and order.get("init", True):
            from datetime import timedelta

            dist.init_process_group(
                "gloo", init_method=order["init_method"], rank=order["rank"], world_size=world_size,
                timeout=timedelta(seconds=60),
            )  # fmt: skip
        for key in ("RANK", "WORLD_SIZE"):
            if key in order:
                os.environ[key] = str(order[key])
        ROLES[order.get("role", "train")](order, say)
        code = 0
    except BaseException as error:
        say("error", kind=type(error).__name__, error=str(error))
        if order.get("traceback"):
            import traceback

            traceback.print_exc()
    say("end")
    os._exit(code)


def warm_up() -> None:
    """Load what is compiled here, not in every rank."""
    import tempfile

    for sparse in (True, False):
        with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stderr(None):
            order = {"path": folder, "rank": 0, "world_size": 1, "steps": 20, "sparse": sparse}
            train(order, lambda *_, **__: None)


def serve() -> None:
    torch.set_num_threads(1)
    children: set[int] = set()

    def reap(*_: Any) -> None:
        for child in list(children):
            with contextlib.suppress(ChildProcessError):
                pid, status = os.waitpid(child, os.WNOHANG)
                if pid:
                    children.discard(child)
                    ended = {"pid": pid, "event": "ended", "code": os.waitstatus_to_exitcode(status)}
                    os.write(1, json.dumps(ended).encode() + b"\n")

    signal.signal(signal.SIGCHLD, reap)
    for line in sys.stdin:
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGCHLD})
        pid = os.fork()
        if not pid:
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGCHLD})
            work(json.loads(line))
        children.add(pid)
        os.write(1, json.dumps({"pid": pid, "event": "started"}).encode() + b"\n")
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGCHLD})


if __name__ == "__main__":
    serve()
