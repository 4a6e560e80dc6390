"""What the program never does: run what a file says, load what can run, or talk to anybody unasked."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FOLDERS = ("glm_gpu", "kernels", "tiers")
FILES = sorted([ROOT / "cli.py", *(path for name in FOLDERS for path in (ROOT / name).rglob("*.py"))])
# Modules that run, or unpack into anything, what a file holds.
FORBIDDEN_MODULES = {"pickle", "_pickle", "cPickle", "dill", "cloudpickle", "joblib", "marshal", "shelve", "code"}
FORBIDDEN_CALLS = {"eval", "exec", "compile", "__import__"}
FORBIDDEN_ATTRIBUTES = {("os", "system"), ("os", "popen"), ("torch", "load"), ("yaml", "load"), ("builtins", "eval"),
                        ("builtins", "exec"), ("subprocess", "getoutput"), ("tempfile", "mktemp")}  # fmt: skip
# file: (what is allowed there, why)
ALLOWED = {
    "kernels/simulator/__init__.py": ({"exec", "compile"}, "runs the package's own kernel sources on NumPy"),
    "glm_gpu/bench/process.py": ({"subprocess"}, "starts this program, to measure its start"),
    "glm_gpu/bench/serve.py": ({"subprocess"}, "starts this program's server, to measure it"),
    "glm_gpu/bench/client.py": ({"http.client"}, "asks the server that is measured"),
    "glm_gpu/convert/hub_files.py": ({"huggingface_hub"}, "fetches the repository that convert was given"),
}
NETWORK = {"socket", "urllib", "http", "requests", "httpx", "aiohttp", "ftplib", "smtplib", "huggingface_hub"}
SERVER_FILES = {"glm_gpu/server/run.py"}


def findings(path):
    """(line, what) of everything in a file that needs a reason."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        match node:
            case ast.Import(names=names):
                modules = [name.name for name in names]
            case ast.ImportFrom(module=str(module), level=0):
                modules = [module]
            case _:
                modules = []
        for module in modules:
            top = module.partition(".")[0]
            if top in FORBIDDEN_MODULES or top == "subprocess":
                yield node.lineno, top
            if top in NETWORK:
                yield node.lineno, module
        if isinstance(node, ast.Call):
            match node.func:
                case ast.Name(id=name) if name in FORBIDDEN_CALLS:
                    yield node.lineno, name
                case ast.Attribute(value=ast.Name(id=owner), attr=name) if (owner, name) in FORBIDDEN_ATTRIBUTES:
                    yield node.lineno, f"{owner}.{name}"
            for keyword in node.keywords:
                if keyword.arg in ("shell", "allow_pickle", "trust_remote_code") and not (
                    isinstance(keyword.value, ast.Constant) and keyword.value.value is False
                ):
                    yield node.lineno, keyword.arg


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_nothing_runs_what_a_file_holds_or_asks_the_network(path):
    name = str(path.relative_to(ROOT))
    allowed = ALLOWED.get(name, (set(), ""))[0] | ({"socket"} if name in SERVER_FILES else set())
    found = [(line, what) for line, what in findings(path) if not what.startswith(tuple(allowed) or ("\0",))]
    assert found == []


@pytest.mark.parametrize("source", [
    "import pickle", "from marshal import loads", "eval('1')", "exec(text)", "compile(a, b, c)", "os.system('x')",
    "np.load(path, allow_pickle=True)", "subprocess.run(x, shell=True)", "import subprocess", "import urllib.request",
    "AutoModel.from_pretrained(x, trust_remote_code=flag)", "__import__(name)", "torch.load(path)",
])  # fmt: skip
def test_the_scan_sees_what_it_looks_for(tmp_path, source):
    (tmp_path / "x.py").write_text(source)
    assert list(findings(tmp_path / "x.py"))


def test_code_of_a_checkpoint_is_never_looked_at(tmp_path):
    """There is no `trust_remote_code`, and what a config names as code stays unread."""
    for path in FILES:
        text = path.read_text(encoding="utf-8")
        assert "auto_map" not in text and "trust_remote_code" not in text, path
    assert not any(re.search(r"\.(bin|pt|pth|pkl|ckpt)\b", path.read_text(encoding="utf-8")) for path in FILES)


def test_a_checkpoint_with_code_beside_it_runs_none_of_it(tmp_path, oracle_dir):
    import shutil

    from glm_gpu.checkpoint import Checkpoint

    folder = tmp_path / "model"
    shutil.copytree(oracle_dir / "tiny_olmoe", folder)
    mark = tmp_path / "ran"
    for name in ("modeling_olmoe.py", "__init__.py", "setup.py", "sitecustomize.py", "conftest.py"):
        (folder / name).write_text(f"open({str(mark)!r}, 'w')")
    config = (folder / "config.json").read_text()
    (folder / "config.json").write_text(config.replace("{", '{"auto_map": {"AutoModel": "modeling_olmoe.Model"},', 1))
    with Checkpoint.open(folder):
        assert not mark.exists()
    assert Path(folder / "modeling_olmoe.py").exists()
