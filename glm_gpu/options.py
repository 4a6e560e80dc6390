"""The command line's options: each defined once, so that it has the same name, range and twin in every command.

A command takes whole groups of them, `def run(model: ModelOptions, sampling: SamplingOptions)`; `expand_options` shows
typer the single options. Every option here but the switches has an environment variable as its twin:
GLM_GPU_RAM for --ram.
"""

import dataclasses
import functools
import inspect
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from glm_gpu.units import parse_bytes

if TYPE_CHECKING:
    from glm_gpu.opening import EngineOptions
    from glm_gpu.sampling import SamplingParams
    from glm_gpu.speculative import SpeculateMode


def option(name: str, help: str, **settings: Any) -> Any:
    """An option with its environment variable: GLM_GPU_RAM for --ram."""
    envvar = "GLM_GPU_" + name.strip("-").replace("-", "_").upper()
    return typer.Option(name, envvar=envvar, show_envvar=False, help=help, **settings)


MaxTokens = Annotated[int | None, option("--max-tokens", "Most tokens to generate.", min=1, metavar="N")]
IgnoreEos = Annotated[bool, option("--ignore-eos", "Go on behind end-of-text tokens.")]
PromptIds = Annotated[
    Path | None,
    typer.Option("--prompt-ids", help="JSON file with a list of token ids, in place of text.", metavar="FILE"),
]
Speculate = Annotated[
    Literal["auto", "off", "mtp", "ngram", "grammar"],
    option(
        "--speculate",
        "Verify guesses several at a time: by the model's own multi-token layer, repeated text, forced text, or all of "
        "them where they pay. The answer is the same.",
    ),
]
JsonSchema = Annotated[
    Path | None,
    typer.Option("--json-schema", help="JSON schema that the answer must conform to.", metavar="FILE"),
]
GrammarFile = Annotated[
    Path | None,
    typer.Option(
        "--grammar",
        help="GBNF or Lark grammar, or a regular expression in a .regex file, that the answer must conform to.",
        metavar="FILE",
    ),
]
Save = Annotated[
    Path | None, typer.Option("--save", help="Keep the text and its cache in a file, to go on later.", metavar="FILE")
]
Resume = Annotated[Path | None, typer.Option("--resume", help="Go on from a file that --save made.", metavar="FILE")]
Profile = Annotated[bool, option("--profile", "Tell where the time went, part by part.")]
Talk = Annotated[
    Path | None,
    typer.Option("--resume", help="Go on from this file if it is there, and keep the chat in it.", metavar="FILE"),
]
Disk = Annotated[
    Path | None,
    typer.Option("--disk", help="Folder that GLM-5.2 is to be stored in: is there room?", metavar="DIR"),
]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON document instead of text.")]


def state_folder() -> Path | None:
    """This user's state folder."""
    from glm_gpu import state

    return state.state_folder(os.environ, sys.platform)


@dataclasses.dataclass
class Shared:
    """What `main` still knows after a command has failed."""

    debug: bool = False


def _remember_debug(context: typer.Context, value: bool) -> bool:
    context.obj.debug = value
    return value


