"""The pages at / and /docs: a few files of the package, read when the server starts."""

from pathlib import Path

from starlette.responses import Response
from starlette.routing import Route

_FOLDER = Path(__file__).parent / "static"
_TYPES = {
    "index.html": "text/html; charset=utf-8",
    "style.css": "text/css; charset=utf-8",
    "app.js": "text/javascript; charset=utf-8",
    "markdown.js": "text/javascript; charset=utf-8",
    "docs.html": "text/html; charset=utf-8",
    "docs.js": "text/javascript; charset=utf-8",
    "icon.svg": "image/svg+xml",
}
# Nothing from elsewhere is loaded and no text of a model can become a script.
_POLICY = "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self'; "
_POLICY += "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"


def page_routes() -> list[Route]:
    """A route for each file; no request names a path on disk."""

    def route(path: str, name: str) -> Route:
        body = (_FOLDER / name).read_bytes()
        headers = {"Content-Security-Policy": _POLICY}

        async def get(request):
            return Response(body, media_type=_TYPES[name], headers=headers)

        return Route(path, get, methods=["GET"], include_in_schema=False)

    pages = {"/": "index.html", "/docs": "docs.html", "/favicon.ico": "icon.svg"}
    parts = {f"/static/{name}": name for name in _TYPES if name not in pages.values()}
    return [route(path, name) for path, name in (pages | parts).items()]
