"""A secret or a link that is shown once, after a redirect: a reload neither shows nor makes it again.

It travels in a cookie that no script can read, on the path of one page only, and ends with that page's
answer.
"""

import binascii
from base64 import urlsafe_b64decode, urlsafe_b64encode

from starlette.requests import Request
from starlette.responses import RedirectResponse, Response

from dashboards.viewer import is_secure

COOKIE = "tollhouse_once"
_AGE_S = 60
_LONGEST = 2_000  # characters; browsers keep 4,096 bytes of a cookie


def redirect_with_secret(request: Request, path: str, notice: str, secret: str) -> Response:
    root = str(request.scope.get("root_path", ""))
    answer = RedirectResponse(f"{root}{path}?notice={notice}", 303)
    answer.set_cookie(
        COOKIE,
        urlsafe_b64encode(secret.encode()).decode().rstrip("="),
        max_age=_AGE_S,
        path=root + path,
        httponly=True,
        samesite="strict",
        secure=is_secure(request),
    )
    return answer


def secret_of(request: Request) -> str:
    """The secret to show; empty if there is none."""
    text = request.cookies.get(COOKIE, "") if request.method == "GET" else ""
    if not text or len(text) > _LONGEST:
        return ""
    try:
        return urlsafe_b64decode(text + "=" * (-len(text) % 4)).decode()
    except (binascii.Error, ValueError):
        return ""


def forget(request: Request, answer: Response) -> None:
    answer.delete_cookie(
        COOKIE,
        path=request.url.path,
        httponly=True,
        samesite="strict",
        secure=is_secure(request),
    )
