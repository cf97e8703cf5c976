"""The supervisor's part of a checkpoint: when to cut, and one manifest for the files of all servers.

``SaveCoordinator.advance`` is the main path, one stage at a time: *cutting* (the supervisor makes workers
hold and servers copy), *collecting* (each server reports its files), *committing* (the dense
file, then the manifest), *tidying* (servers rearrange files) and *replacing* (a manifest with those).
All access to the store runs in the background.

If something is not in a manifest when the supervisor dies, it never will be: the next supervisor starts from
the store, and servers mark the rows of a failed cut again. So nothing here needs to be durable.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import msgspec
import numpy as np
from numpy.typing import NDArray

from holdfast.checkpoint.format.dense import encode_tree
from holdfast.checkpoint.format.manifest import FileChange
from holdfast.checkpoint.layout.shard import Shard
from holdfast.checkpoint.saving.catalog import Catalog
from holdfast.checkpoint.saving.publisher import NewVersion, Publisher
from holdfast.checkpoint.saving.schedule import SaveSchedule
from holdfast.checkpoint.store import Store, WriterLock
from holdfast.cluster.protocol.batches import Layout, merge_layouts
from holdfast.cluster.protocol.envelope import Frame, as_array
from holdfast.cluster.protocol.messages import DAMAGED, Collect, Saved
from holdfast.cluster.protocol.plan import JobPlan
from holdfast.cluster.protocol.retry import Retry
from holdfast.cluster.saving.failures import SaveFailures, cause_of, kind_of
from holdfast.cluster.saving.layout import JobState, dense_tree, encoder_of, saving_of, version_metadata
from holdfast.cluster.saving.shard_saver import Runs
from holdfast.cluster.supervisor.machine import Supervisor
from holdfast.cluster.supervisor.members import Cut
from holdfast.errors import HoldfastError, StoreFull, StoreLocked, StoreUnreachable, message_of
from holdfast.options import Policy

GIVE_UP_SECONDS = 120.0
"""How long a job waits at its end for a store that is locked or unreachable."""
_AGAIN_SECONDS = 2.0
_LEASE_SECONDS = 90.0
"""The lease of a dead supervisor expires within this time, after a minute."""


log = logging.getLogger("holdfast.checkpoint")

Stage = Literal["cutting", "collecting", "committing", "tidying", "replacing"]


@dataclass
class _Answer:
    change: FileChange
    message: Saved
    frames: Sequence[Frame]


@dataclass
class _Save:
    """The version being saved."""

    version: int
    baseline: bool
    whole: bool
    """Whether it contains all changed rows, not only those with priority."""
    began: float
    incarnations: tuple[int, ...]
    """Of the servers: a replaced one has no part in it."""
    stage: Stage = "cutting"
    cut: Cut | None = None
    hold_seconds: float = 0.0
    answers: dict[int, _Answer] = field(default_factory=dict)
    retries: dict[int, Retry] = field(default_factory=dict)
    """Retry timer of the request to each server."""


class SaveCoordinator:
    """Saves a job; implements ``supervisor.machine.Keeper``.

    Args:
        plan: the job's plan.
        open_store: opens the store for writing.
        runs: runs writes in the background; nothing here waits for a disk.
        now: the current time.

    Attributes:
        events: new events; the caller takes them out.
        saved: the versions that this job has saved.
        failures: why other versions could not be saved.
        untidy: why files of saved versions could not be rearranged.
        last_version: the newest version that a job can resume from; 0: none known.
        saved_steps: the number of steps it contains.
    """

    def __init__(self, plan: JobPlan, open_store: Callable[[], Store], runs: Runs, now: float) -> None:
        self.events: list[tuple[str, dict[str, Any]]] = []
        self.saved: list[int] = []
        self.failures, self.untidy = SaveFailures(), SaveFailures()
        resume = plan.resume
        self.last_version, self.saved_steps = (resume.version, resume.steps) if resume else (0, 0)
        self._plan = plan
        self._policy = saving_of(plan).config.policy
        self._encoder = encoder_of(plan)
        strategy: Any = self._policy.strategy
        self._layout_name = Shard(0, self._encoder.stored, strategy).layout_name
        self._runs = runs
        self._opening = Opening(open_store, self._policy, runs, now)
        self._publisher: Publisher | None = None
        self._save: _Save | None = None
        self._outcome: BackgroundOutcome | None = None
        self._clearing: BackgroundOutcome | None = None
        self._live_bytes = 0
        self._last_number = 0
        self._whole_steps = self.saved_steps  # the last version must be whole
        self._schedule = SaveSchedule(self._policy, now, self.saved_steps)
        self._final: float | None = None
        self._final_tried = self._final_again = False
        self._made_room = False
        self._waited = False

    # Called by the supervisor

    def receive(self, slot: int, message: Saved, frames: Sequence[Frame]) -> None:
        """Process a server's report; unexpected ones are dropped."""
        save = self._save
        stage = "tidying" if message.tidy else "collecting"
        if save is None or message.version != save.version or save.stage != stage or slot in save.answers:
            return
        try:
            change = msgspec.json.decode(message.change, type=FileChange)
        except (msgspec.MsgspecError, RecursionError) as error:
            self._drop((f"server {slot} sent a malformed report: {error}", ""))
            return
        save.answers[slot] = _Answer(change, message, list(frames))

    def advance(self, supervisor: Supervisor, now: float) -> None:
        """Take the save in progress one step further, or start one that is due."""
        if self._publisher is None:
            self._advance_opening(supervisor, now)
        elif self._save is not None:
            self._advance_save(self._save, supervisor, now)
        elif self._is_due(supervisor, now) and self._is_free() and supervisor.may_cut():
            self._begin(supervisor, now)
        elif self._final is None and self._is_due(supervisor, now):
            self._skip(supervisor, now)

    def may_stop(self, supervisor: Supervisor, now: float) -> bool:
        """Whether the final state is saved, or cannot be saved."""
        self._final = self._final if self._final is not None else now
        if self._save is not None or not self._is_free():
            return False
        if self._made_room and self._final_tried and not self._final_again:
            self._final_again, self._final_tried = True, False
        steps = supervisor.steps()
        if self._final_tried or self._whole_steps == steps or not self._policy.save_last:
            return True
        if self._publisher is None:
            return self._gives_up(now)
        if supervisor.may_cut():
            self._final_tried = True
            self._begin(supervisor, now)
        return False

    def close(self) -> None:
        """Release the store."""
        self._opening.close()

    # Opening

    def _advance_opening(self, supervisor: Supervisor, now: float) -> None:
        opening = self._opening
        opening.advance(now)
        if opening.catalog is not None:
            self._look_around(opening.catalog, supervisor)
        elif opening.has_failed(now):
            if self.failures.is_news(opening.why()):
                self._say("store_not_opened", message=opening.why())
            if self._is_due(supervisor, now):
                self._schedule.note(supervisor.steps(), now)
                self._fail([(opening.why(), kind_of(opening.error))])

    def _gives_up(self, now: float) -> bool:
        """At the end of the job: whether to stop waiting for the store."""
        opening = self._opening
        assert self._final is not None
        if opening.is_hopeless(self._final, now):
            self._final_tried = True
            self._fail([(opening.why(), kind_of(opening.error))])
        elif opening.is_waited_for and not self._waited:
            self._waited = True
            why = opening.why() if self.failures.is_news(opening.why()) else ""
            self._say("store_waited_for", message=why, most_seconds=GIVE_UP_SECONDS)
        return self._final_tried

    def _look_around(self, catalog: Catalog, supervisor: Supervisor) -> None:
        """Find the state in the store that this job can continue from."""
        self._publisher = Publisher(catalog)
        for complaint in catalog.complaints:
            self._say("checkpoint_damaged", version=None, error=complaint)
        manifest, newest, resume = catalog.manifest, catalog.newest, self._plan.resume
        if newest is None:
            return
        own = newest.metadata.get("job") == self._plan.job
        resumed = resume is not None and resume.continues and resume.version == newest.version
        if own:
            # Its supervisor may have died before it could announce this version.
            supervisor.announce(committed=newest.version)
            self.last_version, self.saved_steps = newest.version, newest.step + 1
            self._schedule.begin_at(newest.step + 1)
            if newest.baseline or self._policy.prioritize is None:  # others may not be whole
                self._whole_steps = newest.step + 1
            self.saved = [v.version for v in manifest.versions if v.metadata.get("job") == self._plan.job]
        if (own or resumed) and manifest.last_version == newest.version:
            self._publisher.resume(manifest.era(newest.era), self._encoder.stored)

    # Deciding

    def _is_due(self, supervisor: Supervisor, now: float) -> bool:
        if supervisor.view.phase != "running" or self._final is not None:
            return False
        steps = supervisor.steps()
        return steps > self._schedule.step and self._schedule.is_due(steps, now)

    def _is_free(self) -> bool:
        """Whether no cleanup is running: it would delete a new save's files, which no manifest has yet."""
        if self._clearing is not None and self._clearing.done:
            self._clearing = None
        return self._clearing is None

    def _begin(self, supervisor: Supervisor, now: float) -> None:
        assert self._publisher is not None
        heard = [s.beat.cut for s in supervisor.servers if s.beat is not None]
        # A number that any server has seen means another instant.
        number = max(self._publisher.catalog.next_version(), self._last_number + 1, 1 + max(heard, default=0))
        self._last_number = number
        baseline = self._publisher.baseline_is_due(self._live_bytes)
        whole = baseline or self._policy.prioritize is None or self._final is not None
        self._save = _Save(number, baseline, whole, now, tuple(s.incarnation for s in supervisor.servers))
        self._schedule.note(supervisor.steps(), now)
        supervisor.request_cut(number, baseline=baseline, whole=whole)

    def _skip(self, supervisor: Supervisor, now: float) -> None:
        """Handle a save that is due while another is in progress: wait, skip it, or cancel the other, by the
        policy."""
        save = self._save
        if self._policy.when_busy == "skip":
            self._schedule.note(supervisor.steps(), now)
            self._say("checkpoint_skipped", step=self._schedule.step)
        elif self._policy.when_busy == "cancel" and save is not None and save.stage == "collecting":
            self._cancel(save)

    def _cancel(self, save: _Save) -> None:
        """Cancel this save in favour of the one that is due; never two in a row, or none would be saved."""
        assert save.cut is not None
        assert self._publisher is not None
        if not self._publisher.last_was_cancelled:
            self._publisher.last_was_cancelled = True
            self._save = None  # servers learn of it with the next cut
            self._say("checkpoint_cancelled", version=save.version, step=save.cut.steps - 1)

    # One save

    def _advance_save(self, save: _Save, supervisor: Supervisor, now: float) -> None:
        replaced = save.incarnations != tuple(s.incarnation for s in supervisor.servers)
        if replaced and save.stage in ("cutting", "collecting"):
            self._drop(("a server was replaced meanwhile", ""))
            self._final_tried = False  # retry once the replacement has its rows
        elif replaced and save.stage == "tidying":
            # The version exists; its files stay as they are.
            self._save = None
            self._clearing = start(self._runs, self._clear_away)
        elif save.stage == "cutting":
            self._advance_cutting(save, supervisor, now)
        elif save.stage in ("collecting", "tidying"):
            self._advance_asking(save, supervisor, now)
        elif self._outcome is not None and self._outcome.done:
            error, self._outcome = self._outcome.error, None
            self._conclude(save, supervisor, error, now)
        if self._save is not None and self._save.stage != "cutting" and self._is_due(supervisor, now):
            self._skip(supervisor, now)

    def _advance_cutting(self, save: _Save, supervisor: Supervisor, now: float) -> None:
        made = [c for c in supervisor.cuts_made if c.version == save.version]
        supervisor.cuts_made.clear()
        if made:
            save.cut = made[0]
            save.hold_seconds = now - save.began
            save.stage = "collecting"
        elif supervisor.cut is None or supervisor.cut.version != save.version:
            # The job was stopped meanwhile, and is saved at its end.
            self._save = None
            self._final_tried = False
            self._say("checkpoint_skipped", step=self._schedule.step)

    def _advance_asking(self, save: _Save, supervisor: Supervisor, now: float) -> None:
        tidy = save.stage == "tidying"
        # Beats do not show whether files are rearranged.
        patience = self._plan.timing.beat_seconds if tidy else self._plan.timing.retry_seconds
        kept = self._kept_versions() if tidy else ()
        for server in supervisor.servers:
            ready = tidy or (server.beat is not None and server.beat.saved == save.version)
            retry = save.retries.setdefault(server.slot, Retry(patience))
            if ready and retry.is_due(now) and server.slot not in save.answers:
                retry.again(now)
                supervisor.send(server.slot, Collect(save.version, tidy, kept))
        if len(save.answers) < self._plan.servers:
            return
        errors = [(a.message.error, a.message.kind) for a in save.answers.values() if a.message.error]
        if not tidy:
            if errors:
                self._drop(*errors)
            else:
                save.stage = "committing"
                self._outcome = start(self._runs, lambda: self._commit(save))
            return
        for error, _ in errors:
            self._say_untidy(save, error)
        self._note_tidied([a.message for a in save.answers.values()])
        if any(a.change != FileChange() for a in save.answers.values()):
            save.stage = "replacing"
            self._outcome = start(self._runs, lambda: self._replace(save))
        else:
            self._finish(save, supervisor)

    def _kept_versions(self) -> tuple[int, ...]:
        """The versions since the last baseline; servers would have to read the manifest for them."""
        assert self._publisher is not None
        catalog = self._publisher.catalog
        return tuple(catalog.versions_from(catalog.newest.era)) if catalog.newest is not None else ()

    def _note_tidied(self, answers: Sequence[Saved]) -> None:
        assert self._publisher is not None
        self._live_bytes = sum(answer.live_bytes for answer in answers)
        if all(answer.read_speed for answer in answers):
            # All servers read at the same time, each its own rows.
            self._publisher.note_read_speed(sum(answer.read_speed for answer in answers))
        if any(answer.kind == DAMAGED for answer in answers):
            # A version that needs a damaged file cannot be restored, and every round would read it again.
            self._publisher.leave_era()

    def _conclude(self, save: _Save, supervisor: Supervisor, error: Exception | None, now: float) -> None:
        """Process the result of writing to the store."""
        assert self._publisher is not None
        if save.stage == "replacing":
            if error is None:
                self._finish(save, supervisor)
            else:  # the version exists, but its files are not rearranged
                self._say_untidy(save, message_of(error))
                self._save = None
            return
        if error is not None:
            self._drop((message_of(error), kind_of(error)))
            return
        assert save.cut is not None
        version = self._publisher.catalog.newest
        assert version is not None
        if save.whole:
            self._whole_steps = save.cut.steps
        self.saved.append(save.version)
        self.last_version, self.saved_steps = save.version, save.cut.steps
        self.failures.note_saved()
        slowest = max(a.message.seconds for a in save.answers.values())
        self._publisher.note_written(version, slowest)
        figures = {"version": save.version, "step": version.step, "baseline": save.baseline}
        self._say(
            "checkpoint_saved",
            **figures,
            rows=version.rows,
            bytes=version.bytes,
            hold_seconds=save.hold_seconds,
            write_seconds=slowest,
            waited_seconds=max(a.message.waited_seconds for a in save.answers.values()),
            seconds_taken=now - save.began,
        )
        supervisor.announce(committed=save.version)
        save.stage = "tidying"
        save.answers.clear()
        save.retries.clear()

    def _finish(self, save: _Save, supervisor: Supervisor) -> None:
        supervisor.announce(tidied=save.version)
        self._save = None

    def _drop(self, *why: tuple[str, str]) -> None:
        """Record that the save failed, with these errors and kinds; servers learn of it with the next one."""
        save, self._save = self._save, None
        assert save is not None
        self._outcome = None
        self._fail(why, save.version)
        self._clearing = start(self._runs, self._clear_away)

    # In the background

    def _commit(self, save: _Save) -> None:
        publisher, cut, plan = self._publisher, save.cut, self._plan
        assert publisher is not None
        assert cut is not None
        assert self._opening.lock is not None
        self._opening.lock.renew()
        before = plan.resume.layouts if plan.resume else ()
        layouts = merge_layouts(*before, Layout(plan.workers, cut.positions))
        state = JobState(layouts, cut.samples, plan.servers, plan.workers, plan.k, plan.r, plan.rings)
        dense_parts = encode_tree(dense_tree(plan, self._network(save), cut.steps, state))
        restores = plan.resume.restores if plan.resume else 0
        step = cut.steps - 1  # the last completed step, from 0
        metadata = version_metadata(plan, cut.samples)
        new = NewVersion(save.version, step, save.baseline, metadata, restores)
        changes = [answer.change for answer in save.answers.values()]
        cancelled_before = publisher.last_was_cancelled
        # Every server's files are durable by now: one manifest makes the version exist.
        publisher.commit(new, self._encoder.stored, self._layout_name, changes, dense_parts)
        if cancelled_before:
            # No server writes to the cancelled version any more, and none has started to tidy.
            try:
                self._clear_away()
            except Exception as error:  # the version exists; the next writer deletes the files
                url = publisher.catalog.store.url
                log.warning("could not delete files of a cancelled save from %s: %r", url, error)

    def _network(self, save: _Save) -> NDArray[np.uint32] | None:
        """Assemble the network's records from the servers' parts."""
        if not saving_of(self._plan).template:
            return None
        group, placement = self._plan.groups[-1], self._plan.placements[-1]
        records = np.zeros((group.rows, group.words), np.uint32)
        owners = placement.owner(np.arange(group.rows))
        for slot, answer in save.answers.items():
            mine = np.flatnonzero(owners == slot)
            if len(answer.frames) != 1:
                raise HoldfastError(f"server {slot} sent {len(answer.frames)} arrays of the network, not one")
            if len(mine):
                records[mine] = as_array(answer.frames[0], np.uint32, (len(mine), group.words))
        return records

    def _replace(self, save: _Save) -> None:
        assert self._publisher is not None
        self._publisher.replace([answer.change for answer in save.answers.values()])
        self._publisher.catalog.free_replaced()

    def _clear_away(self) -> None:
        """Delete the files of a failed save: on a full disk the next one needs the space."""
        assert self._publisher is not None
        catalog, resumed = self._publisher.catalog, self._plan.resume
        catalog.delete_leftovers()
        self._made_room = catalog.make_room(needed={resumed.version} if resumed else set())

    # Events

    def _fail(self, errors: Sequence[tuple[str, str]], version: int | None = None) -> None:
        """Record that a version, or the next one, was not saved; all errors become one message."""
        kinds = {kind for _, kind in errors}
        why = "; ".join(dict.fromkeys(cause_of(error) for error, _ in errors))
        if kinds == {"full"} and self._publisher is not None:
            why = str(self._publisher.catalog.with_advice(StoreFull(why), "checkpoint.keep=N"))
        again = not self.failures.note(why, kinds.pop() if len(kinds) == 1 else "")
        details = "; ".join(error for error, _ in errors)
        self._say("checkpoint_failed", version=version, error=details, why=why, again=again)

    def _say_untidy(self, save: _Save, error: str) -> None:
        """Record that a version exists, but its files are not rearranged."""
        again = not self.untidy.note(cause_of(error), "")
        self._say("checkpoint_tidy_failed", version=save.version, error=error, again=again)

    def _say(self, event: str, **figures: Any) -> None:
        self.events.append((event, figures))


