"""What ``holdfast ckpt`` prints: tables and sentences for people, the same values as JSON for programs."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from rich.console import Console
from rich.filesize import decimal as size
from rich.table import Table
from rich.text import Text

from holdfast.checkpoint.tools.export import ExportedFile
from holdfast.checkpoint.tools.inspect import Description, GarbageReport, Listing, StateLine
from holdfast.checkpoint.tools.verify import VerifyReport
from holdfast.screen import Columns

_PLAIN_WIDTH = 200  # for files and pipes: wide enough to truncate nothing
_MOST_LINES = 30
_LONGEST_METADATA = 40
_VERSIONS = ("version", "step", "age", "strategy", "kind", "rows", "written", "to restore", "metadata")


def make_console() -> Console:
    """Standard output; without line wrapping if it is a file or a pipe."""
    console = Console(highlight=False)
    return console if console.is_terminal else Console(highlight=False, width=_PLAIN_WIDTH)


def print_json(value: Any) -> None:
    """Print a result as JSON; keys are attribute names."""
    print(json.dumps(asdict(value), indent=2))


def age(seconds: float) -> str:
    """A time span in the largest unit that is full at least twice."""
    for unit, length in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= 2 * length:
            return f"{seconds / length:.0f} {unit}"
    return f"{max(seconds, 0):.0f} s"


def plain(value: object) -> Text:
    """Text from a store, with terminal escapes made harmless."""
    return Text("".join(c if c.isprintable() else "�" for c in str(value)))


def show_listing(listing: Listing, console: Console) -> None:
    """Print one line per version, and the total size."""
    if not listing.versions:
        console.print(plain(f"{listing.url} has no versions"), soft_wrap=True)
    else:
        look = {"box": None, "pad_edge": False, "padding": (0, 2, 0, 0)}
        words = ("strategy", "kind", "metadata")
        table = Columns(_VERSIONS, words=words, spare=("metadata", "strategy", "written", "rows"), **look)
        for line in listing.versions:
            table.add_row(
                str(line.version),
                str(line.step),
                age(time.time() - line.time),
                plain(line.strategy.lower()),
                f"{line.kind} (unverified)" if line.unverified else line.kind,
                f"{line.rows:,}",
                size(line.bytes_written),
                size(line.bytes_to_restore),
                plain(_short_metadata(line.metadata)),
            )
        console.print(table)
    count = len(listing.versions)
    console.print(f"{count} version{'s' * (count != 1)}, {size(listing.stored_bytes)} stored in all")
    for reason, numbers in _by_reason(listing):
        console.print(
            Text("unverified ", "yellow") + plain(f"{_ranges(numbers)} may lack changes: {reason}"),
            soft_wrap=True,
        )
    _complain(listing.complaints, console)


def _by_reason(listing: Listing) -> list[tuple[str, list[int]]]:
    """The versions that may lack changes, by the reason."""
    found: dict[str, list[int]] = {}
    for line in listing.versions:
        if line.unverified:
            found.setdefault(line.unverified, []).append(line.version)
    return list(found.items())


def show_description(found: Description, console: Console) -> None:
    """Print a version's facts, tables, files and objects."""
    facts = {
        "version": f"{found.version} ({found.kind}), step {found.step}, {age(time.time() - found.time)} ago",
        "era": f"{found.era}, {found.strategy.lower()}",
        "to restore": size(found.bytes_to_restore),
        "metadata": json.dumps(found.metadata),
    }
    speeds = {"written": found.write_speed, "read": found.read_speed}
    if any(speeds.values()):
        known = (f"{how} at {size(speed)}/s" for how, speed in speeds.items() if speed)
        facts["speed"] = ", ".join(known)
    if found.unverified:
        facts["unverified"] = f"it may lack changes: {found.unverified}"
    for name, fact in facts.items():
        console.print(plain(f"{name:<12}{fact}"), soft_wrap=True)
    tables = _table("table", "rows", "bytes", "fields", title="Tables", left={"fields"})
    for line in found.tables:
        fields = ", ".join(
            f"{name} {width}×{dtype}" + (f" in {bits} bits" if bits else "")
            for name, dtype, width, bits in line.fields
        )
        tables.add_row(plain(line.name), f"{line.rows:,}", size(line.bytes), plain(fields))
    console.print()
    console.print(tables)
    _show_tracking(found, console)
    console.print()
    files = _table("file", "kind", "bytes", "needed", "pieces", title="Files that it reads", left={"kind"})
    for file in found.files:
        share = f"{file.needed_bytes / max(file.bytes, 1):.0%}"
        pieces = f"{file.needed_pieces} of {file.pieces}"
        files.add_row(plain(file.name), file.kind, size(file.bytes), share, pieces)
    console.print(files)
    for name, lines in found.objects.items():
        _show_object(name, lines, console)


def _show_tracking(found: Description, console: Console) -> None:
    """How changed rows of the tables were found, said once for all that are alike."""
    alike: dict[str, list[str]] = {}
    for line in found.tables:
        if line.tracking:
            alike.setdefault(line.tracking, []).append(line.name)
    if not alike:
        return
    table = _table(
        "tables", "changed rows are found by", title="Tracking", left={"changed rows are found by"}
    )
    for how, names in alike.items():
        shown = ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
        table.add_row(plain(shown), plain(how))
    console.print()
    console.print(table)


