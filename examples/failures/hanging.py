"""A game for docs/known-failures.md that waits for ever."""

import time


class Silent:
    def reset(self, seed):
        return "Say something.", {}

    def step(self, action):
        time.sleep(3600)


def make():
    return Silent()
