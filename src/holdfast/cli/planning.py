"""The planning commands: ``plan``, ``simulate`` and ``emulate``."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields
from functools import wraps
from inspect import Parameter, Signature, signature
from pathlib import Path
from typing import Annotated, Any, get_args, get_type_hints

import typer

from holdfast.options import PRIORITIZED_FRACTION
from holdfast.policy.protections import KINDS
from holdfast.recipe import find_own_modules
from holdfast.training.planning_options import CLUSTER, CONFIG, WISHES, Given


def _option(
    text: str, panel: str, metavar: str | None = None, name: str | None = None
) -> typer.models.OptionInfo:
    names = (name,) if name else ()
    option: typer.models.OptionInfo = typer.Option(*names, help=text, rich_help_panel=panel, metavar=metavar)
    return option


def _with_given(*, without: tuple[str, ...] = ()) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Give a command the options of ``Given`` before its own; it gets their values as ``given``."""

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        hints = get_type_hints(Given, include_extras=True)
        options = [
            Parameter(f.name, Parameter.KEYWORD_ONLY, default=f.default, annotation=_option_of(hints[f.name]))
            for f in fields(Given)
            if f.name not in without
        ]
        own = signature(command, eval_str=True).parameters.values()
        parameters = options + [p.replace(kind=Parameter.KEYWORD_ONLY) for p in own if p.name != "given"]

        @wraps(command)
        def wrapper(**values: Any) -> None:
            given = Given(**{option.name: values.pop(option.name) for option in options})
            command(given=given, **values)

        # What typer reads.
        wrapper.__signature__ = Signature(parameters)  # type: ignore[attr-defined]
        wrapper.__annotations__ = {p.name: p.annotation for p in parameters}
        return wrapper

    return decorate


def _option_of(hint: Any) -> Any:
    """The type and the option that typer makes of a field of ``Given``."""
    kind, shown = get_args(hint)
    if shown.name == CONFIG:
        return Annotated[kind, typer.Argument(metavar=CONFIG, help=shown.text)]
    return Annotated[kind, _option(shown.text, shown.panel, shown.example, shown.name)]


Among = Annotated[str | None, _option(f"Consider only these: {', '.join(KINDS)}.", WISHES, "KIND,…")]


@_with_given()
def plan(
    given: Given,
    among: Among = None,
    explain: Annotated[bool, typer.Option("--explain", help="Show the arithmetic.")] = False,
    json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    out: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write the recommendation as a configuration.")
    ] = None,
    store: Annotated[
        str | None, typer.Option(metavar="PATH", help="Checkpoint path of that configuration: folder or URL.")
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Overwrite an existing file.")] = False,
) -> None:  # fmt: skip
    """Recommend a protection for a model on a cluster, and show what each one costs."""
    find_own_modules()
    from holdfast.policy import printing  # noqa: PLC0415
    from holdfast.policy.planner import plan as make_plan  # noqa: PLC0415
    from holdfast.training.planning import read_question, write_configuration  # noqa: PLC0415

    question = read_question(given)
    found = make_plan(question.situation, question.wishes, among.split(",") if among else ())
    if json:
        typer.echo(printing.plan_json(found, question.assumed, question.fits))
    else:
        console = printing.make_console()
        printing.show_basis(question.assumed, question.measured, question.fits, console)
        printing.show_plan(found, console, explain=explain)
    if out is not None:
        write_configuration(found, question.config, out, store, force=force)
        if not json:
            typer.echo(f"wrote {out}: holdfast train {out}")


