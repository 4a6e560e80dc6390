"""Chat templates of a stranger: no way out of the sandbox, and no rendering that takes much memory or time.

Each bomb runs in a process of its own that may take 1.5 GB of addresses and 20 seconds of processor.
"""

import json
import re
import resource
import subprocess
import sys

import pytest

from glm_gpu.chat import ChatTemplate
from glm_gpu.engine import DEMO_MODEL
from glm_gpu.errors import CheckpointError, RequestError
from glm_gpu.tokenizer import Tokenizer

BOMBS = {
    "format width": "{{ '%1000000000d' % 1 }}",
    "format width, as a filter": "{{ '%1000000000d' | format(1) }}",
    "format width from an argument": "{{ '%*d' % (1000000000, 1) }}",
    "str.format width": "{{ '{:>1000000000}'.format(1) }}",
    "str.format width from an argument": "{{ '{:{}}'.format(1, 1000000000) }}",
    "str.format_map width": "{{ '{a:>1000000000}'.format_map({'a': 1}) }}",
    "str.format, many widths": "{{ ('{:>99999}' * 100000).format(1) }}",
    "format, many long fields": "{% set x = 'x' * 1000000 %}{{ ('%s' * 100000) % ((x,) * 100000) }}",
    "one field often": "{% set x = 'x' * 10000000 %}{{ ('{0}' * 100000).format(x) }}",
    "named field often": "{% set x = 'x' * 10000000 %}{{ ('%(a)s' * 100000) % {'a': x} }}",
    "center": "{{ 'x'.center(1000000000) }}",
    "center, as a filter": "{{ 'x' | center(1000000000) }}",
    "ljust": "{{ 'x'.ljust(1000000000) }}",
    "zfill": "{{ 'x'.zfill(1000000000) }}",
    "expandtabs": "{{ ('\t' * 100000).expandtabs(100000) }}",
    "replace": "{{ ('x' * 100000).replace('', 'y' * 100000) }}",
    "replace, as a filter": "{{ ('x' * 100000) | replace('x', 'y' * 100000) }}",
    "join": "{{ ('x' * 1000000).join(range(90000) | map('string') | list) }}",
    "join, as a filter": "{{ range(90000) | join('x' * 1000000) }}",
    "join of one text often": "{{ (['x' * 1000000] * 100000) | join }}",
    "map with a default": "{{ range(99999) | map(attribute='x', default='x' * 1000000) | join }}",
    "translate": "{{ ('a' * 100000).translate({97: 'x' * 100000}) }}",
    "indent": "{{ ('x\n' * 100000) | indent(100000) }}",
    "indent by text": "{{ ('x\n' * 100000) | indent('y' * 100000) }}",
    "tojson": "{{ range(99999) | list | tojson(indent=99999) }}",
    "wordwrap": "{{ ('x' * 60000) | wordwrap(1, wrapstring='y' * 100000) }}",
    "batch": "{{ [1] | batch(1000000000, 'x') | list }}",
    "slice": "{{ [1] | slice(1000000000) | list }}",
    "lipsum": "{{ lipsum(n=1000000000) }}",
    "long number": "{{ (1).to_bytes(1000000000, 'big') }}",
    "nested lists": "{% set ns = namespace(x=['x']) %}{% for i in range(60) %}{% set ns.x = [ns.x, ns.x] %}{% endfor %}"
    "{{ ns.x }}",
    "nested lists, as JSON": "{% set ns = namespace(x=['x']) %}{% for i in range(60) %}{% set ns.x = [ns.x, ns.x] %}"
    "{% endfor %}{{ ns.x | tojson }}",
    "nested lists, compared": "{% set ns = namespace(x=['x'], y=['x']) %}{% for i in range(60) %}"
    "{% set ns.x = [ns.x, ns.x] %}{% set ns.y = [ns.y, ns.y] %}{% endfor %}{{ ns.x == ns.y }}",
    "nested lists, tested": "{% set ns = namespace(x=['x'], y=['x']) %}{% for i in range(60) %}"
    "{% set ns.x = [ns.x, ns.x] %}{% set ns.y = [ns.y, ns.y] %}{% endfor %}{{ ns.x is eq ns.y }}",
    "captured blocks": "{% set x %}xxxxxxxxxx{% endset %}" + "{% set x %}{{ x }}{{ x }}{% endset %}" * 60,
    "macros": "{% set x = 'x' * 100000 %}{% macro m() %}" + "{{ x }}" * 1000 + "{% endmacro %}" + "{{ m() }}" * 99,
    "blocks that call themselves": "{% set ns = namespace(n=0) %}{% block a %}{% set ns.n = ns.n + 1 %}"
    "{% if ns.n % 50 %}{{ self.a() }}{{ self.a() }}{% endif %}{% endblock %}",
    "compared again and again": "{% set a = 'x' * 9999999 %}{% set b = 'x' * 9999998 ~ 'y' %}"
    "{% for i in range(99999) %}{{ a == b }}{% endfor %}",
    "looked for in a list": "{% set a = 'x' * 9999999 %}{% set b = 'x' * 9999998 ~ 'y' %}"
    "{{ b in [" + "a, " * 50_000 + "a] }}",
    "sliced again and again": "{% set a = 'x' * 9999999 %}{% set k = [" + "a[1:], " * 9_999 + "a] %}{{ k | length }}",
    "stripped": "{{ ('a' * 9999999).strip('b' * 9999999 ~ 'a') }}",
    "trimmed": "{{ ('a' * 9999999) | trim('b' * 9999999 ~ 'a') }}",
    "sum of lists": "{{ ([[1] * 9999] * 9999) | sum(start=[]) }}",
    "many comments": "{{ ('<!-- -->' * 900000) | striptags }}",
    "a date's width": "{{ strftime_now('%999999999Y') }}",
    "a long refusal": "{{ raise_exception('x' * 30000000) }}",
    "a long unknown name": "{{ messages[0]['x' * 30000000].y }}",
    "computed while compiling": "{{ 'x' | center(1000000000) if false }}{{ '%1000000000d' % 1 if false }}" * 2
    + "{% for i in range(9999) %}{% for j in range(9999) %}{% endfor %}{% endfor %}",
    "a long template": "x" * 2_000_000,
}  # fmt: skip

