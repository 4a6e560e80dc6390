"""A stranger's Jinja template: no way out of the sandbox, and bounds on the time and memory of a rendering.

Everything that makes or compares text or lists is charged to the rendering's budget before it is done: operators,
filters, tests, methods, slices, captured blocks, output. What is charged is the text in an operation's operands and in
its result, lists counted with all that is in them, as often as it is in them. A single operation is therefore linear
in what was charged for it, and the clock is looked at between operations.
"""

import functools
import re
import time
from collections.abc import Callable, Iterator, Mapping
from contextvars import ContextVar
from typing import Any

# GLM-5.2's full context is about 5 million characters.
MAX_PROMPT_CHARS = 32 * 1024**2
MAX_TEMPLATE_CHARS = 1024**2
# Rounds of loops and calls of macros in one rendering, at 0.3 and 6 us each; GLM's template takes about 5 a message.
MAX_STEPS = 1_000_000
# Of text handled, whatever the messages are; and for each character of theirs.
MAX_CHARS, CHARS_PER_CHAR = 256 * 1024**2, 16
MAX_SECONDS = 10.0
# What a value costs beside its text: to count it takes as long as to copy so many characters, or longer.
_VALUE_CHARS = 128
# A width, count or indentation; GLM's template has none.
_MAX_NUMBER = 100_000
_LONG_NUMBER = re.compile(r"\d{6,}")
# Filters that take more than linear time, and how much text they get.
_SLOW_FILTERS, _MAX_SLOW_CHARS = frozenset({"pprint", "striptags", "urlize", "wordwrap", "xmlattr"}), 65_536
_FREE_FILTERS = frozenset({"attr", "count", "d", "default", "first", "items", "last", "length"})
_WEIGHED_TESTS = ("!=", "<", "<=", "==", ">", ">=", "eq", "equalto", "ge", "greaterthan", "gt", "in", "le", "lessthan",
                  "lower", "lt", "ne", "upper")  # fmt: skip
_STRIPS = frozenset({"strip", "lstrip", "rstrip", "trim"})
_MAX_STRIPPED = 256

# Names of filters that cannot be written in a template.
_STEP, _CONCATENATE, _WEIGH, _SLICED = "count step", "concatenate bounded", "weigh", "sliced"


class LimitError(Exception):
    """The template runs or grows without end."""


class Budget:
    """What one rendering may still do; a context manager that makes it count.

    Args:
        variables: the template's; the more text is in them, the more may be done.
    """

    def __init__(self, variables: Mapping[str, Any]) -> None:
        self._steps, self._chars, self._deadline = MAX_STEPS, 1 << 62, time.monotonic() + MAX_SECONDS
        self._chars = MAX_CHARS + CHARS_PER_CHAR * self.charge(list(variables.values()))

    def __enter__(self) -> "Budget":
        self._token = _budget.set(self)
        return self

    def __exit__(self, *exception: object) -> None:
        _budget.reset(self._token)

    def step(self) -> None:
        self._steps -= 1
        if self._steps < 0:
            raise LimitError(f"more than {MAX_STEPS} rounds of loops and macros")
        self.spend(0)

    def spend(self, num_chars: int) -> None:
        self._chars -= num_chars
        if self._chars < 0:
            raise LimitError(f"more than {MAX_CHARS} characters were handled")
        if time.monotonic() > self._deadline:
            raise LimitError(f"more than {MAX_SECONDS:.0f} seconds")

    def charge(self, *values: Any) -> int:
        """Spend and return the characters that the values would write out, at least; and what counting them costs."""
        total, left = 0, list(values)
        while left:
            value = left.pop()
            total += _VALUE_CHARS
            if isinstance(value, str | bytes):
                total += len(value)
            elif isinstance(value, list | tuple | set | frozenset):
                left += value
            elif isinstance(value, dict):
                left += value
                left += value.values()
            elif isinstance(value, int):
                total += value.bit_length() // 4
            if total + len(left) > self._chars:  # lists within lists may write out to any length
                break
        self.spend(total + len(left))
        return total


_budget: ContextVar[Budget] = ContextVar("budget")


def check_size(num_chars: int) -> None:
    """Refuse one text or list of more than the longest prompt's length."""
    if num_chars > MAX_PROMPT_CHARS:
        raise LimitError(f"text of more than {MAX_PROMPT_CHARS} characters")


