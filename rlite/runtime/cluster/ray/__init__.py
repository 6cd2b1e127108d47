"""Ray: workers as actors, and the processes of the control plane. No other package imports ray."""
