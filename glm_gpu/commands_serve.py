"""The serve command. Nothing heavy is imported before it runs."""

from typing import Annotated

import typer

from glm_gpu import options as opt
from glm_gpu import report

Host = Annotated[str, opt.option("--host", "Address to listen on.", metavar="ADDRESS")]
Port = Annotated[int, opt.option("--port", "Port to listen on; 0 takes a free one.", min=0, max=65535, metavar="N")]
ApiKey = Annotated[
    str | None, opt.option("--api-key", "Key that requests must carry; needed beyond loopback.", metavar="KEY")
]
AllowHost = Annotated[
    list[str] | None, typer.Option("--allow-host", help="Further name that a Host header may have.", metavar="NAME")
]
Alias = Annotated[
    list[str] | None, typer.Option("--alias", help="Further name that requests may call the model.", metavar="NAME")
]
Contexts = Annotated[
    int, opt.option("--contexts", "Full contexts that all conversations share.", min=1, max=4096, metavar="N")
]
MaxRunning = Annotated[int, opt.option("--max-running", "Answers that grow at once.", min=1, max=256, metavar="N")]
MaxQueued = Annotated[int, opt.option("--max-queued", "Requests that may wait.", min=1, max=100_000, metavar="N")]
Drain = Annotated[
    float, opt.option("--drain", "Seconds that answers may go on after SIGTERM.", min=0, max=3600, metavar="S")
]
Keep = Annotated[
    str, opt.option("--keep", "Disk for conversations kept from one run to the next, as in 20GiB.", metavar="SIZE")
]


def register(app: typer.Typer) -> None:
    """Add the command to the program."""
    app.command(epilog="Example: glm-gpu serve --model ~/models/GLM-5.2 --port 8000")(opt.expand_options(serve))


def serve(
    model: opt.ModelOptions,
    host: Host = "127.0.0.1",
    port: Port = 8000,
    api_key: ApiKey = None,
    allow_host: AllowHost = None,
    alias: Alias = None,
    contexts: Contexts = 4,
    max_running: MaxRunning = 32,
    max_queued: MaxQueued = 256,
    drain: Drain = 30.0,
    speculate: opt.Speculate = "auto",
    keep: Keep = "0",
) -> None:
    """Serve the model over HTTP: OpenAI's interface, Anthropic's messages, and a page at /.

    Logs one JSON object a request on stderr, without any text of prompts or answers. Stops on Ctrl-C.
    """
    import dataclasses
    import logging
    import sys

    from glm_gpu.engine import DEMO_MODEL, Engine
    from glm_gpu.errors import RequestError
    from glm_gpu.server import run
    from glm_gpu.server.settings import ServerSettings
    from glm_gpu.status import publisher
    from glm_gpu.tokenizer import Tokenizer
    from glm_gpu.units import parse_bytes

    run.check_exposure(host, api_key)
    keep_bytes, state = parse_bytes(keep), opt.state_folder()
    if keep_bytes and state is None:
        raise RequestError("--keep needs a folder for state; set HOME or XDG_STATE_HOME")
    try:
        import fastapi  # noqa: F401
        import uvicorn  # noqa: F401
    except ImportError as error:
        raise RequestError(f"serve needs {error.name}, which is not installed; pip install 'glm-gpu[serve]'") from None
    options = dataclasses.replace(model.engine_options(speculate), num_contexts=contexts, is_shared=True)
    path = model.model or DEMO_MODEL
    if (path / "config.json").exists() and not (path / "tokenizer.json").exists():
        Tokenizer.open(path)  # raises; better now than after the weights were read
    listening = run.listen(host, port)
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(run.JsonLines())
    logging.getLogger("glm_gpu").addHandler(handler)
    for name in ("glm_gpu.access", "glm_gpu.server"):
        logging.getLogger(name).setLevel(logging.INFO)
    with report.progress(f"opening {path}"):
        engine = Engine.open(path, options)
    with engine, listening, publisher(engine, state):
        address, bound = listening.getsockname()[:2]
        url = f"http://{f'[{address}]' if ':' in address else address}:{bound}"
        settings = ServerSettings(
            path.resolve().name,
            frozenset(alias or ()),
            api_key,
            run.allowed_hosts(host, frozenset(allow_host or ())),
        )
        limits = run.Limits(contexts, max_running, max_queued, drain, keep_bytes)
        folder = state and state / "conversations"
        note = f"{settings.model_name} is served at {url} (Ctrl-C stops it)"
        run.serve(engine, engine.is_kv_bf16, listening, settings, limits, folder, lambda: report.note(note))