class BackgroundOutcome:
    """The result of a background job."""

    def __init__(self) -> None:
        self.done = False
        self.error: Exception | None = None


def start(runs: Runs, job: Callable[[], None]) -> BackgroundOutcome:
    """Run a job in the background."""
    outcome = BackgroundOutcome()

    def run() -> None:
        try:
            job()
        except Exception as error:
            log.warning("%r", error)
            outcome.error = error
        finally:
            outcome.done = True  # last: readers check it before the error

    runs.submit(run)
    return outcome


class Opening:
    """Opens a job's store for writing in the background, and retries until it succeeds.

    A remote store stays locked for a while after its supervisor died; one on a full disk can be opened
    once there is space.

    Args:
        open_store: opens the store for writing.
        policy: the policy of the catalog.
        runs: runs the attempts in the background.
        now: the current time.

    Attributes:
        catalog: the store's catalog, once it is open.
        lock: the writer lock of the store.
        error: why the last attempt failed.
    """

    def __init__(self, open_store: Callable[[], Store], policy: Policy, runs: Runs, now: float) -> None:
        self.catalog: Catalog | None = None
        self.lock: WriterLock | None = None
        self.error: Exception | None = None
        self._open_store = open_store
        self._policy = policy
        self._runs = runs
        self._store: Store | None = None
        self._opened: Catalog | None = None
        self._outcome: BackgroundOutcome | None = None
        self._first = self._began = now
        self._retry = Retry(_AGAIN_SECONDS)

    def advance(self, now: float) -> None:
        """Start an attempt, or process its result."""
        if self._outcome is None:
            if self._retry.is_due(now):
                self._began = now
                self._outcome = start(self._runs, self._open)
        elif self._outcome.done:
            self.error, self._outcome = self._outcome.error, None
            self._retry.again(now)
            self.catalog = self._opened

    def why(self) -> str:
        """A sentence that says why the store is not open."""
        error = self.error or TimeoutError("it did not answer in time")
        return f"the store could not be opened: {cause_of(message_of(error))}"

    def has_failed(self, now: float) -> bool:
        """Whether it is not open for a reason to report."""
        # The lock may belong to the supervisor that died; then it expires.
        locked = isinstance(self.error, StoreLocked) and now - self._first < _LEASE_SECONDS
        return self.error is not None and not locked

    @property
    def is_waited_for(self) -> bool:
        """Whether waiting may help: a lock may be released, a store may answer. A full disk stays full."""
        return isinstance(self.error, StoreLocked | StoreUnreachable)

    def is_hopeless(self, since: float, now: float) -> bool:
        """Whether a job that has waited since then should stop waiting."""
        if self.error is None or self.is_waited_for:
            return now - since >= GIVE_UP_SECONDS
        return self._outcome is None and self._began >= since  # one more attempt has failed

    def close(self) -> None:
        """Release the store."""
        if self.lock is not None:
            self.lock.release()
        if self._store is not None:
            self._store.close()

    def _open(self) -> None:
        store = self._store or self._open_store()
        self._store = store
        self.lock = self.lock or store.lock_writer()
        catalog = Catalog(store, self._policy)
        catalog.take_over()  # before any server puts a file
        self._opened = catalog
