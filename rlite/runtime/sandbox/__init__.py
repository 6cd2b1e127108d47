"""Run user code in processes that can be killed. The driver never executes anything that such a process writes."""
