"""Scenarios of a job on virtual time: a script of commands, each with what it printed when it was recorded.

A script is paragraphs. A paragraph of lines with ``#`` is a comment. Any other begins with one command; below
``----`` is its output. ``run`` plays a script and returns it with the output of now.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

from holdfast.cluster.protocol.envelope import Envelope
from holdfast.cluster.protocol.messages import Peer, Relay, ServerInView, View, WorkerInView
from holdfast.cluster.protocol.plan import LaneOptions
from holdfast.cluster.protocol.stripe_messages import Agreed, Compare, ReadStripes, Recover, Syndromes, Values
from holdfast.cluster.protocol.wire import decode
from holdfast.cluster.server.machine import Server
from holdfast.cluster.supervisor.machine import Supervisor
from holdfast.sim.cluster import Cluster, counting_plan

TRACED = (ReadStripes, Values, Recover, Syndromes, Compare, Agreed)
"""Messages that ``trace`` shows, besides those that take a detour: servers send all others all the time."""
MOST_SECONDS = 60.0
EVENTS = {
    "server_lost": "server {slot} is lost: {reason}",
    "server_recovered": "server {slot} has all rows again",
    "training_resumed": "all workers push to server {slot} again",
    "redundancy_restored": "all parities are there again",
    "worker_lost": "worker {slot} is lost: {reason}",
    "server_rolled_back": "server {slot}: {rows} lost rows go back to version {version}",
}
"""What the supervisor's log says of them."""


def run(text: str) -> str:
    """The script, with what its commands print now."""
    play = Play()
    played = []
    for paragraph in re.split(r"\n{2,}", text.strip()):
        if paragraph.startswith("#"):
            played.append(paragraph)
            continue
        command = paragraph.split("\n----")[0].strip()
        played.append("\n".join([command, "----", *(play(command) or ["ok"])]))
    return "\n\n".join(played) + "\n"


