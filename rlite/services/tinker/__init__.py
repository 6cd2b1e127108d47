"""A server for the clients of the Tinker API: many tenants train and sample adapters of one base model."""
