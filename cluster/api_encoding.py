"""From what bodies hold to token ids: prompts, conversations, contexts and their continuations.

Everything here is work for `ApiEngine.work`. The module knows a model's texts, and no engine.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from cluster.api_models import Message
from cluster.api_work import Texts
from cluster.pairs import TokenPair
from cluster.prompts import Prompt, is_text, parse_prompt
from cluster.scorer import pair_encoder
from cluster.scoring import ScoringParams
from scheduler.codec import IntArray, int_array
from scheduler.errors import InvalidRequest


def encode_prompts(texts: Texts, prompts: Sequence[Prompt]) -> list[IntArray]:
    """Return prompts as token ids, int32 [N] each.

    Raises:
        InvalidRequest: one of them is wrong, and `details["prompt_index"]` says which.
        ModelNotFound: one is text, and the model has no tokenizer.
    """
    found = []
    for index, prompt in enumerate(prompts):
        try:
            token_ids, _ = parse_prompt(prompt, texts.vocab_size, texts.token_ids)
        except InvalidRequest as error:
            message = f"prompt {index}: {error.message}"
            raise type(error)(message, **error.details, prompt_index=index) from None
        found.append(token_ids)
    return found


def encode_pairs(
    texts: Texts, pairs: Sequence[tuple[Any, Any]], params: ScoringParams
) -> list[TokenPair]:
    """Return pairs of contexts and continuations as token ids.

    Raises:
        InvalidRequest: one of them is wrong, and `details["pair_index"]` says which.
        ModelNotFound: one is text, and the model has no tokenizer.
    """
    encoder = pair_encoder(params, lambda: texts.tokenizer)
    found = []
    for index, pair in enumerate(pairs):
        try:
            found.append(encoder.pair(*pair))
        except InvalidRequest as error:
            message = f"pair {index}: {error.message}"
            raise type(error)(message, **error.details, pair_index=index) from None
    return found


def template_ids(texts: Texts, messages: Sequence[Message]) -> IntArray:
    """Return the token ids of a conversation, int32 [N], up to where the answer begins.

    Raises:
        InvalidRequest: the model has no chat template, or it does not take these messages.
    """
    tokenizer = texts.tokenizer if texts.has_tokenizer else None
    if tokenizer is None or not tokenizer.chat_template:
        raise InvalidRequest(
            "the model has no chat template: use /v1/completions", param="messages"
        )
    turns = [message.for_template() for message in messages]
    try:
        text = tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True)
    except Exception as error:  # a template is a program: it raises what it likes
        raise InvalidRequest(
            f"the model's chat template does not take these messages: {error}", param="messages"
        ) from None
    if not is_text(text):
        raise InvalidRequest(
            "messages hold half of a character (a lone surrogate)", param="messages"
        )
    return int_array(texts.token_ids(text, add_special_tokens=False))