@dataclasses.dataclass(frozen=True)
class ModelOptions:
    """Which model to open, in which formats, and how much of the machine it may take."""

    model: Annotated[
        Path | None, option("--model", "Model folder; default: the bundled demo model.", metavar="DIR")
    ] = None
    ram: Annotated[
        str | None, option("--ram", "Most memory to use, as in 20GiB; default: what is available.", metavar="SIZE")
    ] = None
    device: Annotated[
        str,
        option("--device", "What computes: auto, cpu, cuda, or sim:N for N simulated GPUs.", metavar="KIND"),
    ] = "auto"
    gpu: Annotated[
        str | None,
        option("--gpu", "GPUs to use, by number or beginning of UUID, as in 0,1; default: all.", metavar="LIST"),
    ] = None
    vram: Annotated[
        str | None,
        option("--vram", "Most GPU memory to use, one size for all or one for each; default: all.", metavar="SIZES"),
    ] = None
    threads: Annotated[
        int | None, option("--threads", "CPU threads; default: the physical cores.", min=1, max=256, metavar="N")
    ] = None
    context: Annotated[
        int | None,
        option("--context", "Tokens a conversation may hold; default: up to 8192.", min=2, metavar="N"),
    ] = None
    expert_bits: Annotated[
        Literal["16", "8", "4", "2"] | None,
        option("--expert-bits", "Bits of the routed experts; default: as stored, else 4."),
    ] = None
    dense_bits: Annotated[
        Literal["16", "8", "4", "2"] | None,
        option("--dense-bits", "Bits of attention, dense and shared-expert weights; default: as stored, else 4."),
    ] = None
    group: Annotated[
        Literal["0", "64", "128"] | None,
        option("--group", "Weights that share a scale at 4 bits, 0 for a whole row; default: as stored, else 64."),
    ] = None
    rounding: Annotated[
        Literal["search", "rtn"],
        option("--rounding", "Quantize at load with the scales of least error, or to nearest."),
    ] = "search"
    weights: Annotated[Literal["auto", "f32"], option("--weights", "f32 loads every weight without quantizing it.")] = (
        "auto"
    )
    activations: Annotated[
        Literal["int16", "int8", "f32"],
        option("--activations", "What products with packed weights round their inputs to."),
    ] = "int16"
    kv: Annotated[Literal["auto", "bf16", "f32"], option("--kv", "Format of the KV cache.")] = "auto"
    fast_math: Annotated[bool, option("--fast-math", "Allow kernels that may change a last bit.")] = False
    expert_slots: Annotated[
        int | None,
        option("--expert-slots", "Most experts in memory, all layers together.", min=1, metavar="N"),
    ] = None
    prefetch: Annotated[
        Literal["auto", "on", "off"], option("--prefetch", "Read what the next layer will probably use.")
    ] = "auto"
    read: Annotated[
        Literal["auto", "direct", "buffered"], option("--read", "How experts are read: past the page cache or through.")
    ] = "auto"
    read_threads: Annotated[
        int, option("--read-threads", "Expert reads in flight at once.", min=1, max=64, metavar="N")
    ] = 4
    heat_read_only: Annotated[
        bool, option("--heat-read-only", "Go by the expert heat of earlier runs without changing it.")
    ] = False
    trace: Annotated[Path | None, option("--trace", "Record every routing choice in a file.", metavar="FILE")] = None
    debug: Annotated[
        bool,
        option("--debug", "Show the traceback of an error.", callback=_remember_debug),
    ] = False

    def engine_options(self, speculate: "SpeculateMode" = "auto") -> "EngineOptions":
        """The same for the library.

        Raises:
            RequestError: a size that is no size, or options that contradict each other.
        """
        from glm_gpu.device_choice import DeviceRequest
        from glm_gpu.kernels.cubins import cache_folder
        from glm_gpu.opening import EngineOptions

        options = EngineOptions(
            expert_bits=self.expert_bits and int(self.expert_bits),
            dense_bits=self.dense_bits and int(self.dense_bits),
            group=self.group and int(self.group),
            rounding=self.rounding,
            weights=self.weights,
            activations=self.activations,
            kv=self.kv,
            context=self.context,
            threads=self.threads,
            ram=self.ram and parse_bytes(self.ram),
            fast_math=self.fast_math,
            speculate=speculate,
            expert_slots=self.expert_slots,
            prefetch=self.prefetch,
            read=self.read,
            read_threads=self.read_threads,
            trace=self.trace,
            state=state_folder(),
            is_heat_read_only=self.heat_read_only,
            devices=DeviceRequest(self.device, self.gpu, self.vram, cache_folder(os.environ, sys.platform)),
        )
        options.recipe  # noqa: B018 -- raises where widths and weights contradict each other
        return options


@dataclasses.dataclass(frozen=True)
class SamplingOptions:
    """How the next token is chosen; what is not given comes from the checkpoint's generation_config.json."""

    temperature: Annotated[
        float | None,
        option("--temperature", "Randomness; 0 always takes the likeliest token.", min=0.0, metavar="X"),
    ] = None
    top_p: Annotated[
        float | None, option("--top-p", "Keep the likeliest tokens that hold this probability.", metavar="P")
    ] = None
    top_k: Annotated[int | None, option("--top-k", "Keep this many tokens; 0 keeps all.", min=0, metavar="N")] = None
    min_p: Annotated[
        float | None, option("--min-p", "Drop tokens less likely than this share of the likeliest.", metavar="P")
    ] = None
    repetition_penalty: Annotated[
        float | None, option("--repetition-penalty", "Divide the logits of tokens seen before.", metavar="X")
    ] = None
    presence_penalty: Annotated[
        float | None, option("--presence-penalty", "Lower the logits of tokens generated before.", metavar="X")
    ] = None
    seed: Annotated[
        int | None, option("--seed", "Makes sampling repeatable; default: different each time.", min=0, metavar="N")
    ] = None

    def over(self, defaults: "SamplingParams") -> "SamplingParams":
        """The options that were given, and the defaults for the others.

        Raises:
            RequestError: a value is out of its range.
        """
        return dataclasses.replace(defaults, **{k: v for k, v in dataclasses.asdict(self).items() if v is not None})


def expand_options(command: Callable) -> Callable:
    """The same command with each parameter of an option group replaced by the group's options.

    typer sees one parameter for each field; the command is called with the groups put together again.
    """
    groups = {
        name: parameter.annotation
        for name, parameter in inspect.signature(command).parameters.items()
        if dataclasses.is_dataclass(parameter.annotation)
    }

    @functools.wraps(command)
    def call(**values: Any) -> Any:
        for name, group in groups.items():
            values[name] = group(**{field.name: values.pop(field.name) for field in dataclasses.fields(group)})
        return command(**values)

    parameters = []
    for name, parameter in inspect.signature(command).parameters.items():
        if name in groups:
            parameters += [
                inspect.Parameter(field.name, parameter.KEYWORD_ONLY, default=field.default, annotation=field.type)
                for field in dataclasses.fields(groups[name])
            ]
        else:
            parameters.append(parameter.replace(kind=parameter.KEYWORD_ONLY))
    call.__signature__ = inspect.Signature(parameters)
    call.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    del call.__wrapped__  # typer would read the signature behind it
    return call