@_with_given(without=("servers_per_failure", "measure", "machines", "machine_mtbf"))
def simulate(
    given: Given,
    among: Among = None,
    nodes: Annotated[
        str | None,
        typer.Option(
            metavar="N,…", help="Cluster sizes, of servers as given. Default: 10 to 10,000."
        ),
    ] = None,
    failures: Annotated[
        str,
        typer.Option(
            metavar="MODEL,…",
            help="How servers fail: linear, hourly (CPR's), exponential, gamma=SHAPE, weibull=SHAPE, log.",
        ),
    ] = "linear,hourly",
    runs: Annotated[int, typer.Option(help="Simulated runs per protection and size.")] = 10,
    seed: Annotated[int, typer.Option(min=0, help="Seed of the failures.")] = 0,
    paper: Annotated[
        bool, typer.Option("--paper", help="CPR's Figure 13: its own cluster, full and partial recovery.")
    ] = False,
    plot: Annotated[Path | None, typer.Option(metavar="FILE.png", help="Plot the costs.")] = None,
    json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:  # fmt: skip
    """Simulate training under failures on clusters of any size, and compare it with the plan."""
    find_own_modules()
    from holdfast.policy.printing import make_console, show_basis  # noqa: PLC0415
    from holdfast.sim import plots, printing, scaling  # noqa: PLC0415
    from holdfast.training.planning import Question, read_question  # noqa: PLC0415

    if plot is not None:
        plots.check_plot(plot)
    if paper:
        question = Question.of(scaling.FIGURE_13, target_pls=0.1)
        among = "full-stop,partial"
    else:
        question = read_question(given)
    sizes = scaling.parse_nodes(nodes or ("10,30,100,300,1000,3000" + ",10000" * (not paper)))
    models = scaling.parse_models(failures, question.situation, sizes, question.log)
    with printing.progress_bar() as on_done:
        points = scaling.scale(
            question.situation, models, sizes, wishes=question.wishes, runs=runs, seed=seed,
            among=among.split(",") if among else (), one_each=paper, on_done=on_done,
        )  # fmt: skip
    if json:
        typer.echo(printing.points_json(points))
    else:
        console = make_console()
        show_basis(question.assumed, (), question.fits, console)
        printing.show_points(points, console)
    if plot is not None:
        plots.plot_points(points, plot, "CPR, Figure 13" if paper else "Protections on clusters of any size")
        if not json:
            typer.echo(f"wrote {plot}")


_FAILURES, _TRAINING = "Failures", "Training"


def emulate(
    ways: Annotated[
        str, typer.Option(metavar="WAY,…", help="Among full, partial, cpr, cpr-scar, cpr-mfu, cpr-ssu.")
    ] = "full,partial,cpr,cpr-scar,cpr-mfu,cpr-ssu",
    seeds: Annotated[
        int, typer.Option(min=1, help="Runs of each way, with different data and failures.")
    ] = 1,
    failures: Annotated[float, _option("Expected number of failures.", _FAILURES)] = 2.0,
    distribution: Annotated[
        str,
        _option("Their times: uniform, exponential, gamma=SHAPE, weibull=SHAPE.", _FAILURES, "MODEL"),
    ] = "uniform",
    at: Annotated[
        list[str] | None,
        _option("One failure at this time, of a random or of this server. Repeatable.", _FAILURES, "20h:3"),
    ] = None,
    failure_log: Annotated[
        Path | None, _option("Replay a failure log: lines of 'time,server'.", _FAILURES, "FILE")
    ] = None,
    servers_per_failure: Annotated[int, _option("Servers that fail together.", _FAILURES)] = 1,
    hours: Annotated[str, _option("Training time without failures.", CLUSTER, "56h")] = "56h",
    servers: Annotated[int, _option("Number of servers.", CLUSTER)] = 8,
    save: Annotated[str, _option("Time of a full save.", CLUSTER, "5.65m")] = "0.0942h",
    load: Annotated[str, _option("Time to read a checkpoint.", CLUSTER, "2.4m")] = "0.04h",
    reschedule: Annotated[str, _option("Time to replace a machine.", CLUSTER, "2.6m")] = "0.044h",
    target_pls: Annotated[float, _option("Target portion of lost samples (PLS) of cpr.", WISHES)] = 0.1,
    fraction: Annotated[
        float, _option("Fraction of the rows per prioritized save.", WISHES)
    ] = PRIORITIZED_FRACTION,
    shape: Annotated[
        str, _option("Table sizes and samples of Criteo: kaggle or terabyte.", _TRAINING)
    ] = "kaggle",
    samples: Annotated[
        int | None, _option("Number of training samples. Default: from --shape and --scale.", _TRAINING)
    ] = None,
    scale: Annotated[
        float | None, _option("Divisor of --shape. Default: 100 for kaggle, 10,000 for terabyte.", _TRAINING)
    ] = None,
    criteo: Annotated[
        list[str] | None,
        _option("Train on clicks in Criteo's format, not on synthetic ones. Repeatable.", _TRAINING, "FILE"),
    ] = None,
    batch_size: Annotated[int | None, _option("Batch size.", _TRAINING)] = None,
    lr: Annotated[float | None, _option("Learning rate of SGD.", _TRAINING)] = None,
    zipf: Annotated[float | None, _option("Zipf exponent of the lookups.", _TRAINING)] = None,
    noise: Annotated[float | None, _option("Noise of the labels.", _TRAINING)] = None,
    test_samples: Annotated[int | None, _option("Number of test samples.", _TRAINING)] = None,
    processes: Annotated[
        int | None, typer.Option(min=1, help="Parallel processes. Default: one per core.")
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Train a small model under emulated failures, and compare ways to recover."""
    from holdfast.policy.printing import make_console  # noqa: PLC0415
    from holdfast.policy.units import parse_hours  # noqa: PLC0415
    from holdfast.sim import draws, emulation_printing, emulator, printing, student, timeline  # noqa: PLC0415

    cluster = timeline.EmulatedCluster(
        hours=parse_hours(hours, "--hours"), failures=failures, servers=servers,
        servers_per_failure=servers_per_failure, save_hours=parse_hours(save, "--save"),
        load_hours=parse_hours(load, "--load"), reschedule_hours=parse_hours(reschedule, "--reschedule"),
        target_pls=target_pls, fraction=fraction,
    )  # fmt: skip
    lesson = student.lesson_of(
        shape,
        scale=scale,
        samples=samples,
        criteo=tuple(criteo) if criteo else None,
        batch_size=batch_size,
        lr=lr,
        zipf_exponent=zipf,
        noise=noise,
        test_samples=test_samples,
    )
    chosen = draws.parse_failures(cluster, distribution, at or (), failure_log)
    with printing.progress_bar("training") as on_done:
        found = emulator.emulate(
            lesson, cluster, chosen, ways=timeline.parse_ways(ways), seeds=range(seeds),
            processes=processes, on_done=on_done,
        )  # fmt: skip
    if json:
        typer.echo(emulation_printing.emulations_json(found, lesson, cluster))
    else:
        emulation_printing.show_emulations(found, lesson, cluster, make_console())
