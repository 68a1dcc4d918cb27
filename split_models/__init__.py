"""The way of a tensor request, mounted by both houses: front door, cuts, recipes, planner, switch, arms, runner."""
