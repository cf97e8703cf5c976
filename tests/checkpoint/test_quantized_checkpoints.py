"""Checkpoints with quantized rows: what comes back, what is stored, how many bits are chosen."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from msgspec.structs import replace
from safetensors.torch import load_file
from torch import Tensor, nn
from typer.testing import CliRunner

import holdfast as hf
from holdfast.checkpoint.background import computed_ahead
from holdfast.checkpoint.codecs.quantize import FloatCodec, LogCodec, UniformCodec
from holdfast.checkpoint.format.encoding import BLOCK_BYTES, Encoder
from holdfast.checkpoint.format.records import Field, Group, Rows, make_groups
from holdfast.checkpoint.reading.version import open_version
from holdfast.checkpoint.store import open_store
from holdfast.checkpoint.tools.verify import verify_versions
from holdfast.cli.app import app
from holdfast.events import EventLog, read_events
from tests.checkpoint.test_checkpointer import STRATEGIES, Run

ROWS, DIM = 300, 24
OPTIONS: list[dict[str, Any]] = [
    {"quantize": 2, "quantize_state": 8},
    {"quantize": 3, "quantize_state": 16},
    {"quantize": 8},
    {"quantize_state": 16},
]


class Tables:
    """Two tables with Adagrad whose rows are changed by hand; some rows are such that no codec holds them."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        torch.manual_seed(1)
        self.model = nn.ModuleDict({n: nn.EmbeddingBag(ROWS, DIM, dtype=dtype) for n in ("a", "b")})
        self.optimizer = torch.optim.Adagrad(self.model.parameters(), lr=0.1, initial_accumulator_value=0.1)
        self.objects = {"model": self.model, "optim": self.optimizer}
        self.chance = np.random.default_rng(3)

    def weight(self, name: str) -> Tensor:
        return self.model[name].weight.detach()  # type: ignore[operator]

    def sums(self, name: str) -> Tensor:
        return self.optimizer.state[self.model[name].weight]["sum"]  # type: ignore[index, no-any-return]

    def change(self, ckpt: hf.Checkpointer) -> None:
        for name in ("a", "b"):
            ids = torch.from_numpy(np.unique(self.chance.integers(0, ROWS, 40)))
            new = torch.from_numpy(self.chance.normal(size=(len(ids), DIM)).astype(np.float32))
            odd = torch.from_numpy(self.chance.random(len(ids)) < 0.1)
            new[odd, 3] = torch.tensor([torch.nan, torch.inf, -torch.inf])[self.chance.integers(0, 3)]
            self.weight(name)[ids] = new.to(self.weight(name).dtype)
            self.sums(name)[ids] += new.nan_to_num(0, 0, 0).square().to(self.sums(name).dtype)
            ckpt.mark(f"model.{name}.weight", ids.numpy())

    def state(self) -> dict[str, tuple[Tensor, Tensor]]:
        return {n: (self.weight(n).clone(), self.sums(n).clone()) for n in ("a", "b")}


def assert_close(
    truth: dict[str, tuple[Tensor, Tensor]], found: dict[str, tuple[Tensor, Tensor]], options: dict[str, Any]
) -> int:
    """Within a step, and rows that no codec holds bit for bit; how many of those there were."""
    odd = 0
    for name, (weight, sums) in truth.items():
        mine, state = found[name]
        finite = weight.isfinite().all(1)
        odd += int((~finite).sum())
        bits = options.get("quantize")
        assert torch.equal(weight[~finite].view(torch.uint8), mine[~finite].view(torch.uint8))
        errors = (weight[finite].double() - mine[finite].double()).abs().amax(1)
        if bits is None:
            assert errors.max() == 0
        else:
            extent = weight[finite].double().amax(1) - weight[finite].double().amin(1)
            assert (errors <= 1.01 * extent / (2**bits - 1)).all()
            assert errors.max() > 0
        off = {None: 0.0, 16: 2**-8, 8: 2 ** (1 / 16) - 1 + 1e-3}[options.get("quantize_state")]
        assert ((sums.double() - state.double()).abs() <= off * sums.double()).all()
        assert (state >= 0).all()
    return odd


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("strategy", STRATEGIES, ids=str)
def test_every_version_comes_back_within_a_step(
    tmp_path: Path, strategy: Any, options: dict[str, Any]
) -> None:
    policy = hf.Policy(strategy=strategy, **options)
    run, truth = Tables(), {}
    with hf.Checkpointer(tmp_path, run.objects, policy) as ckpt:
        for step in range(9):
            run.change(ckpt)
            version = ckpt.save(step)
            assert version is not None
            truth[version] = run.state()
    odd = 0
    for version, state in truth.items():
        fresh = Tables()
        with hf.Checkpointer(tmp_path, fresh.objects, policy) as ckpt:
            ckpt.restore(version)
        odd += assert_close(state, fresh.state(), options)
    assert odd > 20
    with open_store(tmp_path, create=False, options={}) as store:
        assert verify_versions(store).good


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_tables_of_half_floats(tmp_path: Path, dtype: torch.dtype) -> None:
    policy = hf.Policy(strategy=hf.Chunked(round_versions=2, reset="never"), quantize=4)
    run = Tables(dtype)
    with hf.Checkpointer(tmp_path, run.objects, policy) as ckpt:
        for step in range(5):
            run.change(ckpt)
            ckpt.save(step)
        state = run.state()
        fresh = Tables(dtype)
    with hf.Checkpointer(tmp_path, fresh.objects, policy) as ckpt:
        ckpt.restore()
    for name, (weight, _) in state.items():
        mine = fresh.weight(name)
        finite = weight.isfinite().all(1)
        assert torch.equal(weight[~finite].view(torch.uint8), mine[~finite].view(torch.uint8))
        step_size = (weight[finite].double().amax(1) - weight[finite].double().amin(1)) / 15
        rounding = weight[finite].double().abs().amax(1) * torch.finfo(dtype).eps
        assert ((weight[finite].double() - mine[finite].double()).abs().amax(1) <= step_size + rounding).all()


