"""A game for docs/known-failures.md whose secret depends on the games before."""

GAMES = []


class Guess:
    def reset(self, seed):
        GAMES.append(seed)
        self.secret = str(len(GAMES))
        return f"Guess the number of game {self.secret}.", {}

    def step(self, action):
        return f"It was {self.secret}.", float(self.secret in action), True, False, {}


def make():
    return Guess()
