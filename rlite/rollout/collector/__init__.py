"""The collector: it runs episodes in the background, in whole groups, with bounded staleness."""
