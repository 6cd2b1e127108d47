"""What the rehearsal runs: each module is a program of its own process, whose `measure` returns figures by name."""
