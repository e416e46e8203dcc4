"""The least that a loss verdict needs: the plan refuses requests with less, the verdict calls them INCONCLUSIVE."""

MIN_SEEDS = 3  # fewer have no interval worth the name
MIN_POINTS = 50  # logged losses, one a step; fewer leave under ten for the late window
