"""Machine files: every field is taken, every mistake is named."""

import json

import pytest

from glm_gpu.errors import RequestError
from glm_gpu.predict.machines import Gpu, Machine, open_machine, parse_machine, shipped_machines

SMALL = {"cores": 4, "ram": "16GiB", "memory_gb_s": 40, "disk_gb_s": 2.5}
CARD = {"vram": "24GiB", "memory_gb_s": 1008, "copy_gb_s": 25, "tflops": 165}


def test_defaults_are_what_the_file_format_says():
    assert parse_machine(SMALL, "small.toml", "small") == Machine("small", 4, 16 << 30, 40.0, 2.5, 2 << 30, 0.3, None)


def test_toml_and_json_mean_the_same(tmp_path):
    (tmp_path / "box.json").write_text(json.dumps({**SMALL, "used": "1GiB", "gpus": [{**CARD, "count": 2}]}))
    (tmp_path / "box.toml").write_text(
        'cores = 4\nram = "16GiB"\nmemory_gb_s = 40\ndisk_gb_s = 2.5\nused = "1GiB"\n'
        '[[gpus]]\ncount = 2\nvram = "24GiB"\nmemory_gb_s = 1008\ncopy_gb_s = 25\ntflops = 165\n'
    )
    found = open_machine(str(tmp_path / "box.json"))
    assert found == open_machine(str(tmp_path / "box.toml"))
    assert found.gpus == (Gpu(24 << 30, 1008.0, 25.0, 165.0),) * 2


@pytest.mark.parametrize(
    "change, message",
    [
        ({"cores": None}, "cores is missing"),
        ({"cores": 0}, "cores is 0, expected a whole number from 1 to 4096"),
        ({"cores": True}, "cores is True"),
        ({"ram": 16}, "ram is 16, expected a size in quotes"),
        ({"ram": "sixteen"}, "ram is 'sixteen'"),
        ({"ram": "0GiB"}, "ram is '0GiB'"),
        ({"memory_gb_s": -1}, "memory_gb_s is -1, expected a number above 0"),
        ({"memory_gb_s": float("nan")}, "memory_gb_s is nan"),
        ({"disk_gb_s": "2"}, "disk_gb_s is '2'"),
        ({"used": "16GiB"}, "expected less"),
        ({"memry_gb_s": 3}, "memry_gb_s is no field of a machine"),
        ({"gpus": {}}, "gpus is dict, expected a list of tables"),
        ({"gpus": [{**CARD, "vram": None}]}, "gpus[0]: vram is missing"),
        ({"gpus": [CARD, {**CARD, "tflops": 0}]}, "gpus[1]: tflops is 0"),
        ({"gpus": [{**CARD, "count": 65}]}, "count is 65"),
        ({"gpus": [{**CARD, "cores": 3}]}, "gpus[0]: cores is no field"),
    ],
)
def test_mistakes_are_named_in_one_line(change, message):
    values = {**SMALL, **change}
    values = {name: value for name, value in values.items() if value is not None}
    for table in values.get("gpus", []) if isinstance(values.get("gpus"), list) else []:
        for name in [name for name, value in table.items() if value is None]:
            del table[name]
    with pytest.raises(RequestError) as raised:
        parse_machine(values, "box.toml", "box")
    assert message in str(raised.value) and "box.toml" in str(raised.value) and "\n" not in str(raised.value)


@pytest.mark.parametrize("name, text", [("a.toml", "cores = "), ("a.json", "{"), ("b.json", "[]"), ("b.toml", "\xff")])
def test_files_that_hold_something_else_are_refused(tmp_path, name, text):
    (tmp_path / name).write_bytes(text.encode("latin-1"))
    with pytest.raises(RequestError, match=name):
        open_machine(str(tmp_path / name))


def test_an_unknown_name_lists_the_known_ones():
    with pytest.raises(RequestError, match="laptop-16gb"):
        open_machine("no-such-machine")


def test_every_shipped_machine_opens():
    assert len(shipped_machines()) == 4
    assert {open_machine(name).name for name in shipped_machines()} == set(shipped_machines())
