"""The inference executor "sglang": SGLang's HTTP server behind rlite's replica protocol."""
