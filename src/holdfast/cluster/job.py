"""``Job``: train in many processes, from Python or from a configuration. Start reading here.

``make_plan`` makes the plan that all processes share, ``runner`` starts and watches them, and
``supervisor``, ``server`` and ``worker`` each have a ``process`` that runs a ``machine``.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import secrets
import shutil
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from types import ModuleType
from typing import Any, Literal

import msgspec

from holdfast.cluster.make_plan import plan_job
from holdfast.cluster.memory import with_estimates
from holdfast.cluster.protocol.messages import Happening, Status
from holdfast.cluster.protocol.plan import JobPlan
from holdfast.cluster.remote import CONTROLLER, Remote
from holdfast.cluster.report.progress import JobProgress, Reports
from holdfast.cluster.report.result import JobResult, describe_lack
from holdfast.cluster.runner import Runner
from holdfast.cluster.runtime.engines.agent import OWN_ADDRESS
from holdfast.cluster.runtime.engines.base import Engine
from holdfast.cluster.runtime.engines.local import ONE_THREAD, LocalLauncher
from holdfast.cluster.runtime.files import Journal
from holdfast.cluster.runtime.transport.address import check_shared
from holdfast.cluster.saving.failures import log
from holdfast.cluster.server.witness import ROWS_FOLDER
from holdfast.cluster.succession import Past, Succession, past_of
from holdfast.cluster.supervisor.process import STATE_FILE
from holdfast.data.criteo import Criteo
from holdfast.data.synthetic import Synthetic
from holdfast.errors import ConfigError, DataLoss, StoreLocked
from holdfast.events import EventLog, read_events
from holdfast.options import Kill, Local, NoProtection, Protection, Ray, Training
from holdfast.recipe import Recipe, recipe_of
from holdfast.stopping import stop_on_signals
from holdfast.training.config import Config, load
from holdfast.training.session import open_run

TEST_SAMPLES = 100_000
"""Size of a ``Synthetic`` reader's default test part."""

_MOST_RESTARTS = 10  # from checkpoints, after losses beyond the code
_LOCKED_SECONDS = 90.0  # the lease of a dead supervisor expires after a minute
_LOCKED_AGAIN_SECONDS = 2.0

Made = object | str | tuple[str, Mapping[str, Any]]
"""A model or reader of Holdfast, an import path "package.module:callable", or (path, arguments)."""


