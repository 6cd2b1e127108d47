"""Parts that inference backends share: the pumped replica, checks of requests, and the sampler."""
