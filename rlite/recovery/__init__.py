"""Failover decisions, records of jobs and their stores, and faults on purpose."""
