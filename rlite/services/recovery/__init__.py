"""Failover decisions, records of jobs and their stores, and injected faults."""
