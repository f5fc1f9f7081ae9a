"""Pictures of a journey's steps, each with its caption. Without a folder, nothing is kept."""

import base64
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from pathlib import Path

from playwright.sync_api import Error, Page, ViewportSize

from core.clock import SystemClock

_PAUSE_MS = 1_000
WIDE: ViewportSize = {"width": 1280, "height": 860}


@dataclass
class Film:
    name: str
    folder: Path | None = None
    captions: list[str] = field(default_factory=list)

    def take(self, page: Page, caption: str) -> None:
        self.captions.append(caption)
        if self.folder is not None:
            target = self.folder / f"{self.name}-{len(self.captions):02}.webp"
            target.write_bytes(picture(page))


def picture(page: Page) -> bytes:
    """WebP, a third of PNG's size, which only the browser's own protocol writes."""
    page.wait_for_load_state()
    try:
        return _captured(page)
    except Error:  # a page that is just being replaced has no frame
        page.wait_for_timeout(_PAUSE_MS)
        return _captured(page)


def _captured(page: Page) -> bytes:
    protocol = page.context.new_cdp_session(page)
    taken = protocol.send("Page.captureScreenshot", {"format": "webp", "quality": 80})
    protocol.detach()
    return base64.b64decode(taken["data"])


class MovedClock(SystemClock):
    """The system's clock, moved ahead by the story."""

    def __init__(self) -> None:
        self.ahead = timedelta()

    def now(self) -> datetime:
        return super().now() + self.ahead
