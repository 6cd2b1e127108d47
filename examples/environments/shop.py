"""Tools with state: each episode has a database of its own, which its tools change and the reward reads.

rlite env check examples/environments/shop.py:shop data.path=rows.jsonl    # {"what": "tea"}
"""

import sqlite3

from rlite.rollout import ToolUseWorkflow


class Shop:
    def __init__(self, row):
        self.database, self.row = sqlite3.connect(":memory:"), row
        self.database.execute("create table orders (what text)")

    def prompt(self):
        return f"Order {self.row.get('what', 'tea')}."

    def order(self, what: str) -> str:
        """Orders something.

        Args:
            what: name of the good
        """
        self.database.execute("insert into orders values (?)", [what])
        return "ordered"

    def report(self):
        return {"orders": [what for (what,) in self.database.execute("select what from orders")]}

    def close(self):
        self.database.close()


def bought(prompt, completions, orders, what="tea", **row):
    return float(orders == [what])


def shop(gconfig, tokenizer):
    return ToolUseWorkflow([Shop.order], bought, gconfig, tokenizer, state=Shop)