@pytest.mark.parametrize("strategy", STRATEGIES, ids=str)
def test_a_run_goes_on_from_a_quantized_version(tmp_path: Path, strategy: Any) -> None:
    """The process ends and another takes up what it wrote, again and again: no version is lost."""
    policy = hf.Policy(strategy=strategy, quantize=4)
    truth: dict[int, dict[str, tuple[Tensor, Tensor]]] = {}
    for start in range(0, 12, 3):
        run = Tables()
        run.chance = np.random.default_rng(start)
        with hf.Checkpointer(tmp_path, run.objects, policy) as ckpt:
            assert ckpt.restore() == start
            for step in range(start, start + 3):
                run.change(ckpt)
                version = ckpt.save(step)
                assert version is not None
                truth[version] = run.state()
            if start:
                ckpt.wait()
                assert not ckpt.reports[0].baseline or may_write_a_baseline(strategy)
    for version, state in truth.items():
        fresh = Tables()
        with hf.Checkpointer(tmp_path, fresh.objects, policy) as ckpt:
            ckpt.restore(version)
        assert_close(state, fresh.state(), {"quantize": 4})
    with open_store(tmp_path, create=False, options={}) as store:
        with open_version(store) as reader:
            assert reader.version.restores == 3
        assert verify_versions(store).good


def may_write_a_baseline(strategy: Any) -> bool:
    """Whether a version can hold everything though the run goes on where the last one ended."""
    never = getattr(strategy, "reset", "") == "never" or getattr(strategy, "baseline", "") == "one-shot"
    return not (never or isinstance(strategy, hf.Incremental))


def test_bits_of_each_table(tmp_path: Path) -> None:
    run = Tables()
    policy = hf.Policy(strategy="incremental", quantize={"model.a.*": 2, "*.b.weight": 8})
    with hf.Checkpointer(tmp_path, run.objects, policy) as ckpt:
        ckpt.save(0)
        ckpt.wait()
        with open_version(ckpt.store) as reader:
            bits = {
                g.tables[0].name: g.fields[0].codec.bits for g in reader.stored_groups if g.fields[0].codec
            }
    assert bits == {"model.a.weight": 2, "model.b.weight": 8}
    assert hf.Policy(quantize={"x": 4}).bits_of("y") is None


def test_fields_that_would_not_get_smaller_stay_as_they_are() -> None:
    """Rows of one or two floats, integers, doubles."""
    layout = [
        ("one", 10, (Field("weight", "F32", 1),)),
        ("two", 10, (Field("weight", "F16", 2),)),
        ("many", 10, (Field("weight", "F32", 64), Field("o.sum", "F32", 1), Field("o.n", "I64", 64))),
        ("double", 10, (Field("weight", "F64", 64), Field("o.sum", "F32", 3))),
    ]
    live = make_groups(layout)
    snapshot = [
        Rows(np.arange(g.rows), tuple(np.zeros((g.rows, f.bytes), np.uint8) for f in g.fields)) for g in live
    ]
    policy = hf.Policy(quantize=2, quantize_state=8)
    stored = Encoder.plan(policy, 0, snapshot, live).stored
    codecs = [[f.codec for f in group.fields] for group in stored]
    assert codecs[:2] == [[None], [None]]
    assert codecs[2] == [UniformCodec(2, 16), FloatCodec(), None]
    assert codecs[3] == [None, FloatCodec()]
    assert [g.raw_rows_of for g in stored] == [None, None, None, None, 2, 3]
    assert [Group.from_json(g.to_json()) for g in stored] == list(stored)


