"""``holdfast ckpt``: manages a store."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

ckpt = typer.Typer(
    help="Inspect, verify, export and delete checkpoints.",
    no_args_is_help=True,
    rich_markup_mode="rich",
)

_Path = Annotated[str, typer.Argument(metavar="PATH", help="The store: a folder, or a URL such as s3://…")]
_Version = Annotated[
    int | None, typer.Argument(metavar="[VERSION]", help="Version number, as in ls. Default: the newest.")
]
_Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]
_Force = Annotated[bool, typer.Option("--force", help="Overwrite existing files.")]
_Object = Annotated[
    str | None,
    typer.Option("--object", metavar="NAME", help="The object to export. Default: the only module."),
]


@ckpt.command(epilog="Example: holdfast ckpt ls runs/today/checkpoints")
def ls(path: _Path, json: _Json = False) -> None:
    """List the versions of a store."""
    from holdfast.checkpoint.store import open_store  # noqa: PLC0415
    from holdfast.checkpoint.tools import inspect as tools  # noqa: PLC0415
    from holdfast.checkpoint.tools import printing  # noqa: PLC0415

    with open_store(path, create=False) as store:
        listing = tools.list_versions(store)
    if json:
        printing.print_json(listing)
    else:
        printing.show_listing(listing, printing.make_console())


@ckpt.command(epilog="Example: holdfast ckpt show runs/today/checkpoints 12")
def show(path: _Path, version: _Version = None, json: _Json = False) -> None:
    """Show the tables, files and other state of a version."""
    from holdfast.checkpoint.store import open_store  # noqa: PLC0415
    from holdfast.checkpoint.tools import inspect as tools  # noqa: PLC0415
    from holdfast.checkpoint.tools import printing  # noqa: PLC0415

    with open_store(path, create=False) as store:
        found = tools.describe_version(store, version)
    if json:
        printing.print_json(found)
    else:
        printing.show_description(found, printing.make_console())


@ckpt.command(epilog="Example: holdfast ckpt verify s3://bucket/run1")
def verify(
    path: _Path,
    versions: Annotated[
        list[int] | None, typer.Argument(metavar="[VERSION]…", help="Version numbers. Default: all.")
    ] = None,
    all_: Annotated[bool, typer.Option("--all", help="All versions, even if some are named.")] = False,
    json: _Json = False,
) -> None:
    """Verify the checksums and completeness of versions. Exit code 1 if something is damaged."""
    from holdfast.checkpoint.progress_bar import byte_progress  # noqa: PLC0415
    from holdfast.checkpoint.store import open_store  # noqa: PLC0415
    from holdfast.checkpoint.tools import printing  # noqa: PLC0415
    from holdfast.checkpoint.tools.verify import bytes_to_verify, verify_versions  # noqa: PLC0415

    wanted = [] if all_ else versions or []
    with open_store(path, create=False) as store:
        total = bytes_to_verify(store, wanted)
        with byte_progress("checking", total) as on_progress:
            report = verify_versions(store, wanted, on_progress)
    if json:
        printing.print_json(report)
    else:
        printing.show_verification(report, printing.make_console())
    if not report.good:
        raise typer.Exit(1)


@ckpt.command(epilog="Example: holdfast ckpt restore runs/today/checkpoints 12 --out state.safetensors")
def restore(
    path: _Path,
    version: _Version = None,
    out: Annotated[Path, typer.Option(metavar="FILE", help="The safetensors file to write.")] = ...,  # type: ignore[assignment]
    force: _Force = False,
) -> None:
    """Write all state of a version to one safetensors file: tables, optimizer state, dense state."""
    from holdfast.checkpoint.store import open_store  # noqa: PLC0415
    from holdfast.checkpoint.tools import export, printing  # noqa: PLC0415

    with open_store(path, create=False) as store:
        written = export.restore_file(store, version, out, force=force)
    printing.show_written(written, printing.make_console())


@ckpt.command(
    "export",
    epilog="Examples: holdfast ckpt export run1 --format safetensors --out model.safetensors; "
    "holdfast ckpt export run1 12 --since 11 --format delta --out 11-12.safetensors",
)
def export_(
    path: _Path,
    version: _Version = None,
    format_: Annotated[
        Literal["safetensors", "dcp", "delta"],
        typer.Option(
            "--format",
            help="A state_dict; a folder for torch.distributed.checkpoint; or changed rows only.",
        ),
    ] = "safetensors",
    out: Annotated[Path, typer.Option(metavar="FILE_OR_FOLDER", help="The output path.")] = ...,  # type: ignore[assignment]
    object_: _Object = None,
    since: Annotated[
        int | None, typer.Option(metavar="VERSION", help="delta: the version that it is applied to.")
    ] = None,
    all_fields: Annotated[
        bool, typer.Option("--all-fields", help="delta: include the optimizer state of the rows.")
    ] = False,
    force: _Force = False,
) -> None:
    """Export a version's model for other programs."""
    from holdfast.checkpoint.store import open_store  # noqa: PLC0415
    from holdfast.checkpoint.tools import printing  # noqa: PLC0415
    from holdfast.checkpoint.tools.delta import export_as  # noqa: PLC0415

    with open_store(path, create=False) as store:
        written = export_as(
            store, version, out, format_, object_name=object_, since=since, all_fields=all_fields, force=force
        )
    printing.show_written(written, printing.make_console())


@ckpt.command(epilog="Example: holdfast ckpt gc runs/today/checkpoints --keep 5 --keep-every 100 --dry-run")
def gc(
    path: _Path,
    keep: Annotated[int | None, typer.Option(metavar="N", help="Keep the N newest versions.")] = None,
    keep_every: Annotated[
        int | None, typer.Option(metavar="M", help="Also keep versions whose number is a multiple of M.")
    ] = None,
    keep_seconds: Annotated[
        float | None, typer.Option(metavar="T", help="Also keep versions younger than T seconds.")
    ] = None,
    delay: Annotated[
        float, typer.Option(metavar="SECONDS", help="Keep unneeded files this long for running restores.")
    ] = 0.0,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only print what would be deleted.")] = False,
    json: _Json = False,
) -> None:
    """Delete old versions, and files that no version needs.

    Without a --keep option no version is deleted. The store must have no other writer.
    """
    from holdfast.checkpoint.store import open_store  # noqa: PLC0415
    from holdfast.checkpoint.tools import inspect as tools  # noqa: PLC0415
    from holdfast.checkpoint.tools import printing  # noqa: PLC0415
    from holdfast.options import Policy  # noqa: PLC0415

    policy = Policy(keep=keep, keep_every=keep_every, keep_seconds=keep_seconds, deletion_delay_seconds=delay)
    with open_store(path, create=False) as store:
        report = tools.collect_garbage(store, policy, dry_run=dry_run)
    if json:
        printing.print_json(report)
    else:
        printing.show_garbage(report, printing.make_console())
