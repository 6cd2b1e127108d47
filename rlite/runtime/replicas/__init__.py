"""The replicas of a serving inference engine: routing, replacement of lost replicas, and scaling."""