class Job:
    """Trains a model in many processes: servers hold its rows, workers compute gradients.

    Args:
        model: a ``DLRM``, ``DeepFM`` or ``PNN``; or the import path of a function that takes a reader and
            returns a network, "package.module:build", or (path, arguments). Each worker constructs a model
            object again from its constructor arguments: weights that it has learned since are not used.
        data: a ``Synthetic`` or ``Criteo`` reader; or the import path of a function ``reader(part,
            batch_size)``, or (path, arguments). Its batches are split among the workers.
        servers: number of processes that hold rows.
        workers: number of processes that compute gradients.
        test_data: the data to test on, in the same form as ``data``. Default: the matching test part. That is
            100,000 samples of the same teacher for ``Synthetic``, the part held out by ``test_fraction`` or
            ``test_files`` for ``Criteo``, and ``reader("test", batch_size)`` for an import path.
        training: optimizer, batch size, number of epochs and so on.
        protection: how the job survives the death of servers: ``ErasureCode``, ``Replication``,
            ``PartialRecovery``, or no protection.
        engine: where processes run: "local", or ``Local`` with its options, is this machine; "ray", or
        ``Ray``
            with its options, are the machines of a Ray cluster.
        checkpoint: where to save the job, a folder or a URL; or the keys of the ``checkpoint`` section, such
            as ``{"path": "s3://bucket/run2", "every_steps": 500}``. If it holds versions, the job resumes
            from the newest.
        run: the run's folder. Default: a new one under ``runs/``.
        kill: processes to kill during the run, such as "worker:1@step:200", to test fault tolerance.
    """

    def __init__(
        self,
        model: Made,
        data: Made,
        *,
        servers: int = 4,
        workers: int = 2,
        test_data: Made | None = None,
        training: Training = Training(),  # noqa: B008 (frozen)
        protection: Protection = NoProtection(),  # noqa: B008
        engine: Local | Ray | Literal["local", "ray"] = "local",
        checkpoint: str | os.PathLike[str] | Mapping[str, Any] | None = None,
        run: str | os.PathLike[str] | None = None,
        kill: Sequence[str | Kill] = (),
    ) -> None:
        if isinstance(engine, str) and engine not in ("local", "ray"):
            raise ConfigError(f"engine is {engine!r}: expected 'local', 'ray', a Local(...) or a Ray(...)")
        cluster = Ray() if engine == "ray" else engine if isinstance(engine, Ray) else None
        local = engine if isinstance(engine, Local) else Local()
        data_section, batch_size = _data(data, test_data, training.batch_size)
        job = {
            "servers": servers, "workers": workers, "protection": msgspec.to_builtins(protection),
            "staleness": training.staleness, "bind": local.bind,
            "kill": [str(one) for one in kill], "server_processors": list(local.server_processors),
            "server_threads": local.server_threads,
            "engine": "local" if cluster is None else msgspec.to_builtins(cluster),
        }  # fmt: skip
        self.config = _checked(
            load(
                model=_section(_recipe(model, "model")),
                data=data_section,
                optimizer={"name": training.optimizer, "lr": training.lr},
                job=job,
                checkpoint=_checkpoint(checkpoint),
                batch_size=batch_size,
                epochs=training.epochs,
                max_steps=training.max_steps,
                test_every=training.test_every,
                seed=training.seed,
                run=None if run is None else os.fspath(run),
            )
        )
        """The complete configuration of the run."""
        self.folder: Path | None = None
        """The run's folder; None until ``run`` is called."""

    @classmethod
    def from_config(cls, config: Config) -> Job:
        """Create a job from a configuration; its ``job.servers`` must not be 0."""
        job = cls.__new__(cls)
        job.config, job.folder = _checked(config), None
        return job

    def run(self, on_status: Callable[[JobProgress], None] | None = None) -> JobResult:
        """Train, test and save. No process is left afterwards, whatever happened.

        On the first Ctrl-C (or SIGTERM), workers finish their batch, and the job tests, saves and returns. A
        second one, or one before training has begun, ends the job at once. A checkpoint that cannot be saved
        does not end the job: see ``unsaved`` and ``save_failures`` of the result. If the last one fails, a
        warning is logged.

        Raises ``ServerLost`` when a server dies and nothing protects its rows, ``DataLoss`` when more servers
        die than the code covers and there is no checkpoint to restore, ``WorkerFailed`` when a worker
        cannot make progress.

        Args:
            on_status: called a few times a second with the job's progress.
        """
        with open_run(self.config) as (folder, events, board):
            self.folder = folder
            if self.config.job.engine == "local":
                reports = Reports(self.config, events)
                return _watch(
                    lambda take, signals: self.run_here(folder, events, take, lambda: bool(signals), signals),
                    reports, board, on_status,
                )  # fmt: skip
            remote, reports = self._start_controller(), Reports(self.config, EventLog(None))
            try:
                return _watch(
                    lambda take, signals: remote.follow(folder, take, lambda: bool(signals)),
                    reports, board, on_status,
                )  # fmt: skip
            except KeyboardInterrupt:
                remote.kill()
                raise

    def attach(self, remote: Remote, on_status: Callable[[JobProgress], None] | None = None) -> JobResult:
        """Watch this job, which a controller runs, until it ends; as ``run``, but Ctrl-C does not stop it."""
        with open_run(self.config) as (folder, _, board):
            self.folder = folder
            reports = Reports(self.config, EventLog(None))
            take = _taker(reports, board, on_status, lambda: False)
            return remote.follow(folder, take, lambda: False)

    def run_here(
        self,
        folder: Path,
        events: EventLog,
        on_status: Callable[[Status], None],
        stop_requested: Callable[[], bool],
        signals: Sequence[int] = (),
        succession: Succession | None = None,
    ) -> JobResult:
        """Run the job from this process, which must stay, with its files in a folder. Users call ``run``.

        ``signals`` are those that this process has received so far; more may be added. ``succession`` says
        from whom this process takes over (see ``succeed``).
        """
        succession = succession or Succession()
        try:
            result = _signalled(self._run(folder, events, on_status, stop_requested, succession), signals)
        except BaseException as error:
            events.emit("run_failed", error=type(error).__name__, message=str(error))
            raise
        events.emit("run_finished", **_figures(result))
        return result

    def succeed(self, number: int, journal: Journal) -> Succession:
        """Take over this job as its controller with this number. If the last one had not got far enough, or
        was about to end, the job starts anew, from its checkpoint.

        Args:
            number: 1 for the first controller.
            journal: the run's log, whose file gets what there is of it.
        """
        if number == 1:
            return Succession(number, journal)
        engine = self.config.job.engine
        assert engine != "local"
        module = _ray()
        left = module.inherit(engine, number, journal.path)
        if left is None:
            return Succession(number, journal)
        of_engine, charter = left
        return Succession.after(number, journal, of_engine, charter, module.RayEngine.most_vaults)

    def _start_controller(self) -> Remote:
        engine = self.config.job.engine
        assert engine != "local"
        name = engine.name or f"job-{secrets.token_hex(3)}"
        job = msgspec.structs.replace(self.config.job, engine=msgspec.structs.replace(engine, name=name))
        config = {"config": msgspec.json.encode(msgspec.structs.replace(self.config, job=job))}
        return Remote(_ray().RayHosted.start(engine, name, CONTROLLER, config))

    def _run(
        self,
        folder: Path,
        events: EventLog,
        on_status: Callable[[Status], None],
        stop_requested: Callable[[], bool],
        succession: Succession,
    ) -> JobResult:
        config, job = self.config, self.config.job
        check_shared(job.bind)  # raise here, not in a process whose error is only logged
        bind = job.bind if job.engine == "local" else OWN_ADDRESS
        charter = succession.charter
        past = past_of(read_events(folder)) if charter is not None else Past()
        kills = past.left(job.kills)
        lost: tuple[str, ...] = tuple(past.losses)
        earlier: Runner | None = None
        while True:
            plan = charter.plan if charter is not None else None
            if plan is None and job.engine != "local":  # the engine must know how much memory to reserve
                plan = plan_job(config) if earlier is None else _plan_again(config, earlier, stop_requested)
            with _open_engine(config, folder, succession, plan) as engine:
                if charter is None:
                    # Processes import their modules while this one makes the plan.
                    for role, count in (("supervisor", 1), ("server", job.servers), ("worker", job.workers)):
                        for slot in range(count):
                            engine.warm(role, slot)
                if plan is None:
                    plan = (
                        plan_job(config) if earlier is None else _plan_again(config, earlier, stop_requested)
                    )
                runner = Runner(plan, engine, folder, events, bind, kills, charter=charter, past=past)
                charter, succession, past = None, succession.begin_again(), Past()
                if earlier is not None:
                    if plan.resume is None:
                        raise DataLoss(lost[-1])
                    runner.happened, runner.failures = earlier.happened, earlier.failures
                    runner.saves = earlier.saves
                    runner.saves.end()
                    runner.say("job_restored", version=plan.resume.version, step=plan.resume.steps)
                elif plan.resume is not None:  # its supervisor logs this, but does not report it
                    figures = {"version": plan.resume.version, "step": plan.resume.steps}
                    runner.happened.append(Happening(time.time(), "job_resumed", figures))
                try:
                    return replace(runner.run(on_status, stop_requested), losses=lost)
                except DataLoss as error:
                    if config.checkpoint is None or len(lost) >= _MOST_RESTARTS:
                        raise
                    # The second line of defence: restart from the last checkpoint.
                    lost, kills, earlier = (*lost, str(error)), runner.kills_left, runner
                    runner.say("data_lost", message=str(error))
                finally:
                    shutil.rmtree(folder / ROWS_FOLDER, ignore_errors=True)


