"""Fixtures over a live server; see `server_fixtures`."""

import httpx
import pytest
from server_fixtures import CONTEXT, serve
from waiting import LONG_S

from glm_gpu.engine import Engine


@pytest.fixture(scope="session")
def demo():
    """The bundled demo, opened: its tokenizer and template serve every test here, its weights few."""
    with Engine.open() as engine:
        yield engine


@pytest.fixture(scope="session")
def demo_context(demo):
    """The demo with the context of the toy model."""
    before, demo.context = demo.context, CONTEXT
    yield demo
    demo.context = before


@pytest.fixture(scope="session")
def shared_server(demo_context):
    with serve(demo_context, keep_alive_s=0.15) as served:
        yield served


@pytest.fixture
def served(shared_server):
    """The shared server, as new; a test must leave it idle."""
    served = shared_server
    served.says = None
    served.model.pass_s = served.model.row_s = 0.0
    served.model.before_pass = lambda batch: None
    yield served
    assert served.idle()


@pytest.fixture
def http(served):
    with httpx.Client(base_url=served.url, timeout=LONG_S) as client:
        yield client


@pytest.fixture
def openai(served):
    module = pytest.importorskip("openai", reason="needs the extra 'test'")
    with module.OpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0, timeout=LONG_S) as client:
        yield client


@pytest.fixture
def ask(openai):
    """ask(**fields) -> a chat completion of one question."""

    def call(**fields):
        fields = {"model": "demo", "messages": [{"role": "user", "content": "hello"}], "temperature": 0, **fields}
        return openai.chat.completions.create(**fields)

    return call