class Play:
    """The cluster of a script, and what has happened since its last command."""

    def __init__(self) -> None:
        self._said: list[str] = []
        self._flows: dict[str, set[str]] = {}
        self._view: View | None = None

    def __call__(self, command: str) -> list[str]:
        for pattern, action in self._commands().items():
            if found := re.fullmatch(pattern, command):
                return action(*found.groups()) or []
        raise ValueError(f"no such command: {command}")

    def _commands(self) -> dict[str, Callable[..., list[str] | None]]:
        return {
            r"cluster (.*)": self._make,
            r"run until (.*)": self._run_until,
            r"run ([\d.]+) seconds?": self._run_for,
            r"kill (server|worker) (\d+)": self._kill,
            r"break (server|worker) (\d+) - (server|worker) (\d+)": self._break,
            r"freeze supervisor": self._freeze,
            r"checkpoint": self._checkpoint,
            r"marks": self._marks,
            r"status": self._status,
            r"trace": self._trace,
            r"check": self._check,
        }

    # Commands

    def _make(self, options: str) -> None:
        given = dict(option.split("=") for option in options.split())
        batches = int(given.pop("batches", "60"))
        lanes = LaneOptions(
            pushes=4, seconds=0.15, idle_seconds=0.15, window=8, chunk_rows=100, share=1.0, scrub_seconds=0.0
        )
        plan = counting_plan(
            servers=int(given.pop("servers")),
            workers=int(given.pop("workers")),
            k=int(given.pop("k")),
            r=int(given.pop("r")),
            atomic=given.pop("pushes", "one-phase") == "two-phase",
            beyond="rows" if given.pop("beyond", "job") == "rows" else "job",
            lanes=lanes,
        )
        if given:
            raise ValueError(f"no such options: {given}")
        self.cluster = Cluster(
            plan, 1, batches, server_class=self._server_class(), supervisor_class=self._supervisor_class()
        )

    def _run_until(self, what: str) -> list[str]:
        self._advance(self._condition(what), what)
        return self._take_said()

    def _run_for(self, seconds: str) -> list[str]:
        self.cluster.network.run(lambda: False, float(seconds))
        return self._take_said()

    def _condition(self, what: str) -> Callable[[], bool]:
        cluster = self.cluster
        if found := re.fullmatch(r"batch (\d+)", what):
            batches = int(found[1])
            return lambda: cluster.supervisor.steps() >= batches
        if found := re.fullmatch(
            r"push (\d+) of worker (\d+) is (staged|applied) at (one|every) server", what
        ):
            push, worker, every = int(found[1]), int(found[2]), found[4] == "every"
            return lambda: self._has(push, worker, found[3], every=every)
        conditions: dict[str, Callable[[], bool]] = {
            "all is restored": lambda: (
                not cluster.degraded() and all(s.sound for s in cluster.supervisor.servers)
            ),
            "the end": lambda: cluster.supervisor.view.phase == "stopping",
            "workers hold": lambda: (
                cluster.supervisor.cut is not None and bool(cluster.supervisor.cut.positions)
            ),
            "a checkpoint is made": self._has_cut,
            "all follow another supervisor": self._all_follow_another,
        }
        return conditions[what]

    def _advance(self, condition: Callable[[], bool], what: str) -> None:
        if not self.cluster.network.run(condition, MOST_SECONDS):
            raise AssertionError(f"not within {MOST_SECONDS:g} s: {what}; so far: {self._said}")

    def _has(self, push: int, worker: int, how: str, *, every: bool) -> bool:
        marks = [server.marks()[worker] for server in self.cluster.servers.values()]
        found = [(mark.staged if how == "staged" else mark.sequence) >= push for mark in marks]
        return all(found) if every else any(found)

    def _has_cut(self) -> bool:
        made = len(self.cluster.cuts)
        self.cluster.collect_cuts()
        return len(self.cluster.cuts) > made

    def _all_follow_another(self) -> bool:
        supervisor = self.cluster.supervisor
        members = [*supervisor.servers, *supervisor.workers]
        going = supervisor is not self._frozen and supervisor.view.phase == "running"
        return going and all(member.follows(supervisor.view.number) for member in members)

    def _freeze(self) -> None:
        self._frozen = self.cluster.supervisor
        self.cluster.network.pause(self._frozen.me)

    def _checkpoint(self) -> list[str]:
        self.cluster.cut()
        return self._take_said()

    def _kill(self, role: str, slot: str) -> None:
        self._flows.clear()
        self.cluster.kill(role, int(slot), noticed=True)

    def _break(self, role: Any, slot: str, other_role: Any, other: str) -> None:
        self._flows.clear()
        self.cluster.network.break_link(Peer(role, int(slot)), Peer(other_role, int(other)))

    def _marks(self) -> list[str]:
        lines = []
        for slot, server in sorted(self.cluster.servers.items()):
            for mark in server.marks():
                staged = f", push {mark.staged} staged" if mark.staged else ""
                lines.append(f"server {slot}: push {mark.sequence} of worker {mark.slot} applied{staged}")
        return lines

    def _status(self) -> list[str]:
        lines = []
        for slot, server in sorted(self.cluster.servers.items()):
            said = server.redundancy()
            gone = "" if server.me in self.cluster.network.nodes else ", gone"
            rows = "all rows" if not said.rows else f"lacks {said.rows} rows"
            parities = "all parities" if not said.parities else f"lacks {said.parities} parities"
            lines.append(f"server {slot} incarnation {server.me.incarnation}: {rows}, {parities}{gone}")
        return lines

    def _trace(self) -> list[str]:
        """Who has sent what to whom since the last fault, by kind, in the order of the first of each kind."""
        lines = [f"{kind}: {', '.join(sorted(flows))}" for kind, flows in self._flows.items()]
        self._flows.clear()
        return lines or ["none"]

    def _check(self) -> list[str]:
        """Whether rows, parities and checkpoints are to the bit what the batches that count lead to."""
        cluster = self.cluster
        failure = cluster.supervisor.failure
        if failure is not None:
            return [f"the job ends ({failure.kind}): {failure.peer} {failure.text}"]
        if not cluster.supervisor.finished:
            return ["the job has not finished"]
        cluster.network.run(cluster.is_quiet, MOST_SECONDS)
        wrong = cluster.violations()
        back = len(cluster.lost(0))
        checkpoints = ", ".join(str(version) for version, _ in cluster.cuts)
        return [
            *wrong,
            f"batches that count: {cluster.supervisor.steps()} of {cluster.batches}",
            f"rows, parities and checkpoints as these lead to, bit for bit: {'no' if wrong else 'yes'}",
            *([f"rows that went back: {back}"] if back else []),
            *([f"checkpoints: {checkpoints}"] if checkpoints else []),
        ]

    # What happens

    def _take_said(self) -> list[str]:
        said, self._said = self._said, []
        return said

    def _server_class(self) -> type[Server]:
        note = self._note_message

        class TracedServer(Server):
            def receive(self, envelope: Envelope, now: float) -> None:
                note(envelope)
                super().receive(envelope, now)

        return TracedServer

    def _note_message(self, envelope: Envelope) -> None:
        message, source, target = envelope.message, envelope.source, envelope.target
        if isinstance(message, Relay):
            header = decode(message.header)
            if target == header.target:  # the second half of the way
                kind = f"{type(header.message).__name__} by way of {source}"
                self._flows.setdefault(kind, set()).add(f"{header.source} -> {target}")
        elif isinstance(message, TRACED):
            self._flows.setdefault(type(message).__name__, set()).add(f"{source} -> {target}")

    def _supervisor_class(self) -> type[Supervisor]:
        play = self

        class TracedSupervisor(Supervisor):
            def __init__(self, *arguments: Any) -> None:
                super().__init__(*arguments)
                self._told = 0
                play._note_supervisor(self.view)

            def receive(self, envelope: Envelope, now: float) -> None:
                super().receive(envelope, now)
                self._note()

            def tick(self, now: float) -> None:
                super().tick(now)
                self._note()

            def request_cut(self, version: int, **options: bool) -> None:
                super().request_cut(version, **options)
                self._note()

            def _note(self) -> None:
                for name, figures in self.events[self._told :]:
                    if name in EVENTS:
                        play._said.append(EVENTS[name].format(**figures))
                self._told = len(self.events)
                for envelope in self.outbox:
                    if isinstance(envelope.message, View) and envelope.target.role == "launcher":
                        play._note_view(envelope.message)

        return TracedSupervisor

    def _note_supervisor(self, view: View) -> None:
        if self._view is not None:
            self._said.append(f"epoch {view.number.epoch}: another supervisor")
        self._view = view

    def _note_view(self, view: View) -> None:
        before = self._view
        assert before is not None
        if view.number <= before.number:
            return
        self._view = view
        known = {*map(_server_in, before.servers), *map(_worker_in, before.workers)}
        said = [*map(_server_in, view.servers), *map(_worker_in, view.workers)]
        said = [line for line in said if line not in known and "incarnation 1 " not in line]
        if view.phase != before.phase:
            said.append(f"phase {before.phase} -> {view.phase}")
        if view.cut != before.cut:
            said.append(f"servers copy version {view.cut}")
        self._said += [f"epoch {view.number.epoch}: {line}" for line in said]


def _server_in(entry: ServerInView) -> str:
    who = f"server {entry.slot} incarnation {entry.incarnation}"
    if entry.starts:
        return f"{who} started"
    if entry.counts_until is None:
        return f"{who} fencing"
    pushes = ", ".join(f"push {mark.sequence} of worker {mark.slot}" for mark in entry.counts_until.marks)
    return f"{who} settling: what counts ends with {pushes}"


def _worker_in(entry: WorkerInView) -> str:
    who = f"worker {entry.slot} incarnation {entry.incarnation}"
    if entry.starts:
        return f"{who} started behind push {entry.sequence}"
    return (
        f"{who} fencing" if entry.settle < 0 else f"{who} settling: what counts ends with push {entry.settle}"
    )
