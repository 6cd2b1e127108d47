"""Failover decisions, and records of jobs."""