def test_far_from_zero_the_grid_has_32_bits(tmp_path: Path) -> None:
    run = Tables()
    with torch.no_grad():
        run.weight("a").mul_(1e-4).add_(1000)
        run.weight("b").mul_(1e-4).add_(1000)
    with hf.Checkpointer(tmp_path, run.objects, hf.Policy(quantize=8, quantize_state=8)) as ckpt:
        ckpt.save(0)
        ckpt.wait()
        with open_version(ckpt.store) as reader:
            fields = reader.stored_groups[0].fields
    assert [f.codec for f in fields] == [UniformCodec(8, 32), LogCodec()]


@pytest.mark.parametrize(
    ("auto", "restores", "bits"),
    [
        (hf.AutoBits(), 0, 8),
        (hf.AutoBits(expected_restores=0), 0, 2),
        (hf.AutoBits(expected_restores=0), 1, 2),
        (hf.AutoBits(expected_restores=0), 2, 8),
        (hf.AutoBits(expected_restores=1), 1, 2),
        (hf.AutoBits(expected_restores=1.2), 0, 3),
        (hf.AutoBits(expected_restores=3), 3, 3),
        (hf.AutoBits(expected_restores=3), 4, 8),
        (hf.AutoBits(expected_restores=10), 10, 4),
        (hf.AutoBits(expected_restores=11), 0, 8),
        # 72 hours on 16 machines that fail once in 480 hours each.
        (hf.AutoBits(training_hours=72, nodes=16, failures_per_node_hour=1 / 480), 0, 3),
        (hf.AutoBits(training_hours=72, nodes=1, failures_per_node_hour=1 / 480), 0, 2),
    ],
)
def test_bits_by_expected_and_real_restores(auto: hf.AutoBits, restores: int, bits: int) -> None:
    """Check-N-Run, section 5.2.1."""
    assert auto.choose(restores).bits == bits


def test_more_restores_than_expected_fall_back_to_8_bits(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "holdfast.checkpoint")
    policy = hf.Policy(strategy="incremental", quantize=hf.AutoBits(expected_restores=1))
    bits: list[int] = []
    for life in range(4):
        run = Tables()
        log = tmp_path / f"events-{life}"
        log.mkdir()
        with (
            EventLog(log) as events,
            hf.Checkpointer(tmp_path / "store", run.objects, policy, events=events) as ckpt,
        ):
            ckpt.restore()
            run.change(ckpt)
            ckpt.save(life)
            ckpt.wait()
            with open_version(ckpt.store) as reader:
                codec = reader.stored_groups[0].fields[0].codec
                assert codec is not None
                bits.append(codec.bits)
                assert reader.version.restores == life
        said = [e for e in read_events(log) if e["event"] == "checkpoint_bits"]
        assert [e["bits"] for e in said] == ([2] if life == 0 else [8] if life == 2 else [])
    assert bits == [2, 2, 8, 8]
    assert "in 2 bits: 1 restores are expected" in caplog.text
    assert "in 8 bits: 1 restores are expected, and it has been restored 2 times" in caplog.text


def test_exact_restores_are_not_counted(tmp_path: Path) -> None:
    for life in range(3):
        run = Tables()
        with hf.Checkpointer(tmp_path, run.objects, hf.Policy(strategy="incremental")) as ckpt:
            ckpt.restore()
            ckpt.save(life)
            ckpt.wait()
            assert ckpt.versions()[-1].restores == 0


def test_other_bits_begin_a_new_era(tmp_path: Path) -> None:
    truth = {}
    wishes: list[Any] = [None, 8, 8, 2]
    for number, quantize in enumerate(wishes):
        run = Tables()
        with hf.Checkpointer(
            tmp_path, run.objects, hf.Policy(strategy="incremental", quantize=quantize)
        ) as ckpt:
            ckpt.restore()
            run.change(ckpt)
            version = ckpt.save(number)
            ckpt.wait()
            assert version is not None
            truth[version] = (run.state(), quantize)
            assert ckpt.reports[0].baseline == (number != 2)
    for version, (state, quantize) in truth.items():
        fresh = Tables()
        with hf.Checkpointer(tmp_path, fresh.objects) as ckpt:
            ckpt.restore(version)
        assert_close(state, fresh.state(), {"quantize": quantize})


def test_rows_are_encoded_block_by_block() -> None:
    rows = 4 * BLOCK_BYTES // (64 * 4)
    live = make_groups([("t", rows, (Field("weight", "F32", 64),))])
    values = np.random.default_rng(0).normal(size=(rows, 64)).astype(np.float32)
    snapshot = [Rows(np.arange(rows), (values.view(np.uint8),))]
    encoder = Encoder.plan(hf.Policy(quantize=2), 0, snapshot, live)
    sizes = [len(block) for _, block in encoder.blocks(snapshot)]
    assert len(sizes) == 4
    assert sum(sizes) == rows


