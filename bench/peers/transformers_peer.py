"""transformers as a careful user runs it: padded batches of like length, SDPA attention, bf16.

Scoring has two ways. A careful user's runs the output layer on the rows wanted only, one prompt at
a time. That of evaluation harnesses (workload `choices`) takes the logits of all positions of the
padded batch.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import torch
import transformers
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoModelForCausalLM

from bench.peers.protocol import Job, Outcome, run_peer

_BATCH_SIZE = 8
_HARNESS_WORKLOADS = frozenset({"choices"})


class TransformersPeer:
    """The library's model, driven in batches."""

    def __init__(self, settings: dict[str, Any]) -> None:
        torch.set_num_threads(settings["threads"])
        # Typed as anything: so are the calls of what transformers leaves untyped.
        loaded: Any = AutoModelForCausalLM
        self._model: Any = loaded.from_pretrained(
            settings["model"], dtype=settings["dtype"], attn_implementation="sdpa"
        )
        self._model.eval()
        self.about: dict[str, Any] = {
            "version": transformers.__version__,
            "dtype": settings["dtype"],
            "batch_size": _BATCH_SIZE,
        }

    @torch.inference_mode()
    def score(self, job: Job) -> Outcome:
        """Make the rows asked for."""
        score = self._score_all if job.workload in _HARNESS_WORKLOADS else self._score_rows
        rows: dict[int, torch.Tensor] = {}
        started_s = time.perf_counter()
        for members in _batches(job):
            score(job, members, rows)
        seconds = time.perf_counter() - started_s
        ordered = [rows[i] for i in range(len(job.prompts))]
        return Outcome(
            seconds, [len(each) for each in ordered], [float(each.sum()) for each in ordered]
        )

    def _score_rows(self, job: Job, members: list[int], rows: dict[int, torch.Tensor]) -> None:
        ids, mask = _padded(job, members)
        hidden = self._model.model(ids, attention_mask=mask, use_cache=False).last_hidden_state
        for row, member in enumerate(members):
            start, end = job.starts[member], len(job.prompts[member])
            logits = self._model.lm_head(hidden[row, start - 1 : end - 1])
            rows[member] = _actual(logits.float(), ids[row, start:end], job.num_logprobs)

    def _score_all(self, job: Job, members: list[int], rows: dict[int, torch.Tensor]) -> None:
        ids, mask = _padded(job, members)
        logprobs = torch.log_softmax(
            self._model(ids, attention_mask=mask, use_cache=False).logits, dim=-1
        )
        for row, member in enumerate(members):
            start, end = job.starts[member], len(job.prompts[member])
            own = logprobs[row, start - 1 : end - 1]
            own.argmax(-1)
            rows[member] = own.gather(-1, ids[row, start:end, None]).squeeze(-1).float()

    @torch.inference_mode()
    def generate(self, job: Job) -> Outcome:
        """Continue all prompts, which have one length, as one batch."""
        ids = torch.tensor(job.prompts)
        started_s = time.perf_counter()
        continued = self._model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=False,
            min_new_tokens=job.max_tokens[0],
            max_new_tokens=job.max_tokens[0],
            pad_token_id=0,
        )
        seconds = time.perf_counter() - started_s
        new = continued[:, ids.shape[1] :]
        return Outcome(seconds, first_token_ids=new[:, 0].tolist(), num_generated=new.numel())


def _batches(job: Job) -> Iterator[list[int]]:
    """Yield the indices of prompts of like length, the longest ones first."""
    order = sorted(range(len(job.prompts)), key=lambda i: -len(job.prompts[i]))
    for first in range(0, len(order), _BATCH_SIZE):
        yield order[first : first + _BATCH_SIZE]


def _padded(job: Job, members: list[int]) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return ids [batch, longest] padded on the right, and a mask where any is padded."""
    prompts = [torch.tensor(job.prompts[i]) for i in members]
    lengths = torch.tensor([len(prompt) for prompt in prompts])
    ids = pad_sequence(prompts, batch_first=True)
    if bool((lengths == ids.shape[1]).all()):
        return ids, None
    return ids, (torch.arange(ids.shape[1]) < lengths[:, None]).long()


def _actual(logits: torch.Tensor, targets: torch.Tensor, k: int) -> torch.Tensor:
    """Return the targets' logprobs; make the k likeliest, as whoever asks for them has to."""
    logprobs = torch.log_softmax(logits, dim=-1)
    if k > 0:
        logprobs.topk(k, dim=-1)
    return logprobs.gather(-1, targets[:, None]).squeeze(-1)


if __name__ == "__main__":
    run_peer(TransformersPeer)
