"""The floor of scoring: a model's linear layers and output layer on a prompt's rows, nothing else.

No engine that runs the library's matrix products can be faster. Rows are as many as the prompt has
tokens, weights are the model's own, every product is a plain `torch.nn.functional.linear`.
"""

from __future__ import annotations

import time
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from transformers import AutoModelForCausalLM

from bench.peers.protocol import Job, Outcome, run_peer


class PlainLayers:
    """The weights of a model's `nn.Linear` modules, in the order of the model."""

    def __init__(self, folder: str, dtype: torch.dtype | str) -> None:
        model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)
        self.head: list[nn.Linear] = [model.get_output_embeddings()]
        self.body = [
            m for m in model.modules() if isinstance(m, nn.Linear) and m is not self.head[0]
        ]

    @staticmethod
    @torch.inference_mode()
    def seconds(layers: list[nn.Linear], num_rows: int) -> float:
        """Return how long all products of `layers` take on so many rows."""
        inputs = {
            (layer.in_features, layer.weight.dtype): torch.randn(
                num_rows, layer.in_features, dtype=layer.weight.dtype
            )
            for layer in layers
        }
        started_s = time.perf_counter()
        for layer in layers:
            x = inputs[layer.in_features, layer.weight.dtype]
            functional.linear(x, layer.weight, layer.bias)
        return time.perf_counter() - started_s


class LinearPeer:
    """All layers, prompt after prompt."""

    def __init__(self, settings: dict[str, Any]) -> None:
        torch.set_num_threads(settings["threads"])
        self._layers = PlainLayers(settings["model"], settings["dtype"])
        self.about: dict[str, Any] = {"version": torch.__version__, "dtype": settings["dtype"]}

    def score(self, job: Job) -> Outcome:
        """Time the products; there are no rows."""
        layers = [*self._layers.body, *self._layers.head]
        return Outcome(sum(PlainLayers.seconds(layers, len(prompt)) for prompt in job.prompts))


if __name__ == "__main__":
    run_peer(LinearPeer)
