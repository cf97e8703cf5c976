"""Draw mutants, run the tests that are meant for them, and say which survive: `make mutants`."""

from __future__ import annotations

import argparse
import json
import random
import secrets
import signal
import sys
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from tests.mutants.equivalent import Equivalents
from tests.mutants.mutate import Mutant, mutants
from tests.mutants.nursery import Outcome
from tests.mutants.rooms import meant_for, modules
from tests.mutants.running import BaselineFailed, Runner

_ROOT = Path(__file__).resolve().parents[2]
_BAR = 0.90
_VERDICTS = ("killed", "timeout", "survived")
_Result = tuple[Mutant, Outcome]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run it; returns 1 if too many survive, 2 if the tests fail without a mutant."""
    options = _parser().parse_args(arguments)
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(1))  # and clear up
    seed = options.seed if options.seed is not None else secrets.randbelow(2**32)
    sources = {name: (_ROOT / name).read_bytes() for name in modules(_ROOT, options.only)}
    candidates = [mutant for name, source in sources.items() for mutant in mutants(name, source)]
    drawn = _draw(candidates, options.mutants, seed)
    print(f"{len(drawn)} of {len(candidates)} mutants of {len(sources)} modules, seed {seed}", flush=True)
    if options.list:
        print("\n".join(map(str, drawn)))
        return 0
    equivalents = Equivalents.read(Path(__file__).with_name("equivalent.txt"))
    tests = {mutant.path: meant_for(_ROOT, mutant.path) for mutant in drawn}
    results: list[_Result] = []
    began = time.monotonic()
    try:
        with Runner(_ROOT, options.workers) as runner:
            for result in runner.run(
                [(mutant, sources[mutant.path], tests[mutant.path]) for mutant in drawn]
            ):
                results.append(result)
                _show_progress(results, len(drawn), time.monotonic() - began, equivalents)
                if options.json is not None:
                    _write_json(options.json, seed, results, equivalents)
    except BaselineFailed as failure:
        print(f"without a mutant, tests fail:\n{failure}", file=sys.stderr)
        return 2
    _print_tables(results, equivalents)
    return 0 if _share(results) >= _BAR else 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m tests.mutants", description=__doc__)
    parser.add_argument("-n", "--mutants", type=int, default=300, help="how many (default: 300)")
    parser.add_argument("--seed", type=int, help="which ones; default: drawn, and printed")
    parser.add_argument("--only", default="", help="only modules whose path contains this")
    parser.add_argument("--workers", type=int, default=2, help="processes side by side (default: 2)")
    parser.add_argument("--json", type=Path, help="write all results to this file")
    parser.add_argument("--list", action="store_true", help="print the drawn mutants and run nothing")
    return parser


def _draw(candidates: Sequence[Mutant], count: int, seed: int) -> list[Mutant]:
    return random.Random(seed).sample(list(candidates), min(count, len(candidates)))


def _show_progress(results: Sequence[_Result], total: int, seconds: float, equivalents: Equivalents) -> None:
    mutant, outcome = results[-1]
    if outcome.verdict == "survived":
        print(f"survived{' (equivalent)' if equivalents.why(mutant) else ''}: {mutant}", flush=True)
    if len(results) % 20 == 0 or len(results) == total:
        print(f"  {len(results)} of {total}: {_share(results):.1%} killed, {seconds:.0f} s", flush=True)


def _share(results: Sequence[_Result]) -> float:
    return sum(outcome.verdict != "survived" for _, outcome in results) / max(1, len(results))


def _print_tables(results: Sequence[_Result], equivalents: Equivalents) -> None:
    by_module: dict[str, Counter[str]] = {}
    for mutant, outcome in sorted(results, key=lambda result: result[0].path):
        by_module.setdefault(mutant.path, Counter())[outcome.verdict] += 1
    width = max(map(len, by_module), default=0)
    print(f"\n{'module':{width}}  mutants    killed  timeouts  survived")
    for path, counts in by_module.items():
        killed, timeouts, survived = (counts[verdict] for verdict in _VERDICTS)
        print(f"{path:{width}} {counts.total():8} {killed:9} {timeouts:9} {survived:9}")
    survivors = [mutant for mutant, outcome in results if outcome.verdict == "survived"]
    for title, wanted in (("survivors", False), ("accepted as equivalent", True)):
        listed = sorted(
            (mutant for mutant in survivors if bool(equivalents.why(mutant)) is wanted),
            key=lambda mutant: (mutant.path, mutant.line),
        )
        if listed:
            print(f"\n{title}:")
        for mutant in listed:
            print(f"{mutant}{'  # ' + equivalents.why(mutant) if wanted else ''}")
    rest = [result for result in results if not equivalents.why(result[0])]
    print(
        f"\n{_share(results):.1%} of {len(results)} killed (at least {_BAR:.0%} must be);"
        f" {_share(rest):.1%} of {len(rest)} without those accepted as equivalent"
    )


def _write_json(path: Path, seed: int, results: Sequence[_Result], equivalents: Equivalents) -> None:
    listed = [
        {
            **asdict(mutant),
            "verdict": outcome.verdict,
            "seconds": round(outcome.seconds, 2),
            "failed": outcome.failed,
            "equivalent": equivalents.why(mutant),
        }
        for mutant, outcome in results
    ]
    path.write_text(json.dumps({"seed": seed, "mutants": listed}, indent=1, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    sys.exit(main())