def _ray() -> ModuleType:
    """The module of the Ray engine, which is an extra."""
    try:
        return importlib.import_module("holdfast.cluster.runtime.engines.ray")
    except ImportError:
        raise ConfigError("job.engine is ray, which is not installed: pip install 'holdfast[ray]'") from None


@contextlib.contextmanager
def _open_engine(
    config: Config, folder: Path, succession: Succession, plan: JobPlan | None
) -> Iterator[Engine]:
    """The engine that the configuration asks for; at the end, all processes are ended."""
    job = config.job
    if job.engine == "local" or plan is None:
        with LocalLauncher(folder, environment=_environment()) as launcher:
            yield launcher
        return
    options = with_estimates(job.engine, plan)
    open_engine = _ray().RayEngine(
        folder, options, plan.placement, job.workers, STATE_FILE, controller=succession.launcher,
        journal=succession.journal, inheritance=succession.inheritance, again=succession.again,
    )  # fmt: skip
    with open_engine as engine:
        yield engine


def _watch(
    work: Callable[[Callable[[Status], None], Sequence[int]], JobResult],
    reports: Reports,
    board: Callable[[JobProgress], None],
    on_status: Callable[[JobProgress], None] | None,
) -> JobResult:
    """Run a job, with its progress shown, and stop it on signals."""
    started = False

    def take(status: Status) -> None:
        nonlocal started
        started = status.phase != "starting"
        show(status)

    with stop_on_signals(lambda: started) as received:
        show = _taker(reports, board, on_status, lambda: bool(received))
        result = _signalled(work(take, received), received)
    if result.unsaved:
        log.warning("%s", describe_lack(result))
    return result


def _signalled(result: JobResult, signals: Sequence[int]) -> JobResult:
    """The result with the signal that stopped the job early, if one did."""
    return replace(result, signal=signals[0]) if result.interrupted and signals else result


def _taker(
    reports: Reports,
    board: Callable[[JobProgress], None],
    on_status: Callable[[JobProgress], None] | None,
    stopped: Callable[[], bool],
) -> Callable[[Status], None]:
    """What becomes of each report."""

    def take(status: Status) -> None:
        progress = reports.note(status, stopped=stopped())
        if on_status is not None:
            on_status(progress)
        if progress.step:
            board(progress)

    return take


