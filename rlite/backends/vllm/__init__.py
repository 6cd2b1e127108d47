"""The inference executor "vllm": the real vLLM behind rlite's replica protocol."""
