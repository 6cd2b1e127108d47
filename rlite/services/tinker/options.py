"""Limits of the server of the Tinker API. No torch here."""

from __future__ import annotations

from rlite.config import Count, Options, Positive


class TinkerLimits(Options):
    """Limits of tenants, and of what the server keeps."""

    max_models: Count = 8
    """models of a tenant that are neither unloaded nor of a session that has ended or been silent for idle_minutes"""
    max_adapter_mib: Positive = 4096.0
    """memory of a tenant's adapters with gradients and optimizers; models that rest leave it when others need it"""
    idle_minutes: Positive = 30.0
    """after so long without a request a model leaves memory, and its next request brings it back"""
    save_every: Count = 20
    """optimizer steps between saved states; a server that was killed repeats the steps since the last one"""
    max_journal_mib: Count = 512
    """accepted requests of a model since its last saved state; further ones wait or are refused"""
    keep_samplers: Count = 8
    """newest samplers without a name that a model keeps"""
    keep_weights: Count | None = None
    """newest named states, and named sampler weights, that a model keeps; null keeps all"""
    max_served: Count = 8
    """adapters that the inference engine holds at a time; others are read from disk when they are asked for"""
    max_running: Count = 256
    """sampling requests that are answered at the same time; further ones are told to come back"""
    max_new_tokens: Count = 4096
    """longest answer of requests that set none, in tokens"""