def compile_template(text: str, filters: Mapping[str, Callable], functions: Mapping[str, Callable]) -> Any:
    """A template whose `generate` must run inside a `Budget`.

    Raises:
        LimitError: it is longer than a template is.
        jinja2.TemplateSyntaxError, RecursionError: it cannot be compiled.
    """
    if len(text) > MAX_TEMPLATE_CHARS:
        raise LimitError(f"{len(text)} characters, expected at most {MAX_TEMPLATE_CHARS}")
    from jinja2 import pass_context

    environment_class, transformer = _classes()
    # A finalizer with a context, and no optimizer: so nothing is computed at compile time, where there is no budget.
    environment = environment_class(
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=["jinja2.ext.loopcontrols"],
        optimized=False,
        finalize=pass_context(_shown),
    )
    del environment.globals["lipsum"]
    environment.globals.update(functions)
    environment.filters.update(filters)
    for name, function in environment.filters.items():
        if name not in _FREE_FILTERS:
            environment.filters[name] = _bounded_filter(name, function)
    for name in _WEIGHED_TESTS:
        environment.tests[name] = _bounded_test(environment.tests[name])
    environment.filters |= {_STEP: _step, _CONCATENATE: _concatenate, _WEIGH: _weigh, _SLICED: _sliced}
    return environment.from_string(transformer().visit(environment.parse(text)))


@functools.cache
def _classes() -> tuple[type, type]:
    from jinja2 import nodes
    from jinja2.runtime import Macro
    from jinja2.sandbox import ImmutableSandboxedEnvironment
    from jinja2.visitor import NodeTransformer

    class Environment(ImmutableSandboxedEnvironment):
        intercepted_binops = frozenset({"+", "*", "**", "%"})
        concat = staticmethod(lambda parts: _concatenate(list(parts)))

        def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
            size = _result_size(operator, left, right)
            check_size(size)
            _budget.get().spend(size)
            return super().call_binop(context, operator, left, right)

        def call(__self, __context: Any, __function: Any, *args: Any, **kwargs: Any) -> Any:  # a name cannot collide
            budget, receiver = _budget.get(), getattr(__function, "__self__", None)
            budget.step()
            if isinstance(receiver, str | bytes | int):
                _check_method(__function.__name__, receiver, args, kwargs)
                budget.charge(receiver)
            if not isinstance(__function, Macro):
                budget.charge(args, kwargs)
            result = super().call(__context, __function, *args, **kwargs)
            budget.spend(_size(result))
            return result

        def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
            wrapped = super().wrap_str_format(value)
            return wrapped and _bounded_format(wrapped, value.__self__)

    def filtered(node: Any, name: str) -> Any:
        return nodes.Filter(node, name, [], [], None, None, lineno=node.lineno)

    class Bound(NodeTransformer):
        def visit_For(self, node: Any) -> Any:
            self.generic_visit(node)
            count = filtered(nodes.Const(None, lineno=node.lineno), _STEP)
            node.body.insert(0, nodes.ExprStmt(count, lineno=node.lineno))
            return node

        def visit_Concat(self, node: Any) -> Any:
            self.generic_visit(node)
            return filtered(nodes.List(node.nodes, lineno=node.lineno), _CONCATENATE)

        def visit_Compare(self, node: Any) -> Any:
            self.generic_visit(node)
            for holder in (node, *node.ops):
                if not isinstance(holder.expr, nodes.Const):
                    holder.expr = filtered(holder.expr, _WEIGH)
            return node

        def visit_Getitem(self, node: Any) -> Any:
            self.generic_visit(node)
            return filtered(node, _SLICED) if isinstance(node.arg, nodes.Slice) else node

    return Environment, Bound


def _shown(_: Any, value: Any) -> Any:
    """What an output statement writes; all of it is made before any of it is counted."""
    if not isinstance(value, str):
        check_size(_budget.get().charge(value))
    return value


def _step(_: None) -> None:
    _budget.get().step()


def _concatenate(values: list[Any]) -> str:
    check_size(_budget.get().charge(values))
    return "".join(map(str, values))


def _weigh(value: Any) -> Any:
    _budget.get().charge(value)
    return value


def _sliced(value: Any) -> Any:
    _budget.get().spend(_size(value))
    return value


