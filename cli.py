"""The command line: each command parses, calls the library, and prints.

Nothing but typer and the options is imported before a command runs, so that --help answers at once.
"""

import dataclasses
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from glm_gpu import (
    commands_bench,
    commands_convert,
    commands_eval,
    commands_predict,
    commands_serve,
    commands_tiers,
    report,
)
from glm_gpu import options as opt
from glm_gpu.errors import GlmGpuError, RequestError

if TYPE_CHECKING:
    from glm_gpu.answer import GenerationStats
    from glm_gpu.engine import Engine
    from glm_gpu.grammar import Grammar
    from glm_gpu.speculative import SpeculateMode

app = typer.Typer(
    name="glm-gpu",
    help="Run GLM-5.2 and its relatives at four bits on machines people own.\n\nOptions of model and sampling have "
    "environment variables as their twins: GLM_GPU_RAM for --ram.",
    epilog='Example: glm-gpu run "And it came to pass"',
    rich_markup_mode=None,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"max_content_width": 100},
)


def main(args: Sequence[str] | None = None) -> None:
    """Run one command and leave: 0 done, 1 failed, 2 misused, 130 interrupted."""
    report.open_outputs()
    try:
        code = _exit_code(sys.argv[1:] if args is None else list(args))
    finally:
        is_written = report.close_outputs()
    sys.exit(code if is_written else code or 1)


def _exit_code(args: list[str]) -> int:
    shared = opt.Shared()
    try:
        code = app(args or ["--help"], prog_name="glm-gpu", standalone_mode=False, obj=shared) or 0
    except typer.TyperException as error:
        report.error(error.format_message())
        return error.exit_code
    except Exception as error:
        if shared.debug:
            raise
        if _is_interrupted_wait(error):
            report.note("")
            return 130
        report.error(_message(error))
        return 2 if isinstance(error, RequestError) else 1
    if code == 130:
        report.note("")
    return code


def _is_interrupted_wait(error: Exception) -> bool:
    """Whether Ctrl-C came while a wait was taking its lock back, which Python reports as a lock that nobody holds."""
    contexts: list[BaseException] = [error]
    while (context := contexts[-1].__context__) is not None and context not in contexts:
        contexts.append(context)
    return isinstance(error, RuntimeError) and any(isinstance(found, KeyboardInterrupt) for found in contexts)


def _message(error: Exception) -> str:
    if isinstance(error, GlmGpuError):
        return str(error)
    if isinstance(error, OSError):
        return f"{error.filename or 'reading or writing failed'}: {error.strerror or error}"
    if isinstance(error, MemoryError):
        return "out of memory; give a smaller --context, fewer --expert-bits, or more memory"
    return f"internal error, {type(error).__name__}: {error}; run it again with --debug and report what it prints"


Prompt = Annotated[str | None, typer.Argument(help="Text to continue; - reads standard input.", metavar="[PROMPT]")]
TextFile = Annotated[Path | None, typer.Argument(help="UTF-8 text; - reads standard input.", metavar="[FILE]")]
Logits = Annotated[
    Path | None, typer.Option("--logits", help="Write every position's logits, [T, V] float32.", metavar="OUT.npy")
]


