"""The chat at a terminal: reads lines, streams answers, keeps the conversation."""

from collections.abc import Callable, Iterator
from pathlib import Path

from glm_gpu import report
from glm_gpu.chat import REPLY_TAGS, Delta, Reply, ReplyParser, ends_in_reasoning
from glm_gpu.engine import Engine
from glm_gpu.errors import RequestError
from glm_gpu.resume import resume_session, save_session
from glm_gpu.sampling import SamplingParams

HELP = """\
/reset   forget the conversation
/stats   tokens, speed and memory so far
/help    this list
/exit    leave (so does Ctrl-D)
Ctrl-C stops an answer; what came of it stays in the conversation."""


class Repl:
    """One conversation at a terminal.

    Args:
        engine: has a tokenizer.
        read_line: asks for a line with a prompt, raises EOFError at the end; like `input`.
        max_tokens: most tokens of one answer, or None for what the context holds.
        ignore_eos: go on behind the end of a turn until max_tokens.
    """

    def __init__(
        self,
        engine: Engine,
        params: SamplingParams,
        read_line: Callable[[str], str],
        max_tokens: int | None = None,
        ignore_eos: bool = False,
    ) -> None:
        self._engine = engine
        self._session = engine.session(is_chat=True)
        self._params = params
        self._read_line = read_line
        self._max_tokens = max_tokens
        self._ignore_eos = ignore_eos
        self._messages: list[dict] = []
        self._ids: list[int] = []  # of all that the model has seen and said

    def resume(self, path: Path) -> None:
        """Go on from a file that `save` wrote.

        Raises:
            CheckpointError, RequestError: as `resume_session`, or the file is no chat's.
        """
        saved = resume_session(path, self._engine, self._session)
        messages = saved.note.get("messages")
        if not isinstance(messages, list) or not all(isinstance(message, dict) for message in messages):
            self._session.reset()
            raise RequestError(f"{path} holds a text and no chat; go on from it with: glm-gpu run --resume {path}")
        self._messages, self._ids = messages, saved.ids
        report.note(f"{len(messages)} messages, {saved.num_cached} tokens from {path}")

    def save(self, path: Path) -> None:
        """Keep the conversation and its cache in a file.

        Raises:
            RequestError: it cannot be written.
        """
        save_session(path, self._engine, self._session, self._ids, {"messages": self._messages})

    def run(self) -> None:
        """Talk until the user leaves.

        Raises:
            KeyboardInterrupt: Ctrl-C while no answer was running.
        """
        while True:
            try:
                line = self._read_line("> ").strip()
            except EOFError:
                report.note("")
                return
            if line == "/exit":
                return
            if line == "/reset":
                self._messages, self._ids = [], []
                self._session.reset()
                report.note("the conversation is forgotten")
            elif line == "/stats":
                report.note(report.chat_stats(self._session, self._engine, len(self._messages)))
            elif line == "/help":
                report.note(HELP)
            elif line.startswith("/"):
                report.note(f"no command {line.split()[0]}; /help lists them")
            elif line:
                self._answer(line)

    def _answer(self, question: str) -> None:
        """One turn. A stopped answer stays in the conversation as far as it came, a question without any does not."""
        messages = [*self._messages, {"role": "user", "content": question}]
        deltas: list[Delta] = []
        try:
            for delta in self._deltas(messages):
                deltas.append(delta)
                report.stream(delta.text, "dim" if delta.kind == "reasoning" else None)
            closing = report.closing_line(self._session.last)
        except KeyboardInterrupt:
            closing = "stopped"
        except RequestError as error:
            report.note(f"{error} (or /reset)")
            return
        report.stream("\n")
        report.note(closing)
        if not deltas:
            return
        reply = Reply.of(deltas)
        answer = {"role": "assistant", "content": reply.content, "reasoning_content": reply.reasoning}
        self._messages = [*messages, answer]

    def _deltas(self, messages: list[dict]) -> Iterator[Delta]:
        """The model's answer to a conversation, in pieces as they come."""
        tokenizer = self._engine.tokenizer
        prompt = self._engine.chat_template.render(messages)
        parser, text = ReplyParser(in_reasoning=ends_in_reasoning(prompt)), tokenizer.stream(keep=REPLY_TAGS)
        self._ids = ids = tokenizer.encode(prompt)
        for token_id in self._session.generate(ids, self._params, self._max_tokens, self._ignore_eos):
            self._ids.append(token_id)
            yield from parser.push(text.push(token_id))
        yield from parser.push(text.finish())
        yield from parser.finish()
