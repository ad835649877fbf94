"""The commands, a thin function each: parse, call the planner, print, exit code."""
