"""A model for lm-evaluation-harness, so that its tasks run on any checkpoint or container this program opens.

    import lm_eval
    from pathlib import Path
    from glm_gpu.lm_eval_model import GlmGpuModel

    with GlmGpuModel(Path("~/models/glm-5.2-int4").expanduser()) as model:
        print(lm_eval.simple_evaluate(model=model, tasks=["hellaswag"], limit=100)["results"])

Needs `pip install lm_eval`, which nothing else here does.
"""

from collections.abc import Sequence
from pathlib import Path

from lm_eval.api.model import LM

from glm_gpu.engine import Engine
from glm_gpu.evaluate import continuation_likelihood, log_likelihood
from glm_gpu.opening import EngineOptions
from glm_gpu.sampling import SamplingParams

_MAX_NEW_TOKENS = 256


class GlmGpuModel(LM):
    """An opened model behind lm-eval's three questions; requests are answered in order, one at a time.

    Args:
        path: model folder; None for the bundled demo.
        options: how to open it.
    """

    def __init__(self, path: Path | None = None, options: EngineOptions | None = None) -> None:
        super().__init__()
        self.engine = Engine.open(path, options)

    def __enter__(self) -> "GlmGpuModel":
        return self

    def __exit__(self, *exception: object) -> None:
        self.engine.close()

    def loglikelihood(self, requests: Sequence, disable_tqdm: bool = False) -> list[tuple[float, bool]]:
        """For each (context, continuation): its log-probability, and whether greedy decoding gives it."""
        return [log_likelihood(self.engine, *request.args) for request in requests]

    def loglikelihood_rolling(self, requests: Sequence, disable_tqdm: bool = False) -> list[float]:
        """For each (text,): the log-probability of all of it, read in windows of the context's length.

        The first token is scored behind an end-of-text token, each later window's behind the last token before it.
        """
        totals = []
        for request in requests:
            (text,) = request.args
            ids = [min(self.engine.eos_ids, default=0), *self.engine.tokenizer.encode(text)]
            step = self.engine.context - 1
            windows = [ids[start : start + step + 1] for start in range(0, len(ids) - 1, step)]
            totals.append(sum(continuation_likelihood(self.engine, w, len(w) - 1)[0] for w in windows))
        return totals

    def generate_until(self, requests: Sequence, disable_tqdm: bool = False) -> list[str]:
        """For each (context, settings): the text generated until one of settings["until"], which is not part of it."""
        return [self._generate(*request.args) for request in requests]

    def _generate(self, context: str, settings: dict) -> str:
        until = settings.get("until") or []
        stops = [until] if isinstance(until, str) else list(until)
        max_tokens = settings.get("max_gen_toks", _MAX_NEW_TOKENS)
        temperature = settings.get("temperature", 0.0) if settings.get("do_sample") else 0.0
        ids = self.engine.tokenizer.encode(context)[-(self.engine.context - max_tokens) :]
        stream, text = self.engine.tokenizer.stream(), ""
        for token_id in self.engine.session().generate(ids, SamplingParams(temperature=temperature), max_tokens):
            text += stream.push(token_id)
            if any(stop in text for stop in stops):
                break
        text += stream.finish()
        ends = [text.index(stop) for stop in stops if stop in text]
        return text[: min(ends)] if ends else text
