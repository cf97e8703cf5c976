"""Stands for a role's module in processes of ``LocalLauncher``; ``plan.training`` says what it does.

``python -m tests.cluster.runtime.engines.roles ROLE PARENT`` is a node whose roles are all this module.
"""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from pathlib import Path

from holdfast.cluster.runtime.node import Assignment, main

if __name__ != "__main__":
    print("loaded")


def run(assignment: Assignment) -> None:
    # Its class is the one that roles import: not another copy, of the module that was run.
    assert type(assignment) is Assignment
    what = assignment.plan.training
    print(f"I am {assignment.me}, process {os.getpid()}, with {os.environ.get('OMP_NUM_THREADS')} thread")
    print("an error", file=sys.stderr)
    if "child" in what:
        child = subprocess.Popen(["sleep", "60"])
        Path(what["child"]).write_text(str(child.pid))
    if "ready" in what:
        Path(what["ready"]).write_text(str(os.getpid()))
    if "raise" in what:
        raise ValueError(what["raise"])
    if "thread" in what:
        threading.Thread(target=time.sleep, args=(60,)).start()
    time.sleep(what.get("sleep", 0.0))


if __name__ == "__main__":
    main(dict.fromkeys(("server", "worker", "supervisor"), "tests.cluster.runtime.engines.roles"))
