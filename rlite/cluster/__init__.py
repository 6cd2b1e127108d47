"""Where processes live: placement, worker groups and the launchers that start them."""
