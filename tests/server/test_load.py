"""Many clients at once, some of whom leave: every answer is the one given alone, and nothing is left behind."""

import gc
import random
import threading

import httpx
from server_fixtures import serve
from toy_model import ToyModel
from waiting import LONG_S, wait_until

from glm_gpu.jobs import Job


def num_jobs():
    """Requests that something still refers to, those of other tests' failures included."""
    gc.collect()
    return sum(isinstance(found, Job) for found in gc.get_objects())


def test_32_clients_of_whom_a_fifth_leave_get_the_answers_they_get_alone(demo_context):
    with serve(demo_context, num_pages=160, options={"max_running": 16}) as served:
        served.model.pass_s = 0.001
        tokenizer, failures, counts = served.engine.tokenizer, [], {"ended": 0, "left": 0}
        threads_before = None

        def client(number):
            rng = random.Random(number)
            with httpx.Client(base_url=served.url, timeout=LONG_S) as http:
                for _ in range(5):
                    ids = [rng.randrange(3, 1900) for _ in range(rng.choice([1, 20, 200, 700]))]
                    if rng.random() < 0.5:
                        ids = [7] * 100 + ids  # a beginning that many share
                    num_tokens = rng.choice([1, 10, 40])
                    body = {
                        "prompt": ids,
                        "max_tokens": num_tokens,
                        "temperature": 0,
                        "stream": True,
                        "ignore_eos": True,
                    }
                    is_leaving, pieces = rng.random() < 0.2, []
                    with http.stream("POST", "/v1/completions", json=body) as answer:
                        if answer.status_code != 200:
                            failures.append(answer.status_code)
                            continue
                        for line in answer.iter_lines():
                            if line.startswith("data: {"):
                                pieces.append(httpx.Response(200, content=line[6:]).json()["choices"][0]["text"])
                            if is_leaving and len(pieces) > 1:
                                break
                    counts["left" if is_leaving else "ended"] += 1
                    if not is_leaving and "".join(pieces) != tokenizer.decode(alone.answer(ids, num_tokens)):
                        failures.append("another answer")

        alone = ToyModel(demo_context.config.vocab_size, served._choose)
        httpx.get(f"{served.url}/health", timeout=LONG_S)
        threads_before, jobs_before = threading.active_count(), num_jobs()
        clients = [threading.Thread(target=client, args=(number,)) for number in range(32)]
        for thread in clients:
            thread.start()
        for thread in clients:
            thread.join()
        assert not failures and counts["left"] > 10 and counts["ended"] > 100
        assert served.idle()
        scheduler = served.scheduler
        assert scheduler.pool.num_pages - scheduler.pool.num_free == scheduler.tree.num_pages
        assert threading.active_count() <= threads_before + 8  # the pool that renders prompts keeps a few
        assert wait_until(lambda: num_jobs() <= jobs_before)  # the last ones' connections may still be closing