@app.command(epilog='Example: glm-gpu run "And it came to pass" --max-tokens 64 --temperature 0')
@opt.expand_options
def run(
    model: opt.ModelOptions,
    sampling: opt.SamplingOptions,
    prompt: Prompt = None,
    prompt_ids: opt.PromptIds = None,
    max_tokens: opt.MaxTokens = 256,
    ignore_eos: opt.IgnoreEos = False,
    speculate: opt.Speculate = "auto",
    json_schema: opt.JsonSchema = None,
    grammar: opt.GrammarFile = None,
    save: opt.Save = None,
    resume: opt.Resume = None,
    profile: opt.Profile = False,
    as_json: opt.Json = False,
) -> None:
    """Continue a text, token by token as they come.

    Sampling options that are not given come from the model's generation_config.json. --resume goes on
    behind the saved text and what is given beside it, and computes only what is new.
    """
    from glm_gpu.resume import resume_session, save_session

    _check_sampling(sampling)
    form = _read_grammar(json_schema, grammar)
    if prompt == "-":
        prompt = _read_text(Path("-")).removesuffix("\n")
    if resume is not None and prompt is None and prompt_ids is None:
        text, ids = None, []
    else:
        text, ids = _one_source(prompt, prompt_ids, "a prompt", model)
    with _open(model, needs_text=ids is None, speculate=speculate) as engine, _timed(engine, profile) as phases:
        ids = engine.tokenizer.encode(text) if ids is None else ids
        session, stream = engine.session(), engine.tokenizer and engine.tokenizer.stream()
        if resume is not None:
            ids = resume_session(resume, engine, session).ids + ids
        constraint = form and engine.constraint(form)
        if (room := engine.context - len(ids)) < max_tokens:
            report.note(f"the context of {engine.context} tokens has room for {max(room, 0)} of {max_tokens} new ones")
        new_ids, pieces = [], []
        params = sampling.over(engine.sampling_defaults)
        for token_id in session.generate(ids, params, max_tokens, ignore_eos, constraint):
            new_ids.append(token_id)
            pieces.append(stream.push(token_id) if stream else f"{token_id} ")
            if not as_json:
                report.stream(pieces[-1])
        pieces.append(stream.finish() if stream else "")
        if save is not None:
            save_session(save, engine, session, ids + new_ids)
        times = _times(phases, session.last)
        if as_json:
            found = report.run_document(session.last, new_ids, "".join(pieces) if stream else None, engine)
            report.document(found | ({"profile": times} if profile else {}))
            return
        report.stream(pieces[-1] + "\n")
        report.note(report.closing_line(session.last))
        if warning := engine.speculation.warning:
            report.note(warning)
        if profile:
            report.note(report.profile_text(times))


@app.command(epilog="Example: glm-gpu chat --temperature 0.7 --seed 1")
@opt.expand_options
def chat(
    model: opt.ModelOptions,
    sampling: opt.SamplingOptions,
    max_tokens: opt.MaxTokens = None,
    ignore_eos: opt.IgnoreEos = False,
    speculate: opt.Speculate = "auto",
    resume: opt.Talk = None,
) -> None:
    """Talk with the model.

    Ctrl-C stops an answer and keeps the conversation; /help lists the commands. An answer may be as
    long as the context holds unless --max-tokens is given.
    """
    from glm_gpu.repl import Repl

    _check_sampling(sampling)
    with _open(model, needs_text=True, speculate=speculate) as engine:
        params = sampling.over(engine.sampling_defaults)
        repl = Repl(engine, params, _line_reader(), max_tokens, ignore_eos)
        if resume is not None and resume.exists():
            repl.resume(resume)
        try:
            repl.run()
        finally:
            if resume is not None:
                repl.save(resume)


@app.command(epilog="Example: glm-gpu score README.md --json")
@opt.expand_options
def score(
    model: opt.ModelOptions,
    file: TextFile = None,
    prompt_ids: opt.PromptIds = None,
    logits: Logits = None,
    as_json: opt.Json = False,
) -> None:
    """Score a text: log-likelihood and perplexity.

    A text longer than the context is read in windows of the context's length.
    """
    from glm_gpu.score import logits_writer
    from glm_gpu.score import score as score_ids

    text = None if file is None else _read_text(file)
    text, ids = _one_source(text, prompt_ids, "a text file", model)
    with _open(model, needs_text=ids is None) as engine:
        ids = engine.tokenizer.encode(text) if ids is None else ids
        with logits_writer(logits, len(ids), engine.config.vocab_size) as on_logits, report.progress("scoring"):
            found = score_ids(engine, ids, on_logits)
    report.document(report.score_document(found)) if as_json else report.result(report.score_text(found))


@app.command(epilog="Example: glm-gpu doctor --model ~/models/GLM-5.2")
@opt.expand_options
def doctor(model: opt.ModelOptions, disk: opt.Disk = None, as_json: opt.Json = False) -> None:
    """Check machine and model before loading.

    Exit code 1 when a check fails.
    """
    from glm_gpu.doctor import check_all

    checks = check_all(model.model, model.engine_options(), disk)
    if as_json:
        report.document([dataclasses.asdict(check) for check in checks])
    else:
        report.result(report.checks_text(checks))
    if any(check.state == "fail" for check in checks):
        raise typer.Exit(1)


