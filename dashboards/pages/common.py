"""What every page begins with: the viewer, the house, and the right to look."""

from starlette.requests import Request

from core.errors import Forbidden
from dashboards.viewer import House, Viewer


def house_of(request: Request) -> House:
    house: House = request.app.state.house
    return house


def viewer_of(request: Request, obj: str, act: str = "read") -> Viewer:
    """The signed-in viewer, once casbin has allowed the act; Forbidden otherwise."""
    viewer: Viewer = request.state.viewer
    if not house_of(request).doorman.may(viewer, obj, act):
        raise Forbidden(
            f"The role {viewer.role} may not {act} {obj}.", next_step="Ask an owner or an admin."
        )
    return viewer


def wants_csv(request: Request) -> bool:
    return request.query_params.get("format") == "csv"