def _show_object(name: str, lines: Sequence[StateLine], console: Console) -> None:
    table = _table("key", "type", "shape", "value", title=f"Object {name}", left={"type", "shape", "value"})
    for line in lines[:_MOST_LINES]:
        shape = "" if line.shape is None else "×".join(map(str, line.shape)) or "()"
        table.add_row(plain(line.key), line.dtype, shape, plain(line.value or ""))
    console.print()
    console.print(table)
    if len(lines) > _MOST_LINES:
        console.print(f"… and {len(lines) - _MOST_LINES} more: see --json")


def show_verification(report: VerifyReport, console: Console) -> None:
    """Print intact and damaged versions, and leftover files."""
    for file in report.damaged_files:
        needed = "in a part that no checked version needs"
        if file.versions:
            needed = f"needed by {_ranges(file.versions)}"
        console.print(
            Text("damaged ", "red") + plain(f"{file.name}, {needed}: {file.problem}"), soft_wrap=True
        )
    for one in report.incomplete[:_MOST_LINES]:
        text = f"{_ranges(one.versions)} {one.problem}"
        console.print(Text("damaged ", "red") + plain(text), soft_wrap=True)
    if len(report.incomplete) > _MOST_LINES:
        console.print(f"… and {len(report.incomplete) - _MOST_LINES} more: see --json")
    _complain(report.complaints, console)
    console.print(f"checked {report.files} files, {size(report.bytes)}")
    if report.whole:
        console.print(f"intact: {_ranges(report.whole)}", soft_wrap=True)
    if report.damaged:
        console.print(f"[red]damaged:[/] {_ranges(report.damaged)}", soft_wrap=True)
    if report.gone:
        console.print(f"deleted by a writer meanwhile: {_ranges(report.gone)}", soft_wrap=True)
    if report.leftovers:
        total = size(sum(report.leftovers.values()))
        console.print(f"{len(report.leftovers)} files that no manifest names ({total}; a save under way, or")
        console.print("left by a writer that died; `holdfast ckpt gc` deletes these):")
        for name in list(report.leftovers)[:_MOST_LINES]:
            console.print(plain(f"  {name}"), soft_wrap=True)


def show_garbage(report: GarbageReport, console: Console) -> None:
    """Print what was deleted, or would be."""
    would = "would delete" if report.dry_run else "deleted"
    if report.deleted_versions:
        console.print(f"{would} {_ranges(report.deleted_versions)}", soft_wrap=True)
    for name in report.deleted_files[:_MOST_LINES]:
        note = " (left over)" if name in report.leftovers else ""
        console.print(plain(f"{would} {name}{note}"), soft_wrap=True)
    if len(report.deleted_files) > _MOST_LINES:
        console.print(f"… and {len(report.deleted_files) - _MOST_LINES} more files")
    for name in report.rewritten_files:
        text = f"{'would rewrite' if report.dry_run else 'rewrote'} {name}, mostly of deleted versions"
        console.print(plain(text), soft_wrap=True)
    _complain(report.complaints, console)
    freed = "would free" if report.dry_run else "freed"
    stay = (
        "1 version stays" if len(report.kept_versions) == 1 else f"{len(report.kept_versions)} versions stay"
    )
    console.print(
        f"{freed} {size(max(report.freed_bytes, 0))}; {stay}, {size(report.stored_bytes)} stored in all"
    )


def show_written(written: ExportedFile, console: Console) -> None:
    """Print the result of an export."""
    rows = "" if written.rows is None else f", {written.rows:,} rows"
    console.print(
        plain(
            f"wrote version {written.version} to {written.path}: {written.tensors} tensors{rows}, "
            f"{size(written.bytes)}"
        ),
        soft_wrap=True,
    )


def _table(*columns: str, title: str | None = None, left: frozenset[str] | set[str] = frozenset()) -> Table:
    """A plain table: names are at the left, numbers at the right."""
    table = Table(
        box=None, pad_edge=False, title=title, title_justify="left", title_style="bold", padding=(0, 2, 0, 0)
    )
    words = {columns[0], *left}
    for name in columns:
        is_word = name in words
        # Where it is too narrow, names are folded: numbers that are cut would be wrong.
        table.add_column(name, justify="left" if is_word else "right", no_wrap=not is_word, overflow="fold")
    return table


def _short_metadata(metadata: dict[str, Any]) -> str:
    text = json.dumps(metadata) if metadata else ""
    return text if len(text) <= _LONGEST_METADATA else f"{text[: _LONGEST_METADATA - 1]}…"


def _complain(complaints: Sequence[str], console: Console) -> None:
    for complaint in complaints:
        console.print(Text("complaint ", "red") + plain(complaint), soft_wrap=True)


def _ranges(numbers: Sequence[int]) -> str:
    """ "versions 1 to 4, 7 and 9"."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    shown = [str(r[0]) if len(r) == 1 else f"{r[0]} to {r[-1]}" for r in runs]
    text = shown[0] if len(shown) == 1 else f"{', '.join(shown[:-1])} and {shown[-1]}"
    return f"version{'s' * (len(numbers) != 1)} {text}"
