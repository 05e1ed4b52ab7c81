"""The endpoint's page for people, and the events that it lives on.

The page itself holds nothing about the engine, so it needs no key; what it shows does.
"""

from __future__ import annotations

from contextlib import AsyncExitStack

from fastapi import APIRouter, Request
from starlette.responses import HTMLResponse, Response

from cluster.api_streaming import EventStream
from cluster.live_feed import LiveFeed
from cluster.pictures import live_page

router = APIRouter(include_in_schema=False)


@router.get("/")
async def page(request: Request) -> Response:
    """Return the live page."""
    found = live_page()
    headers = {
        "content-security-policy": found.policy,
        "x-content-type-options": "nosniff",
        "referrer-policy": "no-referrer",
        "cache-control": "no-cache",
    }
    return HTMLResponse(found.html, headers=headers)


@router.get("/events")
async def events(request: Request) -> Response:
    """Tell what the engine does: a snapshot, then what changes, about once a second."""
    feed: LiveFeed = request.app.state.feed
    feed.check_room()
    messages = feed.messages()
    resources = AsyncExitStack()
    resources.push_async_callback(messages.aclose)
    return EventStream(messages, resources)
