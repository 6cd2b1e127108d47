"""The inference executor "remote": servers that the user owns, over `/inference/v1/generate`."""