def _plan_again(config: Config, earlier: Runner, stop_requested: Callable[[], bool]) -> JobPlan:
    """Plan the restart of a job that lost data. A remote store stays locked for a while after its supervisor
    died, so wait for the lease to expire."""
    end, said = time.monotonic() + _LOCKED_SECONDS, False
    while True:
        try:
            return plan_job(config)
        except StoreLocked as error:
            if stop_requested() or time.monotonic() > end:
                raise
            if not said:
                said = True
                earlier.say("store_locked", message=str(error), most_seconds=_LOCKED_SECONDS)
        time.sleep(_LOCKED_AGAIN_SECONDS)


def _checked(config: Config) -> Config:
    if not config.job.servers:
        raise ConfigError(
            "job.servers is 0: expected at least 1; with 0 servers, holdfast train uses one process"
        )
    return config


def _recipe(made: Made, name: str) -> Recipe:
    if isinstance(made, str):
        recipe = Recipe(made)
    elif isinstance(made, tuple):
        if len(made) != 2 or not isinstance(made[0], str) or not isinstance(made[1], Mapping):
            raise ConfigError(f'{name} is {made!r}: expected ("package.module:callable", {{arguments}})')
        recipe = Recipe(made[0], dict(made[1]))
    else:
        return recipe_of(made)
    if recipe.path.startswith("__main__:"):
        raise ConfigError(
            f"{name} is {recipe.path}: other processes cannot import from a script; move it to a module"
        )
    return recipe


def _section(recipe: Recipe) -> dict[str, Any]:
    return {"build": recipe.path, "arguments": recipe.arguments}


def _data(data: Made, test_data: Made | None, batch_size: int | None) -> tuple[dict[str, Any], int | None]:
    """Build the configuration's data section. Returns it and the batch size."""
    recipe = _recipe(data, "data")
    own = getattr(data, "batch_size", None)
    if own is not None:
        if batch_size not in (None, own):
            raise ConfigError(f"batch_size is {batch_size} but the reader's is {own}: set the reader's alone")
        batch_size = own
        # A reader without a part is for training.
        recipe = Recipe(recipe.path, {"part": "train", **recipe.arguments})
    section = _section(recipe)
    if test_data is not None:
        section["test"] = _section(_recipe(test_data, "test_data"))
    elif own is not None:
        section["test"] = _section(_test_part(data, recipe))
    return section, batch_size


def _test_part(data: object, recipe: Recipe) -> Recipe:
    """The test part that matches a reader's training part."""
    if recipe.arguments["part"] != "train":
        part = recipe.arguments["part"]
        raise ConfigError(f"data is a reader of part {part!r}: give test_data, or a reader of part 'train'")
    arguments = {**recipe.arguments, "part": "test"}
    if isinstance(data, Synthetic):
        return Recipe(recipe.path, {**arguments, "samples": TEST_SAMPLES})
    if isinstance(data, Criteo):
        return Recipe(recipe.path, {**arguments, "drop_last": False})
    raise ConfigError(f"data is a {type(data).__name__}, which has no known test part: give test_data")


def _checkpoint(given: str | os.PathLike[str] | Mapping[str, Any] | None) -> dict[str, Any] | None:
    if given is None or isinstance(given, Mapping):
        return None if given is None else dict(given)
    return {"path": os.fspath(given)}


def _environment() -> dict[str, str]:
    """Variables to add to the processes' environment, so that they import from the same paths."""
    return {**ONE_THREAD, "PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path)}


def _figures(result: JobResult) -> dict[str, Any]:
    figures = {
        **asdict(result),
        "auc": result.auc,
        "servers_replaced": result.servers_replaced,
        "checkpoints_failed": result.checkpoints_failed,
        "save_failures": [msgspec.structs.asdict(failure) for failure in result.save_failures],
    }
    tests = [msgspec.structs.asdict(test) for test in result.tests]
    kills = [str(kill) for kill in result.kills_missed]
    return {**figures, "test": tests[-1], "tests": tests, "kills_missed": kills, "folder": str(result.folder)}


def find_job(cluster: Ray, name: str) -> tuple[Job, Remote]:
    """A job that runs on a cluster, and its controller. Raises ConfigError if there is none of this name."""
    remote = Remote(_ray().RayHosted.find(cluster, name))
    return Job.from_config(msgspec.json.decode(remote.config(), type=Config)), remote


def list_jobs(cluster: Ray) -> dict[str, Remote]:
    """The controllers of all jobs on a cluster, by name."""
    module = _ray()
    return {name: Remote(module.RayHosted.find(cluster, name)) for name in module.hosted_names(cluster)}
