"""What a machine of a cluster must have free for the processes of a job."""

from __future__ import annotations

from collections.abc import Mapping

from holdfast.options import Ray
from holdfast.policy.units import show_bytes


def room_for(options: Ray, *, servers: int, workers: int, machines: int) -> dict[str, float]:
    """Processors ("CPU") and bytes of memory ("memory") to reserve on each machine.

    Processors are for the processes that are planned to run there. Memory is also for those of a lost
    machine, which the others share if there is no spare one: processes may share a processor, but one that
    finds no memory is killed.

    Args:
        options: what each process takes.
        servers: the most of one machine.
        workers: the same.
        machines: how many the job uses, without spare ones.
    """
    room = {"CPU": options.server_cpus * servers + options.worker_cpus * workers}
    if machines > 1 and not options.spares:
        servers, workers = (each + -(-each // (machines - 1)) for each in (servers, workers))
    room["memory"] = float((options.server_memory or 0) * servers + (options.worker_memory or 0) * workers)
    return {name: amount for name, amount in room.items() if amount} or {"CPU": 0.001}


def room_in_words(room: Mapping[str, float]) -> str:
    """Processors and memory."""
    memory = f" and {show_bytes(room['memory'])} of memory" if "memory" in room else ""
    return f"{room.get('CPU', 0):g} CPUs{memory}"
