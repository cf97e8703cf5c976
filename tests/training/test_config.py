from __future__ import annotations

from pathlib import Path

import pytest

from holdfast.errors import ConfigError
from holdfast.options import Chunked, Differential, ErasureCode, NoProtection, Policy, Protection, Replication
from holdfast.training.config import (
    Config,
    CriteoConfig,
    JobConfig,
    ModelConfig,
    SyntheticConfig,
    load,
    to_yaml,
)
from holdfast.training.saving import CheckpointConfig
from holdfast.training.trainer import Trainer


def write(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "config.yaml"
    path.write_text(text)
    return path


def test_everything_has_a_default() -> None:
    assert load() == Config()
    assert isinstance(load().data, SyntheticConfig)


def test_file_then_overrides_then_top_level(tmp_path: Path) -> None:
    path = write(tmp_path, "batch_size: 10\noptimizer: {name: sgd, lr: 0.5}\nseed: 1\n")
    config = load(path, ["optimizer.lr=0.25", "batch_size=20", "model.top=[8, 1]"], seed=7, run=None)
    assert isinstance(config.model, ModelConfig)
    assert (config.batch_size, config.optimizer.name, config.optimizer.rate) == (20, "sgd", 0.25)
    assert (config.seed, config.model.top, config.run) == (7, (8, 1), None)


def test_written_configuration_reads_back_the_same(tmp_path: Path) -> None:
    config = load(None, ["data.source=criteo", "data.paths=[a.tsv]", "optimizer.name=adam"])
    assert isinstance(config.data, CriteoConfig)
    assert load(write(tmp_path, to_yaml(config))) == config


@pytest.mark.parametrize(
    ("keys", "policy"),
    [
        (["strategy=incremental"], Policy(strategy="incremental")),
        (["strategy={kind: chunked, layout: 2d}"], Policy(strategy=Chunked(layout="2d"))),
        (["strategy.kind=differential", "strategy.baseline=one-shot"],
         Policy(strategy=Differential(baseline="one-shot"))),
        (["quantize={model.user_*: 4, model.item: auto}"],
         Policy(quantize={"model.user_*": 4, "model.item": "auto"})),
    ],
)  # fmt: skip
def test_what_a_policy_can_say_a_configuration_can(tmp_path: Path, keys: list[str], policy: Policy) -> None:
    config = load(None, ["checkpoint.path=run1", *(f"checkpoint.{key}" for key in keys)])
    assert config.checkpoint is not None
    assert config.checkpoint.policy == policy
    assert load(write(tmp_path, to_yaml(config))) == config


def test_checkpoints_are_a_policy_with_a_path(tmp_path: Path) -> None:
    config = load(None, ["checkpoint.path=run1", "checkpoint.every_steps=5", "checkpoint.quantize=auto"])
    assert config.checkpoint is not None
    assert config.checkpoint.policy == Policy(every_steps=5, quantize="auto")
    other = load(None, ["checkpoint.path=run1", "checkpoint.when_busy=cancel", "checkpoint.save_last=false"])
    assert other.checkpoint is not None
    assert other.checkpoint.policy == Policy(when_busy="cancel", save_last=False)
    assert load(write(tmp_path, to_yaml(config))) == config
    assert {*CheckpointConfig.__struct_fields__} == {"path", *Policy.__struct_fields__}
    with pytest.raises(ConfigError, match="a job's servers see every change"):
        load(None, ["checkpoint.path=run1", "checkpoint.verify=0.1"])
    with pytest.raises(ConfigError, match="only jobs are saved by it"):
        Trainer(config)


@pytest.mark.parametrize(("text", "value"), [("1e-3", 1e-3), ("2E+4", 2e4), (".5e1", 5.0), ("3", 3.0)])
def test_numbers_as_people_write_them(text: str, value: float) -> None:
    assert load(None, [f"optimizer.lr={text}"]).optimizer.rate == value


def test_an_empty_file_is_all_defaults(tmp_path: Path) -> None:
    assert load(write(tmp_path, "")) == Config()


@pytest.mark.parametrize(
    ("text", "protection"),
    [
        ("2+1", ErasureCode(2, 1)),
        ("3 + 2", ErasureCode(3, 2)),
        ("replicate", Replication()),
        ("none", NoProtection()),
    ],
)
def test_protection_in_short(text: str, protection: Protection) -> None:
    assert load(None, ["job.servers=5", f"job.protection={text}"]).job.protection == protection


def test_keys_on_top_of_protection_in_short() -> None:
    config = load(None, ["job.servers=4", "job.protection=2+1", "job.protection.scrub_seconds=5"])
    assert config.job.protection == ErasureCode(2, 1, scrub_seconds=5.0)


def test_the_demonstration() -> None:
    config = load(Path(__file__).parents[2] / "docs" / "examples" / "demo.yaml")
    job = config.job
    assert (job.servers, job.workers, job.protection) == (4, 2, ErasureCode(2, 1))
    assert job.compare_recovered
    assert config.plot
    (kill,) = job.kills
    assert isinstance(config.data, SyntheticConfig)
    steps = config.data.samples / config.batch_size
    assert steps / 4 < kill.step < steps / 2, "there is a before and an after"


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("batchsize=3", r"no key batchsize; did you mean batch_size\?"),
        ("optimizer.learning=3", r"no key optimizer\.learning; optimizer has name, lr"),
        ("optimizer.nam=sgd", r"did you mean optimizer\.name\?"),
        ("lr=0.1", r"no key lr; did you mean optimizer\.lr\?"),
        ("data.paths=[x]", r"no key data\.paths"),
        ("data.source=parquet", r"data\.source is 'parquet': expected 'synthetic' or 'criteo'"),
        ("data.source=criteo", r"data.*paths"),
        ("batch_size=big", r"batch_size: expected `int`, got `str`"),
        ("batch_size=0", r"batch_size: expected `int` >= 1"),
        ("batch_size=1.5", r"batch_size: expected `int`"),
        ("optimizer.lr=-1", r"optimizer\.lr: expected"),
        ("optimizer.name=sdg", r"optimizer\.name: invalid enum value 'sdg'"),
        ("optimizer=sgd", r"optimizer: expected `object`"),
        ("checkpoint.every_steps=5", r"checkpoint: object missing required field `path`"),
        ("checkpoint.every=5", r"no key checkpoint\.every"),
        ("checkpoint={path: a, keep: 0}", r"checkpoint\.keep is 0: expected at least 1"),
        ("optimizer.lr.x=1", r"no key|not a section|expected"),
        ("model.preset=criteo", r"model\.preset: invalid"),
        ("model.dim=8", r"model\.bottom ends in 16 but model\.dim is 8"),
        ("model.top=[5]", r"model\.top ends in 5: expected 1"),
        ("model.top=[]", r"model\.top"),
        ("job={servers: 2, kill: [worker:2@step:3]}", "the job has 2 workers, expected one of 0 to 1"),
        ("job={servers: 2, kill: [server:2@step:3]}", "the job has 2 servers, expected one of 0 to 1"),
        ("job={servers: 2, kill: [worker 2]}", "kill 'worker 2': expected ROLE:SLOT@step:N"),
        (
            "job={servers: 2, server_processors: [-1]}",
            r"job\.server_processors\[0\]: expected `int` >= 0",
        ),
        ("job={servers: 2, server_threads: 0}", r"job\.server_threads: expected `int` >= 1"),
        (
            "job={servers: 2, server_threads: 65}",
            r"job\.server_threads: expected `int` <= 64",
        ),
        ("job={servers: 4, protection: 4+1}", r"job\.servers is 4, but a code of 4 \+ 1 needs 5 servers"),
        ("job={servers: 4, protection: 2+4}", r"r is 4: expected 1 to 3 parities"),
        ("job={servers: 4, protection: twice}", r"protection 'twice': expected K\+R, such as 2\+1"),
        ("job={servers: 4, protection: -2+1}", r"protection '-2\+1': expected K\+R"),
        ("job.servers=-1", r"job\.servers: expected `int` >= 0"),
        ("job.worker=3", r"did you mean job\.workers\?"),
        ("servers=3", r"did you mean job\.servers\?"),
        ("optimizer.lr=.inf", r"optimizer\.lr is inf: expected a finite number"),
        ("optimizer.lr=.nan", r"optimizer\.lr is nan: expected a finite number"),
        ("optimizer.lr=1e300", r"optimizer\.lr: expected `float` <= 1e\+37"),
        ("optimizer.eps=1e-300", r"optimizer\.eps: expected `float` >= 1e-37"),
        ("job.silent_seconds=.inf", r"job\.silent_seconds is inf: expected a finite number"),
        ("data.noise=.nan", r"data\.noise is nan: expected a finite number"),
        (
            "job={servers: 4, protection: {kind: erasure-code, k: 2, scrub_seconds: .inf}}",
            r"job\.protection\.scrub_seconds is inf: expected a finite number",
        ),
        (
            "checkpoint={path: a, keep_seconds: .inf}",
            r"checkpoint\.keep_seconds is inf: expected a finite number",
        ),
        (
            "checkpoint={path: a, strategy: full, prioritize: mfu}",
            r"checkpoint\.prioritize cannot be combined with strategy 'full': use another strategy",
        ),
        ("threads=100000", r"threads: expected `int` <= 1024"),
        ("job.servers=100000", r"job\.servers: expected `int` <= 1024"),
        ("seed=99999999999999999999", r"seed=9+: .*the integer 9+ does not fit in 64 bits"),
        ("seed=9999999999999999999", "seed: expected `int` <= 9223372036854775807"),
        ("model.top=[99999999999999999999, 1]", r"model\.top"),
        ("nonsense", r"expected key=value"),
        ("=3", r"expected key=value"),
        ("batch_size=[", r"not a YAML value"),
    ],
)
def test_mistakes_are_named(override: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load(None, [override])


# Every key of the section, with its default and another value.
OF_JOBS = {
    "workers": ("2", "4"),
    "protection": ("none", "2+1"),
    "staleness": ("1", "0"),
    "engine": ("local", "ray"),
    "bind": ("ipc", "tcp://10.0.0.1"),
    "kill": ("[]", "[server:0@step:3]"),
    "silent_seconds": ("10", "3"),
    "server_processors": ("[]", "[0]"),
    "server_threads": ("1", "2"),
    "compare_recovered": ("false", "true"),
}


def test_all_keys_of_jobs_are_tried() -> None:
    assert {"servers", *OF_JOBS} == set(JobConfig.__struct_fields__)


@pytest.mark.parametrize("key", OF_JOBS)
def test_what_only_jobs_use_is_refused_without_servers(tmp_path: Path, key: str) -> None:
    """Whether it is an override, also of the default's value, or stands in a file."""
    usual, other = OF_JOBS[key]
    for value in (usual, other):
        for overrides in (
            [f"job.{key}={value}"],
            [f"job={{{key}: {value}}}"],
            [f"job.{key}={value}", "job.servers=0"],
        ):
            with pytest.raises(
                ConfigError, match=rf"job\.{key} .*but job\.servers is 0.*--servers"
            ) as refused:
                load(None, overrides)
            assert "leave it out" in str(refused.value)
        with pytest.raises(ConfigError, match=rf"job\.{key} .*but job\.servers is 0"):
            load(write(tmp_path, f"job: {{{key}: {value}}}"))
    with pytest.raises(ConfigError, match=rf"job\.{key} .*but job\.servers is 0"):
        load(write(tmp_path, f"job: {{servers: 0, {key}: {other}}}"))
    assert load(write(tmp_path, f"job: {{servers: 0, {key}: {usual}}}")) == load(), "as a run writes it down"


def test_several_keys_of_jobs_are_named_together() -> None:
    with pytest.raises(
        ConfigError, match=r"job\.workers \(--workers\) and job\.staleness are set but .*leave them out"
    ):
        load(None, ["job.staleness=0", "job.workers=4"])


def test_a_plan_may_decide_the_servers(tmp_path: Path) -> None:
    path = write(tmp_path, "job: {workers: 4}")
    assert load(path, lacks_servers=True).job.workers == 4


def test_partial_recovery_by_priority_and_full_versions_do_not_go_together() -> None:
    partial = "job={servers: 2, protection: {kind: partial, prioritize: ssu}}"
    assert load(None, [partial, "checkpoint={path: a, every_steps: 5}"])
    with pytest.raises(ConfigError, match=r"checkpoint\.prioritize cannot be combined with strategy 'full'"):
        load(None, [partial, "checkpoint={path: a, every_steps: 5, strategy: full}"])


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a: [", "is not YAML"),
        ("- a\n- b\n", "holds a list"),
        ("\x00", "is not YAML"),
        ("1: 2\n", "no key 1"),
    ],
)
def test_bad_files_are_named(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load(write(tmp_path, text))


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"nowhere\.yaml cannot be read: No such file"):
        load(tmp_path / "nowhere.yaml")


def test_yaml_cannot_run_code(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="is not YAML"):
        load(write(tmp_path, "seed: !!python/object/apply:os.system ['true']\n"))
