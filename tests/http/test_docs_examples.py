"""The documentation's examples for the endpoint run: Python, and what is sent with curl."""

from __future__ import annotations

from pathlib import Path

import httpx
import openai
import pytest

from tests.http.conftest import MODEL as SERVED
from tests.pages import ENDPOINT, MODEL, PAGES, ROOT, Command, commands, python_examples

WITH_PYTHON = [page for page in PAGES if any(ENDPOINT in e.text for e in python_examples(page))]
CURLS = [command for page in PAGES for command in commands(page) if command.words[0] == "curl"]


@pytest.mark.parametrize("page", WITH_PYTHON, ids=lambda page: str(page.relative_to(ROOT)))
def test_the_examples_of_a_page_run(page: Path, api: openai.OpenAI, main_url: str) -> None:
    names = {"__name__": "example"}
    for example in python_examples(page):
        if ENDPOINT in example.text:
            exec(example.compiled({ENDPOINT: main_url, MODEL: SERVED}), names)


@pytest.mark.parametrize("command", CURLS, ids=lambda c: c.place)
def test_what_is_sent_with_curl_is_answered(command: Command, http: httpx.Client) -> None:
    words = [word.replace(MODEL, SERVED) for word in command.words]
    (url,) = [word for word in words if word.startswith(ENDPOINT)]
    if "-d" in words:
        body = words[words.index("-d") + 1]
        json = {"content-type": "application/json"}
        answer = http.post(url.removeprefix(ENDPOINT), content=body, headers=json)
    else:
        answer = http.get(url.removeprefix(ENDPOINT))
    assert answer.status_code == 200, answer.text


def test_there_are_examples() -> None:
    assert WITH_PYTHON
    assert CURLS
