"""Commands on a model that train nothing: `rlite generate`, `rlite merge` and `rlite plan`."""