ESCAPES = [
    "{{ messages.__class__ }}",
    "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "{{ ('' | attr('__class__')).__mro__ }}",
    "{{ ['a'] | map(attribute='__class__') | list }}",
    "{{ ['a'] | map('attr', '__class__') | list }}",
    "{{ ['a'] | groupby('__class__') | list }}",
    "{{ '{0.__class__.__mro__}'.format('') }}",
    "{{ '{a.__class__}'.format_map({'a': ''}) }}",
    "{{ ('{0.__class__}' | attr('format'))('') }}",
    "{{ (['{0.__class__}'] | map(attribute='format') | first)('') }}",
    "{% set f = '{0.__class__}'.format %}{{ f('') }}",
    "{{ namespace.__init__.__globals__ }}",
    "{{ cycler.next.__globals__ }}",
    "{{ joiner.__call__.__globals__ }}",
    "{{ raise_exception.__globals__.os }}",
    "{{ strftime_now.__closure__ }}",
    "{{ range.__wrapped__ }}",
    "{{ self._TemplateReference__context }}",
    "{{ self.__init__.__globals__ }}",
    "{% macro m() %}{{ caller.__code__ }}{% endmacro %}{% call m() %}{% endcall %}",
    "{% macro m() %}{% endmacro %}{{ m._environment }}{{ m.__init__.__globals__ }}",
    "{% for x in [1] %}{{ loop._iterable.__class__ }}{{ loop.__init__.__globals__ }}{% endfor %}",
    "{{ (range(2) | map('string')).gi_frame.f_globals }}",
    "{{ (range(2) | select).gi_code }}",
    "{{ messages.append(1) }}",
    "{{ messages[0].update(role='x') }}",
    "{{ messages[0].__setitem__('role', 'x') }}",
    "{{ messages.sort.__self__.clear() }}",
    "{{ dict.fromkeys.__self__.__subclasses__() }}",
    "{{ dict.__base__ }}",
    "{{ undefined_name.__class__.__init__ }}",
    "{{ [undefined_name.__init__.__globals__] }}",
    "{% import 'os' as os %}{{ os }}",
    "{% include '/etc/passwd' %}",
    "{% extends '/etc/passwd' %}",
]  # fmt: skip

RENDER = """
import json, sys, time
from glm_gpu.chat import ChatTemplate
from glm_gpu.errors import CheckpointError, RequestError
from glm_gpu.tokenizer import Tokenizer
from pathlib import Path
import jinja2.sandbox, jinja2.ext
tokenizer = Tokenizer.open(Path(sys.argv[1]))
print(json.dumps("ready"), flush=True)
for line in sys.stdin:
    began = time.process_time()
    try:
        template = ChatTemplate({"default": json.loads(line)}, tokenizer, "test", {})
        said = str(len(template.render([{"role": "user", "content": "hi"}])))
    except (CheckpointError, RequestError) as error:
        said = f"{type(error).__name__}: {error}"
    except BaseException as error:
        said = f"unexpected {type(error).__name__}: {error}"
    print(json.dumps([said, time.process_time() - began]), flush=True)
"""
MEMORY_BYTES, SECONDS = 1500 << 20, 20


def start():
    def limit():
        resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))

    command = [sys.executable, "-c", RENDER, str(DEMO_MODEL)]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, preexec_fn=limit)
    assert process.stdout.readline() == '"ready"\n'
    return process


@pytest.fixture(scope="module")
def bombs_tried():
    """What became of each bomb: (message, seconds of processor), all rendered by one process under limits."""
    process = start()
    found = {}
    for name, template in BOMBS.items():
        process.stdin.write(json.dumps(template) + "\n")
        process.stdin.flush()
        answer = process.stdout.readline()
        if not answer:
            found[name] = ("the process died", process.wait())
            process = start()
            continue
        found[name] = tuple(json.loads(answer))
    process.stdin.close()
    process.stdout.close()
    process.wait()
    return found


@pytest.mark.parametrize("name", BOMBS)
def test_a_bomb_is_stopped_in_bounded_memory_and_time(bombs_tried, name):
    said, seconds = bombs_tried[name]
    assert said.startswith(("CheckpointError: ", "RequestError: ")), said
    assert "MemoryError" not in said and len(said) < 800 and "\n" not in said
    assert seconds < SECONDS


@pytest.fixture(scope="module")
def tokenizer():
    return Tokenizer.open(DEMO_MODEL)


@pytest.mark.parametrize("template", ESCAPES)
def test_no_attribute_of_python_can_be_reached(tokenizer, template):
    messages = [{"role": "user", "content": "hi"}]
    try:
        text = ChatTemplate({"default": template}, tokenizer, "test", {}).render(messages)
    except (CheckpointError, RequestError) as error:
        assert "\n" not in str(error)
        text = ""
    # what is not defined writes nothing, or its name inside a list
    assert re.sub(r"Undefined|[\[\](), 'a]", "", text) == ""
    assert messages == [{"role": "user", "content": "hi"}]
