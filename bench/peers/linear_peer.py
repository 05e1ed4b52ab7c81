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


class LinearPeer:
    """The weights of all `nn.Linear` modules, in the order of the model."""

    def __init__(self, settings: dict[str, Any]) -> None:
        torch.set_num_threads(settings["threads"])
        model = AutoModelForCausalLM.from_pretrained(settings["model"], dtype=torch.bfloat16)
        self._layers = [m for m in model.modules() if isinstance(m, nn.Linear)]
        self.about: dict[str, Any] = {
            "version": torch.__version__,
            "linear_layers": len(self._layers),
        }

    @torch.inference_mode()
    def score(self, job: Job) -> Outcome:
        """Time the products; there are no rows."""
        inputs = {
            (len(prompt), layer.in_features): torch.randn(
                len(prompt), layer.in_features, dtype=torch.bfloat16
            )
            for prompt in job.prompts
            for layer in self._layers
        }
        started_s = time.perf_counter()
        for prompt in job.prompts:
            for layer in self._layers:
                functional.linear(inputs[len(prompt), layer.in_features], layer.weight, layer.bias)
        return Outcome(time.perf_counter() - started_s)


if __name__ == "__main__":
    run_peer(LinearPeer)
