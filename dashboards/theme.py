"""The colour scheme that a viewer chose, in a cookie: the server writes it into the page, so that the
switch works without JavaScript and no page flashes in the other scheme."""

from starlette.requests import Request
from starlette.responses import RedirectResponse, Response
from starlette.routing import Route

from core.errors import BadRequest
from dashboards.navigation import SECTIONS
from dashboards.viewer import is_secure

COOKIE = "tollhouse_theme"
THEMES = {"light": "Light", "dark": "Dark", "system": "System"}
_AGE_S = 365 * 86400


def theme_of(request: Request) -> str:
    theme = request.cookies.get(COOKIE, "")
    return theme if theme in THEMES else "system"


async def choose(request: Request) -> Response:
    async with request.form(max_fields=4, max_part_size=4_000) as fields:
        theme, page = str(fields.get("theme", "")), str(fields.get("page", ""))
    if theme not in THEMES:
        raise BadRequest(
            f"theme is {theme[:20]!r}.", next_step=f"Use one of {', '.join(THEMES)}.", param="theme"
        )
    root = str(request.scope.get("root_path", ""))
    answer = RedirectResponse(root + _own(page), 303)
    answer.set_cookie(
        COOKIE,
        theme,
        max_age=_AGE_S,
        path=root or "/",
        httponly=True,
        samesite="lax",
        secure=is_secure(request),
    )
    return answer


def _own(page: str) -> str:
    """The path to return to; "/" unless it leads to one of our sections."""
    path = page.partition("?")[0]
    tops = [section.path for section in SECTIONS if section.path != "/"]
    known = path in tops or path.startswith(tuple(f"{top}/" for top in tops))
    return page if known and page.isprintable() else "/"


ROUTES = [Route("/theme", choose, methods=["POST"])]
