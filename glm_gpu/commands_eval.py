"""The command eval: how good a model is, alone or beside another. Nothing heavy is imported before it runs."""

import dataclasses
import re
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from glm_gpu import options as opt
from glm_gpu import report
from glm_gpu.errors import RequestError
from glm_gpu.report_convert import table

if TYPE_CHECKING:
    from glm_gpu.evaluate import Estimate, Evaluation, Item

_WIDTHS = re.compile(r"(\d+)/(\d+)(?:/(\d+))?")
_NAMES = {
    "perplexity": "perplexity a token",
    "acc": "multiple choice",
    "acc_norm": "multiple choice, length-normalised",
}


def register(app: typer.Typer) -> None:
    """Add the command to the program."""
    app.command("eval", epilog="Example: glm-gpu eval --model ~/models/GLM-5.2 --against @8/8")(
        opt.expand_options(eval)
    )


def eval(
    model: opt.ModelOptions,
    against: Annotated[
        str | None,
        typer.Option(
            "--against",
            help="A second model, measured alike: DIR, DIR@WIDTHS, or @WIDTHS for the same model. WIDTHS is "
            "expert/dense bits as in 4/8, with a group as in 4/8/128, or f32.",
            metavar="MODEL",
        ),
    ] = None,
    text: Annotated[
        list[Path] | None,
        typer.Option("--text", help="UTF-8 text for perplexity; may be repeated; default: four held-out texts.",
                     metavar="FILE", show_default=False),
    ] = None,
    task: Annotated[
        Path | None,
        typer.Option("--task", help="Multiple-choice questions, a JSON object a line; default: 72 that come with it.",
                     metavar="FILE"),
    ] = None,
    as_json: opt.Json = False,
) -> None:  # fmt: skip
    """Measure a model: perplexity and multiple choice.

    Every figure has its 95 % interval; with --against also the difference, drawn in pairs.
    """
    from glm_gpu.evaluate import TASK_FILE, differences, estimates, heldout_texts, read_items

    items = read_items(task or TASK_FILE)
    texts = {path.name: _read(path) for path in text} if text else heldout_texts()
    models = [("model", model)]
    if against is not None:
        models.append((against, _other(model, against)))
    found = {}
    for name, options in models:
        with report.progress(f"measuring {name}"):
            found[name] = _measure(options, texts, items)
    results = list(found.values())
    compared = differences(*results) if len(results) == 2 else None
    measures = {name: estimates(one) for name, one in found.items()}
    if as_json:
        report.document(_document(found, measures, compared, list(texts)))
    else:
        report.result(_text(found, measures, compared, list(texts)))


def _measure(options: opt.ModelOptions, texts: dict[str, str], items: "list[Item]") -> "Evaluation":
    from glm_gpu.engine import DEMO_MODEL, Engine
    from glm_gpu.evaluate import evaluate

    with Engine.open(options.model or DEMO_MODEL, options.engine_options()) as engine:
        return evaluate(engine, texts, items)


def _other(model: opt.ModelOptions, against: str) -> opt.ModelOptions:
    """The options of the second model: those of the first, but for what --against says."""
    folder, _, widths = against.partition("@")
    changes = {"model": Path(folder)} if folder else {}
    if widths == "f32":
        changes |= {"weights": "f32", "expert_bits": None, "dense_bits": None, "group": None}
    elif match := _WIDTHS.fullmatch(widths):
        changes |= {"weights": "auto", "expert_bits": match[1], "dense_bits": match[2], "group": match[3]}
    elif widths or not folder:
        raise RequestError(f"--against {against}: expected DIR, DIR@8/8, @8/8, @4/8/128 or @f32")
    return dataclasses.replace(model, **changes)


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise RequestError(f"{path}: cannot be read as UTF-8 text ({error})") from None


def _document(
    found: "dict[str, Evaluation]", measures: "dict[str, dict[str, Estimate]]",
    compared: "dict[str, Estimate] | None", texts: list[str],
) -> dict:  # fmt: skip
    return {
        "models": {
            name: {
                **{measure: dataclasses.asdict(value) for measure, value in measures[name].items()},
                "texts": {text: one.text_perplexity(text) for text in texts},
                "num_items": len(one.is_right),
                "num_tokens": int(one.tokens.sum()),
            }
            for name, one in found.items()
        },
        "differences": compared and {name: dataclasses.asdict(value) for name, value in compared.items()},
    }


def _text(
    found: "dict[str, Evaluation]", measures: "dict[str, dict[str, Estimate]]",
    compared: "dict[str, Estimate] | None", texts: list[str],
) -> str:  # fmt: skip
    rows = []
    for measure, title in _NAMES.items():
        for name in found:
            if measure in measures[name]:
                rows.append((f"{title}, {name}", _interval(measures[name][measure], measure == "perplexity")))
        if compared and measure in compared:
            rows.append((f"{title}, difference", _difference(compared[measure], measure == "perplexity")))
        if measure == "perplexity":
            for text in texts:
                values = "  ".join(f"{one.text_perplexity(text):.3f}" for one in found.values())
                rows.append((f"  {text}", values))
    return table(rows)


def _interval(value: "Estimate", is_perplexity: bool) -> str:
    if is_perplexity:
        return f"{value.value:.3f}  [{value.low:.3f}, {value.high:.3f}]"
    return f"{100 * value.value:.1f} %  [{100 * value.low:.1f}, {100 * value.high:.1f}]"


def _difference(value: "Estimate", is_perplexity: bool) -> str:
    unit = "%" if is_perplexity else "points"
    return f"{100 * value.value:+.2f} {unit}  [{100 * value.low:+.2f}, {100 * value.high:+.2f}]"
