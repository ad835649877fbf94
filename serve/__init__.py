"""`meshwright serve`: a page on this machine that asks the planner."""