commands_tiers.register(app)
commands_predict.register(app)
commands_convert.register(app)
commands_eval.register(app)
commands_bench.register(app)
commands_serve.register(app)


@contextmanager
def _open(model: opt.ModelOptions, needs_text: bool, speculate: "SpeculateMode" = "off") -> "Iterator[Engine]":
    from glm_gpu.engine import DEMO_MODEL, Engine
    from glm_gpu.status import publisher
    from glm_gpu.tokenizer import Tokenizer

    options, path = model.engine_options(speculate), model.model or DEMO_MODEL
    if needs_text and (path / "config.json").exists() and not (path / "tokenizer.json").exists():
        Tokenizer.open(path)  # raises; better now than after the weights were read
    with report.progress(f"opening {path}"):
        engine = Engine.open(path, options)
    with engine, publisher(engine, opt.state_folder()):
        yield engine


@contextmanager
def _timed(engine: "Engine", is_wanted: bool) -> Iterator[dict]:
    """What the passes inside the `with` took, by phase; nothing unless it is wanted."""
    if not is_wanted:
        yield {}
        return
    from glm_gpu.pass_profile import profiled

    with profiled(engine) as phases:
        yield phases


def _times(phases: dict, stats: "GenerationStats") -> dict:
    """The document of what `_timed` found; empty when it was not wanted."""
    if not phases:
        return {}
    from glm_gpu.pass_profile import profile_document

    return profile_document(phases, stats)


def _check_sampling(sampling: opt.SamplingOptions) -> None:
    """Refuse values out of range before a model is opened."""
    from glm_gpu.sampling import SamplingParams

    sampling.over(SamplingParams())


def _read_grammar(json_schema: Path | None, grammar: Path | None) -> "Grammar | None":
    """The grammar in one of two files, refused before a model is opened if it is malformed."""
    if json_schema is None and grammar is None:
        return None
    if json_schema is not None and grammar is not None:
        raise RequestError("give either --json-schema or --grammar, not both")
    from glm_gpu.grammar import Grammar

    return Grammar.open(json_schema or grammar, is_json_schema=json_schema is not None)


def _one_source(
    text: str | None, ids_file: Path | None, wanted: str, model: opt.ModelOptions
) -> tuple[str | None, list[int] | None]:
    """The text, or the ids in a file: just one of them must be given."""
    if (text is None) == (ids_file is None):
        raise RequestError(f"give either {wanted} or --prompt-ids FILE")
    if ids_file is not None:
        return None, _read_ids(ids_file, model)
    if not text:
        raise RequestError(f"{wanted} is empty; give at least one character")
    if any(0xD800 <= ord(character) < 0xE000 for character in text):
        raise RequestError(f"{wanted} holds bytes that are no UTF-8; convert the text first")
    return text, None


def _line_reader() -> Callable[[str], str]:
    """`input` with line editing on a terminal; otherwise lines of standard input, without a prompt."""
    if sys.stdin.isatty():
        import readline  # noqa: F401 -- importing it is what gives `input` its editing

        return input

    def read_line(_: str) -> str:
        line = sys.stdin.readline()
        if not line:
            raise EOFError
        return line

    return read_line


def _read_text(file: Path) -> str:
    data = sys.stdin.buffer.read() if str(file) == "-" else file.read_bytes()
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise RequestError(f"{file}: byte {error.start} is no UTF-8; convert the text first") from None


def _read_ids(file: Path, model: opt.ModelOptions) -> list[int]:
    from glm_gpu.config import ModelConfig
    from glm_gpu.engine import DEMO_MODEL

    try:
        ids = json.loads(_read_text(file))
    except (ValueError, RecursionError) as error:
        raise RequestError(f"{file}: not valid JSON ({error}); expected a list of token ids") from None
    if not isinstance(ids, list) or not ids or any(type(token_id) is not int for token_id in ids):
        raise RequestError(f"{file}: expected a JSON list of token ids, as in [1, 2, 3]")
    vocab_size = ModelConfig.open(model.model or DEMO_MODEL).vocab_size
    for position, token_id in enumerate(ids):
        if not 0 <= token_id < vocab_size:
            raise RequestError(f"{file}: id {token_id} at {position} is outside the vocabulary of {vocab_size}")
    return ids
