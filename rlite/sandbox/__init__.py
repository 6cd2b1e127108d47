"""User code in processes that can be killed. Nothing that such a process writes runs in the program that started it."""
