"""Requests to a scheduler over the toy model, and what listens to their answers."""

import threading

import numpy as np
from toy_model import LAYOUT

from glm_gpu.jobs import Request
from glm_gpu.pages import PagePool
from glm_gpu.sampling import SamplingParams

GREEDY = SamplingParams(temperature=0.0)
P = PagePool(LAYOUT, 1).page_tokens
CONTEXT = 64 * P


class Answer:
    """Listens, and lets a test wait for the end."""

    def __init__(self, num_wanted=None):
        self.tokens, self.progress, self.result = [], [], None
        self.num_wanted = num_wanted
        self.has_ended = threading.Event()

    def prefilled(self, num_done, num_prompt):
        self.progress.append((num_done, num_prompt))

    def token(self, token):
        self.tokens.append(token)
        return len(self.tokens) == self.num_wanted

    def ended(self, result):
        assert self.result is None
        self.result = result
        self.has_ended.set()

    @property
    def ids(self):
        return [token.id for token in self.tokens]


def prompt(length, seed):
    return np.random.default_rng(seed).integers(0, 64, length).tolist()


def run(scheduler, *requests):
    """Submit all, run to the end, and give their answers."""
    answers = [Answer() for _ in requests]
    for request, answer in zip(requests, answers, strict=True):
        scheduler.submit(request, answer)
    while scheduler.step():
        pass
    return answers


def ask(ids, max_tokens=8, **more):
    return Request(ids, more.pop("params", GREEDY), max_tokens, **more)