def test_values_are_computed_ahead_but_not_too_far() -> None:
    begun: list[int] = []

    def values() -> Iterator[int]:
        for i in range(100):
            begun.append(i)
            yield i

    found = []
    for i in computed_ahead(values(), 4):
        found.append(i)
        assert len(begun) <= i + 8
    assert found == list(range(100))

    def broken() -> Iterator[int]:
        yield 1
        raise OSError("no more")

    ahead = computed_ahead(broken(), 4)
    assert next(ahead) == 1
    with pytest.raises(OSError, match="no more"):
        next(ahead)
    left = computed_ahead(values(), 1)
    next(left)
    left.close()


@pytest.mark.parametrize(
    "options",
    [
        {"quantize": 5},
        {"quantize": "some"},
        {"quantize": True},
        {"quantize": {"a": 7}},
        {"quantize_state": 4},
        {"background_share": 0},
        {"background_share": 1.5},
    ],
    ids=str,
)
def test_policies_that_cannot_be(options: dict[str, Any]) -> None:
    with pytest.raises(hf.ConfigError, match="expected"):
        hf.Policy(**options)


@pytest.mark.parametrize(
    "options",
    [{"expected_restores": -1}, {"nodes": 0}, {"training_hours": 3}, {"failures_per_node_hour": 0.1}],
    ids=str,
)
def test_estimates_that_cannot_be(options: dict[str, Any]) -> None:
    with pytest.raises(hf.ConfigError):
        hf.AutoBits(**options)


def test_manifests_with_codecs_that_cannot_be_are_refused() -> None:
    group = Group((Field("weight", "F32", 8, UniformCodec(4)),), ())
    good = group.to_json()
    assert Group.from_json(good) == group
    for field in (
        ["weight", "I64", 8, UniformCodec(4).to_json()],
        ["weight", "F32", 8, {"codec": "uniform", "bits": 5}],
        ["weight", "F32", 8, {"codec": "pickle"}],
        ["weight", "F32", 8, UniformCodec(4).to_json(), 1],
        ["weight", "F32", 8, "uniform"],
    ):
        with pytest.raises(hf.CorruptCheckpoint):
            Group.from_json(good | {"fields": [field]})


def test_training_goes_on_with_a_little_noise(tmp_path: Path) -> None:
    """A real model with row-wise Adagrad: what comes back trains on."""
    run = Run("rowwise")
    policy = hf.Policy(quantize=8, quantize_state=16)
    with hf.Checkpointer(tmp_path, run.objects, policy) as ckpt:
        run.train(20)
        ckpt.save(19)
    fresh = Run("rowwise")
    with hf.Checkpointer(tmp_path, fresh.objects, policy) as ckpt:
        assert ckpt.restore() == 20
    for mine, theirs in zip(run.model.parameters(), fresh.model.parameters(), strict=True):
        assert torch.allclose(mine, theirs, atol=0.01)
    fresh.train(5)


def test_a_throttled_save_is_the_same(tmp_path: Path) -> None:
    run = Tables()
    policy = hf.Policy(strategy="full", quantize=4, background_share=0.5)
    with hf.Checkpointer(tmp_path / "1", run.objects, policy) as ckpt:
        ckpt.save(0)
    with hf.Checkpointer(tmp_path / "2", run.objects, replace(policy, background_share=1.0)) as ckpt:
        ckpt.save(0)
    one, two = (
        [p.read_bytes() for p in sorted((tmp_path / name / "chunks").iterdir())] for name in ("1", "2")
    )
    assert one == two


def test_tools_show_bits_and_export_floats(tmp_path: Path) -> None:
    run = Tables()
    store, out = str(tmp_path / "store"), str(tmp_path / "out.safetensors")
    with hf.Checkpointer(store, run.objects, hf.Policy(quantize=4, quantize_state=16)) as ckpt:
        for step in range(3):
            run.change(ckpt)
            ckpt.save(step)
    shown = CliRunner().invoke(app, ["ckpt", "show", store], env={"COLUMNS": "200"})
    assert "weight 24×F32 in 4 bits, optim.sum 24×F32 in 16 bits" in shown.stdout
    for command in (["verify", store], ["restore", store, "--out", out]):
        assert CliRunner().invoke(app, ["ckpt", *command]).exit_code == 0
    state = load_file(out)
    found = {n: (state[f"model.{n}.weight"], state[f"model.{n}.weight.optim.sum"]) for n in ("a", "b")}
    assert assert_close(run.state(), found, {"quantize": 4, "quantize_state": 16}) > 0