def _bounded_filter(name: str, function: Callable) -> Callable:
    num_passed = 1 if hasattr(function, "jinja_pass_arg") else 0

    @functools.wraps(function)
    def bounded(*args: Any, **kwargs: Any) -> Any:
        budget, given = _budget.get(), list(args)
        value = given[num_passed]
        if isinstance(value, Iterator | range):
            value = given[num_passed] = list(value)
        rest = given[num_passed + 1 :]
        size = budget.charge(value, rest, kwargs)
        if name in _SLOW_FILTERS and size > _MAX_SLOW_CHARS:
            raise LimitError(f"the filter {name} on more than {_MAX_SLOW_CHARS} characters")
        if name == "sum" and any(isinstance(start, list | tuple) for start in (*rest[1:], *kwargs.values())):
            raise LimitError("the filter sum on lists")  # copies what it has for each of them
        if name != "int":
            _check_method(name, value, rest, kwargs)
        result = function(*given, **kwargs)
        budget.spend(_size(result))
        return result

    return bounded


def _bounded_test(function: Callable) -> Callable:
    @functools.wraps(function)
    def bounded(*args: Any) -> Any:
        _budget.get().charge(args)
        return function(*args)

    return bounded


def _bounded_format(function: Callable, template: str) -> Callable:
    @functools.wraps(function)
    def bounded(*args: Any, **kwargs: Any) -> str:
        _check_format(template, template.count("{"), (args, kwargs), "{" in template.partition(":")[2])
        return function(*args, **kwargs)

    return bounded


def _check_method(name: str, value: Any, args: Any, kwargs: Mapping[str, Any]) -> None:
    """Refuse a method of a text, or a filter, whose result would be far longer than what it is given."""
    given = (*args, *kwargs.values())
    if any(isinstance(number, int) and abs(number) > _MAX_NUMBER for number in given):
        raise LimitError(f"{name} with a number beyond {_MAX_NUMBER}")
    texts = [text for text in given if isinstance(text, str | bytes)]
    longest = max(map(len, texts), default=0)
    if name == "translate":
        raise LimitError("translate may make any text of any other")
    if name in _STRIPS and longest > _MAX_STRIPPED:
        raise LimitError(f"{name} of more than {_MAX_STRIPPED} different characters")
    if name == "format" and isinstance(value, str):  # the method of that name has its own check
        _check_format(value, value.count("%"), (args, kwargs), "*" in value)
    if name == "replace" and len(texts) > 1:
        size = len(value) if isinstance(value, str | bytes) else _budget.get().charge(value)
        check_size(size + (size // max(1, len(texts[0])) + 1) * len(texts[1]))
    elif name == "join":
        items = value if isinstance(value, list | tuple) else next((a for a in args if isinstance(a, list | tuple)), ())
        between = len(value) if isinstance(value, str | bytes) else longest
        check_size(len(items) * between + _budget.get().charge(items))
    elif name in ("indent", "expandtabs", "tojson"):
        number = max([8, *(number for number in given if isinstance(number, int)), longest])
        check_size(_budget.get().charge(value) * number)


def _check_format(template: str, num_fields: int, values: Any, has_widths: bool) -> None:
    budget = _budget.get()
    if _LONG_NUMBER.search(template) or (has_widths and _has_long_number(values)):
        raise LimitError(f"a format with a width beyond {_MAX_NUMBER}")
    size = len(template) + num_fields * (budget.charge(values) + (_MAX_NUMBER if _has_width(template) else 0))
    check_size(size)
    budget.spend(size)


def _has_width(template: str) -> bool:
    return re.search(r"\d{3,}|\*|:[^}]*\{", template) is not None


def _has_long_number(values: Any) -> bool:
    left = [values]
    while left:
        value = left.pop()
        if isinstance(value, dict):
            left += value.values()
        elif isinstance(value, list | tuple):
            left += value
        elif isinstance(value, int) and abs(value) > _MAX_NUMBER:
            return True
    return False


def _result_size(operator: str, left: Any, right: Any) -> int:
    """The characters of an operation's result, four for an item of a list."""
    if operator == "%":
        if isinstance(left, str | bytes):
            text = left if isinstance(left, str) else left.decode("latin-1")
            _check_format(text, text.count("%"), right, "*" in text)
        return 0
    if operator == "+":
        return _size(left) + _size(right)
    if isinstance(left, int) and isinstance(right, int):
        return _size(left) * right if operator == "**" else _size(left) + _size(right)
    count = right if isinstance(right, int) else left
    return _size(left if count is right else right) * count if isinstance(count, int) else 0


def _size(value: Any) -> int:
    if isinstance(value, int):
        return value.bit_length() * 1024  # long numbers cost time rather than memory: so 32,768 bits are the most
    if isinstance(value, list | tuple):
        return 4 * len(value)
    return len(value) if isinstance(value, str | bytes) else 0
